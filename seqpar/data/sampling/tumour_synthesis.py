"""Synthetic tumours as in Hou et al.: removes the contrast of real lesions and adds it elsewhere."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.data.preparation.cache import PreparedDataset
from seqpar.data.sampling.extra_steps import block_of, lowest_voxels
from seqpar.late_import import late

ndimage = late("scipy.ndimage")
_LESION = re.compile("tumou?r|lesion|cancer|metastas|carcinoma", re.IGNORECASE)
_WHOLE = re.compile("wt|whole[ _-]?tumou?r", re.IGNORECASE)


@dataclass(frozen=True)
class TumourSynthesis:
    """Replaces real lesions by fake ones of the same contrast, channel by channel.

    ``healthy`` and ``lesion`` are label values; if 0 counts as healthy, voxels that are 0 in all channels do not. The
    real lesion becomes ``healthy[0]``, the fake one ``fake`` (default: ``lesion[0]``).
    """

    healthy: tuple[int, ...] = (1,)
    lesion: tuple[int, ...] = (2,)
    fake: int | None = None
    probability: float = 0.5
    smallest: float = 0.05  # smallest share of the volume for a fake lesion; the largest is 0.2 more

    def __post_init__(self) -> None:
        if not self.healthy or not self.lesion or set(self.healthy) & set(self.lesion):
            raise ValueError(
                f"tumour synthesis needs healthy and lesion labels that differ, got {self.healthy} and {self.lesion}"
            )
        if not 0 <= self.probability <= 1 or not 0 < self.smallest <= 0.8:
            raise ValueError(
                "tumour synthesis needs a probability in 0..1 and a smallest share in 0..0.8, "
                f"got {self.probability} and {self.smallest}"
            )

    @property
    def painted(self) -> int:
        """The label of a fake lesion."""
        return self.lesion[0] if self.fake is None else self.fake

    def __call__(
        self, image: NDArray[np.float32], label: NDArray[Any], rng: np.random.Generator
    ) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """Returns changed copies, or the same arrays if there is no lesion or no healthy tissue."""
        real, healthy = np.isin(label, self.lesion), np.isin(label, self.healthy)
        if 0 in self.healthy:
            healthy &= image.any(0)
        if not real.any() or not healthy.any():
            return image, label
        contrast = 1.15 * (image[:, healthy].mean(1) - image[:, real].mean(1))
        if np.abs(contrast).max() <= 1e-4:
            return image, label
        fake = self._region(rng, label.shape) & (real | healthy)
        block = block_of(label.shape)
        change = ndimage.uniform_filter(real.astype(np.float32), block) - ndimage.uniform_filter(
            fake.astype(np.float32), block
        )
        change *= real | healthy  # other voxels (air) keep their values
        new = label.copy()
        new[real] = self.healthy[0]
        new[fake] = self.painted
        shape = (-1, *[1] * label.ndim)
        return image + contrast.astype(np.float32).reshape(shape) * change, new

    @classmethod
    def of(cls, dataset: PreparedDataset, probability: float) -> "TumourSynthesis":
        """Returns the synthesis that suits a data set's labels: whole brain tumours, or lesions of one organ."""
        lesions = {n for name, n in dataset.labels.items() if n and _LESION.search(name)}
        others = sorted(set(dataset.labels.values()) - lesions - {0})
        for (name, members), drawn in zip(dataset.regions.items(), dataset.regions_class_order):
            if _WHOLE.fullmatch(name):  # nested labels: a fake lesion gets only the outermost
                synthesis = cls((0,), members, drawn, probability)
                break
        else:
            if dataset.regions or len(lesions) != 1 or len(others) > 1:
                raise ValueError(
                    f"--synthesis {probability:g}: the labels of {dataset.name} ({', '.join(dataset.labels)}) do not "
                    "tell lesions from healthy tissue: a region WT (whole tumour) is needed, or one label named "
                    "tumour, lesion or cancer and at most one other, the organ; remove the flag"
                )
            synthesis = cls(tuple(others) or (0,), tuple(lesions), None, probability)
        if synthesis.healthy == (0,) and set(dataset.recipe.schemes) != {"zscore"}:
            raise ValueError(
                f"--synthesis {probability:g}: {dataset.name} labels no organ, and without z-scores of what is not 0 ("
                f"{', '.join(dataset.recipe.schemes)}) zero does not tell tissue from air; remove the flag"
            )
        return synthesis

    def _region(self, rng: np.random.Generator, size: tuple[int, ...]) -> NDArray[np.bool_]:
        """Returns the mask of a fake lesion: the lowest voxels of smooth noise, a random share of all."""
        share = self.draw_share(rng)
        return lowest_voxels(rng, size, block_of(size), share)

    def draw_share(self, rng: np.random.Generator) -> float:
        """Returns a random share of the volume for a fake lesion, mostly the smallest."""
        return float(np.clip(rng.normal(0.01, 0.01) + rng.normal(0, 0.05), self.smallest, self.smallest + 0.2))
