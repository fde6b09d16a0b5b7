"""Attention in windows is dense attention with a mask, on any number of ranks; what it sends, and how it grows."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from seqpar import Layout
from seqpar.attention.window_attention import Windows, attend_in_windows, window_borders
from seqpar.parallel.mesh import Group, Mesh
from seqpar.planner.step_counter import StepSetup, count_step
from seqpar.settings.config import Config
from seqpar.vit.token_merging import NestedLayout
from seqpar.vit.tokens import RotaryPositions
from tests.support.ranks import once_per_world, relative

HEADS, WIDTH, SAMPLES = 2, 6, 2
# token grids, sides of windows: odd, even, as long as a side, longer than a rank's box on 3 and 4 ranks
CASES = [((6, 4, 10), 3), ((8, 4, 6), 4), ((10, 6, 4), 5), ((7, 5, 9), 4)]
Gradient = Tensor


def layout_of(grid: tuple[int, ...], ranks: int) -> Layout:
    """Returns the layout of tokens of 2 x 2 x 2 voxels, where sides are even nested, as before a merging."""
    tile = tuple(2 * side for side in grid)
    if any(side % 2 for side in grid):
        return Layout(tile, (2, 2, 2), ranks)
    return NestedLayout(tile, (2, 2, 2), ranks, "spatial", 1)


def inputs(grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns queries, keys and values ``b n 3 a f`` of all tokens in raster order, and a slope at the output."""
    dice = torch.Generator().manual_seed(0)
    count = torch.Size(grid).numel()
    qkv = torch.randn(SAMPLES, count, 3, HEADS, WIDTH, generator=dice, dtype=torch.float64)
    return qkv, torch.randn(SAMPLES, count, HEADS, WIDTH, generator=dice, dtype=torch.float64)


@cache
def masked(grid: tuple[int, ...], side: int, is_shifted: bool) -> tuple[Tensor, Gradient]:
    """Returns dense attention of tokens whose windows have one number in every direction, and its gradient."""
    (qkv, slope), rank = inputs(grid), torch.arange(torch.Size(grid).numel())
    late = side - side // 2 if is_shifted else 0
    same = torch.ones(len(rank), len(rank), dtype=torch.bool)
    for place, extent in zip(torch.unravel_index(rank, grid), grid):
        number = torch.zeros_like(place) if extent <= side else (place + late) // side
        same &= number[:, None] == number
    qkv.requires_grad_()
    rotary = RotaryPositions(Layout(tuple(grid), (1, 1, 1)), 0, WIDTH, qkv)
    q, k, v = rearrange(qkv, "b n m a f -> m b a n f")
    out = rearrange(F.scaled_dot_product_attention(rotary(q), rotary(k), v, attn_mask=same), "b a n f -> b n a f")
    return out.detach(), torch.autograd.grad(out, qkv, slope)[0]


def of_rank(group: Group, grid: tuple[int, ...], side: int, is_shifted: bool, keep_kv: bool) -> tuple[Tensor, ...]:
    """Returns this rank's token numbers, its outputs and the gradient at its queries, keys and values."""
    layout = layout_of(grid, group.size)
    ids, (qkv, slope) = layout.token_ids(group.index), inputs(grid)
    windows = Windows.of(layout, group, side, is_shifted, torch.device("cpu"))
    own = qkv[:, ids].requires_grad_()
    rotary = RotaryPositions.of(layout, group.index, WIDTH, own)
    out = attend_in_windows(own.clone(), windows, rotary, keep_kv)
    return ids, out.detach(), torch.autograd.grad(out, own, slope[:, ids])[0]


def gaps(mesh: Mesh) -> list[tuple[float, float, float]]:
    """Returns for each case how far outputs and gradients are off, and outputs from those of the other windows."""
    rows = []
    for number, (grid, side) in enumerate(CASES):
        for is_shifted in (False, True):
            ids, out, gradient = of_rank(mesh.seq, grid, side, is_shifted, keep_kv=number % 2 == 1)
            (want, slopes), (other, _) = masked(grid, side, is_shifted), masked(grid, side, not is_shifted)
            worst = (out - want[:, ids]).abs().max() / want.abs().max()
            back = (gradient - slopes[:, ids]).abs().max() / slopes.abs().max()
            rows.append((float(worst), float(back), relative(out, other[:, ids])))
    return rows


def sent(mesh: Mesh) -> list[int]:
    """Returns the bytes that windows of 4 send on a grid of 8 x 4 x 6: as they are, shifted, shifted and kept."""
    counts = []
    for is_shifted, keep_kv in ((False, False), (True, False), (True, True)):
        mesh.seq.traffic.clear()
        of_rank(mesh.seq, (8, 4, 6), 4, is_shifted, keep_kv)
        assert set(mesh.seq.traffic) <= {"windows"}
        counts.append(mesh.seq.traffic["windows"])
    return counts


of_world = once_per_world(gaps, sent)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_outputs_and_gradients_are_those_of_dense_attention_with_a_mask(world: int) -> None:
    for grid, side in CASES:
        assert [len(masked(grid, side, is_shifted)) for is_shifted in (False, True)] == [2, 2]  # ranks inherit them
    for seen in of_world(world):
        assert len(seen["gaps"]) == 2 * len(CASES)
        for forward, backward, control in seen["gaps"]:
            assert forward < 1e-12 and backward < 1e-12
            assert control > 1e-3, "windows that are shifted and windows that are not give the same"


def test_a_border_is_crossed_once_forward_and_twice_backward_by_what_lies_between_it_and_its_windows() -> None:
    """Two boxes of 4 x 4 x 6 tokens: windows of 4 end at the border, shifted ones reach 2 tokens to either side."""
    plane = 4 * 6 * SAMPLES * 2 * HEADS * WIDTH * 8  # bytes of keys and values of a plane of tokens
    for seen in of_world(2):
        assert seen["sent"] == [0, 3 * 2 * plane, 2 * 2 * plane]


def test_windows_begin_at_the_first_token_and_end_with_the_grid() -> None:
    assert window_borders(10, 4, False) == (0, 4, 8, 10) and window_borders(10, 4, True) == (0, 2, 6, 10)
    assert window_borders(11, 5, True) == (0, 2, 7, 11) and window_borders(4, 4, True) == (0, 4)


def test_work_memory_and_messages_grow_with_the_tokens() -> None:
    small = Config(
        tile=(64, 32, 32), patch=4, depth=2, embed_dim=12, heads=2, decoder="primus", mode="halo", positions="rope",
        window=4, batch=1, seqpar=4,
    )  # fmt: skip
    sizes = [replace(small, tile=(side, 32, 32)) for side in (64, 128, 256)]
    steps = [count_step(StepSetup(config, 1)) for config in sizes]
    per_token = [(s.operations["attention"] / n, s.tokens / n, s.sent["windows"]) for s, n in zip(steps, (1, 2, 4))]
    assert per_token[1][0] == pytest.approx(per_token[2][0], rel=0.1)
    assert per_token[1][1] == pytest.approx(per_token[2][1], rel=0.1)
    assert steps[0].sent["windows"] > 0
    dense = [count_step(StepSetup(replace(config, window=0), 1)).operations["attention"] for config in sizes]
    assert dense[2] == pytest.approx(16 * dense[0], rel=0.01)  # the control: all tokens grow with their square
