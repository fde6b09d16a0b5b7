"""Tiles per second that reach training: two ranks of a sequence group against one, in one run.

Ranks are forked on this machine, with one worker each; turns of one rank and of two alternate, and the fastest turn
of each counts. Where other work takes the cores, wall time says little: then CPU seconds do, of the busiest process,
which is what bounds the rate once each process has a core.
"""

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from seqpar.data.sampling.augmentation import augment
from seqpar.data.sampling.loader import Loader
from seqpar.data.sampling.tiles import TileKey, TileSource
from seqpar.layout import Layout
from seqpar.rendezvous import start

TILE, PATCH, CHANNELS, VOLUME = 96, 8, 4, 128


@dataclass(frozen=True)
class MappedCase:
    """Noise in files that are mapped, as a cache's are."""

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


def rows(rounds: int = 3, tiles: int = 24, augmentations: tuple[str, ...] = ("light", "full")) -> list[dict[str, Any]]:
    """Returns a row per augmentation and group size: tiles a second of the group and their ratio to one rank's, by
    wall time and by CPU seconds of the busiest process; and those seconds a tile, of worker and trainer."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        cases = tuple(_make_cases(Path(folder)))
        for name in augmentations:
            source = TileSource(cases, augment(name, (TILE,) * 3), CHANNELS, 2)
            for sample in range(20):
                source.draw(TileKey(0, 0, sample))  # files are read and libraries imported before clocks run
            turns = [[_turn(source, size, tiles) for size in (1, 2)] for _ in range(rounds)]
            best = [_Rate(*map(min, zip(*same))) for same in zip(*turns)]
            for size, rate in zip((1, 2), best):
                found.append({
                    "augmentation": name, "ranks": size,
                    "tiles_per_s": 1 / rate.wall, "ratio": best[0].wall / rate.wall,
                    "tiles_per_cpu_s": 1 / rate.busiest, "cpu_ratio": best[0].busiest / rate.busiest,
                    "worker_ms": 1000 * rate.worker, "trainer_ms": 1000 * rate.trainer,
                })  # fmt: skip
    return found


def _make_cases(folder: Path, count: int = 2) -> Iterator[MappedCase]:
    for number in range(count):
        case, rng = MappedCase(str(number), folder / str(number)), np.random.default_rng(number)
        case.folder.mkdir()
        np.save(case.folder / "image.npy", rng.standard_normal((CHANNELS, *(VOLUME,) * 3), dtype=np.float32))
        np.save(case.folder / "label.npy", rng.integers(0, 2, (VOLUME,) * 3, dtype=np.uint8))
        np.save(case.folder / "locations.npy", rng.integers(0, VOLUME, (1000, 3)).astype(np.int32))
        yield case


class _Rate(NamedTuple):
    """Seconds a tile of the group: by the clock, and of each busiest process by its use of a core."""

    wall: float
    worker: float
    trainer: float

    @property
    def busiest(self) -> float:
        return max(self.worker, self.trainer)


def _turn(source: TileSource, size: int, tiles: int) -> _Rate:
    """Returns the rate of one group of ``size`` ranks; the first tiles, prepared ahead, do not count."""
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
    finally:
        for rank in ranks:
            rank.join()


def _rank(source: TileSource, rank: int, size: int, port: int, tiles: int, answer: Connection) -> None:
    env = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    alone = {} if size == 1 else {name: str(value) for name, value in env.items()} | {"MASTER_ADDR": "127.0.0.1"}
    ahead = 2 * size + 2  # more than is prepared ahead: workers have work before the clocks start and after they stop
    steps = range(ahead + tiles + ahead)
    torch.set_num_threads(1)  # threads that the forking process had are not here: an operation on them would hang
    with (
        start(size, alone, "cpu") as mesh,
        Loader(source, Layout.of(TILE, PATCH, size), mesh, batch=1, steps=steps, workers=1) as loader,
    ):
        clocks = {part.step: _clocks(loader) for part in loader}
    began, ended = clocks[ahead - 1], clocks[ahead + tiles - 1]
    answer.send([(now - then) / tiles for now, then in zip(ended, began)])


def _clocks(loader: Loader) -> tuple[float, float, float]:
    """Returns wall time, and CPU time of this rank's worker and of this process."""
    (pid,) = loader.worker_ids
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    worker = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), worker, time.process_time()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    for row in rows():
        print(*(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
