"""Synthetic tumours per volume, as in the code of Hou et al.: contrast and fake lesion are those of the whole case.

A tile gets its part of the changed case. What a tile alone does not show (mean intensities, the noise's percentile)
is computed once from the whole case, so that no changed case is ever stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.data.boxes import CaseArrays, read_box
from seqpar.data.preparation.cache import PreparedDataset
from seqpar.data.sampling.extra_steps import SmoothNoise, block_of
from seqpar.data.sampling.tumour_synthesis import TumourSynthesis
from seqpar.late_import import late

ndimage = late("scipy.ndimage")
Arrays = tuple[NDArray[np.float32], NDArray[Any]]
_SLABS = 32  # pieces in which a case is read for its means


@dataclass(frozen=True)
class VolumeSynthesis:
    """Replaces the lesions of a whole case by fake ones that are as much darker than the organ as the real ones.

    A case without lesions, or whose lesions are not darker than the organ in every channel, stays unchanged.
    ``labels``: the label values of organ and lesion, how often a tile gets a fake lesion, and how large it is.
    """

    labels: TumourSynthesis
    _contrasts: dict[str, NDArray[np.float32]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if 0 in self.labels.healthy:
            raise ValueError("synthesis per volume needs a labelled organ; 0 is the background")

    @classmethod
    def of(cls, dataset: PreparedDataset, probability: float) -> "VolumeSynthesis":
        """Returns the synthesis that suits a data set's labels."""
        labels = TumourSynthesis.of(dataset, probability)
        if 0 in labels.healthy:
            raise ValueError(
                f"--synthesis-per volume: {dataset.name} does not label the organ around its lesions ("
                f"{', '.join(dataset.labels)}), which must be brighter than they are; use --synthesis-per tile"
            )
        return cls(labels)

    def read(self, case: CaseArrays, first: Sequence[int], size: Sequence[int], outside: int, seed: int) -> Arrays:
        """Returns a box of the changed case; it may reach beyond the case, where the label is ``outside``.

        - ``first``: the box's first voxel, negative if it begins before the case
        - ``seed``: of the fake lesion
        """
        whole_image, whole_label = case.image, case.label
        contrast = self._contrast(case)
        if not (contrast > 1e-4).all():
            return read_box(whole_image, first, size, 0), read_box(whole_label, first, size, outside)
        rng, block = np.random.default_rng(seed), block_of(whole_label.shape)
        share = self.labels.draw_share(rng)
        noise = SmoothNoise(rng, whole_label.shape, block)
        # beyond the box as far as edges are blurred; mirrored at the ends of the case, as for the whole
        starts = [min(max(0, at - block), side - 1) for at, side in zip(first, whole_label.shape)]
        near = tuple(
            slice(start, max(start + 1, min(side, at + length + block)))
            for start, at, length, side in zip(starts, first, size, whole_label.shape)
        )
        image, label = np.array(whole_image[(slice(None), *near)], np.float32), np.array(whole_label[near])
        real = np.isin(label, self.labels.lesion)
        fake = (noise.at(near) < noise.percentile(share)) & (real | np.isin(label, self.labels.healthy))
        image += contrast.reshape(-1, *[1] * label.ndim) * (_blurred(real, block) - _blurred(fake, block))
        label[real] = self.labels.healthy[0]
        label[fake] = self.labels.painted
        inner = [at - start for at, start in zip(first, starts)]
        return read_box(image, inner, size, 0), read_box(label, inner, size, outside)

    def _contrast(self, case: CaseArrays) -> NDArray[np.float32]:
        """Returns how much brighter the organ is than the lesion in each channel; NaN if one of them is missing."""
        if case.id not in self._contrasts:
            image, label = case.image, case.label
            sums, counts = np.zeros((2, len(image))), np.zeros(2)
            for start in range(0, len(label), step := -(-len(label) // _SLABS)):
                voxels, values = image[:, start : start + step], label[start : start + step]
                for row, members in enumerate((self.labels.healthy, self.labels.lesion)):
                    mask = np.isin(values, members)
                    sums[row] += voxels[:, mask].sum(1, dtype=np.float64)
                    counts[row] += mask.sum()
            with np.errstate(invalid="ignore"):
                organ, lesion = sums / counts[:, None]
            self._contrasts[case.id] = (1.15 * (organ - lesion)).astype(np.float32)
        return self._contrasts[case.id]


def _blurred(mask: NDArray[np.bool_], block: int) -> NDArray[np.float32]:
    blurred: NDArray[np.float32] = ndimage.uniform_filter(mask.astype(np.float32), block)
    return blurred
