"""Measures the tiles per second that reach training, for a sequence group of one rank and of two.

Ranks are forked on this machine, with one worker each; the fastest turn counts. On a busy machine wall time says
little; the CPU seconds of the busiest process then bound the rate that is possible if each process has its own core.
"""

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lab.benches.series import Row, Runs, Series, alternate, spread
from seqpar.data.sampling.augmentation import augment
from seqpar.data.sampling.loader import Loader
from seqpar.data.sampling.tiles import TileKey, TileSource
from seqpar.parallel.layout import Layout
from seqpar.parallel.rendezvous import start

TILE, PATCH, CHANNELS, VOLUME = 96, 8, 4, 128


@dataclass(frozen=True)
class MappedCase:
    """A case of noise in memory-mapped files, as in a cache."""

    id: str
    folder: Path

    @property
    def image(self) -> np.ndarray:
        return self._map("image")

    @property
    def label(self) -> np.ndarray:
        return self._map("label")

    @property
    def locations(self) -> dict[int, np.ndarray]:
        return {1: self._map("locations")}

    def _map(self, name: str) -> np.ndarray:
        array: np.ndarray = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return array


def series(quick: bool = False) -> list[Series]:
    """Returns a series per augmentation: a sequence group of one rank and one of two."""
    tiles, turns = (12, 2) if quick else (24, 3)
    return [_of_augmentation(name, tiles, turns) for name in ("light", "full")]


def _of_augmentation(name: str, tiles: int, turns: int) -> Series:
    cases = {"1 rank": 1, "2 ranks": 2}

    def row(case: str, runs: Runs) -> Row:
        best = {name: _Rate(*map(min, zip(*rates))) for name, rates in runs.items() if rates}
        one, rate = best["1 rank"], best[case]
        return {
            "augmentation": name,
            "ranks": cases[case],
            "tiles_per_s": 1 / rate.wall,
            "ratio": one.wall / rate.wall,
            "of turns": spread(*([turn.wall for turn in runs[of]] for of in ("1 rank", case))),
            "tiles_per_cpu_s": 1 / rate.busiest,
            "cpu_ratio": one.busiest / rate.busiest,
            "worker_ms": 1000 * rate.worker,
            "trainer_ms": 1000 * rate.trainer,
        }

    def measure(turns: int) -> Generator[tuple[str, _Rate], None, None]:
        with tempfile.TemporaryDirectory() as folder:
            source = TileSource(tuple(_make_cases(Path(folder))), augment(name, (TILE,) * 3), CHANNELS, 2)
            for sample in range(20):
                source.draw(TileKey(0, 0, sample))  # reads files and imports libraries before the clock starts
            yield from alternate(tuple(cases), lambda case: _turn(source, cases[case], tiles), turns)

    what = f"tiles of {TILE} that reach training, augmentation {name}"
    return Series(what, tuple(cases), turns, 15.0, measure, row)


def _make_cases(folder: Path, count: int = 2) -> Iterator[MappedCase]:
    for number in range(count):
        case, rng = MappedCase(str(number), folder / str(number)), np.random.default_rng(number)
        case.folder.mkdir()
        np.save(case.folder / "image.npy", rng.standard_normal((CHANNELS, *(VOLUME,) * 3), dtype=np.float32))
        np.save(case.folder / "label.npy", rng.integers(0, 2, (VOLUME,) * 3, dtype=np.uint8))
        np.save(case.folder / "locations.npy", rng.integers(0, VOLUME, (1000, 3)).astype(np.int32))
        yield case


class _Rate(NamedTuple):
    """Seconds a tile of the group: wall time, and CPU time of the busiest worker and the busiest trainer."""

    wall: float
    worker: float
    trainer: float

    @property
    def busiest(self) -> float:
        return max(self.worker, self.trainer)


def _turn(source: TileSource, size: int, tiles: int) -> _Rate:
    """Returns the rate of a group of ``size`` ranks, not counting the first tiles, which are prepared ahead."""
    context = multiprocessing.get_context("fork")
    pipes, port = [context.Pipe(duplex=False) for _ in range(size)], _free_port()
    ranks = [context.Process(target=_rank, args=(source, n, size, port, tiles, pipes[n][1])) for n in range(size)]
    for rank, (_, theirs) in zip(ranks, pipes):
        rank.start()
        theirs.close()
    try:
        return _Rate(*map(max, zip(*(ours.recv() for ours, _ in pipes))))
    except EOFError:
        raise RuntimeError("a rank of the measurement ended without a result") from None
    except KeyboardInterrupt:
        for rank in ranks:
            rank.terminate()
        raise
    finally:
        for rank in ranks:
            rank.join()


def _rank(source: TileSource, rank: int, size: int, port: int, tiles: int, result: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    env = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    environment = {} if size == 1 else {name: str(value) for name, value in env.items()} | {"MASTER_ADDR": "127.0.0.1"}
    ahead = 2 * size + 2  # more than the loader prepares ahead, so that workers are busy while the clocks run
    steps = range(ahead + tiles + ahead)
    torch.set_num_threads(1)  # the parent's threads do not survive the fork: an operation on them would hang
    with (
        start(size, environment, "cpu") as mesh,
        Loader(source, Layout.of(TILE, PATCH, size), mesh, batch=1, steps=steps, workers=1) as loader,
    ):
        clocks = {part.step: _clocks(loader) for part in loader}
    began, ended = clocks[ahead - 1], clocks[ahead + tiles - 1]
    result.send([(now - then) / tiles for now, then in zip(ended, began)])


def _clocks(loader: Loader) -> tuple[float, float, float]:
    """Returns the wall time and the CPU times of this rank's worker and of this process."""
    (pid,) = loader.worker_ids
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    worker = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), worker, time.process_time()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
