"""Loads this rank's parts of tiles. The ranks that share a tile share the work: each tile is prepared once.

Micro-batch m of data index d has the samples (m D + d) B + p, p < B, of its step, so that the global batch D B A is the
same tiles however it is split. A group's tiles are numbered t over all steps; rank t % size prepares tile t. In a
pipeline, all places get the parts and prepare them together.

Legend: b tiles, c channels, n tokens, p voxels of a patch along one direction; ``n/s`` over the sequence group.
"""

import importlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from seqpar.data.sampling.tiles import Tile, TileKey, TileSource
from seqpar.data.sampling.worker_pool import Pool, TaskFailure
from seqpar.parallel.collectives import exchange_rows
from seqpar.parallel.consensus import max_of_each_over_ranks, raise_on_all_ranks
from seqpar.parallel.layout import Layout
from seqpar.parallel.meeting import START_S
from seqpar.parallel.mesh import Mesh


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """This rank's part of the tiles of one micro-batch."""

    step: int
    image: Tensor  # b n/s c p p p, float32
    label: Tensor  # b n/s p p p, class ids
    samples: tuple[int, ...]  # the indices of the tiles in the step's global batch
    cases: tuple[str, ...]  # the ids of their cases
    wait_s: float  # the longest time that a rank waited for its workers


@dataclass(frozen=True)
class Packing:
    """How a row of ``row_bytes`` bytes stores a token's image and label: the image's float32 first.

    A tile is one row per token, owner after owner, so that one message carries image and label.
    """

    layout: Layout
    channels: int
    label_dtype: np.dtype[Any]

    @property
    def image_bytes(self) -> int:
        return 4 * self.channels * math.prod(self.layout.patch)

    @property
    def label_bytes(self) -> int:
        return self.label_dtype.itemsize * math.prod(self.layout.patch)

    @property
    def row_bytes(self) -> int:
        return self.image_bytes + -(-self.label_bytes // 4) * 4  # aligned: every row begins at a multiple of 4

    @property
    def tile_bytes(self) -> int:
        return self.layout.num_tokens * self.row_bytes

    def pack(self, tile: Tile, rows: Tensor) -> None:
        """Writes a tile into ``rows`` (n, row_bytes): the first rank's tokens, then the second's, and so on."""
        assert tile.image.shape == (self.channels, *self.layout.tile), (tile.image.shape, self.layout.tile)
        image, label = rows[:, : self.image_bytes], rows[:, self.image_bytes :][:, : self.label_bytes]
        self._write(tile.image, image.view(torch.float32))
        self._write(tile.label[None], label.view(_torch_type(self.label_dtype)))

    def _write(self, whole: np.ndarray, rows: Tensor) -> None:
        """Writes the voxels of each token of c W D H into ``rows`` n (c p p p): one copy for boxes, two for chunks."""
        cells, dims = torch.from_numpy(whole), len(self.layout.patch)
        sides = [side for pair in zip(self.layout.grid, self.layout.patch) for side in pair]
        cells = cells.view(-1, *sides).permute(*range(1, 2 * dims, 2), 0, *range(2, 2 * dims + 1, 2))  # w d h c p p p
        if not self.layout.is_box:
            rows.index_copy_(0, torch.argsort(torch.cat(self.layout.all_ids)), cells.reshape(rows.shape))
            return
        for rank, own in enumerate(rows.split(self.layout.counts)):
            box = cells[tuple(slice(*side) for side in self.layout.box(rank))]
            own.view(box.shape).copy_(box)

    def empty(self, tiles: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns image ``b n c p p p`` and label ``b n p p p`` for ``unpack`` to fill."""
        patch, dtype = self.layout.patch, _torch_type(self.label_dtype)
        image = torch.empty(tiles, tokens, self.channels, *patch, device=device)
        return image, torch.empty(tiles, tokens, *patch, dtype=dtype, device=device)

    def unpack(self, rows: Tensor, image: Tensor, label: Tensor) -> None:
        """Writes rows ``n bytes`` into an image ``n c p p p`` and a label ``n p p p``, on their device."""
        values, classes = rows[:, : self.image_bytes], rows[:, self.image_bytes :][:, : self.label_bytes]
        image.flatten(1).copy_(values.view(torch.float32))
        label.flatten(1).copy_(classes.view(label.dtype))


def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


@dataclass(frozen=True)
class _Preparation:
    """The workers' task: draws a tile and packs it into a slot."""

    source: TileSource
    packing: Packing

    def __call__(self, task: TileKey, slot: Tensor) -> None:
        self.packing.pack(self.source.draw(task), slot.view(-1, self.packing.row_bytes))

    def describe(self, task: TileKey) -> str:
        return f"case {self.source.case_of(task)}, for sample {task.sample} of step {task.step}"


class Loader:
    """An iterator over micro-batches, in order; a context manager that ends its workers.

    layout: how a tile is cut into parts.
    batch: tiles per sequence group in a micro-batch.
    steps: the steps to load, as a range.
    accumulate: micro-batches per step.
    workers: processes of this rank; 0 prepares in this process, with the same results.
    prefetch: tiles that each worker prepares ahead.
    """

    def __init__(
        self,
        source: TileSource,
        layout: Layout,
        mesh: Mesh,
        *,
        batch: int,
        steps: range,
        accumulate: int = 1,
        workers: int = 2,
        prefetch: int = 2,
        seed: int = 0,
    ) -> None:
        _check(source, layout, mesh, batch, steps, accumulate, workers, prefetch, seed)
        self.source, self.layout, self.mesh = source, layout, mesh
        self.batch, self.accumulate, self.steps, self.seed = batch, accumulate, steps, seed
        self.packing = Packing(replace(layout), source.channels, source.label_dtype)  # without layout's cached values
        self._at = 0
        self._coming: Callable[[], MicroBatch] | None = None  # takes the micro-batch that was begun
        # one for all micro-batches: the allocator keeps freed memory for the stream that asked for it
        self._stream = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
        if workers:
            importlib.import_module("scipy.ndimage")  # once here, not in every forked worker
            if source.marks_skeletons:
                importlib.import_module("skimage.morphology")
        self._pool = Pool(
            _Preparation(source, self.packing),
            self._my_tiles(),
            self.packing.tile_bytes,
            workers,
            prefetch,
            start_method(mesh.device),
        )

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The process ids of this rank's workers."""
        return self._pool.worker_ids

    @property
    def global_batch(self) -> int:
        """Tiles of a step over all ranks and micro-batches."""
        return self.mesh.data.size * self.batch * self.accumulate

    def __len__(self) -> int:
        """Returns the number of micro-batches left."""
        return len(self.steps) * self.accumulate - self._at + (self._coming is not None)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> MicroBatch:
        if not len(self):
            self.close()
            raise StopIteration
        coming, self._coming = self._coming, None
        return self._load() if coming is None else coming()

    def begin_next(self) -> None:
        """Prepares and uploads the next micro-batch while the device still computes; all ranks call it.

        Errors are raised when that micro-batch is taken.
        """
        if self._coming is not None or not len(self):
            return
        try:
            if self._stream is None:
                micro = self._load()
                self._coming = lambda: micro
            else:
                self._coming = _load_on(self._stream, self._load)
        except Exception as error:
            self._coming = partial(_raise, error)

    def _load(self) -> MicroBatch:
        """Returns the next micro-batch, which was not begun."""
        step, micro = self.steps.start + self._at // self.accumulate, self._at % self.accumulate
        self._at += 1
        preparers = self._preparers(step, micro)
        image, label = self.packing.empty(len(preparers), self._counts[self.mesh.tile.index], self.mesh.device)
        wait_s = self._prepare(preparers, image, label)
        keys = self._keys(step, micro)
        samples, cases = tuple(key.sample for key in keys), tuple(self.source.case_of(key) for key in keys)
        return MicroBatch(step, image, label, samples, cases, wait_s)

    def close(self) -> None:
        """Ends the workers and drops what they have prepared ahead."""
        self._at, self._coming = len(self.steps) * self.accumulate, None
        self._pool.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _keys(self, step: int, micro: int) -> list[TileKey]:
        """Returns the keys of the tiles in the group's micro-batch."""
        first = (micro * self.mesh.data.size + self.mesh.data.index) * self.batch
        return [TileKey(self.seed, step, first + p) for p in range(self.batch)]

    def _preparers(self, step: int, micro: int) -> list[int]:
        """Returns the rank of the group that prepares each tile of a micro-batch."""
        first = (step * self.accumulate + micro) * self.batch
        return [(first + p) % self.mesh.tile.size for p in range(self.batch)]

    def _my_tiles(self) -> Iterator[TileKey]:
        for step in self.steps:
            for micro in range(self.accumulate):
                for key, rank in zip(self._keys(step, micro), self._preparers(step, micro)):
                    if rank == self.mesh.tile.index:
                        yield key

    @property
    def _counts(self) -> list[int]:
        """Returns the number of tokens of each rank that shares tiles: every place of a pipeline gets them."""
        return [self.layout.counts[rank % self.mesh.seq.size] for rank in range(self.mesh.tile.size)]

    def _prepare(self, preparers: list[int], image: Tensor, label: Tensor) -> float:
        """Fills this rank's image and label of all tiles; returns the seconds that ranks waited for their workers."""
        group, parts = self.mesh.tile, self.mesh.seq.size
        mine = [p for p, rank in enumerate(preparers) if rank == group.index]
        sizes = [0 if rank == group.index else count for rank, count in enumerate(self._counts)]
        leaving = torch.empty(len(mine) * sum(sizes), self.packing.row_bytes, dtype=torch.uint8, device=image.device)
        sent = [len(mine) * size for size in sizes]
        to = [rows.view(len(mine), size, rows.shape[1]) for rows, size in zip(leaving.split(sent), sizes)]  # by rank
        fault, waited = None, 0.0
        for number, p in enumerate(mine):
            began = time.perf_counter()
            result = self._pool.take(self._limit_s)
            waited += time.perf_counter() - began
            if isinstance(result, TaskFailure):
                fault = result
                break
            pieces = self._on_device(result.view(-1, self.packing.row_bytes)).split(self.layout.counts)
            self.packing.unpack(pieces[group.index % parts], image[p], label[p])
            for rank in group.peers:
                to[rank][number].copy_(pieces[rank % parts])
            self._pool.release()
        waited = self._agree(fault, waited)
        self._exchange(leaving, sent, preparers, image, label)
        return waited

    @property
    def _limit_s(self) -> float:
        """The seconds that this rank waits for a worker: it gives up before the others give it up."""
        watch = self.mesh.world.watch
        return (watch.limit_s or watch.start_limit_s or START_S) * (1.0 if self.mesh.world.size == 1 else 0.9)

    def _on_device(self, rows: Tensor) -> Tensor:
        """Returns rows of a slot on the device; on a CPU they stay in the slot."""
        if self.mesh.device.type == "cpu":
            return rows
        return rows.pin_memory().to(self.mesh.device, non_blocking=True)

    def _agree(self, fault: TaskFailure | None, waited: float) -> float:
        """Returns the longest wait of all ranks; if any rank has a fault, all ranks raise that of the first one."""
        world = self.mesh.world
        failed, wait_us = max_of_each_over_ranks((fault is not None, round(waited * 1e6)), world)
        if failed:
            self.close()
            here = f"rank {world.index} on {self.mesh.hosts[world.index]}"
            error = None if fault is None else fault.error(here)
            if isinstance(error, TimeoutError):
                flag = "timeout" if world.watch.limit_s else "start-timeout"
                error = TimeoutError(f"{error}; continue with --resume, with a larger --{flag} if the disk is slow")
            raise_on_all_ranks(error, world, name_rank=False)
        return wait_us / 1e6

    def _exchange(self, leaving: Tensor, sent: list[int], preparers: list[int], image: Tensor, label: Tensor) -> None:
        """Fills image and label with the tiles that other ranks prepared, by one all-to-all.

        - ``leaving``: rows for the other ranks, ``sent`` of them for each, none for this one
        """
        group, size = self.mesh.tile, image.shape[1]
        coming = [0 if rank == group.index else preparers.count(rank) * size for rank in range(group.size)]
        received = exchange_rows(leaving, group, sent, coming, "tiles").split(coming)
        for rank in group.peers:
            places = [p for p, preparer in enumerate(preparers) if preparer == rank]
            for p, rows in zip(places, received[rank].split(size)):
                self.packing.unpack(rows, image[p], label[p])


def _load_on(stream: torch.cuda.Stream, load: Callable[[], MicroBatch]) -> Callable[[], MicroBatch]:
    """Loads on ``stream``; returns a function that hands the micro-batch to the current stream."""
    with torch.cuda.stream(stream):
        micro = load()

    def take() -> MicroBatch:
        current = torch.cuda.current_stream(stream.device)
        current.wait_stream(stream)
        for tensor in (micro.image, micro.label):
            tensor.record_stream(current)
        return micro

    return take


def _raise(error: Exception) -> NoReturn:
    raise error


def start_method(device: torch.device) -> str:
    """Returns how to start workers; a process that uses a GPU must not be forked."""
    return "fork" if device.type == "cpu" else "forkserver"


def _check(
    source: TileSource,
    layout: Layout,
    mesh: Mesh,
    batch: int,
    steps: range,
    accumulate: int,
    workers: int,
    prefetch: int,
    seed: int,
) -> None:
    """Raises ValueError, the same on all ranks, for unusable arguments."""
    for name, value, least in (
        ("batch", batch, 1), ("accumulate", accumulate, 1), ("workers", workers, 0), ("prefetch", prefetch, 1),
        ("seed", seed, 0),
    ):  # fmt: skip
        if value < least:
            raise ValueError(f"--{name} {value}: it must be at least {least}")
    if steps.step != 1 or steps.start < 0:
        raise ValueError(f"steps {steps} must count up by one from 0 or more")
    if layout.num_ranks != mesh.seq.size:
        num_ranks, group = layout.num_ranks, mesh.seq
        raise ValueError(
            f"the layout cuts tiles for {num_ranks} ranks, but the {group} has {group.size}; make both equal"
        )
    if layout.tile != source.tile_size:
        raise ValueError(
            f"the source makes tiles of {source.tile_size}, the layout cuts tiles of {layout.tile}; use one size"
        )
