"""Prepares one case: from its files to a network's arrays, and from predictions back to the files' geometry.

``Preparation`` is what training and prediction ask of any preparation.

Legend: ``c`` channels, ``W D H`` voxels, ``k`` classes. "Prepared" arrays are canonical, cropped, resampled.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seqpar.data.boxes import Box, crop, smallest_box, uncrop
from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.data.geometry import Geometry, from_canonical, geometry_difference, to_canonical
from seqpar.data.preparation import transforms
from seqpar.data.preparation.recipe import BY_VOLUME, Recipe, generator
from seqpar.data.volumes import digest_voxels, read_volume
from seqpar.losses.soft_labels import Change, Probabilities, Readers
from seqpar.text import quantity


class SettingsError(DataError):
    """A case cannot be prepared as told: the settings have to change, not its files."""


@dataclass(frozen=True, eq=False)
class Properties:
    """What takes prepared arrays back to the geometry of the case's files."""

    geometry: Geometry  # of the first image's file
    box: Box  # the crop, in voxels of the file in canonical axes
    shape: tuple[int, int, int]  # W D H as prepared
    spacing: tuple[float, float, float]  # as prepared, in mm
    schemes: tuple[str, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...]
    values: tuple[int, ...]  # the file's label for each class id
    counts: tuple[int, ...]  # voxels of each class id as prepared; empty if there is no label

    @property
    def box_shape(self) -> tuple[int, int, int]:
        """Returns the size of the crop at the file's spacing."""
        w, d, h = (stop - start for start, stop in self.box)
        return w, d, h

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` reads."""
        return {**vars(self), "geometry": self.geometry.to_json()}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Properties":
        """Returns the properties that `to_json` wrote."""
        tuples: dict[str, Any] = {key: tuple(part) for key, part in value.items() if isinstance(part, list)}
        box = tuple((int(start), int(stop)) for start, stop in value["box"])
        return Properties(**{**tuples, "box": box}, geometry=Geometry.from_json(value["geometry"]))


class Prepared(NamedTuple):
    """A prepared case, as a network takes it."""

    image: np.ndarray  # c W D H, float32
    label: np.ndarray | None  # W D H, class ids, or codes of labels with doubt
    locations: dict[int, np.ndarray]  # class id to voxels (n, 3)
    properties: Properties
    digests: tuple[str, ...]  # of the files read
    voxels: tuple[str, ...]  # a digest of each channel, as ``digest_voxels`` returns it
    truth: np.ndarray | None = None  # class ids on the grid on which predictions are scored, if that is another


Step = Callable[[], None]
CLOSE = 1e-3  # how far probabilities may be from 0 to 1, and their sum from 1
MOST_GROWTH, LARGE = 1000, 10**7  # voxels for each one of the file, or in all, that a case may become
STAGES = 3  # after its files are read, a case is cropped, normalised, resampled


def ignore_step() -> None:
    """Ignores a step."""


class Loaded(NamedTuple):
    """A case's files as canonical arrays, checked but not yet prepared."""

    image: np.ndarray  # c W D H, the files' numbers
    ids: np.ndarray | None  # W D H, class ids, or codes of labels with doubt
    geometry: Geometry
    digests: tuple[str, ...]
    voxels: tuple[str, ...] = ()  # digest of each channel


@dataclass(frozen=True)
class TargetGrid:
    """The grid that logits are resampled to.

    - ``nearest``: the direction that takes the nearest row; None: all directions are linear
    """

    shape: tuple[int, ...]
    nearest: int | None = None


class Preparation(ABC):
    """How the cases of a run are prepared, and predictions brought back to their files.

    - ``recipe``: names the modalities, and the file's label for each class id
    - ``axes``: the axes of its arrays; preparations of the same axes crop a case alike
    """

    recipe: Recipe
    axes: str

    @abstractmethod
    def prepare(self, loaded: Loaded, case: Case, step: Step = ignore_step) -> Prepared:
        """Returns loaded arrays as the network takes them; errors name the files of ``case``.

        step: called after each of the ``STAGES``.
        """

    @abstractmethod
    def target_grid(self, properties: Properties) -> TargetGrid:
        """Returns the grid of the case's crop."""

    @abstractmethod
    def scored_grid(self, properties: Properties) -> TargetGrid:
        """Returns the grid on which validation compares with the truth."""

    @abstractmethod
    def labels_to_source(self, ids: np.ndarray, properties: Properties) -> np.ndarray:
        """Returns class ids of the crop as the file's label values in the file's geometry."""

    @abstractmethod
    def channel_to_source(self, channel: np.ndarray, properties: Properties, fill: float = 0) -> np.ndarray:
        """Returns a channel of the crop, such as a probability, in the file's geometry, ``fill`` outside the crop."""

    @abstractmethod
    def canonical(self, volume: np.ndarray, properties: Properties) -> np.ndarray:
        """Returns a prepared volume, its last dims in the axes of the preparation, in canonical axes."""

    @abstractmethod
    def canonical_properties(self, properties: Properties) -> Properties:
        """Returns the properties of a prepared case in canonical axes; a CT's scheme is "ct"."""


def load_case(case: Case, recipe: Recipe, step: Step = ignore_step) -> Loaded:
    """Returns a case's files as canonical arrays; raises DataError if they do not match each other or the recipe.

    step: called after each file.
    """
    channels, digests = [], []
    first: Geometry | None = None
    for path in case.images:
        array, geometry, digest = read_volume(path)
        first = first or geometry
        refuse_mismatch(case, path, geometry, len(array), first, recipe.modalities)
        channels += list(to_canonical(array, geometry.orientation))
        digests.append(digest)
        step()
    assert first is not None
    maps, soft = list[np.ndarray](), recipe.soft
    for path in case.labels:
        array, geometry, digest = read_volume(path)
        refuse_mismatch(case, path, geometry, len(array), first, recipe.modalities, len(recipe.label_values))
        if isinstance(soft, Probabilities):
            own = soft.encode(_probabilities(array, recipe, path))
        else:
            own = _class_ids(array[0], recipe, path)
        maps.append(to_canonical(own, geometry.orientation))
        digests.append(digest)
        step()
    if isinstance(soft, Readers) and maps:
        maps = [soft.join(maps)]
    voxels = tuple(map(digest_voxels, channels))
    return Loaded(np.stack(channels), maps[0] if maps else None, first, tuple(digests), voxels)


def refuse_mismatch(
    case: Case, path: Path, geometry: Geometry, num_channels: int, first: Geometry, modalities: Sequence[str],
    label_channels: int = 1,
) -> None:  # fmt: skip
    """Raises DataError for a file of a case, image or label, that does not match its other files or the data set.

    first: of the case's first image.
    """
    if len(case.images) not in (1, len(modalities)):
        raise DataError(case.images[0], f"has {len(case.images)} modalities; {len(modalities)} are needed")
    if path in case.labels:
        if (how := geometry_difference(geometry, first)) is not None:
            raise DataError(path, f"does not match {case.images[0]}: {how}; draw it on the image again")
        if num_channels != label_channels:
            hint = 'a label has one value per voxel, or declare "soft_labels": true if these are probabilities'
            if label_channels > 1:
                hint = f'with "soft_labels", it needs the probabilities of {label_channels} labels, in order of value'
            raise DataError(path, f"has {quantity(num_channels, 'channel')}; {hint}")
        return
    needed = len(modalities) if len(case.images) == 1 else 1
    if num_channels != needed:
        names = f"{quantity(num_channels, 'channel')}; it needs {needed}: {', '.join(modalities)}"
        apart = len(case.images) == 1 and num_channels == 1  # one case may have been given as files of a channel each
        hint = f"; of one case, give files named CASE_0000 to CASE_{needed - 1:04d}, or its folder" if apart else ""
        raise DataError(path, f"has {names}{hint}")
    if (how := geometry_difference(geometry, first)) is not None:
        raise DataError(path, f"does not match {case.images[0]}: {how}; register or resample it")


def prepare_loaded(loaded: Loaded, case: Case, recipe: Recipe, step: Step = ignore_step) -> Prepared:
    """Returns loaded arrays cropped, normalised and resampled; errors name the files of ``case``.

    step: called after each of the ``STAGES``.
    """
    image, ids, geometry, digests, voxels = loaded
    box = nonzero_box(image, case, ids) if recipe.crop_to is None else _fixed_box(image, ids, case, recipe)
    image, ids = crop(image, box), None if ids is None else crop(ids, box)
    step()
    image, means, stds = _normalise(image, recipe, case)
    step()
    spacing, shape = geometry.canonical_spacing, image.shape[1:]
    if recipe.spacing is not None:
        shape = resampled_shape(shape, spacing, recipe.spacing, len(image), case)
        image, spacing = transforms.resample(image, shape), recipe.spacing
        if ids is not None:
            on_grid = partial(transforms.resample_label, shape=shape), partial(transforms.resample, shape=shape)
            ids = resample_ids(ids, recipe, *on_grid)
    step()
    counts = () if ids is None else count_ids(ids, recipe)
    return Prepared(
        np.ascontiguousarray(image, np.float32),
        None if ids is None else np.ascontiguousarray(ids),
        {} if ids is None else locate(case.id, ids, recipe),
        Properties(geometry, box, shape, spacing, recipe.schemes, means, stds, recipe.values, counts),
        digests,
        voxels,
    )


def count_ids(ids: np.ndarray, recipe: Recipe) -> tuple[int, ...]:
    """Returns the number of voxels of each class id, of labels with doubt by consensus."""
    ids = ids if recipe.soft is None else recipe.soft.consensus(ids)
    return tuple(np.bincount(ids.reshape(-1), minlength=len(recipe.values)).tolist())


def resample_ids(ids: np.ndarray, recipe: Recipe, of_labels: Change, of_shares: Change) -> np.ndarray:
    """Returns class ids on another grid; of labels with doubt, each reader's or each probability by itself.

    - ``of_labels``: resamples label maps; ``of_shares``: numbers, linearly
    """
    return of_labels(ids) if recipe.soft is None else recipe.soft.resampled(ids, of_labels, of_shares)


def resampled_shape(
    sides: Sequence[int],
    spacing: Sequence[float],
    target: Sequence[float],
    num_channels: int,
    case: Case,
    share: float = 1.0,
) -> tuple[int, int, int]:
    """Returns a case's shape at another spacing; raises ``SettingsError`` if it is too large, or nothing is left.

    - ``share``: of the shape that memory has to hold: a crop, which headers do not show, may leave no more
    """
    shape = transforms.new_shape(sides, spacing, target)
    refuse_growth(case, sides, shape, f"--spacing {','.join(f'{side:g}' for side in target)}", num_channels, share)
    if all(n * old < new / 2 for n, old, new in zip(sides, spacing, target)):
        raise SettingsError(
            case.images[0], f"--spacing {','.join(f'{side:g}' for side in target)} would make less than one voxel of "
            f"its {'x'.join(map(str, sides))}; give smaller sizes in mm"
        )  # fmt: skip
    return shape


def refuse_growth(
    case: Case, sides: Sequence[int], shape: Sequence[int], spacing: str, num_channels: int, share: float = 1.0
) -> None:
    """Raises ``SettingsError`` if no memory holds a case of this shape, or if most of its voxels are made up.

    - ``spacing``: what makes that shape of its ``sides``, in words
    - ``share``: of the shape that memory has to hold
    """
    size, memory = 4 * num_channels * math.prod(shape), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if share * size > memory or math.prod(shape) > max(LARGE, MOST_GROWTH * math.prod(sides)):
        was, becomes = ("x".join(map(str, shown)) for shown in (sides, shape))
        raise SettingsError(
            case.images[0], f"{spacing} would make {becomes} voxels ({size / 1e9:,.1f} GB) of its {was}; give larger "
            "sizes in mm"
        )  # fmt: skip


def refuse_unannotated(case: Case, counts: Sequence[int], recipe: Recipe) -> None:
    """Raises DataError if a label has voxels of a class that its case does not list as annotated."""
    if case.annotated is None or case.label is None:
        return
    shown = {0, *case.annotated, *recipe.values[len(recipe.values) - recipe.has_ignore :]}
    if extra := [value for value, count in zip(recipe.values, counts) if count and value not in shown]:
        raise DataError(
            case.label, f"has voxels of value {extra}, whose classes the data set does not list as annotated in case "
            f"{case.id}; list them, or erase the voxels"
        )  # fmt: skip


def labels_to_source(ids: np.ndarray, properties: Properties, fill: int = 0) -> np.ndarray:
    """Returns prepared class ids ``(W, D, H)`` as the file's label values in the file's geometry.

    Class ids that already have the crop's shape at the file's spacing are not resampled.
    """
    ids = transforms.resample_label(ids, properties.box_shape)
    whole = uncrop(ids, properties.box, properties.geometry.canonical_shape, fill)
    return from_canonical(transforms.to_values(whole, properties.values), properties.geometry.orientation)


def channel_to_source(channel: np.ndarray, properties: Properties, fill: float = 0) -> np.ndarray:
    """Returns one prepared channel ``(W, D, H)``, such as a probability, in the file's geometry."""
    whole = uncrop(
        transforms.resample(channel, properties.box_shape),
        properties.box,
        properties.geometry.canonical_shape,
        fill,
    )
    return from_canonical(whole, properties.geometry.orientation)


def image_to_source(image: np.ndarray, properties: Properties) -> np.ndarray:
    """Returns a prepared image ``(c, W, D, H)`` in the file's geometry and intensities (CT stays clipped)."""
    rows = zip(image, properties.means, properties.stds, properties.schemes)
    channels = [transforms.denormalise(row, mean, std, scheme == "zscore") for row, mean, std, scheme in rows]
    return np.stack([channel_to_source(channel, properties) for channel in channels])


def _class_ids(label: np.ndarray, recipe: Recipe, path: Path) -> np.ndarray:
    """Returns the class ids ``(W, D, H)`` of a label file; raises DataError for an undeclared value."""
    if label.dtype.kind == "f":
        whole = np.rint(label)
        if (fractions := int((whole != label).sum())) > 0:
            raise DataError(path, f"{fractions} voxels are not whole numbers; resample labels with nearest neighbour")
        label = whole
    values, joined = np.unique(label), dict(recipe.joined)
    if undeclared := [int(value) for value in values if value not in recipe.values and int(value) not in joined]:
        new = path.name.lower().startswith("brats-")  # a name used since 2023, when 4 stopped meaning enhancing tumour
        hint = "" if new or undeclared != [4] else " (enhancing tumour is 4 in BraTS up to 2021, and 3 from 2023 on)"
        raise DataError(
            path,
            f"has voxels of value {undeclared}; declared are {sorted({*recipe.values, *joined})}{hint}: correct either",
        )
    if recipe.ignore_id is not None and values.tolist() == [recipe.values[recipe.ignore_id]]:
        raise DataError(path, "every voxel has the ignore label; label some, or remove the case")
    return transforms.to_ids(label.astype(np.int64), recipe.values, recipe.joined)


def _probabilities(label: np.ndarray, recipe: Recipe, path: Path) -> np.ndarray:
    """Returns the probabilities ``k W D H`` of class ids in a 4-D label file; raises DataError unless they are some."""
    low, high, sums = float(label.min()), float(label.max()), label.sum(0, dtype=np.float64)
    if low < -CLOSE or high > 1 + CLOSE:
        raise DataError(path, f"has values from {low:.4g} to {high:.4g}; probabilities are from 0 to 1")
    if wrong := int((abs(sums - 1) > CLOSE).sum()):
        worst = float(sums.flat[abs(sums - 1).argmax()])
        raise DataError(
            path, f"has {wrong} voxels whose probabilities do not have the sum 1, but up to {worst:.4g}; write one "
            f"channel for each of {', '.join(map(str, recipe.label_values))}, the background's included"
        )  # fmt: skip
    given = np.zeros((len(recipe.values), *label.shape[1:]), np.float32)
    for channel, value in zip(label, recipe.label_values):
        given[recipe.values.index(dict(recipe.joined).get(value, value))] += channel
    return given


def nonzero_box(image: np.ndarray, case: Case, ids: np.ndarray | None = None) -> Box:
    """Returns the smallest box around the image's nonzero voxels, and all labelled ones of ``ids``."""
    if not image.any():
        raise DataError(case.images[0], "every voxel is 0; replace it by the image")
    present = (image != 0).any(0)
    return smallest_box(present if ids is None else present | (ids != 0))


def _fixed_box(image: np.ndarray, ids: np.ndarray | None, case: Case, recipe: Recipe) -> Box:
    """Returns the box in the middle with the recipe's sides; an odd remainder cuts off more at the start.

    A direction that is shorter stays whole. Raises DataError if labelled voxels would be cut off.
    """
    if not image.any():
        raise DataError(case.images[0], "every voxel is 0; replace it by the image")
    sides = [min(side, extent) for side, extent in zip(recipe.crop_to or (), image.shape[1:])]
    starts = [(extent - side + 1) // 2 for side, extent in zip(sides, image.shape[1:])]
    box = tuple((start, start + side) for start, side in zip(starts, sides))
    if ids is not None and not recipe.cut_labels and (lost := int((ids != 0).sum() - (crop(ids, box) != 0).sum())):
        shown = " ".join(map(str, recipe.crop_to or ()))
        raise SettingsError(
            case.label or case.images[0],
            f"--crop-to {shown} would cut off {lost} labelled voxels; give larger sides, or add --force",
        )
    return box


def _normalise(
    image: np.ndarray, recipe: Recipe, case: Case
) -> tuple[np.ndarray, tuple[float, ...], tuple[float, ...]]:
    """Returns the normalised image, and the mean and standard deviation of each channel."""
    done, means, stds = np.empty(image.shape, np.float32), [], []
    for n, (scheme, intensity) in enumerate(zip(recipe.schemes, recipe.intensities)):
        channel, mean, std = image[n], 0.0, 1.0
        path = case.images[n] if len(case.images) > 1 else case.images[0]
        if scheme != "none" and channel.min() == channel.max():
            raise DataError(
                path, f"modality {recipe.modalities[n]} is {channel.flat[0]} everywhere; replace it by the image"
            )
        largest = max(abs(float(channel.min())), abs(float(channel.max())))
        if largest > float(np.finfo(np.float32).max):
            raise DataError(path, f"has values up to {largest:.3g}, too large for float32; rescale them")
        if scheme == "zscore":
            mean, std = transforms.measure(channel)
            if std == 0:
                raise DataError(
                    path,
                    f"modality {recipe.modalities[n]} is constant where it is not 0; "
                    "if it is a mask, call it noNorm in channel_names to keep it as it is",
                )
        elif scheme == BY_VOLUME:
            mean, std = transforms.measure_all(channel)
        elif intensity is not None:
            channel = np.clip(channel, intensity.low, intensity.high)
            mean, std = intensity.mean, intensity.std
        done[n] = transforms.normalise(channel, mean, std, scheme == "zscore")
        means.append(mean)
        stds.append(std)
    return done, tuple(means), tuple(stds)


def locate(name: str, ids: np.ndarray, recipe: Recipe) -> dict[int, np.ndarray]:
    """Returns up to `recipe.locations` voxels (n, 3) of each class id in the case, except background and ignored.

    Of labels with doubt, those that may be of the class.
    """
    locations, soft = {}, recipe.soft
    for n in range(1, len(recipe.values)):
        own = ids == n if soft is None else soft.possible(ids, n)
        places = np.flatnonzero(own) if n != recipe.ignore_id else np.zeros(0, int)
        if len(places) > recipe.locations:
            places = np.sort(generator(name, n).choice(places, recipe.locations, replace=False))
        if len(places):
            locations[n] = np.stack(np.unravel_index(places, ids.shape), 1).astype(np.int32)
    return locations
