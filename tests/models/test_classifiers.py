"""Classifiers on several ranks are the one of a single process, in every exact mode, batch norm over boxes and data."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from seqpar.models.build import build_network
from seqpar.models.classifier import TokenClassifier
from seqpar.parallel.mesh import Group
from seqpar.settings.config import Config
from tests.support import classifiers
from tests.support.classifiers import (
    Make,
    batch,
    gaps,
    one_process,
    outcomes,
    resattnet,
    resattnet_text,
    vit,
    vit_with_token,
)
from tests.support.marks import long_case

MAKERS: tuple[Make, ...] = (resattnet, resattnet_text, vit, vit_with_token)
CASES = {  # of each number of ranks: mode and split
    2: [("gather", "ordered"), ("halo", "spatial"), ("halo", "ordered"), ("swap", "spatial"), ("auto", "spatial")],
    3: [("halo", "spatial"), ("swap", "ordered")],
    4: [("gather", "spatial"), ("halo", "spatial")],
}


@pytest.mark.parametrize("world", [long_case(world) if world > 2 else world for world in CASES])
def test_every_exact_mode_equals_one_process(world: int, ranks: Callable[..., list]) -> None:
    cases = [(make, *case, 6 if "swap" in case else 3) for make in MAKERS for case in CASES[world]]
    every = ranks(world, outcomes, cases, timeout=240)
    for number, case in enumerate(cases):
        want = one_process(case[0], case[-1])
        seen = torch.cat([results[number]["samples"] for results in every]).unique()
        assert torch.equal(seen, torch.arange(case[-1])), "samples without logits"
        for results in every:
            differences = gaps(results[number], want)
            assert max(differences.values()) < 1e-12, (case, differences)


def test_batch_norm_and_loss_run_over_data_too(ranks: Callable[..., list]) -> None:
    """Two groups of two ranks, each with three of six volumes, whose classes do not weigh the same."""
    cases = [(make, mode, "spatial", 6) for make in MAKERS for mode in ("halo", "gather")]
    for results in ranks(4, outcomes, cases, seqpar=2, timeout=240):
        for number, (make, *_) in enumerate(cases):
            differences = gaps({**results[number], "samples": results[number]["samples"]}, one_process(make, 6))
            assert max(differences.values()) < 1e-12, (cases[number], differences)
            assert (make in (resattnet, resattnet_text)) == any("running" in name for name in differences)


def test_where_a_class_is_seen_is_what_hooks_make_of_it() -> None:
    torch.manual_seed(1)  # a class that something speaks for
    net = resattnet(Group("seq"), None, "gather", "spatial").double().eval()
    image, taken = batch(1)[0], dict[str, torch.Tensor]()
    part = net.layout.cut(image, 0)
    stage = net.resattnet.cells["stage0_0"]  # no later one has 6 points along 16 voxels, nor has this

    def look(module: object, args: object, output: tuple) -> None:
        taken["x"] = output[0]
        output[0].register_hook(lambda slopes: taken.update(slopes=slopes))

    hook = stage.register_forward_hook(look)
    net(image)[0, 2].sum().backward()
    hook.remove()
    means = taken["slopes"].mean((2, 3, 4), keepdim=True)
    for way, weights in (("grad-cam", means), ("hirescam", taken["slopes"])):
        wanted = (weights * taken["x"]).sum(1).clamp(min=0)[0].detach()
        ours, stride = net.evidence(part, net.layout, 2, way)
        assert stride == 4
        assert ours.shape == (18, 10, 4) and wanted.max() > 0
        assert torch.allclose(ours, wanted, rtol=1e-12, atol=1e-15)
        assert not torch.allclose(ours, net.evidence(part, net.layout, 1, way).points)
    assert torch.equal(net.evidence(part, net.layout, 2).points, ours), "the usual way"
    with pytest.raises(ValueError, match="--explain-by grad-cam: this network has no such way"):
        vit(Group("seq"), None, "gather", "spatial").known_way("grad-cam")


def test_a_class_token_is_a_token_more() -> None:
    """With ``--pooling token``; it has no place, so that it cannot be rotated."""
    config = Config(task="classify", tile=(16, 16, 16), patch=(8, 8, 8), depth=1, embed_dim=12, heads=2)
    names = [
        set(build_network(replace(config, pooling=how), 1, 2, Group("seq")).state_dict()) for how in ("mean", "token")
    ]
    assert names[1] - names[0] == {"class_token"} and not names[0] - names[1]
    net = vit_with_token(Group("seq"), None, "gather", "spatial")
    encoder = classifiers.SeqParViT(2, classifiers.TILE, 8, 24, 2, 2, positions="rope")
    with pytest.raises(ValueError, match="pooling='token' with positions='rope'"):
        TokenClassifier(encoder, 3, net.mode, "token")
