"""Prepares cases bit for bit as nnU-Net does, by the plan that its networks were trained with.

All is computed in nnU-Net's axes: the file's, reversed, then transposed as planned. Legend: ``c`` channels, ``x y z``
these axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from seqpar.data.boxes import Box, crop, smallest_box, uncrop
from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.nnunet_plans import BY_TORCH, ImagePlan, NnunetDeclaration, Resampling
from seqpar.data.geometry import Geometry, from_canonical, parse_header, to_canonical
from seqpar.data.preparation.prepared_case import (
    Loaded,
    Preparation,
    Prepared,
    Properties,
    Step,
    TargetGrid,
    count_ids,
    ignore_step,
    locate,
    refuse_growth,
    resample_ids,
)
from seqpar.data.preparation.recipe import Recipe
from seqpar.data.preparation.transforms import nearest_rows, to_values
from seqpar.late_import import late

ndimage = late("scipy.ndimage")
ANISOTROPIC = 3  # an axis whose spacing is this many times the smallest is resampled separately
_LEAST = 1e-8  # smallest divisor


@dataclass(frozen=True)
class NnunetPreparation(Preparation):
    """Follows an nnU-Net plan: crops, normalises in float32, then resamples.

    Arrays and ``Properties``, the box too, are in nnU-Net's axes, or else ``in_file_axes``: W D H of the file, which
    are canonical where the plan's reader turns images.
    """

    plan: ImagePlan
    recipe: Recipe
    in_file_axes: bool = False

    @classmethod
    def of(cls, plan: ImagePlan, declaration: NnunetDeclaration) -> "NnunetPreparation":
        """Returns the preparation of a plan; class ids equal the files' labels."""
        channels = declaration.channels
        values = tuple(declaration.labels.values())
        return cls(plan, Recipe(channels, plan.schemes, (None,) * len(channels), plan.spacing, values, False, 1))  # type: ignore[arg-type]

    def prepare(self, loaded: Loaded, case: Case, step: Step = ignore_step) -> Prepared:
        """Returns the case cropped, normalised and resampled."""
        plan, geometry = self.plan, loaded.geometry
        image = np.array(self._from_canonical(loaded.image, geometry), np.float32, order="C")
        present = (image != 0).any(0)
        if not present.any():
            raise DataError(case.images[0], "every voxel is 0; replace it by the image")
        box = smallest_box(present)
        image, mask = crop(image, box).copy(), crop(ndimage.binary_fill_holes(present), box)
        ids = None if loaded.ids is None else crop(self._from_canonical(loaded.ids[None], geometry)[0], box).copy()
        step()
        counted = mask if ids is None else mask | (ids != 0)  # what is labelled is never outside
        for number, (scheme, masked) in enumerate(zip(plan.schemes, plan.masked)):
            image[number] = normalised(image[number], scheme, counted if masked else None, plan.intensities[number])
        step()
        spacing, sides = self._spacing(geometry), image.shape[1:]
        shape = tuple(max(1, round(old / new * n)) for old, new, n in zip(spacing, plan.spacing, sides))
        if not plan.resamples:
            shape = sides
        refuse_growth(case, sides, shape, f"the plan's spacing {plan.spacing}", len(image))
        image = resampled(image, shape, spacing, plan.spacing, plan.resampling)
        label = None
        if ids is not None:
            order = np.argsort(self.recipe.values).tolist()
            how = shape, spacing, plan.spacing, plan.label_resampling
            label = resample_ids(
                ids, self.recipe, lambda x: resampled_label(x, *how, order, ~counted),
                lambda x: resampled(x[None], *how)[0],
            )  # fmt: skip
        step()
        return self._turned(image, label, ids, box, loaded, case)

    def _turned(
        self,
        image: np.ndarray,
        label: np.ndarray | None,
        truth: np.ndarray | None,
        box: Box,
        loaded: Loaded,
        case: Case,
    ) -> Prepared:
        """Returns a case that is prepared in nnU-Net's axes in those of its arrays; ``truth``: on its own crop."""
        plan, order = self.plan, self._order
        spacing = plan.spacing if plan.resamples else self._spacing(loaded.geometry)
        image = np.ascontiguousarray(image.transpose(0, *(1 + axis for axis in order)))
        volumes = [None if one is None else np.ascontiguousarray(one.transpose(order)) for one in (label, truth)]
        label, truth = volumes
        counts = () if label is None else count_ids(label, self.recipe)
        properties = Properties(
            loaded.geometry,
            tuple(box[axis] for axis in order),
            image.shape[1:],
            tuple(spacing[axis] for axis in order),  # type: ignore[arg-type]
            plan.schemes,
            (0.0,) * len(image),
            (1.0,) * len(image),
            self.recipe.values,
            counts,
        )
        locations = {} if label is None else locate(case.id, label, self.recipe)
        own_grid = properties.box_shape != properties.shape
        of_files = loaded.digests, loaded.voxels
        return Prepared(image, label, locations, properties, *of_files, truth if own_grid else None)

    def target_grid(self, properties: Properties) -> TargetGrid:
        """Returns the grid of the case's crop; an axis of much larger spacing takes the nearest row."""
        spacing = self._spacing(properties.geometry)
        axis = separate_axis(self.plan.spacing, spacing, self.plan.logit_resampling)
        return TargetGrid(properties.box_shape, None if axis is None else self._order.index(axis))

    def scored_grid(self, properties: Properties) -> TargetGrid:
        """Returns the grid of the case's crop, as nnU-Net scores what it writes."""
        return self.target_grid(properties)

    def labels_to_source(self, ids: np.ndarray, properties: Properties) -> np.ndarray:
        """Returns class ids of the crop as the file's label values in the file's geometry."""
        return to_values(self.channel_to_source(ids, properties), properties.values)

    def channel_to_source(self, channel: np.ndarray, properties: Properties, fill: float = 0) -> np.ndarray:
        """Returns a channel of the crop in the file's geometry, ``fill`` beyond the crop."""
        geometry = properties.geometry
        sides = geometry.canonical_shape if self.plan.turns else geometry.shape
        whole = uncrop(channel, properties.box, [sides[axis] for axis in self._file_axes], fill)
        in_file = whole.transpose(np.argsort(self._file_axes))
        return from_canonical(in_file, geometry.orientation) if self.plan.turns else in_file

    def canonical(self, volume: np.ndarray, properties: Properties) -> np.ndarray:
        """Returns a prepared volume in canonical axes."""
        lead = volume.ndim - 3
        in_file = volume.transpose(*range(lead), *(lead + axis for axis in np.argsort(self._file_axes)))
        return in_file if self.plan.turns else to_canonical(in_file, properties.geometry.orientation)

    def canonical_properties(self, properties: Properties) -> Properties:
        """Returns the properties of a prepared case in canonical axes, with the plan's statistics of a CT."""
        geometry, back = properties.geometry, np.argsort(self._file_axes).tolist()
        parts: list[Sequence[Any]] = [properties.box, properties.shape, properties.spacing]
        box, shape, spacing = ([part[axis] for axis in back] for part in parts)
        if not self.plan.turns:
            grows = [geometry.orientation[axis] in "RAS" for axis in range(3)]
            box = [(a, b) if up else (n - b, n - a) for (a, b), up, n in zip(box, grows, geometry.shape)]
            box, shape, spacing = (from_file(part, geometry) for part in (box, shape, spacing))
        turned: dict[str, Any] = {"box": tuple(box), "shape": tuple(shape), "spacing": tuple(spacing)}
        units = [
            ("ct", own["mean"], max(own["std"], _LEAST)) if scheme == "CTNormalization" else (scheme, 0.0, 1.0)
            for scheme, own in zip(self.plan.schemes, self.plan.intensities)
        ]
        schemes, means, stds = zip(*units)
        return replace(properties, **turned, schemes=schemes, means=means, stds=stds)

    @property
    def axes(self) -> str:  # type: ignore[override]
        """The axes of its arrays, by reader and transposition."""
        if self.in_file_axes:
            return f"the file's ({self.plan.reader})"
        return f"nnU-Net's ({self.plan.reader}, transposed {' '.join(map(str, self.plan.transpose_forward))})"

    @property
    def _order(self) -> tuple[int, ...]:
        """The axis of nnU-Net's for each axis of the arrays."""
        return self.plan.file_axes if self.in_file_axes else (0, 1, 2)

    @property
    def _file_axes(self) -> tuple[int, ...]:
        """The axis of a file for each axis of the arrays."""
        return tuple(2 - self.plan.transpose_forward[axis] for axis in self._order)

    def _from_canonical(self, image: np.ndarray, geometry: Geometry) -> np.ndarray:
        """Returns ``c x y z`` of an image in canonical axes."""
        image = image if self.plan.turns else from_canonical(image, geometry.orientation)
        return image.transpose(0, *(3 - axis for axis in self.plan.transpose_forward))

    def _spacing(self, geometry: Geometry) -> tuple[float, ...]:
        """Returns the spacing along nnU-Net's axes, as in the file's header."""
        sizes: Sequence[float] = geometry.spacing
        if geometry.header:
            sizes = parse_header(geometry.header, "header")["pixdim"][1:4].astype(float).tolist()
        if self.plan.turns:
            sizes = from_file(sizes, geometry)
        return tuple(sizes[2 - axis] for axis in self.plan.transpose_forward)


def from_file(sizes: Sequence[Any], geometry: Geometry) -> list[Any]:
    """Returns what belongs to the axes of a file in the order of canonical axes."""
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
    """Returns ``c x y z`` on a grid of ``shape``; a separate axis takes the nearest slice.

    By splines in float64, or linearly by torch in float32.
    """
    shape = tuple(shape)
    if image.shape[1:] == shape:
        return image
    axis = separate_axis(spacing, target, resampling)
    if resampling.function == BY_TORCH:
        return _by_torch(torch.from_numpy(image), shape, axis, _interpolated).numpy()
    out = np.empty((len(image), *shape), image.dtype)
    for number, x in enumerate(image.astype(np.float64)):
        out[number] = _by_slices(x, shape, axis, lambda x, shape: _zoomed(x, shape, resampling.order))
    return out


def resampled_label(
    ids: np.ndarray, shape: Sequence[int], spacing: Sequence[float], target: Sequence[float], resampling: Resampling,
    order: Sequence[int], outside: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Returns class ids ``x y z`` on a grid of ``shape``: a class wins where its resampled mask is at least one half.

    By torch, the class with the largest mask wins.

    - ``order``: of the ids, by their labels; later ones win ties, by torch earlier ones
    - ``outside``: voxels outside the mask of what is not 0, which are background of their own to torch
    """

    def zoomed(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        out = np.zeros(tuple(shape), ids.dtype)
        for value in order:
            if (mask := x == value).any():
                out[_zoomed(mask.astype(np.float64), shape, resampling.order) >= 0.5] = value
        return out

    if ids.shape == tuple(shape):
        return ids
    if resampling.function == BY_TORCH:
        ranks = np.argsort(order)[ids].astype(np.int16)
        if outside is not None:
            ranks[outside] = -1
        axis = separate_axis(spacing, target, resampling)
        chosen = _by_torch(torch.from_numpy(ranks)[None], tuple(shape), axis, _likeliest)[0].clamp_(min=0).numpy()
        return np.asarray(order)[chosen].astype(ids.dtype)
    return _by_slices(ids, tuple(shape), separate_axis(spacing, target, resampling), zoomed)


def _by_torch(
    x: Tensor, shape: tuple[int, ...], axis: int | None, zoom: Callable[[Tensor, Sequence[int], str], Tensor]
) -> Tensor:
    """Returns ``c x y z`` zoomed linearly; across ``axis`` slice by slice, taking the nearest slices."""
    if axis is None:
        return zoom(x, shape, "trilinear")
    plane = [n for d, n in enumerate(shape) if d != axis]
    slices = x.movedim(1 + axis, 1)
    slices = zoom(slices.flatten(0, 1), plane, "bilinear").unflatten(0, slices.shape[:2])
    return zoom(slices.movedim(1, 1 + axis), shape, "nearest-exact")


def _interpolated(x: Tensor, shape: Sequence[int], mode: str) -> Tensor:
    return x if x.shape[1:] == tuple(shape) else F.interpolate(x[None].float(), tuple(shape), mode=mode)[0]


def _likeliest(x: Tensor, shape: Sequence[int], mode: str) -> Tensor:
    """Returns for each voxel the value with the largest interpolated mask, compared in float16 as nnU-Net does."""
    if x.shape[1:] == tuple(shape):
        return x
    values, most = torch.unique(x), 1000
    masks = torch.stack([(_interpolated((x == value) * most, shape, mode)).half() for value in values])
    out = values[masks.argmax(0)]
    for value, mask in zip(values, masks):
        out[mask > 0.7 * most] = value
    return out


def _by_slices(
    x: np.ndarray, shape: tuple[int, ...], axis: int | None, zoom: Callable[[np.ndarray, Sequence[int]], np.ndarray]
) -> np.ndarray:
    """Returns an array whose slices across ``axis`` are zoomed, and then the nearest taken; None: all of it zoomed."""
    if axis is None:
        return zoom(x, shape)
    plane = tuple(n for d, n in enumerate(shape) if d != axis)
    slices = [zoom(np.take(x, at, axis), plane) for at in range(x.shape[axis])]
    return np.stack([slices[at] for at in nearest_rows(len(slices), shape[axis])], axis)


def _zoomed(x: np.ndarray, shape: Sequence[int], order: int) -> np.ndarray:
    """Returns an array resampled over the same extent and clipped to its own range; edges are repeated outside."""
    factors = [1 / (old / new) for old, new in zip(x.shape, shape)]  # rounded as in nnU-Net
    out = ndimage.zoom(x, factors, order=order, mode="nearest", grid_mode=True)
    return np.clip(out, x.min(), x.max())
