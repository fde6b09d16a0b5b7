"""Which input interval each output interval of an operation needs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from seqpar.halo_exchange import Interval
from seqpar.layout import Bounds
from seqpar.spatial.box_grid import BoxGrid


@dataclass(frozen=True)
class Reach:
    """What an operation does to one dimension: where its output is cut, and the input that each interval needs.

    ``local`` where the dimension is whole on every rank and the operation itself pads it by ``padding`` each side;
    otherwise all that it needs is in ``needed``, reaching out of the volume where it pads.
    """

    edges: Bounds
    needed: tuple[Interval, ...]
    local: bool = False
    padding: int = 0


def sliding_reach(
    edges: Bounds, span: int, stride: int, pads: tuple[int, int], what: str, ceil_mode: bool = False
) -> Reach:
    """Returns the reach of a window of ``span`` voxels (kernel with its dilation) that moves by ``stride``.

    The output at o reads [o stride - pad, o stride - pad + span); a rank holds those whose o stride is in its box,
    the last one all that remain.
    """
    extent = edges[-1]
    count = (extent + sum(pads) - span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= extent + pads[0]:
        count -= 1
    cut = _cut_at([-(-edge // stride) for edge in edges], count, edges, what)
    needed = tuple((a * stride - pads[0], (b - 1) * stride - pads[0] + span) for a, b in itertools.pairwise(cut))
    local = len(edges) == 2 and pads[0] == pads[1]
    return Reach(cut, needed, local, pads[0] if local else 0)


def transposed_reach(
    edges: Bounds, kernel: int, stride: int, padding: int, dilation: int, output_padding: int, what: str
) -> Reach:
    """Returns the reach of a transposed convolution, whose input i adds to outputs i stride - padding + dilation t."""
    extent, span = edges[-1], dilation * (kernel - 1)
    count = (extent - 1) * stride - 2 * padding + span + output_padding + 1
    cut = _cut_at([edge * stride for edge in edges], count, edges, what)
    needed = []
    for a, b in itertools.pairwise(cut):
        low = min(max(-(-(a + padding - span) // stride), 0), extent - 1)
        high = max(min((b - 1 + padding) // stride + 1, extent), low + 1)  # one at least: no empty convolution
        needed.append((low, high))
    return Reach(cut, tuple(needed), len(edges) == 2, padding if len(edges) == 2 else 0)


def enlarging_reach(edges: Bounds, factor: int, halo: int) -> Reach:
    """Returns the reach of an enlargement by ``factor`` that reads ``halo`` voxels of each neighbour."""
    needed = tuple((max(a - halo, 0), min(b + halo, edges[-1])) for a, b in itertools.pairwise(edges))
    return Reach(tuple(edge * factor for edge in edges), needed, len(edges) == 2)


def _cut_at(wanted: Sequence[int], count: int, edges: Bounds, what: str) -> Bounds:
    """Returns the output's edges; refuses an empty output, and ranks that would hold none of it."""
    if count < 1:
        raise ValueError(f"{what} leaves nothing of extent {edges[-1]}: use a larger --tile or a smaller kernel")
    cut = (*(min(at, count) for at in wanted[:-1]), count)
    if any(a >= b for a, b in itertools.pairwise(cut)):
        raise ValueError(
            f"{what} turns the intervals at {edges} into ones at {cut}: a rank would hold no output; use a smaller "
            "--seqpar, a larger --tile, or --mode gather"
        )
    return cut


def output_grid(grid: BoxGrid, reaches: Sequence[Reach]) -> BoxGrid:
    """Returns the box grid of an operation's output."""
    return BoxGrid(tuple(reach.edges for reach in reaches), grid.group)
