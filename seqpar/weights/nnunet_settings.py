"""What nnU-Net's plans, and nnssl pretrainings, say as settings of a run: in W D H, the axes of a file."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from seqpar.data.addresses import is_missing, local_file
from seqpar.data.errors import DataError
from seqpar.data.files import read_json
from seqpar.data.formats.nnunet_plans import NnunetPlan, plan_of
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.decoders.unets.architecture import Architecture, Style, three
from seqpar.decoders.unets.nnunet import of_plan
from seqpar.models.unet_families import Stages, format_stages
from seqpar.settings.config import Config
from seqpar.settings.data_settings import OWN, planned
from seqpar.settings.field import VOXELS
from seqpar.text import flag_name
from seqpar.weights.nnssl import holds_pretrained_unet, read_pretrained_unet
from seqpar.weights.nnunet_results import REFUSE, holds_primus, holds_unet, read_checkpoint
from seqpar.weights.primus_weights import settings_of_primus
from seqpar.weights.weight_files import checkpoint_of, is_of_torch

USUAL = "3d_fullres"
PLAN = "plan"  # value of --prepare


def with_plans(config: Config, flags: Collection[str]) -> tuple[Config, frozenset[str]]:
    """Returns the config with the settings of ``--plans`` or of nnU-Net's ``--weights``, where no flag says otherwise.

    Then the names of these settings. Nothing of the plans is needed afterwards: they are spelled out in the settings.
    So are those of a Primus that nnU-Net trained. An nnssl pretraining says the network and the tile; data are prepared
    as without it. An address whose file has not been downloaded brings no settings.

    - ``flags``: the settings on the command line
    """
    plan, source = None, f"--weights {config.weights}"
    is_read = not config.plans and not is_missing(config.weights)  # a dry run downloads nothing
    weights = local_file(config.weights) if is_read else Path()
    checkpoint = checkpoint_of(weights, mapped=True) if is_of_torch(weights) else {}
    if config.plans:
        plan, source = read_plan(config.plans), f"--plans {config.plans}"
        settings = settings_of(plan, config.plans)
    elif holds_unet(checkpoint) or config.task in VOXELS and holds_primus(checkpoint):
        results = read_checkpoint(weights)
        if config.trainer_unknown == REFUSE:
            results.refuse_unknown_trainers()
        plan, is_unet = results.plan, results.architecture is not None
        settings = settings_of(plan, config.weights) if is_unet else settings_of_primus(checkpoint) | _data_of(plan)
        settings |= _training_of(checkpoint, plan, config.data)
    elif holds_pretrained_unet(checkpoint):
        pretrained = read_pretrained_unet(checkpoint, config.weights)
        tile = tuple(pretrained.patch_size[axis] for axis in pretrained.file_axes)
        settings = network_of(pretrained.architecture, pretrained.file_axes, config.weights) | {"tile": tile}
    else:
        settings = {}
    if plan is None and "prepare" in flags and config.prepare != OWN:
        raise ValueError(f"--prepare {config.prepare}: that needs --plans, or nnU-Net's --weights; remove it")
    if not settings:
        return config, frozenset()
    if "network" in flags and config.network != settings["network"]:
        raise ValueError(
            f"--network {config.network}: {source} has the network {settings['network']}; leave one of both out"
        )
    if {"features", "stages"} & set(flags) and config.plans:
        named = next(name for name in ("features", "stages") if name in flags)
        raise ValueError(f"--{flag_name(named)}: {source} names the stages; leave one of both out")
    if plan is not None:
        settings["prepare"] = _preparation(plan, config, flags)
    taken = {name: value for name, value in settings.items() if name not in flags or name == "prepare"}
    return replace(config, plans="", **taken), frozenset(taken)


def _training_of(checkpoint: Mapping[str, Any], plan: NnunetPlan, data: str) -> dict[str, str]:
    """Returns ``--val-mirror`` of a checkpoint, and its ``--fold`` if it learned from the same data set, so that no
    case that it saw is held out.
    """
    mirror = checkpoint.get("inference_allowed_mirroring_axes") or ()
    flipped = {"val_mirror": "".join(axis for axis, own in zip("WDH", plan.file_axes) if own in mirror) or "none"}
    fold = fold_of_training(checkpoint, data)
    return flipped | ({"fold": fold} if fold else {})


def fold_of_training(checkpoint: Mapping[str, Any], data: str) -> str:
    """Returns the fold that nnU-Net trained a checkpoint on, if on this data set; "" elsewhere."""
    arguments = checkpoint.get("init_args")
    if not isinstance(arguments, Mapping) or not isinstance(arguments.get("plans"), Mapping):
        return ""
    name, learned = Path(data).name, str(arguments["plans"].get("dataset_name"))
    is_same = learned.startswith(f"Dataset{int(name):03d}_") if name.isdecimal() else learned == name
    return str(arguments["fold"]) if is_same and "fold" in arguments else ""


def _preparation(plan: NnunetPlan, config: Config, flags: Collection[str]) -> str:
    """Returns ``--prepare``: own where the command line says so, else the plan, with the spacing of a flag."""
    if "prepare" in flags:
        if config.prepare not in (OWN, PLAN):
            raise ValueError(f"--prepare {config.prepare}: choose {OWN} or {PLAN}")
        if config.prepare == OWN:
            return OWN
    return preparation_by(plan, config.spacing if "spacing" in flags else "")


def preparation_by(plan: NnunetPlan, spacing: str) -> str:
    """Returns ``--prepare`` by a plan, with another ``spacing`` if it is not ""."""
    images = plan.of_images
    if spacing:
        images = images.spaced(PrepareSettings.spaced(spacing).spacing)
    return json.dumps(images.to_json())


def describe_preparation(config: Config) -> str:
    """Returns the line that says that a run prepares its data by nnU-Net's plan, "" where it does not."""
    if config.prepare == OWN:
        return ""
    plan = planned(config)
    axes = "turned to canonical axes" if plan.turns else "in the file's axes"
    mirror = "" if config.val_mirror == "none" else f"; validation averages over flips ({config.val_mirror})"
    sizes = " x ".join(f"{plan.spacing[axis]:.4g}" for axis in plan.file_axes)
    spacing = f"{sizes} mm" if plan.resamples else "each with its own spacing"
    return (
        f"data are prepared as nnU-Net's plan says: {axes}, {', '.join(plan.schemes)}, {spacing}{mirror} "
        f"(--prepare {OWN} takes seqpar's own way)"
    )


def read_plan(text: str) -> NnunetPlan:
    """Returns a configuration of a plans file: 3d_fullres, else its first 3d one, or that behind a colon."""
    name = ""
    if not Path(text).is_file() and ":" in text:
        text, _, name = text.rpartition(":")
    path = Path(text)
    content = read_json(path)
    configurations = content.get("configurations") if isinstance(content, dict) else None
    if not isinstance(configurations, dict):
        raise DataError(path, "has no configurations: give the plans.json of nnU-Net v2")
    usual = [USUAL, *(own for own in configurations if own.startswith("3d"))]
    return plan_of(content, name or next((own for own in usual if own in configurations), USUAL), path)


def settings_of(plan: NnunetPlan, source: str | Path) -> dict[str, Any]:
    """Returns the settings of ``Config`` that a plan determines, by name; ``source``: for messages."""
    try:
        a = of_plan(plan.network_class, plan.network_arguments, 1, 2)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(source, f"its network cannot be built: {error}") from error
    return network_of(a, plan.file_axes, source) | _data_of(plan)


def _data_of(plan: NnunetPlan) -> dict[str, Any]:
    """Returns the settings of ``Config`` that a plan determines whatever the network is, by name."""
    return {
        "tile": tuple(plan.patch_size[axis] for axis in plan.file_axes),
        "batch": plan.batch_size,
        "batch_dice": plan.batch_dice,
        "spacing": ",".join(f"{plan.spacing[axis]:.10g}" for axis in plan.file_axes) if plan.resamples else "source",
    }


def network_of(a: Architecture, file_axes: Sequence[int], source: str | Path) -> dict[str, Any]:
    """Returns the settings of an architecture in nnU-Net's axes; ``file_axes``: of these for each axis of a file."""
    stem = a.features[0] if a.block == "residual" else 0
    if a.block == "bottleneck" or a.stem != stem or a.style != Style():
        raise DataError(
            source, "its network has bottlenecks, a stem of its own width, or other norms, slopes or biases than "
            "nnU-Net's default: load_nnunet loads it, but it is not trained here"
        )  # fmt: skip
    kernels, strides = (
        tuple(three([sides[axis] for axis in file_axes]) for sides in every) for every in (a.kernels, a.strides)
    )
    return {
        "network": "nnunet-plain" if a.block == "plain" else "nnunet-resenc",
        "stages": format_stages(Stages(kernels, strides, a.features, a.encoder, a.decoder[::-1])),
        "features": 0,
    }
