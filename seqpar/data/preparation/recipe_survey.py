"""Decides the recipe of a data set, from its headers alone or by a survey of its files, which the cache keeps.

The survey is nnU-Net's fingerprint: its voxels, drawn by its generator, give its statistics.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from seqpar.data.boxes import crop
from seqpar.data.errors import DataError
from seqpar.data.files import read_json, write_json
from seqpar.data.formats.dataset import Case, Dataset
from seqpar.data.geometry import from_canonical
from seqpar.data.preparation.cache import VERSION
from seqpar.data.preparation.cache_index import describe_dataset, json_round_trip, sources_of
from seqpar.data.preparation.cache_writer import as_cache_error
from seqpar.data.preparation.fingerprint import median_spacing
from seqpar.data.preparation.prepared_case import Loaded, load_case, nonzero_box
from seqpar.data.preparation.recipe import (
    BY_VOLUME,
    SURVEYED,
    Intensity,
    PrepareSettings,
    Recipe,
    draft_recipe,
    needs_survey,
)
from seqpar.data.volumes import read_geometry
from seqpar.data.workers import Progress, ReportProgress, WorkerDied, map_in_processes, no_item_progress

SAMPLED_VOXELS = 100_000_000  # in the statistics of CT; each case has as many of them
SEED = 1234  # of the voxels that nnU-Net draws
DRAWN_AT_ONCE = 1 << 22
MASKED_SHARE = 0.75  # of an image that its nonzero part takes, from which on z-scores are over the whole


class Sample(NamedTuple):
    """Intensities drawn from a channel: the values, and how often each was drawn."""

    values: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, eq=False)
class Finding:
    """The survey of one case.

    - ``spacing``: R, A, S
    - ``share``: of the image, that the smallest box around what is not 0 takes
    - ``samples``: of each modality inside the labels; None if it is not CT
    """

    spacing: tuple[float, float, float]
    share: float
    samples: tuple[Sample | None, ...]


@dataclass(frozen=True)
class _Survey:
    recipe: Recipe
    num_samples: int  # per case

    def __call__(self, case: Case, tell: ReportProgress = no_item_progress) -> Finding:
        if SURVEYED.isdisjoint(self.recipe.schemes):
            spacing = read_geometry(case.images[0])[0].canonical_spacing
            return Finding(spacing, 1.0, (None,) * len(self.recipe.schemes))
        return survey(load_case(case, self.recipe), case, self.recipe, self.num_samples)


def survey(loaded: Loaded, case: Case, recipe: Recipe, num_samples: int) -> Finding:
    """Returns the survey of a case, whose CT intensities are those that nnU-Net draws from it."""
    image, ids, geometry, *_ = loaded
    box, orientation = nonzero_box(image, case), geometry.orientation
    share = math.prod(stop - start for start, stop in box) / math.prod(image.shape[1:])
    samples: list[Sample | None] = [None] * len(recipe.schemes)
    if ids is not None and "ct" in recipe.schemes:
        rng = np.random.RandomState(SEED)
        inside = from_canonical(crop(ids, box) > 0, orientation).T  # nnU-Net's axes, the order in which it draws
        for n in range(len(recipe.schemes) - recipe.schemes[::-1].index("ct")):
            counts = _draw(rng, int(np.count_nonzero(inside)), num_samples)
            if recipe.schemes[n] == "ct":
                values = from_canonical(crop(image[n], box), orientation).T[inside].astype(np.float32)
                samples[n] = merge_samples([Sample(values, counts)])
    return Finding(geometry.canonical_spacing, share, tuple(samples))


def _draw(rng: np.random.RandomState, population: int, num_samples: int) -> np.ndarray:
    """Returns how often each of ``population`` voxels is drawn by ``rng.choice`` with replacement."""
    counts = np.zeros(population, np.int64)
    for start in range(0, num_samples if population else 0, DRAWN_AT_ONCE):
        drawn = rng.randint(0, population, min(DRAWN_AT_ONCE, num_samples - start), dtype=np.uint32)
        counts += np.bincount(drawn, minlength=population)
    return counts


def merge_samples(samples: Sequence[Sample]) -> Sample:
    """Returns samples as one, whose values are sorted, each of them drawn at least once."""
    values, counts = (np.concatenate(parts) for parts in zip(*samples))
    unique, where = np.unique(values[counts > 0], return_inverse=True)
    return Sample(unique, np.bincount(where, counts[counts > 0], len(unique)).astype(np.int64))


def finish_recipe(recipe: Recipe, dataset: Dataset, settings: PrepareSettings, findings: Sequence[Finding]) -> Recipe:
    """Returns the recipe completed by a survey: median spacing, CT intensities, and what z-scores are over.

    As in nnU-Net's plans they are over the voxels that are not 0 if the median case loses more than a quarter by the
    crop to these, and else over all.
    """
    intensities: list[Intensity | None] = []
    for n, scheme in enumerate(recipe.schemes):
        drawn = [sample for finding in findings if (sample := finding.samples[n]) is not None]
        intensities.append(_intensity(drawn, dataset, n) if scheme == "ct" else recipe.intensities[n])
    spacing = recipe.spacing
    if settings.spacing == "median":
        spacing = median_spacing([finding.spacing for finding in findings])
    if np.median([finding.share for finding in findings]) >= MASKED_SHARE:
        schemes = tuple(BY_VOLUME if scheme == "zscore" else scheme for scheme in recipe.schemes)
        recipe = replace(recipe, schemes=schemes)
    return replace(recipe, intensities=tuple(intensities), spacing=spacing)


def _intensity(drawn: Sequence[Sample], dataset: Dataset, n: int) -> Intensity:
    values, counts = merge_samples(drawn) if drawn else Sample(np.zeros(0), np.zeros(0))
    if len(values) < 2:
        raise DataError(
            dataset.root,
            f"modality {dataset.modalities[n]} is normalised by its values inside the labels, "
            f"and {'all are equal' if len(values) else 'no case has a labelled voxel'}; "
            "label some cases, or rename the modality",
        )
    values, total, reached = values.astype(np.float64), int(counts.sum()), np.cumsum(counts)
    mean = float((values * counts).sum() / total)
    std = math.sqrt(float(((values - mean) ** 2 * counts).sum() / total))

    def percentile(percent: float) -> float:
        place = percent / 100 * (total - 1)
        low, high = values[np.searchsorted(reached, [math.floor(place), math.ceil(place)], side="right")]
        return float(low + (high - low) * (place - math.floor(place)))

    return Intensity(percentile(0.5), percentile(99.5), mean, std)


def decide_recipe(
    dataset: Dataset, out: Path, settings: PrepareSettings, workers: int, progress: Progress, keep: bool = True
) -> tuple[Recipe, bool]:
    """Returns the recipe, and whether files were surveyed, which happens if it depends on them and they have changed.

    A surveyed case counts as half done in ``progress``, since preparing it reads it once more.

    keep: whether to write the survey's result into the cache folder ``out``.
    """
    draft = draft_recipe(dataset, settings)
    if not needs_survey(dataset, settings):
        return draft, False
    key = {
        "version": VERSION,
        "settings": json_round_trip(settings.described()),
        "dataset": describe_dataset(dataset),
        "sources": {},
    }
    try:
        key["sources"] = {case.id: sources_of(case) for case in dataset.cases}
        stored = read_json(out / "recipe.json")
        if stored["key"] == key:
            return Recipe.from_json(stored["recipe"]), False
    except (DataError, KeyError, TypeError):
        pass  # none yet, or an unreadable file, whose case is reported below
    findings, faults = dict[str, Finding](), list[DataError]()
    ended_ids, total = list[str](), len(dataset.cases)

    def beat(shares: dict[int, float]) -> None:
        progress((len(ended_ids) + sum(shares.values())) / 2, total)

    work = _Survey(draft, SAMPLED_VOXELS // total)
    with closing(map_in_processes(work, dataset.cases, workers, beat)) as outcomes:
        for case, outcome in outcomes:
            ended_ids.append(case.id)
            if isinstance(outcome, WorkerDied):
                raise case_lost_error(case, outcome)
            if isinstance(outcome, Finding):
                findings[case.id] = outcome
            else:  # preparation will tell of it, if there is one
                faults.append(outcome)
    if not findings:
        raise min(faults, key=lambda fault: fault.path)
    in_order = [findings[name] for name in sorted(findings)]  # not in the order in which they finished
    recipe = finish_recipe(draft, dataset, settings, in_order)
    if keep:
        with as_cache_error(out):
            write_json(out / "recipe.json", {"key": key, "recipe": recipe.to_json()})
    return recipe, True


def case_lost_error(case: Case, why: WorkerDied) -> DataError:
    """Returns the error for a case whose process ended without a result."""
    return DataError(case.images[0], f"could not be prepared: {why}; free memory, or use fewer --workers")
