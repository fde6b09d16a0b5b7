"""Draws tiles: tile j of step i depends on (seed, i, j) alone, whichever process draws it, whenever.

Legend: c channels, W D H voxels.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from seqpar.data.boxes import CaseArrays, read_box
from seqpar.data.errors import DataError
from seqpar.data.preparation.cache import PreparedDataset
from seqpar.data.sampling.volume_synthesis import VolumeSynthesis
from seqpar.losses import SoftLabels, mark_skeleton

_DOMAIN = 0x7469_6C65  # "tile": separates these numbers from others made from the same seed
FOREGROUND = 1 / 3  # nnU-Net's 33 % rule


class Augmenting(Protocol):
    """Makes a tile from a crop centred on it; the result depends on crop and seed alone."""

    @property
    def tile_size(self) -> tuple[int, ...]: ...
    @property
    def outside_label(self) -> int: ...
    def needed_size(self, seed: int) -> tuple[int, ...]: ...
    def __call__(self, image: np.ndarray, label: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]: ...


class TileKey(NamedTuple):
    """Everything that a tile depends on: it is sample ``sample`` of the global batch of step ``step``."""

    seed: int
    step: int
    sample: int

    def seeds(self) -> tuple[int, int, int]:
        """Returns independent seeds: for the position, the augmentation and global generators."""
        words = np.random.SeedSequence((_DOMAIN, *self)).generate_state(3, np.uint64)
        return int(words[0]), int(words[1]), int(words[2])


class Tile(NamedTuple):
    """A tile: image ``c W D H`` float32, label ``W D H`` class ids, or codes of labels with doubt."""

    image: np.ndarray
    label: np.ndarray


@dataclass(frozen=True)
class TileSource:
    """Draws tiles from cases; has no open files, so that it can be sent to a worker.

    Draws a case uniformly. With probability ``foreground``, it then draws one of the case's classes and centres the
    tile on one of its stored voxels; otherwise, or if the case has no foreground, the position is uniform.

    ``step_tiles``: the number of tiles in a step; the last of them are centred, as many as the share ``foreground``
    says (nnU-Net's rounding); 0: each tile by chance.
    """

    cases: tuple[CaseArrays, ...]
    augmentation: Augmenting
    channels: int
    num_values: int  # of the label: classes, and the ignore label if there is one
    foreground: float = FOREGROUND
    synthesis: VolumeSynthesis | None = None  # per volume; synthesis per tile belongs to the augmentation
    step_tiles: int = 0
    shifted: bool = False  # a labelled voxel is anywhere in its tile, not in the middle
    from_middle: bool = False  # cut each tile from the middle of its case
    marks_skeletons: bool = False  # of labels
    soft: SoftLabels | None = None  # what labels are codes of, if they are labels with doubt

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError("there are no cases to train on; choose another fold")
        if not 0 <= self.foreground <= 1:
            raise ValueError(f"foreground is {self.foreground}; it must be a share from 0 to 1")
        names = [case.id for case in self.cases]
        if names != sorted(set(names)):
            raise ValueError("cases must be sorted by id and unique, since tiles are drawn by their index")

    @classmethod
    def of(
        cls,
        dataset: PreparedDataset,
        ids: Sequence[str],
        augmentation: Augmenting,
        foreground: float = FOREGROUND,
        synthesis: VolumeSynthesis | None = None,
    ) -> "TileSource":
        """Returns a source of tiles from some cases of a cache."""
        unknown = sorted(set(ids) - set(dataset.cases))
        if unknown:
            raise ValueError(f"case {unknown[0]} is not in the cache {dataset.path}; prepare it, or correct the split")
        outside = dataset.ignore_label or 0
        if augmentation.outside_label != outside:
            raise ValueError(
                f"voxels outside a case get the label {augmentation.outside_label}, but {outside} is needed; "
                f"make the augmentation with outside_label={outside}"
            )
        cases = tuple(dataset.cases[name] for name in sorted(set(ids)))
        values = len(dataset.labels) + (dataset.ignore_label is not None)
        return cls(cases, augmentation, len(dataset.modalities), values, foreground, synthesis, soft=dataset.soft)

    @property
    def tile_size(self) -> tuple[int, ...]:
        return tuple(self.augmentation.tile_size)

    @property
    def label_dtype(self) -> np.dtype[Any]:
        """Returns the type of labels, which is known before any file is read."""
        if self.soft is not None:
            return self.soft.dtype
        return np.dtype(np.uint8 if self.num_values <= 256 and not self.marks_skeletons else np.int16)

    def case_of(self, key: TileKey) -> str:
        """Returns the id of the case that the tile is cut from, without reading it."""
        return self._choose(np.random.default_rng(key.seeds()[0])).id

    def draw(self, key: TileKey) -> Tile:
        """Returns a tile; raises DataError with the case's id if its files cannot be used."""
        place_seed, augmentation_seed, global_seed = key.seeds()
        rng = np.random.default_rng(place_seed)
        case = self._choose(rng)
        try:
            with _seeded(global_seed):
                return self._cut(case, rng, augmentation_seed, key.sample)
        except DataError as fault:
            raise DataError(fault.path, f"{fault.problem} ({_which_tile(case, key)})") from fault
        except OSError as error:
            path = error.filename or f"case {case.id}"
            raise DataError(path, f"cannot be read ({error.strerror or error}; {_which_tile(case, key)})") from error

    def _choose(self, rng: np.random.Generator) -> CaseArrays:
        return self.cases[int(rng.integers(len(self.cases)))]

    def _cut(self, case: CaseArrays, rng: np.random.Generator, seed: int, sample: int) -> Tile:
        image, label = case.image, case.label
        if image.shape != (self.channels, *label.shape) or label.ndim != len(self.tile_size):
            raise DataError(
                f"case {case.id}", f"image {image.shape} and label {label.shape} do not match {self.channels} channels "
                f"and a tile {self.tile_size}; prepare the data again"
            )  # fmt: skip
        start = self._place(case, label.shape, rng, sample)
        need = self.augmentation.needed_size(seed)
        low = [s - (n - t) // 2 for s, n, t in zip(start, need, self.tile_size)]
        outside = self.augmentation.outside_label
        # drawn after the position, so that the position does not depend on it
        if self.synthesis and rng.random() < self.synthesis.labels.probability:
            image, label = self.synthesis.read(case, low, need, outside, int(rng.integers(2**63)))
        else:
            image, label = read_box(image, low, need, 0), read_box(label, low, need, outside)
        low_value, high_value = int(label.min()), int(label.max())
        if self.soft is None and not 0 <= low_value <= high_value < self.num_values:
            raise DataError(
                getattr(case.label, "filename", f"case {case.id}"), f"holds labels from {low_value} to {high_value}, "
                f"and 0 to {self.num_values - 1} are known: its bytes have changed (prepare --check finds such files); "
                "prepare the data again"
            )  # fmt: skip
        image, label = self.augmentation(image, label, seed)
        if self.marks_skeletons:
            label = mark_skeleton(torch.from_numpy(label)[None], outside or None)[0].numpy()
        return Tile(np.ascontiguousarray(image, np.float32), np.ascontiguousarray(label, self.label_dtype))

    def _is_centred(self, rng: np.random.Generator, sample: int) -> bool:
        """Returns whether to centre a tile on a labelled voxel."""
        if self.step_tiles:
            return sample >= round(self.step_tiles * (1 - self.foreground))
        return rng.random() < self.foreground

    def _place(self, case: CaseArrays, shape: tuple[int, ...], rng: np.random.Generator, sample: int) -> list[int]:
        """Returns the tile's first voxel; as in nnU-Net, a tile centred on foreground respects only the lower bound."""
        bounds = [position_bounds(n, t) for n, t in zip(shape, self.tile_size)]
        if self.from_middle:
            return middle_of(shape, self.tile_size)
        if self._is_centred(rng, sample):
            locations = {name: rows for name, rows in sorted(case.locations.items()) if len(rows)}
            if locations:
                rows = list(locations.values())[int(rng.integers(len(locations)))]
                centre = rows[int(rng.integers(len(rows)))]
                if self.shifted:  # kept inside the case, which keeps the voxel inside the tile
                    starts = [int(c) - int(rng.integers(t)) for c, t in zip(centre, self.tile_size)]
                    return [min(max(low, start), high) for (low, high), start in zip(bounds, starts)]
                return [max(low, int(c) - t // 2) for (low, _), c, t in zip(bounds, centre, self.tile_size)]
        return [int(rng.integers(low, high + 1)) for low, high in bounds]


def position_bounds(extent: int, tile: int) -> tuple[int, int]:
    """Returns the smallest and the largest first voxel of a tile in one direction; a smaller case is centred in it."""
    lacking = max(0, tile - extent)
    return -((lacking + 1) // 2), max(0, extent - tile) - lacking // 2


def middle_of(shape: Sequence[int], tile: Sequence[int]) -> list[int]:
    """Returns the first voxel of the tile in the middle of a case, negative if the tile is larger."""
    return [(extent - side) // 2 for extent, side in zip(shape, tile)]


def _which_tile(case: CaseArrays, key: TileKey) -> str:
    return f"case {case.id}, for sample {key.sample} of step {key.step}"


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the global generators for transforms that use them, and restores their states afterwards."""
    numpy_state, python_state, torch_state = np.random.get_state(), random.getstate(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
