"""Cases and an augmentation that exist in memory only, for tests of tiles and of their loader."""

import faulthandler
import os
import random
import signal
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_info

from seqpar.data.errors import DataError
from seqpar.data.sampling.augmentation import Augmentation, augment
from seqpar.data.sampling.loader import Loader
from seqpar.data.sampling.tiles import TileSource
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Mesh

SHAPE = (30, 26, 28)


@dataclass(frozen=True)
class NoiseCase:
    """Noise that its id determines; channel 0 tells which case it is."""

    id: str
    shape: tuple[int, ...] = SHAPE
    log: str = ""  # a file that gets a line each time the image is asked for
    wait_s: float = 0.0
    ends_with: int = 0  # the signal by which the process that reads this case ends
    fault: str = ""  # what is wrong with its label

    @cached_property
    def label(self) -> np.ndarray:
        if self.fault == "crash":
            raise ZeroDivisionError("a mistake of ours")
        if self.fault:
            raise DataError(f"/cache/{self.id}/label.npy", self.fault)
        return np.random.default_rng(int(self.id)).integers(0, 4, self.shape, dtype=np.uint8) % 3

    @property
    def image(self) -> np.ndarray:
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()} {self.id}\n")
        if self.ends_with:
            faulthandler.disable()
            os.kill(os.getpid(), self.ends_with)
        time.sleep(self.wait_s)
        image = np.random.default_rng(int(self.id)).standard_normal((2, *self.shape), dtype=np.float32)
        image[0] = int(self.id) + 1
        return image

    @cached_property
    def locations(self) -> dict[int, np.ndarray]:
        return {n: np.argwhere(self.label == n) for n in (1, 2)}


@dataclass(frozen=True)
class PlaceCase:
    """An image whose channels are the voxels' coordinates plus one, so that a tile tells where it was cut."""

    id: str
    shape: tuple[int, ...]
    places: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()  # class and its voxels

    @cached_property
    def image(self) -> np.ndarray:
        return np.stack(np.meshgrid(*(np.arange(1.0, n + 1) for n in self.shape), indexing="ij")).astype(np.float32)

    @cached_property
    def label(self) -> np.ndarray:
        return np.ones(self.shape, np.uint8)

    @cached_property
    def locations(self) -> dict[int, np.ndarray]:
        return {name: np.array(rows, np.int32).reshape(-1, len(self.shape)) for name, rows in self.places}


@dataclass(frozen=True)
class Telling:
    """An augmentation that tells in channel 1 of its first voxels what it saw, and draws from global generators."""

    tile_size: tuple[int, ...] = (8, 8, 8)
    outside_label: int = 0

    def needed_size(self, seed: int) -> tuple[int, ...]:
        return self.tile_size

    def __call__(self, image: np.ndarray, label: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = [np.random.random(), random.random(), float(torch.rand(()))]
        threads = [torch.get_num_threads(), max([pool["num_threads"] for pool in threadpool_info()], default=1)]
        handled = [int(signal.getsignal(name) is signal.SIG_IGN) for name in (signal.SIGUSR1, signal.SIGTERM)]
        image[1, 0, 0, : len(drawn + threads + handled)] = drawn + threads + handled
        return image, label


def noise_source(augmentation: Augmentation | Telling | None = None, count: int = 4, **first: object) -> TileSource:
    """Returns a source of ``count`` noise cases; ``first`` describes the one with id 0."""
    cases = [NoiseCase(str(n)) for n in range(count)]
    cases[0] = NoiseCase("0", **first)  # type: ignore[arg-type]
    return TileSource(tuple(cases), augmentation or augment("none", (8, 8, 8)), channels=2, num_values=3)


def load(mesh: Mesh, source: TileSource, split: str = "spatial", patch: int = 4, **how: Any) -> Loader:
    """Returns a loader of ``source``'s tiles; ``how`` replaces what it is made with."""
    how = {"batch": 1, "steps": range(2), "workers": 0, **how}
    return Loader(source, Layout.of(source.tile_size, patch, mesh.seq.size, split), mesh, **how)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
