"""Predicts whole volumes with a network of tiles: by sliding windows, or in one sequence-parallel pass.

Windows go to sequence groups, each window's parts to the ranks of its group; logits travel to the ranks that add up
the rows they lie in. Legend: b windows, c channels, n tokens, k classes, p voxels of a patch along a direction, W D H
voxels of the volume, w rows of a slab; ``/s`` after the letter that is spread over ranks.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from seqpar.data.boxes import read_box
from seqpar.data.workers import ReportProgress, no_item_progress
from seqpar.losses.tile_network import TileNetwork
from seqpar.models.network import Network, autocast
from seqpar.parallel.collectives import all_gather
from seqpar.parallel.consensus import max_over_ranks
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.layout import Layout, per_axis, to_patches
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.rendezvous import join
from seqpar.prediction.window_grid import RULES, Region, Sliding, WindowGrid, flipped, mirrors, rows_at_once, whole_box
from seqpar.prediction.window_sums import HalfSums, WindowBlock, WindowSums

Image = Tensor | np.ndarray
Volume = TypeVar("Volume", Tensor, np.ndarray)
BEYOND = 2.0  # times as many tokens along a direction as in training, from which on a whole pass may fail


class FinishedRows(NamedTuple):
    """Finished rows of a volume: rank r holds the rows ``bounds[r]`` to ``bounds[r + 1]``, none if they are equal."""

    bounds: tuple[int, ...]
    logits: Tensor  # k w/s D H


def sliding_window(
    nets: Sequence[Network],
    image: Image,
    sliding: Sliding,
    mesh: Mesh,
    tell: ReportProgress = no_item_progress,
    precision: str = "fp32",
) -> Iterator[FinishedRows]:
    """Yields the weighted mean of the networks' logits over all windows, slab by slab along W.

    ``image`` is ``c W D H`` on every rank; a memory-mapped array is read window by window. All ranks get the same
    number of slabs. Sums are taken in float32 or better, unless ``sliding`` says half, and in window order, whatever
    the number of groups. ``tell`` is told which share of the windows is done. With ``precision`` bf16 the networks
    compute as they were trained in it.
    """
    window_grid = WindowGrid.of(image.shape[1:], sliding, mesh.world.size)
    weights = RULES[sliding.rule].weights(sliding.tile, sliding.weights)
    batch = fitting_batch(nets, min(sliding.batch, len(window_grid.corners)))
    views = _views(nets, window_grid, sliding.mirror, batch, mesh)
    return _walk(_Sweep(views, image, window_grid, weights, batch, mesh, precision, sliding.sums), tell)


def predict(
    model: nn.Module,
    volume: Volume,
    tile: int | Sequence[int],
    overlap: float = 0.25,
    weights: str = "constant",
    batch: int = 1,
    mesh: Mesh | None = None,
) -> Volume:
    """Returns a network's logits of a volume, the weighted mean over windows: those of ``sliding_window_inference``.

    With several ranks, call it on all of them, with the same volume; each gets the whole result. An array gives an
    array, a tensor a tensor on its device.

    Args:
        ``model``: a ``ParallelModel``, a network of ``seqpar``, or any module that takes and returns whole windows.
        ``volume``: ``c W D H``, or ``b c W D H`` for several.
        ``tile``: voxels of a window, one number or one per direction.
        ``overlap``: share of a window that the next one covers again.
        ``weights``: of a window's voxels: ``"constant"`` or ``"gaussian"``.
        ``batch``: number of windows that a group computes at once.
        ``mesh``: the ranks that share the work: sequence groups take turns, and each rank adds up its own rows. None:
            every sequence group computes all windows, and every rank adds them up.
    """
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise ValueError(f"model is a {type(model).__name__}: give a module with parameters, which tell its device")
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    shared = next((net for net in model.modules() if isinstance(net, TileNetwork)), None)
    dims = shared.group_and_dims()[1] if shared else 3
    sides = per_axis(tile, "tile", dims)
    if min(sides, default=0) < 1 or (shared is not None and len(sides) != dims):
        raise ValueError(f"{tile=}: give {dims} numbers of voxels above 0, or one for all")
    if not isinstance(volume, Tensor | np.ndarray):
        raise ValueError(f"volume is a {type(volume).__name__}: give an array or a tensor")
    if not math.prod(volume.shape):
        raise ValueError(f"a volume of shape {tuple(volume.shape)} came, which has no voxels: give at least one")
    if volume.ndim not in (len(sides) + 1, len(sides) + 2):
        raise ValueError(f"a volume of shape {tuple(volume.shape)} came: c W D H or b c W D H is needed for {tile=}")
    sliding = Sliding(sides, overlap, weights, batch)
    if mesh is None:
        mesh = join(Launcher("this process"), None, 1, next(model.parameters()).device)
    images = list(volume) if volume.ndim == len(sides) + 2 else [volume]
    results = [_predict_one(model, image, sliding, mesh) for image in images]
    logits = torch.stack(results) if volume.ndim == len(sides) + 2 else results[0]
    return logits.numpy() if isinstance(volume, np.ndarray) else logits.to(volume.device)


def _predict_one(net: nn.Module, image: Image, sliding: Sliding, mesh: Mesh) -> Tensor:
    """Returns the logits ``k W D H`` of a volume on the CPU of every rank."""
    window_grid = WindowGrid.of(image.shape[1:], sliding, mesh.world.size)
    batch = min(sliding.batch, len(window_grid.corners))
    window_weights = RULES[sliding.rule].weights(sliding.tile, sliding.weights)
    views = [_WholeView(net, sliding.tile)]
    sweep = _Sweep(views, image, window_grid, window_weights, batch, mesh, "fp32")
    slabs = [join_rows(rows, bounds, mesh, 1) for bounds, rows in _walk(sweep, no_item_progress)]
    return torch.cat(slabs, 1)


def whole_volume(
    nets: Sequence[Network],
    image: Image,
    mesh: Mesh,
    mirror: Sequence[int] = (),
    tell: ReportProgress = no_item_progress,
    precision: str = "fp32",
) -> Iterator[FinishedRows]:
    """Yields the logits of one pass over the whole volume, each rank of a sequence group holding a part of it.

    Directions shorter than the network's tile are padded to it, as for sliding windows; longer ones to whole patches.
    ``tell`` is told which share is done, block by block; ``precision`` as for windows. Slabs are small: while labels
    are taken, a rank holds its share of the logits and a few rows, no second copy.
    """
    shape = tuple(image.shape[1:])
    tile = padded_shape(shape, nets[0].layout) if nets else shape
    for net in nets:
        net.refuse_whole(tile)
    starts = tuple((-((padded - side) // 2),) for padded, side in zip(tile, shape))
    window_grid = WindowGrid(shape, tile, starts, mesh.world.size)
    batch = fitting_batch(nets, 1)
    views = _views(nets, window_grid, mirror, batch, mesh)
    weights = torch.ones(()).expand(tile)
    return _walk_by_blocks(_Sweep(views, image, window_grid, weights, batch, mesh, precision), tell)


def padded_shape(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Returns the shape to which ``whole_volume`` pads a volume."""
    return tuple(max(tile, -(-side // p) * p) for side, tile, p in zip(shape, layout.tile, layout.patch))


def whole_grid(net: Network, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens or cubes per direction in a pass over a whole volume of that shape."""
    return net.layout.of_tile(padded_shape(shape, net.layout)).grid


def warn_beyond_training(net: Network, shape: Sequence[int], measured: Sequence[int] = ()) -> str:
    """Returns a warning where a whole volume has many more tokens or cubes along a direction than a tile, else "".

    - ``measured``: the largest grid in whole passes of the run's validation, which showed how good these are
    """
    grid, trained = whole_grid(net, shape), net.layout.grid
    known = [max(sides) for sides in zip(trained, measured or trained)]
    if all(now <= BEYOND * then for now, then in zip(grid, known)):
        return ""
    sizes = ["x".join(map(str, sides)) for sides in (grid, trained, measured)]
    validated = f", and validation measured passes of up to {sizes[2]}" if measured else ""
    return (
        f"{sizes[0]} {net.piece}s in one pass, but the network was trained on {sizes[1]}{validated}: more than "
        f"{BEYOND:g} times as many along a direction, which can ruin a result; use --window sliding, or let train "
        "--val-window both measure it on such volumes"
    )


def join_rows(rows: Tensor, bounds: Sequence[int], mesh: Mesh, dim: int = 0) -> Tensor:
    """Returns all ranks' rows of a slab joined, on the CPU of every rank."""
    sizes = [high - low for low, high in zip(bounds, bounds[1:])]
    return all_gather(rows.cpu(), mesh.world, dim, sizes, "labels")


def fitting_batch(nets: Sequence[Network], batch: int) -> int:
    """Returns how many windows a group predicts at once: a multiple of its size where each rank decodes whole ones."""
    unit = math.lcm(*(net.samples_at_once for net in nets))
    return unit * -(-batch // unit)


def _views(
    nets: Sequence[Network], window_grid: WindowGrid, mirror: Sequence[int], batch: int, mesh: Mesh
) -> list["_PartView"]:
    """Returns every network with every combination of flips; what cannot pass is refused on all ranks alike."""
    if not nets:
        raise ValueError("there is no network: give one or, as an ensemble, several")
    views = list[_PartView]()
    for net in nets:
        if net.training:
            raise ValueError("the network is in training mode: call eval() first")
        if net.group.size != mesh.seq.size:
            raise ValueError(
                f"the network was built for a sequence group of {net.group.size}, the mesh has {mesh.seq.size}"
            )
        layout = net.layout.of_tile(window_grid.tile)
        net.mode.check(layout, batch)
        views += [_PartView(net, layout, flips) for flips in mirrors(mirror, len(window_grid.tile))]
    return views


class _View(ABC):
    """A network, and how it sees a window."""

    net: nn.Module

    @abstractmethod
    def blocks(self, batch: int, mesh: Mesh) -> list[WindowBlock]:
        """Returns which logits of ``batch`` windows each rank of a group holds."""

    @abstractmethod
    def logits(self, image: Image, corners: Sequence[Sequence[int]], sweep: "_Sweep") -> Tensor:
        """Returns this rank's logits ``b k W/s D/s H/s`` of the windows at ``corners``."""

    def units(self) -> list[nn.Module]:
        """Returns the modules whose passes are told as progress."""
        return []

    def call(self, *arguments: Any) -> Any:
        """Returns what the network returns."""
        return self.net(*arguments)

    def computed(self, windows: Sequence[Tensor], sweep: "_Sweep", *others: Any) -> Tensor:
        """Returns what the network computes of windows: always as many, so that kernels round alike."""
        filled = [*windows, *[windows[-1]] * (sweep.batch - len(windows))]
        device, dtype = sweep.mesh.device, next(self.net.parameters()).dtype
        with torch.no_grad():
            part = torch.stack(filled).to(device, dtype)
            with autocast(sweep.precision, device):
                output = self.call(part, *others)
        if not isinstance(output, Tensor):
            raise ValueError(f"the network returned a {type(output).__name__} of a window: one tensor is needed")
        return output.to(dtype)


@dataclass(frozen=True, eq=False)
class _PartView(_View):
    """A network of parts that sees windows flipped along some directions."""

    net: Network
    layout: Layout
    flips: tuple[int, ...]

    def units(self) -> list[nn.Module]:
        return self.net.units()

    def blocks(self, batch: int, mesh: Mesh) -> list[WindowBlock]:
        """Lets the network's mode move the numbers of the tokens, and returns where they arrive."""
        layout, group = self.layout, mesh.seq
        tokens = Layout(layout.grid, (1,) * len(layout.grid), layout.num_ranks, layout.split)
        sides = (batch, *layout.grid)
        numbers = torch.arange(math.prod(sides), device=mesh.device).reshape(sides)
        own_numbers = self.net.arrange(tokens.cut(numbers, group.index), tokens).flatten()
        first_and_last = all_gather(own_numbers[[0, -1]][None], group, 0, [1] * group.size, "plan").cpu().numpy()
        blocks = []
        for first, last in np.stack(np.unravel_index(first_and_last, sides), 2).tolist():  # torch's imports sympy
            windows, *intervals = ((low, high + 1) for low, high in zip(first, last))
            box = tuple((low * p, high * p) for (low, high), p in zip(intervals, layout.patch))
            blocks.append(WindowBlock(windows, flipped(box, layout.tile, self.flips)))
        (low, high), box = blocks[group.index]
        assert len(own_numbers) * math.prod(layout.patch) == (high - low) * math.prod(b - a for a, b in box), "no box"
        return blocks

    def logits(self, image: Image, corners: Sequence[Sequence[int]], sweep: "_Sweep") -> Tensor:
        parts = [self._cut(image, corner, sweep.mesh.seq.index) for corner in corners]
        logits = self.computed(parts, sweep, self.layout)
        return logits.flip([2 + direction for direction in self.flips]) if self.flips else logits

    def _cut(self, image: Image, corner: Sequence[int], rank: int) -> Tensor:
        """Returns the rank's part ``n/s c p p p`` of the flipped window at ``corner``, zeros outside the volume."""
        layout, flip_dims = self.layout, [1 + direction for direction in self.flips]
        if not layout.is_box:
            return layout.cut(_read(image, corner, whole_box(layout.tile)).flip(flip_dims)[None], rank)[0]
        box = tuple((low * p, high * p) for (low, high), p in zip(layout.box(rank), layout.patch))
        window = _read(image, corner, flipped(box, layout.tile, self.flips)).flip(flip_dims)
        return rearrange(to_patches(window, layout.patch), "c n ... -> n c ...")


@dataclass(frozen=True, eq=False)
class _WholeView(_View):
    """A network that is given whole windows and returns their whole logits on every rank of its group."""

    net: nn.Module
    tile: tuple[int, ...]

    def blocks(self, batch: int, mesh: Mesh) -> list[WindowBlock]:
        return [WindowBlock((0, batch), whole_box(self.tile))] * mesh.seq.size

    def call(self, *arguments: Any) -> Any:
        return self.net.on_whole(*arguments) if isinstance(self.net, TileNetwork) else self.net(*arguments)

    def logits(self, image: Image, corners: Sequence[Sequence[int]], sweep: "_Sweep") -> Tensor:
        logits = self.computed([_read(image, corner, whole_box(self.tile)) for corner in corners], sweep)
        if tuple(logits.shape[2:]) != self.tile:
            raise ValueError(
                f"the network returned {tuple(logits.shape[2:])} voxels of a window of {self.tile}: it must return as "
                "many as it is given"
            )
        return logits


@dataclass(frozen=True, eq=False)
class _Sweep:
    """A walk over the windows of a grid, ``batch`` of them at once, with every view; ``weights``: of their voxels.

    ``precision``: of what the networks compute; ``sums``: float (float32 at least), or half as in nnU-Net.
    """

    views: Sequence[_View]
    image: Image
    window_grid: WindowGrid
    weights: Tensor
    batch: int
    mesh: Mesh
    precision: str
    sums: str = "float"


def _walk(sweep: _Sweep, tell: ReportProgress) -> Iterator[FinishedRows]:
    """Yields the slabs of a window grid: in each round, every group predicts some windows with every view."""
    views, window_grid, batch, mesh = sweep.views, sweep.window_grid, sweep.batch, sweep.mesh
    num_windows, groups = len(window_grid.corners), mesh.data.size
    blocks = [view.blocks(batch, mesh) for view in views]
    dtype = _sums_dtype(views)
    # nnU-Net adds up each network's windows by themselves, and then the networks.
    nets = list(dict.fromkeys(view.net for view in views)) if sweep.sums == "half" else []
    owners = [nets.index(view.net) if nets else 0 for view in views]
    kind = HalfSums if nets else WindowSums
    every = list[WindowSums]()
    num_complete = 0
    for first in range(0, num_windows, groups * batch):
        end = min(first + groups * batch, num_windows)
        # Whole batches go to groups: a window shares its batch with the same ones, however many groups there are.
        starts = range(first, first + groups * batch, batch)
        turns = [range(min(start, end), min(start + batch, end)) for start in starts]
        for number, (view, view_blocks) in enumerate(zip(views, blocks)):
            logits = _predict(sweep, view, turns[mesh.data.index])
            if not every:  # a group without a window gets the number of classes from the others
                num_classes = max_over_ranks(0 if logits is None else logits.shape[1], mesh.world)
                weights = sweep.weights.to(mesh.device, dtype)
                for own in dict.fromkeys(owners):
                    every.append(kind(window_grid, weights, num_classes, mesh, owners.count(own)))
            if number == owners.index(owners[number]):
                every[owners[number]].open(range(first, end))
            every[owners[number]].deliver(logits, view_blocks, turns)
            tell((first + (end - first) * (number + 1) / len(views)) / num_windows)
            del logits
        for sums in every:
            sums.close()
        for slab in range(num_complete, window_grid.num_complete(end)):
            yield FinishedRows(window_grid.bounds[slab], _mean([sums.finish(slab) for sums in every]))
        num_complete = window_grid.num_complete(end)


def _mean(logits: Sequence[Tensor]) -> Tensor:
    """Returns the mean over networks, in float32 at least; in the precision of their sums in between."""
    total, *others = logits
    for other in others:
        total += other
    if others:
        total /= len(logits)
    return total.to(torch.promote_types(total.dtype, torch.float32))


def _sums_dtype(views: Sequence[_View]) -> torch.dtype:
    return torch.promote_types(next(views[0].net.parameters()).dtype, torch.float32)


def _walk_whole(sweep: _Sweep) -> Iterator[FinishedRows]:
    """Yields small slabs of the one window of a grid: the last view's logits travel slab by slab."""
    views, window_grid, mesh, dtype = sweep.views, sweep.window_grid, sweep.mesh, _sums_dtype(sweep.views)
    turns = [range(group == 0) for group in range(mesh.data.size)]
    sums: WindowSums | None = None
    for number, view in enumerate(views):
        blocks = view.blocks(sweep.batch, mesh)
        logits = _predict(sweep, view, turns[mesh.data.index])
        if sums is None:  # the other groups get the number of classes from the first
            num_classes = max_over_ranks(0 if logits is None else logits.shape[1], mesh.world)
            rows = rows_at_once(num_classes, window_grid.shape[1:], dtype.itemsize) * mesh.world.size
            window_grid = replace(window_grid, slab_rows=rows)
            weight = sweep.weights.new_ones((), device=mesh.device, dtype=dtype)  # for all voxels: no memory
            sums = WindowSums(window_grid, weight.expand(window_grid.tile), num_classes, mesh, len(views))
            sums.open([0])
        for slab, bounds in enumerate(window_grid.bounds):
            sums.deliver(logits, blocks, turns, [slab])
            if number == len(views) - 1:
                sums.close([slab])
                yield FinishedRows(bounds, sums.finish(slab))
        del logits


def _walk_by_blocks(sweep: _Sweep, tell: ReportProgress) -> Iterator[FinishedRows]:
    """Yields what ``_walk_whole`` does, and tells of each block or cell that has run: one window takes long."""
    total = sum(len(view.units()) + 1 for view in sweep.views)  # a decoder is about as much again
    numbers = itertools.count(1)
    hooks = [
        block.register_forward_hook(lambda *_: tell(min(next(numbers) / total, 1.0)))
        for units in {view.net: view.units() for view in sweep.views}.values()
        for block in units
    ]
    try:
        yield from _walk_whole(sweep)
    finally:
        for hook in hooks:
            hook.remove()
    tell(1.0)


def _predict(sweep: _Sweep, view: _View, windows: Sequence[int]) -> Tensor | None:
    """Returns this rank's logits of its group's windows, as the volume lies; None without windows."""
    corners = [sweep.window_grid.corners[window] for window in windows]
    return view.logits(sweep.image, corners, sweep) if corners else None


def _read(image: Image, corner: Sequence[int], box: Region) -> Tensor:
    """Returns a box ``c W D H`` of the window at ``corner``, 0 outside the volume."""
    first = [start + low for start, (low, _) in zip(corner, box)]
    size = [high - low for low, high in box]
    return read_box(image, first, size) if isinstance(image, Tensor) else torch.from_numpy(read_box(image, first, size))
