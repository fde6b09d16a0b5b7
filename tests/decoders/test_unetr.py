"""UNETR's decoder: which blocks it takes, MONAI's function for every patch, the same on any number of ranks."""

import pytest
import torch
from torch import Tensor, nn

from seqpar.decoders.unetr import UnetrDecoder, skip_blocks
from seqpar.spatial.memory_format import is_channels_last
from seqpar.weights.monai_weights import load_monai, monai_names
from tests.support import nets, references
from tests.support.marks import long_case
from tests.support.ranks import relative


def small() -> tuple[nn.Module, tuple[int, ...]]:
    patch = (nets.PATCH,) * 3
    return UnetrDecoder(nets.CHANNELS, nets.EMBED, nets.CLASSES, patch, 2), skip_blocks(nets.DEPTH, patch)


@pytest.mark.parametrize(
    "depth, patch, monai, paper",
    [
        (12, 16, (3, 6, 9), (2, 5, 8)),
        (24, 16, (6, 12, 18), (5, 11, 17)),
        (12, 8, (4, 8), (3, 7)),
        (12, 4, (6,), (5,)),
        (12, 2, (), ()),
        (6, 16, (2, 3, 5), (1, 2, 4)),
        (2, 16, (1, 1, 1), (0, 0, 1)),
        (1, 8, (0, 0), (0, 0)),
    ],
)
def test_skips_leave_the_encoder_at_equal_steps(depth: int, patch: int, monai: tuple, paper: tuple) -> None:
    assert skip_blocks(depth, (patch,) * 3) == monai
    assert skip_blocks(depth, (patch,) * 3, "paper") == paper


def test_other_skips_and_patches_are_refused() -> None:
    with pytest.raises(ValueError, match="monai or paper"):
        skip_blocks(12, (16,) * 3, "late")
    for patch in [(6, 6, 6), (4, 4, 3), (1, 1, 1)]:
        with pytest.raises(ValueError, match="patch=2, 4, 8 or 16"):
            UnetrDecoder(1, 24, 2, patch)


def test_a_decoder_says_what_it_needs() -> None:
    decoder, grid = small()[0], torch.zeros(1, nets.EMBED, 2, 2, 2)
    image = torch.zeros(1, nets.CHANNELS, *[2 * nets.PATCH] * 3)
    needed = decoder.num_features
    with pytest.raises(ValueError, match=f"expected {needed} token grids and the image, got {needed} and no image"):
        decoder([grid] * needed, None)
    with pytest.raises(ValueError, match=f"expected {needed} token grids and the image, got 1 and an image"):
        decoder([grid], image)


@pytest.mark.parametrize("patch, depth", [(2, 1), (4, 3), (8, 3), (8, 5), (16, 4)])
def test_each_patch_has_its_levels(patch: int, depth: int) -> None:
    grid = (2, 1, 3) if patch > 4 else (3, 4, 2)
    state = references.draw(references.unetr_shapes(2, 3, patch, grid, 3, 24, 40, depth))
    tile = tuple(side * patch for side in grid)
    x = torch.randn(2, 2, *tile, dtype=torch.float64)
    net = load_monai(state, tile, 4).eval()
    with torch.no_grad():
        assert (net(x) - references.unetr(state, x, 4, skip_blocks(depth, (patch,) * 3))).abs().max() < 1e-12
        if patch > 2:
            other = tuple((at + 1) % depth for at in skip_blocks(depth, (patch,) * 3))
            assert (net(x) - references.unetr(state, x, 4, other)).abs().max() > 1e-4


def test_gradients_are_those_of_the_reference() -> None:
    """The decoder's norms have a backward of their own; the reference's is torch's."""
    state = references.draw(references.unetr_shapes(2, 3, 8, (2, 1, 3), 3, 24, 40, 3))
    x = torch.randn(2, 2, 16, 8, 24, dtype=torch.float64)
    net = load_monai(state, (16, 8, 24), 4)
    slope = torch.randn(2, 3, 16, 8, 24, dtype=torch.float64)
    (net(x) * slope).sum().backward()
    for tensor in state.values():
        tensor.requires_grad_()
    (references.unetr(state, x, 4, skip_blocks(3, (8, 8, 8))) * slope).sum().backward()
    learned = dict(net.named_parameters())
    names = monai_names(3, False, 3, True)
    assert len(names) == len(learned)
    for theirs, ours in names.items():
        assert relative(learned[ours].grad, state[theirs].grad) < 1e-11, theirs  # type: ignore[arg-type]


def test_a_skip_reaches_as_far_as_its_level_says() -> None:
    """Deep tokens move logits through the coarsest grid, the image through the finest: both must be there."""
    decoder = UnetrDecoder(1, 24, 2, (8, 8, 8), 2).double()
    features = [torch.randn(1, 24, 2, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    image: Tensor = torch.randn(1, 1, 16, 16, 16, dtype=torch.float64, requires_grad=True)
    logits, _ = decoder(features, image)
    for grad in torch.autograd.grad(logits[0, 0, 0, 0, 0], [*features, image]):
        assert grad.abs().max() > 1e-6


@pytest.mark.parametrize(
    "world, patch, grid",
    [(2, 4, (4, 3, 4)), (3, 4, (4, 3, 4)), (4, 4, (3, 3, 1)), (8, 4, (2, 3, 2)), (3, 16, (3, 1, 1))],
)
def test_boxes_decode_as_the_whole(ranks, world: int, patch: int, grid: tuple) -> None:
    make = lambda: UnetrDecoder(nets.CHANNELS, nets.EMBED, nets.CLASSES, (patch,) * 3, 2)  # noqa: E731
    for gaps, extents, traffic in ranks(world, nets.decode_boxes, make, grid, patch):
        assert max(gaps.values()) < 1e-12, gaps
        assert extents == tuple(side * patch for side in grid)
        assert sum(traffic.values()) > 0


@pytest.mark.parametrize("world", [1, 3])
def test_float32_computes_channels_last_and_the_same(ranks, world: int) -> None:
    """Float64 has no such kernels: what the other tests compare lies in another order."""
    make = lambda: UnetrDecoder(nets.CHANNELS, nets.EMBED, nets.CLASSES, (4,) * 3, 2)  # noqa: E731
    for gaps, _, _ in ranks(world, nets.decode_boxes, make, (4, 3, 4), 4, torch.float32):
        assert max(gaps.values()) < 1e-4, gaps
    image = torch.randn(1, nets.CHANNELS, 16, 12, 16)
    logits, _ = make()([torch.randn(1, nets.EMBED, 4, 3, 4) for _ in range(2)], image)
    assert is_channels_last(logits)


@pytest.mark.parametrize("world", [1, 2, 3, long_case(4), long_case(8)])
def test_every_exact_mode_and_split_equals_one_process(ranks, world: int) -> None:
    nets.check_exact(ranks, world, small)


def test_nogather_is_another_function(ranks) -> None:
    (gaps,) = nets.differences(ranks, 2, small, [("nogather", "spatial")]).values()
    assert gaps["logits"] > 1e-3 and gaps["gradients"] > 1e-3
