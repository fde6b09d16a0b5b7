"""Primus's decoder: each token by itself, so that boxes exchange nothing."""

import pytest
import torch
from torch import nn

from seqpar.decoders.primus import PrimusDecoder, primus_widths
from tests.support import nets
from tests.support.marks import long_case


def decoder(patch: int = nets.PATCH) -> nn.Module:
    return PrimusDecoder(nets.EMBED, nets.CLASSES, (patch,) * 3)


def small() -> tuple[nn.Module, tuple[int, ...]]:
    return decoder(), ()


def test_widths_fall_geometrically_in_eights() -> None:
    assert primus_widths(396, 4, 3) == [104, 32]
    assert primus_widths(864, 2, 3) == [144, 24]
    assert primus_widths(24, 100, 2) == [72]  # more classes than features: they rise
    assert primus_widths(8, 3, 1) == []


@pytest.mark.parametrize("patch", [2, 4, 8])
def test_logits_of_a_token_depend_on_it_alone(patch: int) -> None:
    net, grid = decoder(patch).double(), torch.randn(1, nets.EMBED, 3, 2, 2, dtype=torch.float64)
    whole, _ = net([grid], None)
    assert whole.shape == (1, nets.CLASSES, 3 * patch, 2 * patch, 2 * patch)
    one, _ = net([grid[..., 1:2, 1:2, 0:1]], None)
    assert (one - whole[..., patch : 2 * patch, patch:, :patch]).abs().max() < 1e-13
    assert (one - whole[..., :patch, patch:, :patch]).abs().max() > 1e-2


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_boxes_decode_as_the_whole_without_traffic(ranks, world: int) -> None:
    for gaps, extents, traffic in ranks(world, nets.decode_boxes, decoder, (4, 3, 4), nets.PATCH):
        assert max(gaps.values()) < 1e-12, gaps
        assert extents == (16, 12, 16)
        assert traffic == {}


@pytest.mark.parametrize("world", [1, 2, 3, 4, long_case(8)])
def test_every_exact_mode_and_split_equals_one_process(ranks, world: int) -> None:
    nets.check_exact(ranks, world, small)


@pytest.mark.parametrize("world", [2, 8])
def test_nogather_has_the_same_logits_and_another_loss(ranks, world: int) -> None:
    (gaps,) = nets.differences(ranks, world, small, [("nogather", "spatial")]).values()
    assert gaps["logits"] < 1e-12
    assert gaps["loss"] > 1e-6  # Dice of each part by itself
