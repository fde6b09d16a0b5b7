"""Preparation: what prediction asks of any preparation, images in and predictions back to the file.

Legend: ``c`` channels, ``W D H`` voxels in the axes of the preparation.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from seqpar.data.formats.dataset import Case
from seqpar.data.preparation.prepared_case import (
    Loaded,
    Prepared,
    Properties,
    channel_to_source,
    labels_to_source,
    prepare_loaded,
)
from seqpar.data.preparation.recipe import Recipe


@dataclass(frozen=True)
class TargetGrid:
    """The grid that logits are resampled to: that of the case's own crop.

    - ``nearest``: the direction that takes the nearest row; None: all directions are linear
    """

    shape: tuple[int, ...]
    nearest: int | None = None


class Preparation(ABC):
    """How the cases of a run are prepared.

    - ``recipe``: names the modalities, and the file's label for each class id
    - ``axes``: the axes of its arrays; preparations of the same axes crop a case alike
    """

    recipe: Recipe
    axes: str

    @abstractmethod
    def prepare(self, loaded: Loaded, case: Case) -> Prepared:
        """Returns loaded arrays as the network takes them; errors name the files of ``case``."""

    @abstractmethod
    def target_grid(self, properties: Properties) -> TargetGrid:
        """Returns the grid of the case's crop."""

    @abstractmethod
    def labels_to_source(self, ids: np.ndarray, properties: Properties) -> np.ndarray:
        """Returns class ids of the crop as the file's label values in the file's geometry."""

    @abstractmethod
    def channel_to_source(self, channel: np.ndarray, properties: Properties, fill: float = 0) -> np.ndarray:
        """Returns a channel of the crop, such as a probability, in the file's geometry, ``fill`` outside the crop."""


@dataclass(frozen=True)
class RecipePreparation(Preparation):
    """Prepares as seqpar's training does: canonical axes, linear resampling."""

    recipe: Recipe
    axes = "canonical"

    def prepare(self, loaded: Loaded, case: Case) -> Prepared:
        """Returns the case cropped, normalised and resampled."""
        return prepare_loaded(loaded, case, self.recipe)

    def target_grid(self, properties: Properties) -> TargetGrid:
        """Returns the grid of the case's crop."""
        return TargetGrid(properties.box_shape)

    def labels_to_source(self, ids: np.ndarray, properties: Properties) -> np.ndarray:
        """Returns class ids of the crop as the file's label values in the file's geometry."""
        return labels_to_source(ids, properties)

    def channel_to_source(self, channel: np.ndarray, properties: Properties, fill: float = 0) -> np.ndarray:
        """Returns a channel of the crop in the file's geometry, ``fill`` outside the crop."""
        return channel_to_source(channel, properties, fill)
