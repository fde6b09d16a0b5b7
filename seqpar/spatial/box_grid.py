"""How a grid is spread over a group, which interval of it each rank needs for an operation, and how it comes.

A dimension of extent L is cut at ``edges`` 0 < ... < L; ranks are the raster over the product of all dimensions'
intervals, last dimension fastest, as in ``Layout.cuts``. The rules (``reach.py``) give
the output's edges and each rank's input interval from numbers that all ranks know: they refuse, or not, alike.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from seqpar.halo_exchange import Interval
from seqpar.layout import Bounds
from seqpar.mesh import Group


@dataclass(frozen=True)
class BoxGrid:
    """The boxes that the ranks of ``group`` hold of a grid: where each spatial dimension is cut."""

    edges: tuple[Bounds, ...]
    group: Group

    def __post_init__(self) -> None:
        for edges in self.edges:
            if len(edges) < 2 or edges[0] != 0 or any(a >= b for a, b in itertools.pairwise(edges)):
                raise ValueError(f"edges {edges} must begin at 0 and ascend: every rank needs a box with voxels")
        if math.prod(self.parts) != self.group.size:
            raise ValueError(f"edges {self.edges} make {math.prod(self.parts)} boxes for the {self.group}")

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Into how many intervals each dimension is cut."""
        return tuple(len(edges) - 1 for edges in self.edges)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """The whole grid's extents."""
        return tuple(edges[-1] for edges in self.edges)

    @cached_property
    def place(self) -> tuple[int, ...]:
        """Which interval of each dimension this rank holds."""
        steps = [math.prod(self.parts[dim + 1 :]) for dim in range(len(self.parts))]
        return tuple(self.group.index // step % count for step, count in zip(steps, self.parts))

    @cached_property
    def box(self) -> tuple[Interval, ...]:
        """This rank's half-open interval of each dimension."""
        return tuple((edges[at], edges[at + 1]) for edges, at in zip(self.edges, self.place))

    @cached_property
    def sides(self) -> tuple[int, ...]:
        """The extents of this rank's box."""
        return tuple(high - low for low, high in self.box)

    def line(self, dim: int) -> range:
        """Returns the places in the group whose boxes differ from this rank's along ``dim`` only, in order."""
        step = math.prod(self.parts[dim + 1 :])
        first = self.group.index - self.place[dim] * step
        return range(first, first + step * self.parts[dim], step)

    def scaled(self, times: int | Sequence[int]) -> "BoxGrid":
        """Returns the box grid of a grid with ``times`` as many points along each dimension."""
        factors = (times,) * len(self.edges) if isinstance(times, int) else tuple(times)
        return BoxGrid(tuple(tuple(e * f for e in edges) for edges, f in zip(self.edges, factors)), self.group)

    def fits(self, x: Tensor) -> bool:
        """Returns whether ``b c W D H`` holds this rank's box."""
        return x.ndim == len(self.edges) + 2 and tuple(x.shape[2:]) == self.sides
