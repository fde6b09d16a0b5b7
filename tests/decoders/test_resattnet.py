"""3D-ResAttNet is the network of torch's own functions; which boxes it refuses, what it has."""

import re

import pytest
import torch

from seqpar.decoders.resattnet import BLOCKS, STEMS, ResAttNet, refuse_cut
from tests.support.boxes import numbers
from tests.support.pages import page
from tests.support.plain_resattnet import logits_of
from tests.support.ranks import relative


def make(variant: str) -> ResAttNet:
    torch.manual_seed(0)
    net = ResAttNet(2, 3, BLOCKS[18], 8 if variant == "text" else 2, variant=variant).double()
    with torch.no_grad():  # attention's weight begins at 0, which would hide it
        for number, p in enumerate(net.parameters()):
            p += 0.1 * numbers(1000 + number, *p.shape)
    return net


@pytest.mark.parametrize("variant", STEMS)
def test_it_is_the_network_of_torchs_own_functions(variant: str) -> None:
    net, image, slope = make(variant), numbers(1, 2, 2, 40, 24, 33), numbers(2, 2, 3)
    weights = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    ours, theirs = net(image), logits_of(image, weights, BLOCKS[18])
    assert relative(ours, theirs) < 1e-12
    grads = torch.autograd.grad((ours * slope).sum(), list(net.parameters()))
    wanted = torch.autograd.grad((theirs * slope).sum(), list(weights.values()))
    largest = max(float(grad.abs().max()) for grad in wanted)
    assert max(float((a - b).abs().max()) for a, b in zip(grads, wanted)) < 1e-12 * largest
    assert all(float(grad.abs().max()) > 1e-9 * largest for grad in wanted), "a gradient that compares nothing"


def test_it_begins_without_attention_and_has_as_many_parameters_as_read() -> None:
    fresh = ResAttNet(1, 2)
    assert float(fresh.cells["attention"].weight.detach()) == 0.0
    assert sum(p.numel() for p in fresh.parameters()) == 33_161_026 + 590_913
    convolutions = [m for m in ResAttNet(1, 2, BLOCKS[34], 8).modules() if isinstance(m, torch.nn.Conv3d)]
    assert len(convolutions) == 33 + 3 + 4  # one each of a layer; of shortcuts; of attention
    assert [fresh.names[end] for end in fresh.stage_ends] == ["stage0_1", "stage1_1", "stage2_1", "attention"]


def test_the_texts_has_only_kernels_of_three_and_attention_after_every_residual_layer() -> None:
    for layers, blocks in BLOCKS.items():
        net = ResAttNet(1, 2, blocks, 8, variant="text")
        kernels = {m.kernel_size for m in net.modules() if isinstance(m, torch.nn.Conv3d)}
        assert kernels == {(3, 3, 3), (1, 1, 1)}, "those of 1 are shortcuts and attention's"
        inner = net.names[2:-1]
        assert [name.split("_")[0][:-1] for name in inner] == ["stage", "attention"] * sum(blocks)
        assert sum(blocks) * 2 + 2 == layers
    few, text = (sum(p.numel() for p in ResAttNet(1, 2, variant=variant).parameters()) for variant in STEMS)
    attention = [(9 * c * c) // 4 + (17 * c) // 8 + 1 for c in (64, 128, 256, 512)]
    assert text == few - 64 * (7**3 - 3**3) - attention[-1] + 2 * sum(attention) == 34_711_610


@pytest.mark.parametrize("layers", BLOCKS)
def test_both_readings_have_the_parameters_that_the_page_says(layers: int) -> None:
    """Counted by hand: a stem, two convolutions a layer, shortcuts where channels change, attention, a matrix."""
    blocks = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}[layers]  # ResNet's
    attention = {c: (9 * c * c) // 4 + (17 * c) // 8 + 1 for c in (64, 128, 256, 512)}
    body, before = 512 * 2 + 2, 64
    for count, c in zip(blocks, attention):
        body += 27 * c * before + 27 * c * c * (2 * count - 1) + 2 * 2 * c * count
        body += (before * c + 2 * c) * (c != before)
        before = c
    stems = {"few attentions": 64 * 7**3, "text": 64 * 3**3}
    added = {
        "few attentions": attention[512],
        "text": sum(count * each for count, each in zip(blocks, attention.values())),
    }
    text = page("explanation/presets-resattnet").read_text()
    shown = dict(re.findall(r"^\| `resattnet18(.*?)`, `resattnet34.*?` \| (.+) \|$", text, re.M))
    for variant, suffix in (("few attentions", ""), ("text", "-text")):
        net = ResAttNet(1, 2, BLOCKS[layers], variant=variant)
        total = sum(p.numel() for p in net.parameters())
        assert total == body + stems[variant] + 2 * 64 + added[variant]
        assert shown[suffix].split(", ")[layers == 34] == f"{total / 1e6:.1f} M"


def test_boxes_that_leave_a_rank_without_a_voxel_are_refused() -> None:
    refuse_cut([(0, 24, 48), (0, 24, 56), (0, 48)])
    with pytest.raises(ValueError, match="leaves a rank without output"):
        refuse_cut([(0, 16, 32, 48)])
    refuse_cut([(0, 24, 48), (0, 24, 56), (0, 48)], "text")
    with pytest.raises(ValueError, match="choose 'few attentions' or 'text'"):
        ResAttNet(1, 2, variant="reading")
    with pytest.raises(ValueError, match="use a multiple of 8"):
        ResAttNet(1, 2, (1,), 4)
