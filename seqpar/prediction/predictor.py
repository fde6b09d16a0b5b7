"""Predictor: one case through the networks of a run, back in the source's geometry, postprocessed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from nibabel.spatialimages import SpatialImage
from torch import Tensor

from seqpar.data.formats.dataset import Case
from seqpar.data.geometry import Geometry, geometry_of, make_geometry, to_canonical
from seqpar.data.preparation.prepared_case import Loaded, Prepared, Properties, TargetGrid
from seqpar.data.workers import ReportProgress, no_item_progress
from seqpar.models.network import Network
from seqpar.parallel.collectives import all_gather
from seqpar.parallel.consensus import run_on_rank0
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.rendezvous import start
from seqpar.prediction.logits_to_labels import RowsOf, WriteRows, slabs_to_labels
from seqpar.prediction.sliding_window import Image, sliding_window, whole_volume
from seqpar.prediction.window_grid import WINDOWS, Sliding
from seqpar.runs.nnunet_run import open_run
from seqpar.runs.trained_run import TrainedRun
from seqpar.scores.postprocessing import Steps, drop_small_components, keep_largest, parse_min_component
from seqpar.settings.optimizer_settings import PRECISIONS


@dataclass(frozen=True)
class PredictionSettings:
    """How cases are predicted.

    ``window`` is "sliding" or "whole" (one pass over the volume). ``overlap`` (a share of the window), ``weights`` and
    ``window_batch`` (windows at once) are for sliding windows; so is ``sums``: "half" adds them up in half precision,
    which gives nnU-Net's own labels. ``mirror`` names the directions (0 W, 1 D, 2 H) over
    whose flips logits are averaged. ``min_component`` is a volume in mm3 such as "50", or a count such as "20voxels":
    smaller connected components are removed. ``postprocessing``: label values whose largest component is kept,
    step by step. ``precision`` is of what the networks compute: with "bf16" they run under
    autocast, else in their weights' precision. ``force``: predict whole volumes by networks for which that is another
    function than they were trained for. ``temperature``: what logits are divided by before they become probabilities;
    labels do not depend on it.
    """

    window: str = "sliding"
    overlap: float = 0.5
    weights: str = "gaussian"
    window_batch: int = 1
    mirror: tuple[int, ...] = ()
    min_component: str = "0"
    postprocessing: Steps = ()
    precision: str = "fp32"
    force: bool = False
    sums: str = "float"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.window not in WINDOWS:
            raise ValueError(f"window={self.window!r}: choose {' or '.join(WINDOWS)}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r}: choose one of {', '.join(PRECISIONS)}")
        if self.window_batch < 1:
            raise ValueError(f"window_batch={self.window_batch}: give 1 or more windows")
        if not 1e-3 <= self.temperature <= 1e3:  # beyond, quotients of logits may be infinite, or all 0
            raise ValueError(f"temperature={self.temperature}: give a number from 0.001 to 1000")
        parse_min_component(self.min_component, 1.0)
        self.sliding((1, 1, 1))  # checks the settings of sliding windows

    def refuse_for(self, run: TrainedRun) -> None:
        """Raises ValueError where the run's networks are not to predict so, or ``force`` would do nothing."""
        discouraged = self.window == "whole" and bool(run.why_not_whole)
        if discouraged and not self.force:
            raise ValueError(f"window='whole' with {run.path}: {run.why_not_whole}; remove it, or add force=True")
        if self.force and not discouraged:
            raise ValueError("force=True would do nothing: it is for window='whole' with nnU-Net networks: remove it")

    def sliding(self, tile: Sequence[int], rule: str = "stride") -> Sliding:
        """Returns the settings of sliding windows of ``tile`` voxels, laid by a ``rule`` of ``windows.RULES``."""
        return Sliding(tuple(tile), self.overlap, self.weights, self.window_batch, self.mirror, rule, self.sums)


class Predictor:
    """Predicts cases with the networks of a run; several networks are an ensemble, whose logits are averaged.

    ``Predictor.from_run(folder)`` makes one, ``predict(image)`` returns the label map. With several ranks, call every
    method on all of them.

    - ``run``: the run folder, as ``read_run`` reads it
    - ``nets``: its networks with trained weights
    - ``settings``: windows, flips, small components; those that would not suit the networks are refused
    - ``mesh``: the ranks that predict together
    """

    def __init__(self, run: TrainedRun, nets: Sequence[Network], settings: PredictionSettings, mesh: Mesh) -> None:
        settings.refuse_for(run)
        self.run, self.nets, self.settings, self.mesh = run, list(nets), settings, mesh

    @classmethod
    def from_run(
        cls,
        run: str | Path,
        checkpoints: Sequence[str] = (),
        settings: PredictionSettings | None = None,
        mesh: Mesh | None = None,
    ) -> "Predictor":
        """Returns the predictor of a run folder.

        - ``run``: the folder that train wrote, or an nnU-Net results folder
        - ``checkpoints``: "best" (the default), "latest" or files of weights
        - ``settings``: windows, flips, small components; None: windows as the run's validation found better, and the
          precision of its training
        - ``mesh``: the ranks, from ``seqpar.start``; None: this process alone, without a process group
        """
        opened, mesh = open_run(run, checkpoints), mesh or start(1, env={})
        usual = PredictionSettings(window=opened.window, mirror=opened.mirror, precision=opened.config.precision)
        (settings or usual).refuse_for(opened)  # before weights are read
        nets = opened.load_nets(opened.weights_of(checkpoints), mesh)
        return cls(opened, nets, settings or usual, mesh)

    def predict(
        self, images: SpatialImage | Sequence[SpatialImage] | np.ndarray, affine: np.ndarray | None = None
    ) -> Any:
        """Returns the label map of one case: a NIfTI image for images, an array for an array.

        ``images`` is one image, one per modality, or an array ``c W D H`` or ``W D H``. ``affine`` places an array in
        space (without it: RAS, voxels of 1 mm).
        """
        if isinstance(images, (str, Path)):
            raise ValueError(f"predict takes images, and a path came: give nibabel.load({str(images)!r})")
        if isinstance(images, Tensor):
            raise ValueError("predict takes images or an array, and a tensor came: give tensor.cpu().numpy()")
        loaded = _from_array(images, affine) if isinstance(images, np.ndarray) else _from_images(images)
        needed = len(self.run.recipe.modalities)
        if len(loaded.image) != needed:
            names = ", ".join(self.run.recipe.modalities)
            raise ValueError(f"{len(loaded.image)} channels came; the network needs {needed}: {names}")
        prepared = self.run.preparation.prepare(loaded, Case("image", (Path("the image"),)))
        ids = self.class_ids(prepared.image, self.run.preparation.target_grid(prepared.properties))
        labels = self.to_source(ids.numpy(), prepared.properties)
        if isinstance(images, np.ndarray):
            return labels
        header = nibabel.Nifti1Image.from_image(_as_list(images)[0]).header.copy()
        header.set_data_dtype(labels.dtype)
        return nibabel.Nifti1Image(labels, loaded.geometry.affine, header)

    def class_ids(
        self,
        image: Image,
        target: TargetGrid,
        write_rows: WriteRows | None = None,
        tell: ReportProgress = no_item_progress,
        rows_of: RowsOf | None = None,
    ) -> Tensor:
        """Returns the class ids of a prepared image ``c W D H`` on the grid ``target``; the same on all ranks.

        ``write_rows`` takes the probabilities, or what ``rows_of`` makes of them; pass it on all ranks or none, it is
        called on the first one alone.
        ``tell`` is told which share of the work is done.
        """
        settings, tile = self.settings, self.nets[0].layout.tile
        if settings.window == "whole":
            slabs = whole_volume(self.nets, image, self.mesh, settings.mirror, tell, settings.precision)
        else:
            sliding = settings.sliding(tile, self.run.window_rule)
            slabs = sliding_window(self.nets, image, sliding, self.mesh, tell, settings.precision)
        order = self.run.output_order
        halves = settings.sums == "half" and self.run.rounds_resampled
        heat, shape = settings.temperature, image.shape[1:]
        return slabs_to_labels(
            slabs, shape, target, self.mesh, order, write_rows, halves=halves, temperature=heat, rows_of=rows_of
        )

    def to_source(self, ids: np.ndarray, properties: Properties) -> np.ndarray:
        """Returns the file's label values in the file's geometry, without small components, from class ids."""
        return self.kept_to_source(self.without_small(ids, properties), properties)

    def without_small(self, ids: np.ndarray, properties: Properties) -> np.ndarray:
        """Returns class ids without small components."""
        min_voxels = parse_min_component(self.settings.min_component, 1000 * properties.geometry.voxel_ml)
        return drop_small_components(ids, min_voxels, self.run.regions.values(), self.run.regions_class_order)

    def kept_to_source(self, ids: np.ndarray, properties: Properties) -> np.ndarray:
        """Returns the file's label values in the file's geometry from class ids without small components."""
        return keep_largest(self.run.preparation.labels_to_source(ids, properties), self.settings.postprocessing)

    def distribute(self, prepare: Callable[[], Prepared]) -> tuple[Image, TargetGrid]:
        """Prepares a case on the first rank; returns on every rank its image ``c W D H`` and the grid of its crop."""
        prepared: Prepared | None = None

        def prepare_and_measure() -> Any:
            nonlocal prepared
            prepared = prepare()
            target = self.run.preparation.target_grid(prepared.properties)
            return prepared.image.shape, target.shape, target.nearest

        shape, crop_shape, nearest = run_on_rank0(prepare_and_measure, self.mesh.world)
        channels = torch.empty(0, *shape[1:]) if prepared is None else torch.from_numpy(prepared.image)
        num_channels = [shape[0], *[0] * (self.mesh.world.size - 1)]  # all lie on the first rank
        image = all_gather(channels, self.mesh.world, 0, num_channels, "images")
        return image, TargetGrid(tuple(crop_shape), nearest)


def _as_list(images: SpatialImage | Sequence[SpatialImage]) -> list[SpatialImage]:
    return [images] if isinstance(images, SpatialImage) else list(images)


def _from_images(images: SpatialImage | Sequence[SpatialImage]) -> Loaded:
    channels: list[np.ndarray] = []
    first: Geometry | None = None
    for image in _as_list(images):
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
        raise ValueError("no image came: give one, or one per modality")
    return Loaded(np.stack(channels), None, first, ())


def _from_array(array: np.ndarray, affine: np.ndarray | None) -> Loaded:
    array = array[None] if array.ndim == 3 else array
    if array.ndim != 4:
        raise ValueError(f"an array of shape {array.shape} came: (channels, W, D, H) or (W, D, H) is needed")
    w, d, h = array.shape[1:]
    geometry = make_geometry((w, d, h), np.eye(4) if affine is None else np.asarray(affine, float))
    return Loaded(to_canonical(array, geometry.orientation), None, geometry, ())
