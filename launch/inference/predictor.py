"""Predicts cases with the networks of a run: prepared as the run's data were, answered in the source's geometry.

Legend: c channels, k classes, W D H voxels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from nibabel.spatialimages import SpatialImage
from torch import Tensor

from seqpar.collectives import all_gather
from seqpar.consensus import by_first
from seqpar.data.formats.dataset import Case
from seqpar.data.geometry import Geometry, geometry_of, make_geometry, to_canonical
from seqpar.data.preparation.case import Loaded, Prepared, Properties, labels_to_source, prepare_loaded
from seqpar.launch.inference.logits_to_labels import Keep, decide
from seqpar.launch.inference.sliding_window import Image, sliding_window, whole_volume
from seqpar.launch.inference.small_components import drop_small, smallest
from seqpar.launch.inference.windows import Sliding
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.runs.trained_run import Run, find_weights, load_nets, read_run
from seqpar.mesh import Mesh
from seqpar.rendezvous import start

WINDOWS = ("sliding", "whole")


@dataclass(frozen=True)
class Settings:
    """How cases are predicted; ``min_component`` is a volume in mm3, or a number such as "20voxels"."""

    window: str = "sliding"
    overlap: float = 0.5
    weights: str = "gaussian"
    window_batch: int = 1
    mirror: tuple[int, ...] = ()
    min_component: str = "0"

    def __post_init__(self) -> None:
        if self.window not in WINDOWS:
            raise ValueError(f"--window {self.window}: choose {' or '.join(WINDOWS)}")
        smallest(self.min_component, 1.0)
        self.sliding((1, 1, 1))

    def sliding(self, tile: Sequence[int]) -> Sliding:
        """Returns the windows over a volume."""
        return Sliding(tuple(tile), self.overlap, self.weights, self.window_batch, self.mirror)


class Predictor:
    """The networks of a run (several: the mean of their logits) with the settings to predict by.

    On several ranks every method is called on all of them alike.
    """

    def __init__(self, run: Run, nets: Sequence[SegmentationNet], settings: Settings, mesh: Mesh) -> None:
        self.run, self.nets, self.settings, self.mesh = run, list(nets), settings, mesh

    @classmethod
    def from_run(
        cls,
        run: str | Path,
        checkpoints: Sequence[str] = ("best",),
        settings: Settings | None = None,
        mesh: Mesh | None = None,
    ) -> "Predictor":
        """Returns the predictor of a folder that train wrote; without a mesh this process is alone."""
        found, mesh = read_run(run), mesh or start(1, env={})
        files = [find_weights(found, which) for which in checkpoints]
        return cls(found, load_nets(found, files, mesh), settings or Settings(), mesh)

    def predict(
        self, images: SpatialImage | Sequence[SpatialImage] | np.ndarray, affine: np.ndarray | None = None
    ) -> Any:
        """Returns the label map of one case: a NIfTI image of images (one, or one a modality), else an array.

        An array is ``c W D H`` or ``W D H``, with an ``affine`` that says where it lies (else RAS at 1 mm).
        """
        loaded = _from_array(images, affine) if isinstance(images, np.ndarray) else _from_images(images)
        needed = len(self.run.recipe.modalities)
        if len(loaded.image) != needed:
            named = ", ".join(self.run.recipe.modalities)
            raise ValueError(f"{len(loaded.image)} channels came; the network needs {needed}: {named}")
        place = Path("the image")
        prepared = prepare_loaded(loaded, Case("image", (place,)), self.run.recipe)
        ids = self.class_ids(prepared.image, prepared.properties.box_shape)
        labels = self.to_source(ids.numpy(), prepared.properties)
        if isinstance(images, np.ndarray):
            return labels
        header = nibabel.Nifti1Image.from_image(_listed(images)[0]).header.copy()
        header.set_data_dtype(labels.dtype)
        return nibabel.Nifti1Image(labels, loaded.geometry.affine, header)

    def class_ids(self, image: Image, to_shape: Sequence[int], keep: Keep | None = None) -> Tensor:
        """Returns class ids on the grid ``to_shape`` of a prepared image ``c W D H``, the same on all ranks."""
        settings, tile = self.settings, self.nets[0].encoder.layout.tile
        if settings.window == "whole":
            slabs = whole_volume(self.nets, image, self.mesh, settings.mirror)
        else:
            slabs = sliding_window(self.nets, image, settings.sliding(tile), self.mesh)
        return decide(slabs, image.shape[1:], to_shape, self.mesh, self.run.regions_class_order, keep)

    def to_source(self, ids: np.ndarray, properties: Properties) -> np.ndarray:
        """Returns the file's label values in the file's geometry, without components that are too small."""
        least = smallest(self.settings.min_component, float(np.prod(properties.geometry.spacing)))
        kept = drop_small(ids, least, self.run.regions.values(), self.run.regions_class_order)
        return labels_to_source(kept, properties)

    def share(self, prepare: Callable[[], Prepared]) -> tuple[Image, tuple[int, ...], Prepared | None]:
        """Returns a case's image and the shape of its crop on every rank, prepared by the first one alone."""
        prepared: Prepared | None = None

        def shapes() -> Any:
            nonlocal prepared
            prepared = prepare()
            return prepared.image.shape, prepared.properties.box_shape

        shape, box_shape = by_first(shapes, self.mesh.world)
        mine = torch.empty(0, *shape[1:]) if prepared is None else torch.from_numpy(prepared.image)
        sizes = [shape[0], *[0] * (self.mesh.world.size - 1)]
        return all_gather(mine, self.mesh.world, 0, sizes, "images"), tuple(box_shape), prepared


def _listed(images: SpatialImage | Sequence[SpatialImage]) -> list[SpatialImage]:
    return [images] if isinstance(images, SpatialImage) else list(images)


def _from_images(images: SpatialImage | Sequence[SpatialImage]) -> Loaded:
    channels: list[np.ndarray] = []
    first: Geometry | None = None
    for image in _listed(images):
        nifti = nibabel.Nifti1Image.from_image(image)
        nifti.update_header()
        geometry = geometry_of(nifti.header.binaryblock, "the image")
        first = first or geometry
        if geometry.shape != first.shape or not np.allclose(geometry.affine, first.affine, atol=1e-3):
            raise ValueError("the modalities' images differ in shape or affine: resample them to one grid")
        array = np.asanyarray(image.dataobj)
        array = np.moveaxis(array, 3, 0) if geometry.ndim == 4 else array[None]
        channels += list(to_canonical(array, geometry.orientation))
    if first is None:
        raise ValueError("no image came: give one, or one a modality")
    return Loaded(np.stack(channels), None, first, ())


def _from_array(array: np.ndarray, affine: np.ndarray | None) -> Loaded:
    array = array[None] if array.ndim == 3 else array
    if array.ndim != 4:
        raise ValueError(f"an array of shape {array.shape} came: (channels, W, D, H) or (W, D, H) is needed")
    w, d, h = array.shape[1:]
    geometry = make_geometry((w, d, h), np.eye(4) if affine is None else np.asarray(affine, float))
    return Loaded(to_canonical(array, geometry.orientation), None, geometry, ())
