"""How much memory prediction takes on each rank, counted before it starts, and what plan prints of it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from seqpar.cluster.devices import GIB, MIB, Device
from seqpar.models.build import build_on_meta, family_of, to_meta
from seqpar.models.network import Network
from seqpar.parallel.mesh import Group
from seqpar.planner.attention_choice import choose_fastest
from seqpar.planner.memory_counter import MemoryCounter
from seqpar.prediction.sliding_window import fitting_batch, padded_shape
from seqpar.prediction.window_grid import Sliding, WindowGrid, rows_at_once
from seqpar.settings.config import Config
from seqpar.text import in_flags


@dataclass(frozen=True)
class Footprint:
    """Bytes that prediction takes on a rank.

    - ``encoder``, ``decoder``: while the network runs; ``decoder`` includes the logits that it returns
    - ``sums``: logits that wait for those of other windows, flips or networks
    - ``labels``: while labels are taken, without ``sums``
    """

    encoder: int
    decoder: int
    sums: int
    labels: int
    weights: int

    @property
    def total(self) -> int:
        """The largest of encoder, decoder and labels, which follow each other, with what stays during all."""
        return max(self.encoder, self.decoder, self.labels) + self.sums + self.weights

    def __str__(self) -> str:
        parts = {
            "encoder": self.encoder,
            "decoder": self.decoder,
            "labels": self.labels,
            "sums": self.sums,
            "weights": self.weights,
        }
        sizes = ", ".join(f"{name} {size / MIB:.1f}" for name, size in parts.items())
        return f"about {self.total / MIB:.1f} MiB on each rank ({sizes})"


def footprint(
    net: Network,
    shape: Sequence[int],
    num_classes: int,
    ranks: int,
    to_shape: Sequence[int] = (),
    views: int = 1,
    sliding: Sliding | None = None,
) -> Footprint:
    """Returns the memory that predicting a volume of this shape takes on each rank.

    A volume that the network cannot pass raises ValueError, as the pass would; call it on all ranks, so that all do.

    - ``to_shape``: the case's own, to which logits are resampled; by default ``shape``
    - ``views``: networks and flips over which logits are averaged
    - ``sliding``: of windows; None: one pass over the whole volume
    """
    meta_net = to_meta(net).eval()
    tile = padded_shape(shape, meta_net.layout) if sliding is None else sliding.tile
    layout, batch = meta_net.layout.of_tile(tile), fitting_batch([net], 1 if sliding is None else sliding.batch)
    dtype = next(meta_net.parameters()).dtype
    with torch.no_grad(), MemoryCounter() as counter:
        counter.phase = "encoder"
        part_shape = batch, layout.counts[meta_net.group.index], net.in_channels, *layout.patch  # b n/s c p p p
        part = torch.empty(part_shape, dtype=dtype, device="meta")
        meta_net.on_phases(lambda phase: setattr(counter, "phase", phase))
        logits = meta_net(part, layout).nbytes
    itemsize = max(dtype.itemsize, 4)
    row = num_classes * math.prod(shape[1:]) * itemsize
    step = _label_step(num_classes, shape, to_shape or shape, ranks, itemsize)
    if sliding is None:
        sums = row * -(-shape[0] // ranks) if views > 1 else 0
        labels = logits + step
    else:
        rows = _open_rows(WindowGrid.of(shape, sliding, ranks))
        sums = rows * (row + row // num_classes)
        labels = max(4 * logits, step)  # of its windows: as they are, on their way, and as they come
    weights = sum(p.nbytes for p in net.parameters())
    return Footprint(counter.peaks["encoder"], counter.peaks["decoder"], sums, labels, weights)


def _label_step(num_classes: int, shape: Sequence[int], to_shape: Sequence[int], ranks: int, itemsize: int) -> int:
    """Returns the bytes that resampling and labels take at a time, of a slab's rows."""

    def rows_of(extents: Sequence[int]) -> int:
        rows = min(rows_at_once(num_classes, extents[1:], itemsize), -(-extents[0] // ranks))
        return rows * num_classes * math.prod(extents[1:]) * itemsize

    old, new, row = rows_of(shape), rows_of(to_shape), num_classes * math.prod(shape[1:]) * itemsize
    resampling = 0 if tuple(shape) == tuple(to_shape) else 2 * row + 2 * new  # neighbours' rows; logits, probabilities
    return max(2 * old, old + resampling)


def _open_rows(window_grid: WindowGrid) -> int:
    """Returns how many rows of the slabs under a layer of windows the first rank holds, which has most."""
    tile = window_grid.tile[0]
    return max(
        sum(bounds[1] - bounds[0] for bounds in window_grid.bounds if start < bounds[-1] and bounds[0] < start + tile)
        for start in window_grid.starts[0]
    )


def print_prediction(
    config: Config, shape: Sequence[int], device: Device, sizes: Sequence[int], channels: int, classes: int
) -> int:
    """Prints the plan, group sizes one by one, as they are counted: the GiB on a rank; returns 0.

    - ``shape``: of the volume
    - ``sizes``: numbers of ranks that share a window, or the whole volume
    """
    for line in _lines(config, shape, device, sizes, channels, classes):
        print(line, flush=True)
    return 0


def _lines(
    config: Config, shape: Sequence[int], device: Device, sizes: Sequence[int], channels: int, classes: int
) -> Iterator[str]:
    if config.task == "classify":
        raise ValueError("--predict with --task classify: a case passes whole, and takes less than a step of training: "
                         "remove it")  # fmt: skip
    if len(shape) != 3:
        raise ValueError("--predict needs the --volume to predict: its sides in voxels")
    every = math.prod(shape) * classes * (8 if config.precision == "fp64" else 4)
    tile = "x".join(map(str, config.tile))
    yield (
        f"prediction of {'x'.join(map(str, shape))} voxels by {family_of(config).describe(config)}: {classes} classes, "
        f"{every / GIB:.1f} GiB of logits that lie nowhere at once"
    )
    yield f"{device.name}: {device.memory / GIB:.1f} GiB; a rank takes, in GiB (! more than there is):"
    yield f"{'seqpar':>6} | windows of {tile} | a whole pass"
    width = len(f"windows of {tile}")
    for size in sizes:
        cells = []
        for sliding in (Sliding(config.tile, config.val_overlap), None):
            try:
                total = _bytes(config, shape, device, size, channels, classes, sliding)
            except ValueError as error:
                cells.append(in_flags(str(error)))
            else:
                cells.append(f"{total / GIB:.2f}{'' if total <= device.memory else '!'}")
        yield f"{size:>6} | {cells[0]:>{width}} | {cells[1]:>12}"


def _bytes(
    config: Config,
    shape: Sequence[int],
    device: Device,
    size: int,
    channels: int,
    classes: int,
    sliding: Sliding | None,
) -> int:
    """Returns the bytes on the rank of a group that holds most."""
    mode = config.mode if config.mode == "nogather" else "auto"
    config = choose_fastest(replace(config, seqpar=size, mode=mode, batch=1), device.of(size))
    net = build_on_meta(config, Group("seq", tuple(range(size))), channels, classes)
    return footprint(net, shape, classes, size, sliding=sliding).total
