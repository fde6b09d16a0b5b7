"""Prepares cases bit for bit as nnU-Net does, by the plan that its networks were trained with.

Axes are nnU-Net's: the file's, reversed, then transposed as planned. Legend: ``c`` channels, ``x y z`` these axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seqpar.data.boxes import crop, smallest_box, uncrop
from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.nnunet_plans import NnunetDeclaration, NnunetPlan, Resampling
from seqpar.data.geometry import Geometry, from_canonical, parse_header
from seqpar.data.preparation.preparation import Preparation, TargetGrid
from seqpar.data.preparation.prepared_case import Loaded, Prepared, Properties
from seqpar.data.preparation.recipe import Recipe
from seqpar.data.preparation.transforms import nearest_rows, to_values
from seqpar.late_import import late

ndimage = late("scipy.ndimage")
ANISOTROPIC = 3  # an axis whose spacing is this many times the smallest is resampled separately
_LEAST = 1e-8  # smallest divisor


@dataclass(frozen=True)
class NnunetPreparation(Preparation):
    """Follows a plan of nnU-Net's: crops, normalises in float32, then resamples.

    The ``Properties`` that it returns are in its axes, the box too.
    """

    plan: NnunetPlan
    recipe: Recipe

    @classmethod
    def of(cls, plan: NnunetPlan, declaration: NnunetDeclaration) -> "NnunetPreparation":
        """Returns the preparation of a plan; class ids equal the files' labels."""
        channels = declaration.channels
        values = tuple(declaration.labels.values())
        return cls(plan, Recipe(channels, plan.schemes, (None,) * len(channels), plan.spacing, values, False, 1))  # type: ignore[arg-type]

    def prepare(self, loaded: Loaded, case: Case) -> Prepared:
        """Returns the case cropped, normalised and resampled."""
        plan, geometry = self.plan, loaded.geometry
        image = np.array(self._from_canonical(loaded.image, geometry), np.float32, order="C")
        present = (image != 0).any(0)
        if not present.any():
            raise DataError(case.images[0], "every voxel is 0; replace it by the image")
        box = smallest_box(present)
        image, mask = crop(image, box).copy(), crop(ndimage.binary_fill_holes(present), box)
        for number, (scheme, masked) in enumerate(zip(plan.schemes, plan.masked)):
            image[number] = normalised(image[number], scheme, mask if masked else None, plan.intensities[number])
        spacing, sides = self._spacing(geometry), image.shape[1:]
        shape = tuple(max(1, round(old / new * n)) for old, new, n in zip(spacing, plan.spacing, sides))
        if plan.resampling.function == "no_resampling_hack":
            shape = sides
        image = resampled(image, shape, spacing, plan.spacing, plan.resampling)
        zeros, ones = (0.0,) * len(image), (1.0,) * len(image)
        properties = Properties(
            geometry, box, shape, plan.spacing, plan.schemes, zeros, ones, self.recipe.values, ()  # type: ignore[arg-type]
        )  # fmt: skip
        return Prepared(np.ascontiguousarray(image), None, {}, properties, loaded.digests)

    def target_grid(self, properties: Properties) -> TargetGrid:
        """Returns the grid of the case's crop; an axis of much larger spacing takes the nearest row."""
        spacing = self._spacing(properties.geometry)
        return TargetGrid(properties.box_shape, separate_axis(self.plan.spacing, spacing, self.plan.logit_resampling))

    def labels_to_source(self, ids: np.ndarray, properties: Properties) -> np.ndarray:
        """Returns class ids of the crop as the file's label values in the file's geometry."""
        return to_values(self.channel_to_source(ids, properties), properties.values)

    def channel_to_source(self, channel: np.ndarray, properties: Properties, fill: float = 0) -> np.ndarray:
        """Returns a channel of the crop in the file's geometry, ``fill`` beyond the crop."""
        geometry = properties.geometry
        sides = (geometry.canonical_shape if self._turns else geometry.shape)[::-1]
        whole = uncrop(channel, properties.box, [sides[axis] for axis in self.plan.transpose_forward], fill)
        in_file = whole.transpose(np.argsort(self.plan.transpose_forward)).transpose(2, 1, 0)
        return from_canonical(in_file, geometry.orientation) if self._turns else in_file

    @property
    def axes(self) -> str:  # type: ignore[override]
        """The axes of its arrays, by reader and transposition."""
        return f"nnU-Net's ({self.plan.reader}, transposed {' '.join(map(str, self.plan.transpose_forward))})"

    @property
    def _turns(self) -> bool:
        """Whether volumes are turned to canonical axes before the axes are reversed."""
        return self.plan.reader.endswith("WithReorient")

    def _from_canonical(self, image: np.ndarray, geometry: Geometry) -> np.ndarray:
        """Returns ``c x y z`` of an image in canonical axes."""
        image = image if self._turns else from_canonical(image, geometry.orientation)
        return image.transpose(0, *(3 - axis for axis in self.plan.transpose_forward))

    def _spacing(self, geometry: Geometry) -> tuple[float, ...]:
        """Returns the spacing along these axes, as in the file's header."""
        sizes: Sequence[float] = geometry.spacing
        if geometry.header:
            sizes = parse_header(geometry.header, "header")["pixdim"][1:4].astype(float).tolist()
        if self._turns:
            sizes = from_file(sizes, geometry)
        return tuple(sizes[2 - axis] for axis in self.plan.transpose_forward)


def from_file(sizes: Sequence[float], geometry: Geometry) -> list[float]:
    """Returns numbers that belong to the axes of a file in the order of canonical axes."""
    order = [("RL", "AP", "SI")[axis] for axis in range(3)]
    return [sizes[next(at for at, code in enumerate(geometry.orientation) if code in pair)] for pair in order]


def normalised(x: np.ndarray, scheme: str, mask: np.ndarray | None, intensity: dict[str, float]) -> np.ndarray:
    """Returns a channel normalised by the plan's scheme, in float32 throughout; ``mask``: the voxels that count."""
    if scheme == "CTNormalization":
        x = np.clip(x, intensity["percentile_00_5"], intensity["percentile_99_5"])
        x -= intensity["mean"]
        x /= max(intensity["std"], _LEAST)
    elif scheme == "ZScoreNormalization" and mask is not None:
        inside = x[mask]
        x = x.copy()
        x[mask] = (inside - inside.mean()) / max(inside.std(), _LEAST)  # voxels outside stay 0
    elif scheme == "ZScoreNormalization":
        x = (x - x.mean()) / max(x.std(), _LEAST)
    elif scheme == "RescaleTo01Normalization":
        x = x - x.min()
        x = x / np.clip(x.max(), _LEAST, None)
    elif scheme == "RGBTo01Normalization":
        x = x / 255.0
    return x


def separate_axis(spacing: Sequence[float], target: Sequence[float], resampling: Resampling) -> int | None:
    """Returns the axis that is resampled separately: that of the largest spacing, if it is much larger; else None."""
    if resampling.force_separate_z is not None:
        return None
    for sizes in (spacing, target):
        if max(sizes) / min(sizes) > ANISOTROPIC:
            longest = [axis for axis, size in enumerate(sizes) if max(sizes) / size == 1]
            return longest[0] if len(longest) == 1 else None
    return None


def resampled(
    image: np.ndarray, shape: Sequence[int], spacing: Sequence[float], target: Sequence[float], resampling: Resampling
) -> np.ndarray:
    """Returns ``c x y z`` on a grid of ``shape``, by splines in float64; a separate axis takes the nearest slice."""
    shape = tuple(shape)
    if image.shape[1:] == shape:
        return image
    axis = separate_axis(spacing, target, resampling)
    out = np.empty((len(image), *shape), image.dtype)
    for number, x in enumerate(image.astype(np.float64)):
        if axis is None:
            out[number] = _zoomed(x, shape, resampling.order)
            continue
        plane = tuple(n for d, n in enumerate(shape) if d != axis)
        slices = [_zoomed(np.take(x, at, axis), plane, resampling.order) for at in range(x.shape[axis])]
        out[number] = np.stack([slices[at] for at in nearest_rows(len(slices), shape[axis])], axis)
    return out


def _zoomed(x: np.ndarray, shape: Sequence[int], order: int) -> np.ndarray:
    """Returns an array resampled over the same extent and clipped to its own range; edges are repeated outside."""
    factors = [1 / (old / new) for old, new in zip(x.shape, shape)]  # rounded as in nnU-Net
    out = ndimage.zoom(x, factors, order=order, mode="nearest", grid_mode=True)
    return np.clip(out, x.min(), x.max())
