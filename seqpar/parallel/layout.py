"""Layout: which rank owns which tokens and voxels. Nothing here communicates.

Legend: b batch, c channels, n tokens, p q r voxels of a patch per axis, all written p if the patch is a cube; W D H
voxels, w d h tokens. There are as many axes as ``tile`` has numbers.
"""

import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, SupportsIndex, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from seqpar.text import quantity

Box = tuple[tuple[int, int], ...]  # half-open token interval per axis
Bounds = tuple[int, ...]  # where an axis is cut: 0, ..., its extent
Made = TypeVar("Made")
SPLITS = ("spatial", "ordered")


@dataclass(frozen=True)
class Layout:
    """Assigns the tokens of a tile to the ranks of a sequence group; an encoder's is ``encoder.layout``.

    ``cut`` returns a rank's part of an image or label; ``join`` is its inverse.

    Args:
        ``tile``: voxels per axis, each a multiple of the patch; ``Layout.of`` also takes one number for a cube.
        ``patch``: voxels of a token per axis.
        ``num_ranks``: size of the sequence group.
        ``split``: ``"spatial"`` gives each rank a box: the prime factors of ``num_ranks``, largest first, cut W, D and
            H in turn. ``"ordered"`` gives consecutive runs of tokens in raster order, H fastest, which need not be
            boxes.
    """

    tile: tuple[int, ...]
    patch: tuple[int, ...]
    num_ranks: int = 1
    split: str = "spatial"
    is_nested = False  # whether a rank's tokens are in another order than the raster's

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"split={self.split!r}: choose {' or '.join(SPLITS)}")
        if not (isinstance(self.tile, tuple) and isinstance(self.patch, tuple)):
            sides = per_axis(self.tile, "tile")
            object.__setattr__(self, "tile", sides)
            object.__setattr__(self, "patch", per_axis(self.patch, "patch", len(sides)))
        if len(self.patch) != len(self.tile):
            raise ValueError(f"tile={self.tile} and patch={self.patch} have different numbers of axes")
        if min(self.tile) < 1 or min(self.patch) < 1 or self.num_ranks < 1:
            raise ValueError(f"tile={self.tile}, patch={self.patch} and num_ranks={self.num_ranks} must be positive")
        if any(t % p for t, p in zip(self.tile, self.patch)):
            nearest = tuple(-(-t // p) * p for t, p in zip(self.tile, self.patch))
            raise ValueError(f"tile={self.tile} is not a multiple of patch={self.patch}: use tile={nearest}")
        if self.num_ranks > self.num_tokens:
            raise ValueError(
                f"num_ranks={self.num_ranks} is more than the {quantity(self.num_tokens, 'token')} of tile={self.tile} "
                f"with patch={self.patch}: use num_ranks={self.num_tokens} or less, a larger `tile` or smaller `patch`"
            )
        if self.split == "spatial":
            self.parts  # noqa: B018  raises if the grid cannot be cut into that many boxes

    @classmethod
    def of(
        cls, tile: int | Sequence[int], patch: int | Sequence[int], num_ranks: int = 1, split: str = "spatial"
    ) -> "Layout":
        """Returns the layout of a tile and patch, each given as one number for a cube or one per axis."""
        sides = per_axis(tile, "tile")
        return cls(sides, per_axis(patch, "patch", len(sides)), num_ranks, split)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Layout":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # without what is made once

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Tokens per axis."""
        return tuple(t // p for t, p in zip(self.tile, self.patch))

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The number of intervals into which ``spatial`` cuts each axis."""
        return cut_counts(self.num_ranks, self.grid)

    @cached_property
    def _ids(self) -> tuple[Tensor, ...]:
        raster = torch.arange(self.num_tokens, device="cpu")  # on the CPU even inside a meta device context
        if self.split == "ordered":
            return tuple(raster[low:high] for low, high in self.runs)
        grid = raster.reshape(self.grid)
        return tuple(grid[tuple(slice(*side) for side in box)].flatten() for box in grid_boxes(self.grid, self.parts))

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The half-open interval of raster numbers that ``ordered`` gives each rank."""
        return tuple(itertools.pairwise(even_bounds(self.num_tokens, self.num_ranks)))

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Returns ``make()``, cached under ``key``.

        Token ids, orders and tables of this layout are thus made once and stay on their device.
        """
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[no-any-return]

    def token_ids(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Returns the raster numbers of the rank's tokens, ascending, on the CPU or on ``device``."""
        if device is None or device.type == "cpu":
            return self._ids[rank]
        if device.type == "meta":  # a list would take gigabytes at a large tile
            return torch.empty(self.counts[rank], dtype=torch.int64, device=device)
        return self.once(("ids", rank, device), lambda: self._ids[rank].to(device))

    def raster_order(self, device: torch.device) -> Tensor:
        """Returns, for each token of the grid in raster order, its position among all ranks' tokens in rank order."""
        if device.type == "meta":
            return torch.empty(self.num_tokens, dtype=torch.int64, device=device)
        return self.once(("order", device), lambda: torch.argsort(torch.cat(self._ids)).to(device))

    @property
    def all_ids(self) -> tuple[Tensor, ...]:
        """Each rank's token numbers, in rank order."""
        return self._ids

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Each rank's number of tokens."""
        if self.split == "ordered":
            return tuple(high - low for low, high in self.runs)
        return tuple(_size(box) for box in grid_boxes(self.grid, self.parts))

    @cached_property
    def owner(self) -> Tensor:
        """The rank that owns each token of the grid, shaped like the grid."""
        flat = torch.empty(self.num_tokens, dtype=torch.int64, device="cpu")
        for rank, ids in enumerate(self._ids):
            flat[ids] = rank
        return flat.reshape(self.grid)

    def coordinates(self, rank: int) -> Tensor:
        """Returns the grid coordinates of the rank's tokens: one row per token, one column per axis."""
        return torch.stack([self._ids[rank] // step % side for step, side in zip(_steps(self.grid), self.grid)], 1)

    @cached_property
    def _boxes(self) -> tuple[Box | None, ...]:
        if self.split == "ordered":
            return tuple(_box_of_run(low, high, self.grid) for low, high in self.runs)
        return tuple(grid_boxes(self.grid, self.parts))

    @property
    def is_box(self) -> bool:
        """Whether every rank's part is a rectangle of tokens."""
        return None not in self._boxes

    def box(self, rank: int) -> Box:
        """Returns the rank's token intervals; raises ValueError if its part is not a box."""
        box = self._boxes[rank]
        if box is None:
            raise ValueError(f"rank {rank}'s part of the token grid {self.grid} is not a box: {self.box_advice()}")
        return box

    def num_below(self, rank: int, number: int) -> int:
        """Returns how many tokens of the rank's box have raster numbers below ``number``, without listing them."""
        box, result = self.box(rank), 0
        slab = _size(box)
        for (low, high), step in zip(box, _steps(self.grid)):
            slab //= high - low  # tokens of the box in one step along the axis
            at, number = divmod(number, step)
            result += (min(max(at, low), high) - low) * slab
            if not low <= at < high:
                break
        return result

    def box_advice(self) -> str:
        """Returns advice on which split or number of ranks gives boxes."""
        sizes = [s for s in range(1, self.num_ranks) if Layout(self.tile, self.patch, s, self.split).is_box]
        smaller = f" or num_ranks={' or '.join(map(str, sizes))}" if sizes else ""
        return f"use split='spatial'{smaller}"

    @cached_property
    def cuts(self) -> tuple[Bounds, ...] | None:
        """Token bounds per axis if the parts form a grid of boxes in rank order, else None."""
        boxes = [box for box in self._boxes if box is not None]
        if len(boxes) < self.num_ranks:
            return None
        bounds = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(self.grid))]
        product = itertools.product(*(itertools.pairwise(edges) for edges in bounds))
        return tuple(map(tuple, bounds)) if list(product) == boxes else None

    def voxel_cuts(self, per_token: int | Sequence[int] = 1) -> tuple[Bounds, ...]:
        """Returns ``cuts`` scaled to ``per_token`` points for each token along each axis."""
        if self.cuts is None:
            raise ValueError(
                f"the parts of the token grid {self.grid} do not form a grid of boxes: use split='spatial'"
            )
        times = (per_token,) * len(self.grid) if isinstance(per_token, int) else tuple(per_token)
        return tuple(tuple(edge * t for edge in edges) for edges, t in zip(self.cuts, times))

    def boxed(self) -> "Layout":
        """Returns this layout if its parts form a grid of boxes, else the spatial one."""
        return self if self.cuts is not None else Layout(self.tile, self.patch, self.num_ranks, "spatial")

    def of_tile(self, tile: int | Sequence[int]) -> "Layout":
        """Returns the same split of another tile."""
        sides = (tile,) * len(self.tile) if isinstance(tile, int) else tuple(tile)
        return self if sides == self.tile else Layout(sides, self.patch, self.num_ranks, self.split)

    def place(self, whole: Tensor) -> tuple[Tensor, "Layout"]:
        """Pads a whole image ``b c W D H`` to the patch; returns it as the part of a group of one, with its layout."""
        if self.num_ranks > 1:
            raise ValueError(
                f"a sequence group of {self.num_ranks} ranks got a whole tile {tuple(whole.shape)}: give each rank "
                "its part, layout.cut(tile, rank)"
            )
        short = [-side % p for side, p in zip(whole.shape[2:], self.patch)]
        whole = F.pad(whole, [edge for missing in reversed(short) for edge in (0, missing)])
        layout = self.of_tile(whole.shape[2:])
        return layout.cut(whole, 0), layout

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Returns a rank's part: ``b n c p p p`` of an image ``b c W D H``, ``b n p p p`` of a label ``b W D H``."""
        axes = len(self.tile)
        is_image = whole.ndim == axes + 2
        if whole.ndim not in (axes + 1, axes + 2) or tuple(whole.shape[-axes:]) != self.tile:
            raise ValueError(
                f"expected an image (batch, channels, *tile) or a label (batch, *tile) with tile={self.tile}, got a "
                f"tensor of shape {tuple(whole.shape)}; layout.of_tile(tile) is the layout of another tile"
            )
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank={rank}: this layout has {quantity(self.num_ranks, 'rank')}, counted from 0")
        whole = plain_tensor(whole)
        if self.num_ranks > 1 and not (torch.compiler.is_compiling() or whole.is_meta):
            self.once(("fingerprint", is_image), lambda: fingerprint_of(whole))
        cells = to_patches(whole, self.patch)
        if self.num_ranks > 1 or self.is_nested:
            cells = cells.index_select(2 if is_image else 1, self.token_ids(rank, whole.device))
        return rearrange(cells, "b c n ... -> b n c ...") if is_image else cells

    @property
    def fingerprint(self) -> Tensor | None:
        """Numbers of the first image and the first label that were cut here, which ranks of a group compare."""
        found = [self._made[key] for is_image in (True, False) if (key := ("fingerprint", is_image)) in self._made]
        return torch.stack(found).sum(0) if found else None

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins all ranks' parts to the whole image or label; the inverse of ``cut``."""
        if [x.shape[1] for x in parts] != list(self.counts):
            raise ValueError(
                f"expected {quantity(self.num_ranks, 'part')} of {' and '.join(map(str, self.counts))} tokens, in rank "
                f"order, got {quantity(len(parts), 'part')} of {' and '.join(str(x.shape[1]) for x in parts)}"
            )
        cells = parts[0]
        if len(parts) > 1 or self.is_nested:
            cells = torch.cat(list(parts), 1).index_select(1, self.raster_order(cells.device))
        is_image = cells.ndim == len(self.tile) + 3
        return from_patches(rearrange(cells, "b n c ... -> b c n ...") if is_image else cells, self.grid)


def _size(box: Box) -> int:
    return math.prod(high - low for low, high in box)


def _steps(grid: Sequence[int]) -> list[int]:
    """Returns by how much the raster number grows from a token to the next along each axis."""
    return [math.prod(grid[dim + 1 :]) for dim in range(len(grid))]


def _box_of_run(low: int, high: int, grid: Sequence[int]) -> Box | None:
    """Returns the box that tokens with consecutive raster numbers fill, or None if they do not fill a box."""
    sides, is_cut = list[tuple[int, int]](), False
    for step, extent in zip(_steps(grid), grid):
        first, last = low // step % extent, (high - 1) // step % extent
        sides.append((0, extent) if is_cut else (first, last + 1))
        is_cut = is_cut or first != last  # the run then reaches both ends of all later axes
    return tuple(sides) if _size(tuple(sides)) == high - low else None


def per_axis(value: int | Iterable[int], name: str, axes: int = 3) -> tuple[int, ...]:
    """Returns one whole number per axis: those of ``value``, or the same one for all ``axes``.

    - ``name``: of the argument, for the error
    """
    try:
        numbers = value if isinstance(value, Iterable) else (value,) * axes
        return tuple(map(operator.index, numbers))
    except TypeError:
        raise ValueError(f"{name}={value!r}: give a whole number, or several in a tuple") from None


def refuse_no_count(**values: int) -> None:
    """Raises ValueError for values, by the names of their arguments, that are not whole numbers above 0."""
    for name, value in values.items():
        if not isinstance(value, SupportsIndex) or operator.index(value) < 1:
            raise ValueError(f"{name}={value!r}: give a whole number above 0")


def plain_tensor(x: Tensor) -> Tensor:
    """Returns a tensor without what a library attached to it, such as MONAI's ``MetaTensor``; shares its memory."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{type(x).__name__}: give a tensor, as torch.as_tensor makes one")
    as_tensor: Callable[[], Tensor] | None = getattr(x, "as_tensor", None)
    return x if as_tensor is None else as_tensor()


def fingerprint_of(whole: Tensor) -> Tensor:
    """Returns three float64 numbers that hardly depend on rounding: a weighted sum of some voxels, 1, and the size.

    Fingerprints add up: the second number counts the tensors.
    """
    voxels = whole.detach().reshape(-1)
    voxels = voxels[:: len(voxels) >> 14 | 1].double()  # an odd step, which does not stay in one plane of the tile
    weights = torch.arange(1, len(voxels) + 1, device=voxels.device, dtype=torch.float64).square().sin()
    total = voxels @ weights / voxels.norm().clamp(min=1e-30)
    size = sum(side * math.sqrt(axis) for axis, side in enumerate(reversed(whole.shape), 2))
    return torch.stack([total, torch.ones_like(total), torch.full_like(total, size)])


def to_patches(whole: Tensor, patch: Sequence[int]) -> Tensor:
    """Splits ``... W D H`` into patches ``... n p p p``, tokens in raster order."""
    voxels, cells = _patterns(len(patch))
    return rearrange(whole, f"{voxels} -> {cells}", **dict(zip("pqr", patch)))


def from_patches(cells: Tensor, grid: Sequence[int]) -> Tensor:
    """Joins patches ``... n p p p`` to ``... W D H``; the inverse of ``to_patches``."""
    voxels, cells_pattern = _patterns(len(grid))
    return rearrange(cells, f"{cells_pattern} -> {voxels}", **dict(zip("wdh", grid)))


def _patterns(num_directions: int) -> tuple[str, str]:
    """Returns the einops patterns of voxels and patches: ``... (w p) (d q) (h r)`` and ``... (w d h) p q r`` in 3D."""
    tokens, inside = "wdh"[:num_directions], "pqr"[:num_directions]
    voxels = " ".join(f"({token} {voxel})" for token, voxel in zip(tokens, inside))
    return f"... {voxels}", f"... ({' '.join(tokens)}) {' '.join(inside)}"


def even_bounds(extent: int, count: int) -> Bounds:
    """Returns the bounds that cut ``extent`` into ``count`` intervals whose lengths differ by at most one."""
    return tuple(extent * at // count for at in range(count + 1))


def grid_boxes(grid: Sequence[int], parts: Sequence[int]) -> list[Box]:
    """Returns the boxes of a grid cut into ``parts`` intervals per axis, last axis fastest."""
    sides = [list(itertools.pairwise(even_bounds(g, s))) for g, s in zip(grid, parts)]
    return list(itertools.product(*sides))


def cut_counts(num_ranks: int, grid: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of intervals per axis: prime factors of ``num_ranks``, largest first, go to W, D, H in turn.

    If an axis has fewer tokens than that, returns the factorization whose largest box is smallest.
    """
    counts = [1] * len(grid)
    for turn, prime in enumerate(sorted(_primes(num_ranks), reverse=True)):
        counts[turn % len(grid)] *= prime
    if all(s <= g for s, g in zip(counts, grid)):
        return tuple(counts)
    fitting = [c for c in _factorisations(num_ranks, len(grid)) if all(s <= g for s, g in zip(c, grid))]
    if not fitting:
        possible = [s for s in range(1, num_ranks) if _fits(s, grid)]
        raise ValueError(
            f"num_ranks={num_ranks} cannot cut the token grid {tuple(grid)} into boxes: use num_ranks={possible[-1]} "
            "or split='ordered'"
        )
    return min(fitting, key=lambda c: (math.prod(-(-g // s) for s, g in zip(c, grid)), [-s for s in c]))


def _fits(num_ranks: int, grid: Sequence[int]) -> bool:
    return any(all(s <= g for s, g in zip(c, grid)) for c in _factorisations(num_ranks, len(grid)))


def _primes(number: int) -> Iterator[int]:
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1


def _factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorisations(number // first, count - 1):
                yield (first, *rest)
