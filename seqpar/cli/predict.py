"""Predicts with a trained run: ``torchrun launch/predict.py RUN -i IMAGES -o FOLDER``."""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seqpar.cluster import exit_codes
from seqpar.cluster.devices import device_here
from seqpar.cluster.start_ranks import start_missing_ranks
from seqpar.cluster.torch_setup import set_arithmetic
from seqpar.data.addresses import local_file
from seqpar.data.dicom_series import load_highdicom
from seqpar.decoders.modes.named_modes import MODES
from seqpar.models.classifier import WAYS
from seqpar.parallel.consensus import refuse_unequal
from seqpar.parallel.launcher import read_launcher
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.processes import die_with_parent
from seqpar.parallel.rendezvous import start
from seqpar.prediction.case_stream import Request
from seqpar.prediction.predictor import PredictionSettings
from seqpar.prediction.run_average import EnsembleMember, check_compatible_runs, check_no_duplicates, fitting_seqpar
from seqpar.prediction.window_grid import DIRECTIONS, SUMS, WEIGHTS, WINDOWS, mirrored_dims
from seqpar.runs.fold_folder import expand_folds
from seqpar.runs.nnunet_run import open_run
from seqpar.runs.run_folder import read_config, tested_cases
from seqpar.runs.run_status import warn_if_killed, warn_of_weights
from seqpar.runs.trained_run import TrainedRun
from seqpar.scores.postprocessing import read_postprocessing
from seqpar.settings.parser import Parser
from seqpar.settings.run_settings import DEVICE_KINDS, UNKNOWN_TRAINERS
from seqpar.tasks.lookup import task_of
from seqpar.terminal import coloured
from seqpar.weights.facts import changed_between, several_data
from seqpar.weights.nnunet_results import PLANS_NAME, TRAINER, find_results, is_results
from seqpar.weights.weight_files import digest

RUN = "run"  # the temperature that a run's validation fitted


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0, or 3 if a case could not be predicted; raises what the user has to correct."""
    die_with_parent()
    options = _parser().parse_args(list(arguments))
    options.run = expand_folds([local_file(run) for run in _runs(options)])
    launcher = read_launcher(os.environ)
    if launcher.rank == 0:
        warn_if_killed(*options.run)
        warn_of_weights(*options.run, are_named=bool(options.checkpoint))
    request, members = _request(options), _members(options)
    if options.seqpar > 1:
        for member in members:
            member.run.check_share(options.seqpar, request.mode)
    if options.seqpar > launcher.world:
        return start_missing_ranks(options.seqpar, "predict", arguments, launcher)
    memory = device_here(options.device).of(launcher.world).memory
    seqpar, line = (options.seqpar, "") if options.seqpar else fitting_seqpar(members, launcher.world, memory)
    if line and launcher.rank == 0:
        print(line, flush=True)
    if launcher.rank == 0:
        _warn_of_several_states(options.run)
    set_arithmetic("tf32" if all(member.settings.precision == "tf32" for member in members) else "fp32")
    with start(seqpar, device=options.device) as mesh:
        try:
            _refuse_unequal_ranks(request, members, mesh)
            faults = task_of(members[0].run.config).predict(request, members, mesh)
        except Exception as error:
            return _exit_code(error, mesh)
    return exit_codes.DATA if faults else 0


def _warn_of_several_states(runs: Iterable[Path]) -> None:
    """Prints what a mean of predictions mixes, on stderr: several states of the data, or several data sets."""
    described = list[dict[str, Any]]()
    for run in runs:
        with suppress(ValueError, OSError):  # nnU-Net's results do not tell
            described.append(read_config(run).get("dataset", {}))
    if told := changed_between(*described):
        line = f"warning: {told}: the mean of their predictions mixes two states of the data"
        print(coloured(line, sys.stderr), file=sys.stderr, flush=True)
    if told := several_data(*described):
        print(f"note: {told}", file=sys.stderr, flush=True)


def _refuse_unequal_ranks(request: Request, members: Sequence[EnsembleMember], mesh: Mesh) -> None:
    """Raises ValueError on every rank if some predict otherwise than the first, or with other weights."""
    if mesh.world.size > 1:  # weights are read whole for this
        settings = {name: value for name, value in asdict(request).items() if name not in ("inputs", "output", "only")}
        for number, member in enumerate(members, 1):
            which = f" of run {number}" * (len(members) > 1)
            settings |= {f"{name}{which}": value for name, value in asdict(member.settings).items()}
        weights = [[digest(path) for path in member.weights] for member in members]
        refuse_unequal(settings, {"has other weights than rank 0 in its RUN": weights}, mesh.world)


def _exit_code(error: Exception, mesh: Mesh) -> int:
    """Returns the exit code of an error that all ranks raise alike; on any other error ends this process at once.

    The other ranks may be waiting for this one in a collective, so it must not wait for them.
    """
    code, on_all_ranks = exit_codes.code_of(error), isinstance(error, ValueError)
    if mesh.world.size == 1 or code is None:
        raise error
    if mesh.is_first or not on_all_ranks:
        exit_codes.report(f"{error}" if on_all_ranks else f"rank {mesh.world.index}: {error}")
    if not on_all_ranks:
        os._exit(code)
    return code


def _request(options: argparse.Namespace) -> Request:
    names = ("output", "mode", "probabilities", "npz", "dicom_seg", "statistics", "uncertainty", "resume")
    same = {name: getattr(options, name) for name in names}
    if options.dicom_seg:
        load_highdicom()
    only = tested_cases(*options.run) if options.test_part else None
    explain_by = options.explain_by if options.explain or options.explain_by else None
    return Request(inputs=tuple(options.input), explain_by=explain_by, only=only, **same)


def _runs(options: argparse.Namespace) -> list[Path]:
    """Returns the runs that the command line names; -d and -c name a results folder under $nnUNet_results."""
    named = {f"-{letter}": getattr(options, name) for letter, name in (("d", "dataset"), ("c", "configuration"))}
    given = [flag for flag, value in named.items() if value]
    if given and options.run:
        raise ValueError(f"{options.run[0]} and {given[0]}: give a RUN, or nnU-Net's -d and -c, and not both")
    if len(given) == 1:
        raise ValueError(f"{given[0]} {named[given[0]]}: -d and -c together name an nnU-Net network: give both")
    if idle := [flag for flag, value in (("-tr", options.trainer), ("-p", options.plans)) if value and not given]:
        raise ValueError(f"{idle[0]} would do nothing: it is for nnU-Net's -d and -c: remove it")
    if not given and not options.run:
        raise ValueError("RUN is missing: name a run folder, or an nnU-Net network by -d and -c (--help lists all)")
    return options.run or [
        find_results(options.dataset, options.configuration, options.trainer or TRAINER, options.plans or PLANS_NAME)
    ]


def _members(options: argparse.Namespace) -> list[EnsembleMember]:
    """Returns the runs with their settings and weights; refuses runs that cannot be averaged."""
    checkpoints = options.checkpoint or []
    of_nnunet = [path for path in options.run if is_results(path)] or options.run  # else open_run refuses --folds
    runs = [
        open_run(path, checkpoints, options.folds if path in of_nnunet else (), options.trainer_unknown)
        for path in options.run
    ]
    check_compatible_runs(runs)
    task = task_of(runs[0].config)
    task.refuse_idle_flags("predict", options, f"{runs[0].path} {task.does}")
    if len(runs) > 1 and (files := [name for name in checkpoints if name not in ("best", "latest")]):
        raise ValueError(f"--checkpoint {files[0]}: a file belongs to one run, and {len(runs)} came: remove it")
    _refuse_temperature(options, runs)
    return check_no_duplicates(
        EnsembleMember(run, _settings(options, run), run.weights_of(checkpoints)) for run in runs
    )


def _refuse_temperature(options: argparse.Namespace, runs: Sequence[TrainedRun]) -> None:
    """Raises ``ValueError`` for a temperature that nothing is written with, or that does not belong to these runs."""
    if (given := options.temperature) is None:
        return
    if not (options.probabilities or options.npz or options.uncertainty):
        raise ValueError(
            f"--temperature {given} would do nothing: labels do not depend on it: add --probabilities, --npz or "
            "--uncertainty, or remove it"
        )
    if len(runs) > 1:
        raise ValueError(
            f"--temperature {given} is for one run, and {len(runs)} came: it would change the labels of their mean: "
            "remove it, or predict with one run"
        )
    if given == RUN and (other := [name for name in options.checkpoint or () if name != "best"]):
        raise ValueError(
            f"--temperature run was fitted to the best checkpoint, and --checkpoint {other[0]} came: give a number, or "
            "remove one of both"
        )


def _temperature_of(options: argparse.Namespace, run: TrainedRun, window: str) -> float:
    """Returns what logits are divided by."""
    if options.temperature != RUN:
        return 1.0 if options.temperature is None else float(options.temperature)
    if window not in run.temperatures:
        other = f" for --window {window}, only for --window {' and '.join(run.temperatures)}" * bool(run.temperatures)
        raise ValueError(f"--temperature run: {run.path} has none{other}: give a number, or remove it")
    return run.temperatures[window]


def _temperature(text: str) -> float | str:
    """Returns a number, or the word for the run's own."""
    try:
        return text if text == RUN else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {RUN!r}") from None


def _settings(options: argparse.Namespace, run: TrainedRun) -> PredictionSettings:
    window = options.window or run.window
    values = {name: getattr(options, name) for name in ("overlap", "weights", "sums", "window_batch")}
    sliding = {name: value for name, value in values.items() if value is not None}
    if sliding and window == "whole":
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sliding)
        whose = "" if options.window else f", which {run.path} found better than sliding windows,"
        raise ValueError(f"{flags}: a whole pass{whose} has no windows; remove it, or use --window sliding")
    mirror = run.mirror if options.mirror is None else mirrored_dims(options.mirror)
    others = {"min_component": options.min_component, "precision": options.precision or run.config.precision}
    others["temperature"] = _temperature_of(options, run, window)
    if options.postprocessing:
        others["postprocessing"] = steps = read_postprocessing(options.postprocessing)
        written = run.recipe.values or tuple(run.labels.values())
        if unknown := sorted({value for step in steps for value in step} - {*written, *dict(run.recipe.joined)}):
            raise ValueError(
                f"--postprocessing {options.postprocessing}: is for label {unknown[0]}, which {run.path} does not "
                f"write (it writes {', '.join(map(str, written))}): give the file of a network that learned the same"
            )
    try:
        settings = PredictionSettings(window=window, mirror=mirror, force=options.force, **others, **sliding)
    except ValueError as error:  # which names the argument: here it came as a flag
        flagged = re.sub(r"^(\w+)='?(.*?)'?:", lambda m: f"--{m[1].replace('_', '-')} {m[2]}:", str(error))
        raise ValueError(flagged) from None
    settings.refuse_for(run)
    return settings


def _parser() -> Parser:
    parser = Parser("predict", description="Predicts label maps, or classes of cases, with a trained run.")
    add = parser.add_argument
    add("run", type=Path, nargs="*", metavar="RUN",
        help="run folder, archive or its address, or nnU-Net results; several are averaged")  # fmt: skip
    add("-d", "--dataset", default="", metavar="ID", help="in place of RUN: nnU-Net's data set in $nnUNet_results")
    add("-c", "--configuration", default="", metavar="NAME", help="its configuration, such as 3d_fullres")
    add("-tr", "--trainer", default="", metavar="NAME", help=f"its trainer (default {TRAINER})")
    add("-p", "--plans", default="", metavar="NAME", help=f"its plans (default {PLANS_NAME})")
    add("-i", "--input", nargs="+", required=True, metavar="PATH", help="data set, folder or list of images, or files")
    add("-o", "--output", type=Path, required=True, metavar="FOLDER", help="folder to write to")
    add("--test-part", action="store_true", help="predict only the cases that the run kept for tests")
    add(
        "-f",
        "--folds",
        nargs="+",
        default=[],
        metavar="FOLD",
        help="nnU-Net's folds to average (default: all)",
    )
    add("--trainer-unknown", choices=UNKNOWN_TRAINERS, default=UNKNOWN_TRAINERS[0],
        help="nnU-Net's networks by a trainer that is not one of its own: take them if all tensors fit the plan's "
        "network (default), or refuse them")  # fmt: skip
    add("--checkpoint", nargs="+", action="extend", metavar="WHICH",
        help="best (nnU-Net: final), latest or a file; logits of several are averaged")  # fmt: skip
    add("--window", choices=WINDOWS,
        help="windows of the training tile, or one pass (default: as validated)")  # fmt: skip
    add("--force", action="store_true", help="predict whole volumes with nnU-Net's networks anyway")
    add("--overlap", type=float, metavar="SHARE", help="share of a window that the next one overlaps (default 0.5)")
    add("--weights", choices=WEIGHTS, help="weights of a window's voxels in the mean over windows (default gaussian)")
    add("--sums", choices=SUMS, help="precision of the sums over windows (default float: float32; nnU-Net: half)")
    add("--window-batch", type=int, metavar="WINDOWS", help="windows that a group predicts at once (default 1)")
    add("--mirror", nargs="*", choices=[*DIRECTIONS, "none"],
        help="average over flips along these directions, all three if none is named (default: none; nnU-Net's "
        "networks: all that training flipped)")  # fmt: skip
    add("--probabilities", action="store_true", help="also write a volume of probabilities per network output")
    add("--npz", action="store_true", help="also write npz/, probabilities that nnUNetv2_ensemble averages")
    add("--dicom-seg", action="store_true", help="also write dicom-seg/, a DICOM segmentation of each DICOM series")
    add(
        "--statistics",
        action="store_true",
        help="also write statistics.csv: ml and intensities per case and class",
    )
    add(
        "--uncertainty",
        action="store_true",
        help="also write maps of the entropy and, of several runs, their disagreement",
    )
    add(
        "--temperature",
        type=_temperature,
        metavar="NUMBER",
        help="of written probabilities (default 1); run: as validation fitted",
    )
    add(
        "--explain",
        action="store_true",
        help="classification: also write maps of the evidence for each case's class",
    )
    add("--explain-by", choices=WAYS, default="", help="method of that map; implies --explain (default: hirescam; "
        "vit: gradient-x-input)")  # fmt: skip
    add("--min-component", default="0", metavar="SIZE",
        help="remove connected components below SIZE: 50 (mm3) or 20voxels (default 0)")  # fmt: skip
    add("--postprocessing", type=Path, metavar="FILE", help="apply a postprocessing.json of evaluate or nnU-Net")
    add("--continue", action="store_true", dest="resume", help="skip the cases that are already predicted")
    add("--seqpar", type=int, default=0, metavar="RANKS",
        help="ranks that share a window, started if need be (default: as in training; whole volume: all)")  # fmt: skip
    add("--mode", choices=MODES, default="",
        help="how ranks share the decoding of a window (default: with the least memory)")  # fmt: skip
    add("--precision", choices=("fp32", "tf32", "bf16"), help="arithmetic of the networks (default: as in training)")
    add("--device", choices=DEVICE_KINDS, default="auto", help="device to predict on (default auto)")
    return parser


def main() -> None:
    exit_codes.leave(exit_codes.run(act))


if __name__ == "__main__":
    main()
