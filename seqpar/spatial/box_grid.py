"""Box grids: where a volume is cut into boxes, and which box each rank holds.

A dimension of extent L is cut at ``edges`` 0 < ... < L. Each rank holds the product of one interval per dimension;
ranks are numbered in raster order of these products, last dimension fastest, as in ``Layout.cuts``.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from seqpar.parallel.layout import Bounds, cut_counts
from seqpar.parallel.mesh import Group, as_group
from seqpar.parallel.row_exchange import Interval


@dataclass(frozen=True)
class BoxGrid:
    """The boxes into which a volume is cut, one per rank of ``group``.

    Get one from a mode (``mode.box_grid``) or build it as ``BoxGrid(layout.voxel_cuts(), encoder.group)``.

    Args:
        ``edges``: where each spatial dimension is cut, from 0 to its extent.
        ``group``: the ranks, as many as there are boxes: a ``Group``, torch's ``ProcessGroup``, or a one-dimensional
            ``DeviceMesh``.
    """

    edges: tuple[Bounds, ...]
    group: Group

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", as_group(self.group))
        for edges in self.edges:
            if len(edges) < 2 or edges[0] != 0 or any(a >= b for a, b in itertools.pairwise(edges)):
                raise ValueError(f"edges {edges} must start at 0 and ascend: no box may be empty")
        if math.prod(self.parts) != self.group.size:
            raise ValueError(
                f"edges {self.edges} make {math.prod(self.parts)} boxes, but the {self.group} needs one per rank"
            )

    @classmethod
    def even(cls, extents: Sequence[int], group: Group) -> "BoxGrid | None":
        """Returns boxes of about equal size for a volume of these extents; None if it is too small for the group.

        The number of intervals along each dimension depends on the group alone, and cuts are at multiples of the
        largest power of two that keeps the boxes within 5 % of equal: halving the volume then halves the cuts.
        """
        parts = cut_counts(group.size, (group.size,) * len(extents))
        if any(extent < count for extent, count in zip(extents, parts)):
            return None
        return cls(tuple(_round_edges(extent, count) for extent, count in zip(extents, parts)), group)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The number of intervals into which each dimension is cut."""
        return tuple(len(edges) - 1 for edges in self.edges)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """The extents of the whole volume."""
        return tuple(edges[-1] for edges in self.edges)

    @cached_property
    def place(self) -> tuple[int, ...]:
        """The index of this rank's interval in each dimension."""
        steps = [math.prod(self.parts[dim + 1 :]) for dim in range(len(self.parts))]
        return tuple(self.group.index // step % count for step, count in zip(steps, self.parts))

    @cached_property
    def box(self) -> tuple[Interval, ...]:
        """This rank's half-open interval in each dimension."""
        return tuple((edges[at], edges[at + 1]) for edges, at in zip(self.edges, self.place))

    @cached_property
    def sides(self) -> tuple[int, ...]:
        """The extents of this rank's box."""
        return tuple(high - low for low, high in self.box)

    def line(self, dim: int) -> range:
        """Returns the group's indices, in order, whose boxes differ from this rank's only along ``dim``."""
        step = math.prod(self.parts[dim + 1 :])
        first = self.group.index - self.place[dim] * step
        return range(first, first + step * self.parts[dim], step)

    def scaled(self, times: int | Sequence[int]) -> "BoxGrid":
        """Returns the box grid of a volume with ``times`` as many voxels along each dimension."""
        factors = (times,) * len(self.edges) if isinstance(times, int) else tuple(times)
        return BoxGrid(tuple(tuple(e * f for e in edges) for edges, f in zip(self.edges, factors)), self.group)

    def refuse_other_box(self, x: Tensor) -> None:
        """Raises ValueError unless ``x``, ``b c W D H``, has the extents of this rank's box."""
        if x.ndim != len(self.edges) + 2 or tuple(x.shape[2:]) != self.sides:
            raise ValueError(
                f"a volume of shape {tuple(x.shape)} is not the box of rank {self.group.index}, which has the sides "
                f"{self.sides}: give each volume with its own box grid"
            )


def as_box(logits: Tensor) -> Tensor:
    """Returns logits, noted as those of one rank's box."""
    logits.is_box = True  # type: ignore[attr-defined]
    return logits


def refuse_box_alone(logits: Tensor, loss_groups: object) -> None:
    """Raises ValueError for logits of one rank's box if None says over which ranks their loss sums."""
    if loss_groups is None and getattr(logits, "is_box", False):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} came without loss_groups, and are those of this rank's box alone: "
            "call net.loss(loss_fn, image, label), or give the ranks over which the loss sums, such as "
            "net.mode.loss_groups(mesh.data)"
        )


def _round_edges(extent: int, count: int) -> Bounds:
    unit = extent & -extent  # the largest power of two that divides the extent
    while True:
        edges = tuple((2 * at * extent // unit + count) // (2 * count) * unit for at in range(count + 1))
        sides = [high - low for low, high in itertools.pairwise(edges)]
        if unit == 1 or (min(sides) > 0 and 20 * count * max(sides) <= 21 * extent):
            return edges
        unit //= 2
