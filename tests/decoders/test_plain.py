"""The plain decoder is the paper's: an independent one, written from its text, has the same logits and gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.plain import PlainDecoder
from seqpar.models.build import build_network
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Group
from seqpar.settings.presets import PRESETS
from tests.support.paper_decoder import PaperDecoder
from tests.support.ranks import relative

EMBED, CLASSES, WIDTH = 24, 4, 6
GRIDS = {4: (3, 2, 4), 8: (2, 1, 3), 16: (2, 1, 1)}  # tokens, by patch


def with_weights_of(ours: nn.Module, theirs: nn.Module) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
    """Copies the weights of one decoder into the other; returns their parameters by name."""
    weights = dict(theirs.named_parameters())
    assert weights.keys() == dict(ours.named_parameters()).keys()
    pairs = [(name, own, weights[name]) for name, own in ours.named_parameters()]
    with torch.no_grad():
        for _, own, other in pairs:
            own.copy_(other.view(own.shape))  # the classifier is a convolution of one voxel, or a linear layer
    return pairs


def reference(patch: int, **how: bool) -> PaperDecoder:
    """Returns a decoder whose every weight, norms' scales and shifts included, is random."""
    torch.manual_seed(0)
    decoder = PaperDecoder(EMBED, CLASSES, patch, WIDTH, **how).double()
    with torch.no_grad():
        for norm in decoder.norms:
            norm.weight.uniform_(0.5, 1.5)  # type: ignore[union-attr, operator]
            norm.bias.normal_()  # type: ignore[union-attr, operator]
    return decoder


def gaps(patch: int, dtype: torch.dtype = torch.float64, **how: bool) -> dict[str, float]:
    """Returns the largest relative differences of logits and of each gradient, of the tokens' too."""
    grid = GRIDS[patch]
    layout = Layout.of([side * patch for side in grid], patch)
    theirs, ours = reference(patch, **how), PlainDecoder(EMBED, CLASSES, (patch,) * 3, WIDTH)
    pairs = with_weights_of(ours.to(dtype), theirs)
    tokens = torch.randn(2, layout.num_tokens, EMBED, dtype=torch.float64, requires_grad=True)
    mine = tokens.detach().to(dtype).requires_grad_()
    wanted = theirs(tokens, grid)
    logits, _ = ours(choose_mode("gather", Group("seq")).features([mine], layout), None)
    slope = torch.randn(wanted.shape, dtype=torch.float64)
    (wanted * slope).sum().backward()
    (logits * slope.to(dtype)).sum().backward()

    def apart(a: Tensor | None, b: Tensor | None) -> float:
        assert a is not None and b is not None and b.abs().max() > 1e-6
        return relative(a.double().view(b.shape), b)

    gradients = {name: apart(own.grad, other.grad) for name, own, other in pairs}
    return {"logits": apart(logits, wanted), "tokens": apart(mine.grad, tokens.grad), **gradients}


@pytest.mark.parametrize("patch", GRIDS)
def test_logits_and_every_gradient_are_the_papers(patch: int) -> None:
    """Ours classifies before the last upsampling, the paper after it: it is the same function."""
    differences = gaps(patch)
    assert len(differences) == 2 + 3 * (patch.bit_length() - 1) + 2
    assert max(differences.values()) < 1e-12, differences


def test_the_kernels_that_train_in_float32_compute_it_too() -> None:
    differences = gaps(8, torch.float32)
    assert max(differences.values()) < 1e-4, differences


def test_norm_and_upsampling_do_not_commute() -> None:
    """The control: another order of the operations is seen."""
    differences = gaps(4, upsample_first=True)
    assert differences["logits"] > 1e-2 and differences["tokens"] > 1e-2, differences


@pytest.mark.parametrize("patch", GRIDS)
def test_the_presets_decoder_has_the_papers_sizes(patch: int) -> None:
    """E_m = 768 to 128, log2 P convolutions, then the classes; the preset's own tile comes out whole."""
    paper = replace(PRESETS["paper"](), patch=patch, depth=1)
    net = build_network(paper, 4, CLASSES, Group("seq"), device="meta")
    with torch.device("meta"):
        theirs = PaperDecoder(768, CLASSES, patch)
        tokens = torch.empty(1, net.encoder.layout.num_tokens, 768)
        grid = net.mode.features([tokens], net.encoder.layout)
        logits = net.decoder(grid, None)[0]
        assert logits.shape == theirs(tokens, net.encoder.layout.grid).shape == (1, CLASSES, 96, 96, 96)
    assert len(with_weights_of(net.decoder, theirs)) == 3 * (patch.bit_length() - 1) + 2
