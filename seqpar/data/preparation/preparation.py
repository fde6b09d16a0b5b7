"""Prepares cases by a recipe: seqpar's own way, or as nnU-Net's plan in it says."""

import itertools
from dataclasses import dataclass

import numpy as np

from seqpar.data.formats.dataset import Case
from seqpar.data.preparation.as_nnunet import NnunetPreparation
from seqpar.data.preparation.prepared_case import (
    STAGES,
    Loaded,
    Preparation,
    Prepared,
    Properties,
    Step,
    TargetGrid,
    channel_to_source,
    ignore_step,
    labels_to_source,
    load_case,
    prepare_loaded,
)
from seqpar.data.preparation.recipe import Recipe
from seqpar.data.workers import ReportProgress, no_item_progress


@dataclass(frozen=True)
class RecipePreparation(Preparation):
    """Prepares as seqpar's training does: canonical axes, linear resampling."""

    recipe: Recipe
    axes = "canonical"

    def prepare(self, loaded: Loaded, case: Case, step: Step = ignore_step) -> Prepared:
        """Returns the case cropped, normalised and resampled."""
        return prepare_loaded(loaded, case, self.recipe, step)

    def target_grid(self, properties: Properties) -> TargetGrid:
        """Returns the grid of the case's crop."""
        return TargetGrid(properties.box_shape)

    def scored_grid(self, properties: Properties) -> TargetGrid:
        """Returns the grid of the prepared case."""
        return TargetGrid(properties.shape)

    def labels_to_source(self, ids: np.ndarray, properties: Properties) -> np.ndarray:
        """Returns class ids of the crop, or as prepared, as the file's label values in the file's geometry."""
        return labels_to_source(ids, properties)

    def channel_to_source(self, channel: np.ndarray, properties: Properties, fill: float = 0) -> np.ndarray:
        """Returns a channel of the crop in the file's geometry, ``fill`` outside the crop."""
        return channel_to_source(channel, properties, fill)

    def canonical(self, volume: np.ndarray, properties: Properties) -> np.ndarray:
        """Returns the volume, whose axes are canonical."""
        return volume

    def canonical_properties(self, properties: Properties) -> Properties:
        """Returns the properties, whose axes are canonical."""
        return properties


def preparation_of(recipe: Recipe) -> Preparation:
    """Returns the preparation of a recipe: by nnU-Net's plan if it has one, in the axes W D H of a file."""
    if recipe.plan is None:
        return RecipePreparation(recipe)
    return NnunetPreparation(recipe.plan, recipe, in_file_axes=True)


def prepare_case(case: Case, recipe: Recipe, tell: ReportProgress = no_item_progress) -> Prepared:
    """Reads a case and returns it cropped, normalised and resampled.

    tell: takes the share of the work that is done; each file and each stage counts the same.
    """
    numbers, total = itertools.count(1), len(case.files) + STAGES

    def step() -> None:
        tell(next(numbers) / total)

    return preparation_of(recipe).prepare(load_case(case, recipe, step), case, step)
