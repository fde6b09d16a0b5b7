"""The input interval that each rank's output interval needs, one dimension at a time.

It follows from numbers that all ranks know, so either all ranks raise ValueError or none does.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from seqpar.parallel.layout import Bounds
from seqpar.parallel.row_exchange import Interval
from seqpar.spatial.box_grid import BoxGrid


class EmptyBoxError(ValueError):
    """An operation would leave a rank without output."""


@dataclass(frozen=True)
class ReceptiveField:
    """Where an operation's output is cut along one dimension, and the input interval that each rank needs for its part.

    ``needed`` extends beyond the volume if the operation pads. If the dimension is not cut, it may be ``local``:
    nothing is fetched, and the operation itself pads both sides by ``padding``.
    """

    edges: Bounds
    needed: tuple[Interval, ...]
    local: bool = False
    padding: int = 0


def sliding_reach(
    edges: Bounds, span: int, stride: int, pads: tuple[int, int], what: str, ceil_mode: bool = False
) -> ReceptiveField:
    """Returns the receptive field of a window of ``span`` voxels (the dilated kernel) that moves by ``stride``.

    The output at ``o`` reads ``[o * stride - pad, o * stride - pad + span)``. A rank holds the outputs whose window has
    its centre in the rank's box; the last rank holds all that remain. ``what`` names the operation in errors.
    """
    extent = edges[-1]
    count = (extent + sum(pads) - span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= extent + pads[0]:
        count -= 1
    shift = pads[0] - (span - 1) // 2
    cut = _cut_at([0, *(-(-(edge + shift) // stride) for edge in edges[1:])], count, edges, what)
    needed = tuple((a * stride - pads[0], (b - 1) * stride - pads[0] + span) for a, b in itertools.pairwise(cut))
    local = len(edges) == 2 and pads[0] == pads[1]
    return ReceptiveField(cut, needed, local, pads[0] if local else 0)


def transposed_reach(
    edges: Bounds,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    output_padding: int,
    what: str,
    cut_shift: int = 0,
) -> ReceptiveField:
    """Returns the receptive field of a transposed convolution.

    Input ``i`` contributes to the outputs ``i * stride - padding + dilation * t``, for each kernel element ``t``. The
    output is cut ``cut_shift`` voxels before where the edges of the input's boxes come to be.
    """
    extent, span = edges[-1], dilation * (kernel - 1)
    count = (extent - 1) * stride - 2 * padding + span + output_padding + 1
    cut = _cut_at([0, *(edge * stride - cut_shift for edge in edges[1:])], count, edges, what)
    needed = []
    for a, b in itertools.pairwise(cut):
        low = min(max(-(-(a + padding - span) // stride), 0), extent - 1)
        high = max(
            min((b - 1 + padding) // stride + 1, extent), low + 1
        )  # at least one row, because torch refuses empty inputs
        needed.append((low, high))
    return ReceptiveField(cut, tuple(needed), len(edges) == 2, padding if len(edges) == 2 else 0)


def enlarging_reach(edges: Bounds, factor: int, halo: int) -> ReceptiveField:
    """Returns the receptive field of an upsampling by ``factor`` that reads ``halo`` voxels of each neighbour."""
    needed = tuple((max(a - halo, 0), min(b + halo, edges[-1])) for a, b in itertools.pairwise(edges))
    return ReceptiveField(tuple(edge * factor for edge in edges), needed, len(edges) == 2)


def _cut_at(targets: Sequence[int], count: int, edges: Bounds, what: str) -> Bounds:
    """Returns the output's edges; raises if the output, or a rank's part of it, is empty."""
    if count < 1:
        raise ValueError(f"{what} has no output for an extent of {edges[-1]}: use a larger `tile` or a smaller kernel")
    cut = (*(min(at, count) for at in targets[:-1]), count)
    if any(a >= b for a, b in itertools.pairwise(cut)):
        raise EmptyBoxError(
            f"{what} maps the intervals at {edges} to {cut}, which leaves a rank without output: use a smaller "
            "`seqpar`, a larger `tile`, or mode='gather'"
        )
    return cut


def output_grid(grid: BoxGrid, reaches: Sequence[ReceptiveField]) -> BoxGrid:
    """Returns the box grid of an operation's output."""
    return BoxGrid(tuple(reach.edges for reach in reaches), grid.group)
