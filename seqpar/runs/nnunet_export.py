"""Writes runs as an nnU-Net results folder, which its nnUNetv2_predict takes unchanged.

FOLDER/plans.json, FOLDER/dataset.json     how images are prepared, and the network; channels and labels
FOLDER/fold_N/checkpoint_final.pth         weights by nnU-Net's names, in its axes; a folder for each run
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from seqpar.data.errors import DataError, unwritable
from seqpar.data.files import read_json
from seqpar.data.formats.nnunet_plans import BY_TORCH, NONE, ImagePlan, Resampling
from seqpar.data.preparation.recipe import Recipe
from seqpar.decoders.unets.architecture import Architecture
from seqpar.models.cell_network import VolumeNet
from seqpar.models.network import Network
from seqpar.runs.trained_run import TrainedRun
from seqpar.weights.nnssl import primus_name
from seqpar.weights.nnunet_results import CHECKPOINT, DATASET, PLANS
from seqpar.weights.nnunet_weights import export_nnunet
from seqpar.weights.primus_weights import export_primus
from seqpar.weights.weight_files import State, write_pth

_SCHEMES = {  # of a recipe -> nnU-Net's, and whether it is that of the nonzero voxels
    "zscore": ("ZScoreNormalization", True),
    "volume": ("ZScoreNormalization", False),
    "ct": ("CTNormalization", False),
    "clip": ("CTNormalization", False),
    "none": ("NoNormalization", False),
}
_CLASSES = {"plain": "PlainConvUNet", "residual": "ResidualEncoderUNet"}
_NORMS = {"instance": "instancenorm.InstanceNorm3d", "batch": "batchnorm.BatchNorm3d"}
_USUAL = ("nnUNetTrainer", "seqparPlans", "3d_fullres")  # where the folder's name says nothing else


def write_results(
    folder: Path, runs: Sequence[tuple[TrainedRun, Mapping[str, Any], Network]], licence: str
) -> list[str]:
    """Writes the folder, whole or not at all; returns the folds and lines on what nnU-Net does otherwise.

    - ``runs``: one, or those of several folds, each with its config.json and its network
    - ``licence``: of the weights
    """
    if folder.exists() and any(folder.iterdir()):
        raise DataError(folder, "is there already; name another folder, or remove it")
    named = folder.absolute().name.split("__")
    _, plans_name, configuration = named if len(named) == 3 else _USUAL
    contents, folds = list[dict[str, Any]](), list[str]()
    for run, description, net in runs:
        trainer, state, architecture = _network_of(run, net)
        plans = _plans_of(run, description["dataset"], plans_name, configuration, architecture)
        arguments = {
            "plans": plans, "configuration": configuration, "fold": _fold_of(run),
            "dataset_json": dataset_of(run, description["dataset"]),
        }  # fmt: skip
        if contents and contents[0]["init_args"]["plans"] != plans:
            raise ValueError(f"{run.path} and {runs[0][0].path} differ in what their plans say: export each by itself")
        mirror = [axis for axis in range(3) if _axis_of_file(run, axis) in run.mirror]
        contents.append({
            "network_weights": state, "optimizer_state": {}, "grad_scaler_state": None, "logging": {},
            "_best_ema": None, "current_epoch": run.config.epochs, "init_args": arguments, "trainer_name": trainer,
            "inference_allowed_mirroring_axes": tuple(mirror) or None, "licence": licence,
        })  # fmt: skip
        folds.append(f"fold_{arguments['fold']}")
    _write(folder, contents, folds)
    return [f"{', '.join(folds)}, {contents[0]['trainer_name']}", *_notes(runs[0][0])]


def _write(folder: Path, contents: Sequence[Mapping[str, Any]], folds: Sequence[str]) -> None:
    """Writes plans, data set and checkpoints under a temporary name, then renames the folder."""
    target, shared = folder.absolute(), contents[0]["init_args"]
    place: str | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        place = mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)  # that no other export writes to
        temporary = Path(place, target.name)
        temporary.mkdir()  # with the usual permissions
        for name, content in ((PLANS, shared["plans"]), (DATASET, shared["dataset_json"])):
            (temporary / name).write_text(json.dumps(content, indent=4) + "\n")
        for fold, content in zip(folds, contents):
            (temporary / fold).mkdir()
            write_pth(temporary / fold / CHECKPOINT, content)
        temporary.rename(target)  # which may be an empty folder
    except OSError as error:
        raise unwritable(folder, error) from error
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)


def images_of(recipe: Recipe, path: Path) -> ImagePlan:
    """Returns the plan that says how a recipe prepares images; raises ValueError for what no plan can say."""
    if recipe.plan is not None:
        return recipe.plan
    if recipe.crop_to is not None:
        raise ValueError(
            f"{path} cuts volumes to {' '.join(map(str, recipe.crop_to))} voxels (--crop-to), which nnU-Net's plans "
            "cannot say: train without it, or hand on an archive (.zip)"
        )
    nothing = {"mean": 0.0, "std": 1.0, "percentile_00_5": 0.0, "percentile_99_5": 1.0}
    known = ({"mean": i.mean, "std": i.std, "percentile_00_5": i.low, "percentile_99_5": i.high} if i else nothing
             for i in recipe.intensities)  # fmt: skip
    function = NONE if recipe.spacing is None else Resampling().function
    linear = Resampling(function, 1, 0, False)
    names, masked = zip(*(_SCHEMES[scheme] for scheme in recipe.schemes))
    spacing = tuple((recipe.spacing or (1.0, 1.0, 1.0))[::-1])
    return ImagePlan(spacing, (0, 1, 2), names, masked, tuple(known), linear, linear, linear, "NibabelIOWithReorient")


def _notes(run: TrainedRun) -> list[str]:
    """Returns lines on what nnU-Net does otherwise than ``predict`` does with the run."""
    notes = []
    if "zscore" in run.recipe.schemes:
        notes.append(
            "note: nnU-Net also normalises voxels that are 0 inside the body, or in some channels alone; this run "
            "leaves them 0, so that labels differ where images have many of them"
        )
    if run.window == "whole":
        notes.append("note: nnU-Net predicts by windows, and this run's validation found whole passes better")
    return notes


def _network_of(run: TrainedRun, net: Network) -> tuple[str, State, dict[str, Any]]:
    """Returns the trainer that builds the network, its weights, and the plan's architecture."""
    if run.config.mode == "nogather" and run.config.seqpar > 1:
        raise ValueError(
            f"{run.path} was trained by --mode nogather on {run.config.seqpar} ranks; each sees its own part "
            "alone, as no nnU-Net network does: hand on an archive (.zip)"
        )
    if run.config.network.startswith("mednext-"):
        raise ValueError(
            f"{run.path} has the network {run.config.network}, which nnU-Net does not build: for MedNeXt's package, "
            "name a file OUT.pth; else hand on an archive (.zip)"
        )
    if isinstance(net, VolumeNet):
        state = export_nnunet(net, images_of(run.recipe, run.path).transpose_forward)
        trainer, architecture = "nnUNetTrainer", _architecture_of(net.unet.architecture, run)
    elif run.config.decoder == "primus" and run.config.task == "segment":
        name = primus_name(net)
        state = export_primus(net, True, images_of(run.recipe, run.path).transpose_forward)
        # its trainer builds the network by itself; a plan has an architecture in any case
        trainer, architecture = f"nnUNet_{_trained_name(name)}_Trainer", {
            "network_class_name": f"dynamic_network_architectures.architectures.primus.{name}",
            "arch_kwargs": {}, "_kw_requires_import": [],
        }  # fmt: skip
    else:
        raise ValueError(
            f"{run.path} has the network {run.config.network}, and nnU-Net builds its own U-Nets (--network nnunet-…) "
            "and Primus (--decoder primus): hand on an archive (.zip)"
        )
    return trainer, {name: tensor.float() for name, tensor in state.items()}, architecture


def _trained_name(name: str) -> str:
    """Returns the name of a Primus in that of its trainer: PrimusM is Primus_M, PrimusV2M stays."""
    return re.sub(r"^Primus([SBML])$", r"Primus_\1", name)


def _architecture_of(a: Architecture, run: TrainedRun) -> dict[str, Any]:
    """Returns the architecture of a U-Net as plans have it, in nnU-Net's axes."""
    if a.block not in _CLASSES:
        raise ValueError(f"{run.path} has {a.block} blocks, which are not exported: hand on an archive (.zip)")
    residual = a.block == "residual"
    kernels, strides = ([_turned(run, sides) for sides in every] for every in (a.kernels, a.strides))
    arguments: dict[str, Any] = {
        "n_stages": len(a.features), "features_per_stage": list(a.features),
        "conv_op": "torch.nn.modules.conv.Conv3d", "kernel_sizes": kernels, "strides": strides,
        "n_blocks_per_stage" if residual else "n_conv_per_stage": list(a.encoder),
        "n_conv_per_stage_decoder": list(a.decoder), "conv_bias": a.style.bias,
        "norm_op": f"torch.nn.modules.{_NORMS[a.style.norm]}",
        "norm_op_kwargs": {"eps": a.style.eps, "affine": True}, "dropout_op": None, "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU", "nonlin_kwargs": {"negative_slope": a.style.slope, "inplace": True},
    }  # fmt: skip
    return {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{_CLASSES[a.block]}",
        "arch_kwargs": arguments,
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def _axis_of_file(run: TrainedRun, axis: int) -> int:
    """Returns the axis W D H of a run's arrays for one of nnU-Net's."""
    return 2 - images_of(run.recipe, run.path).transpose_forward[axis]


def _turned(run: TrainedRun, sizes: Sequence[float]) -> list[Any]:
    """Returns sizes W D H of a run's arrays in nnU-Net's axes."""
    return [sizes[_axis_of_file(run, axis)] for axis in range(3)]


def _plans_of(
    run: TrainedRun, dataset: Mapping[str, Any], name: str, configuration: str, architecture: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the content of plans.json."""
    images, config = images_of(run.recipe, run.path), run.config
    patch, medians = _turned(run, config.tile), dataset.get("medians")  # which older runs lack
    shape, cropped = (_turned(run, medians[name]) if medians else patch for name in ("shape", "cropped_shape"))
    spacing = _turned(run, medians["file_spacing"]) if medians else list(images.spacing)
    own: dict[str, Any] = {
        "data_identifier": f"{name}_{configuration}", "preprocessor_name": "DefaultPreprocessor",
        "batch_size": config.batch, "patch_size": patch, "median_image_size_in_voxels": [float(n) for n in shape],
        "spacing": list(images.spacing), "normalization_schemes": list(images.schemes),
        "use_mask_for_norm": list(images.masked),
    }  # fmt: skip
    steps = {"data": images.resampling, "seg": images.label_resampling, "probabilities": images.logit_resampling}
    for what, step in steps.items():
        orders = {} if step.function == BY_TORCH else {"order": step.order, "order_z": step.order_z}
        options = {**orders, "force_separate_z": step.force_separate_z}
        own[f"resampling_fn_{what}"] = step.function
        own[f"resampling_fn_{what}_kwargs"] = {} if step.function == NONE else {"is_seg": what == "seg", **options}
    own |= {"architecture": dict(architecture), "batch_dice": config.batch_dice}
    intensities = {str(n): {"median": i["mean"], "min": i["percentile_00_5"], "max": i["percentile_99_5"], **i}
                   for n, i in enumerate(images.intensities)}  # fmt: skip
    return {
        "dataset_name": _name_of(run, dataset), "plans_name": name, "original_median_spacing_after_transp": spacing,
        "original_median_shape_after_transp": [round(n) for n in cropped], "image_reader_writer": images.reader,
        "transpose_forward": list(images.transpose_forward),
        "transpose_backward": [images.transpose_forward.index(axis) for axis in range(3)],
        "configurations": {configuration: own}, "experiment_planner_used": "seqpar", "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": intensities,
    }  # fmt: skip


def dataset_of(run: TrainedRun, description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of dataset.json; raises ValueError for outputs that it cannot declare."""
    values, recipe = run.recipe.values, run.recipe
    labels: dict[str, Any] = {"background": 0}
    if run.learns_regions:
        labels |= {name: [values[n] for n in members] for name, members in run.regions.items()}
        if all(len(members) == 1 for members in run.regions.values()):
            raise ValueError(
                f"{run.path} learns {', '.join(run.regions)} by a sigmoid each, and nnU-Net does so only where a "
                "region has several labels: hand on an archive (.zip)"
            )
    else:
        labels |= {name: values[n] for name, n in run.labels.items() if n}
        if list(labels.values()) != list(range(len(labels))):
            raise ValueError(
                f"{run.path} has labels of the values {list(labels.values())}, and nnU-Net numbers them from 0 without "
                "gaps: join or renumber the labels, or hand on an archive (.zip)"
            )
    if recipe.has_ignore and values[-1] == max(values[:-1]) + 1:
        labels["ignore"] = values[-1]
    content: dict[str, Any] = {
        "channel_names": {str(n): name for n, name in enumerate(recipe.modalities)}, "labels": labels,
        "numTraining": len({*description.get("train", ()), *description.get("held_out", ())}),
        "file_ending": _file_ending(run), "name": _name_of(run, description),
    }  # fmt: skip
    if run.learns_regions:
        content["regions_class_order"] = [values[n] for n in run.regions_class_order]
    return content


def _name_of(run: TrainedRun, description: Mapping[str, Any]) -> str:
    """Returns the name of a run's data set, else that of the run."""
    return str(description.get("name", run.path.name))


def _file_ending(run: TrainedRun) -> str:
    """Returns the ending of the names of the run's files, as its data declare it; usually .nii.gz."""
    if not run.config.data:  # an archive names no folder, and generated brains have none
        return ".nii.gz"
    try:
        return str(read_json(Path(run.config.data) / DATASET)["file_ending"])
    except (DataError, KeyError, TypeError):
        return ".nii.gz"


def _fold_of(run: TrainedRun) -> int | str:
    """Returns the fold as nnU-Net counts them: a number, or all; of other splits 0."""
    fold = run.config.fold
    return int(fold) if fold.isdigit() else fold if fold == "all" else 0
