"""Prepares a data set for training: ``python launch/prepare.py DATA [--out CACHE]``."""

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from seqpar.cluster.exit_codes import DATA, INTERRUPTED, run
from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Dataset
from seqpar.data.formats.joined_labels import join_labels
from seqpar.data.preparation.cache import check_cache, open_cache
from seqpar.data.preparation.cache_index import cache_folder, is_current, outdated_cache
from seqpar.data.preparation.prepare_dataset import Report, check_sources, prepare
from seqpar.data.preparation.recipe import BY_NAME, NORMALISATIONS, PrepareSettings
from seqpar.scores.label_files import MAX_NAMED
from seqpar.settings.data_settings import OWN, DataSettings, prepare_settings
from seqpar.settings.field import PROCESSES
from seqpar.settings.parser import Parser, check_numbers
from seqpar.tasks.lookup import TASKS
from seqpar.terminal import ProgressBar, coloured, next_command
from seqpar.text import name_images, quantity
from seqpar.weights.nnunet_settings import preparation_by, read_plan


def act(arguments: Sequence[str]) -> int:
    """Prepares or checks a data set; returns exit code 0, or 3 if something is wrong."""
    options = _parser().parse_args(arguments)
    check_numbers(options, workers=PROCESSES)
    settings = prepare_settings(
        DataSettings(
            spacing=options.spacing or "source",
            prepare=_planned(options) if options.plans else OWN,
            join_labels=options.join_labels,
            crop_to=tuple(options.crop_to),
            force=options.force,
            normalise=options.normalise or BY_NAME,
        )
    )
    task = TASKS[options.task]
    dataset = join_labels(task.read_dataset(options.data), settings.joins)
    out = cache_folder(dataset, options.out, settings)
    names = ", ".join(name_images(dataset.modalities))
    print(f"{dataset.name}: {dataset.layout}, {quantity(len(dataset.cases), 'case')}, {names} -> {out}")
    if line := outdated_cache(dataset.root, out):
        print(line)
    for note in dataset.notes:
        print(f"warning: {note}", file=sys.stderr, flush=True)
    if options.check:
        return _check(dataset, out, settings, options.workers)
    try:
        report = prepare(
            dataset,
            out,
            settings,
            options.workers,
            ProgressBar("preparing"),
            replace=not options.out,  # what another process has just prepared there stays
            labelled=task.is_labelled,
        )
    except KeyboardInterrupt:
        print(
            "\ninterrupted; what is finished is kept, and the same command continues",
            file=sys.stderr,
            flush=True,
        )
        return INTERRUPTED
    _print_report(report)
    code = _print_faults(report.faults, "data set")
    if code == 0:
        _warn_of_twins({name: case.voxels for name, case in open_cache(report.path).cases.items()})
        more = ["--cache", options.out] if options.out else []
        more += ["--plans", options.plans] if options.plans else []
        more += ["--spacing", options.spacing] if options.spacing not in ("", "source") else []
        more += ["--join-labels", options.join_labels] if options.join_labels else []
        more += ["--crop-to", *options.crop_to, *["--force"] * options.force] if options.crop_to else []
        more += ["--normalise", options.normalise] if options.normalise not in ("", BY_NAME) else []
        print(coloured(f"next: {next_command(*task.train_command, '--data', options.data, *more)}", sys.stdout))
    return code


def _warn_of_twins(voxels: Mapping[str, str]) -> None:
    """Prints a sentence on cases with the same voxels in all images, if there are any; ``voxels``: their digests."""
    names = defaultdict[str, list[str]](list)
    for name, digest in voxels.items():
        names[digest].append(name)
    several = [own for digest, own in names.items() if digest and len(own) > 1]
    if not several:
        return
    others = len(several) - 1
    more = f", and {quantity(others, 'more scan')} {'has' if others == 1 else 'have'} several" * bool(others)
    listed = f"{', '.join(several[0][:MAX_NAMED])}{', …' * (len(several[0]) > MAX_NAMED)}"
    told = (
        f"warning: {listed} are one scan under {len(several[0])} names{more}: if one is trained on and another held "
        "out, scores are too good. Keep one of them"
    )
    print(coloured(told, sys.stderr), file=sys.stderr, flush=True)


def _planned(options: argparse.Namespace) -> str:
    """Returns how nnU-Net's plan prepares, as JSON; refuses flags that would do nothing."""
    if idle := [name for name in ("crop_to", "normalise") if getattr(options, name)]:
        raise ValueError(f"--{idle[0].replace('_', '-')} would do nothing: --plans decides it: remove one of both")
    return preparation_by(read_plan(options.plans), options.spacing)


def _check(dataset: Dataset, out: Path, settings: PrepareSettings, workers: int | None) -> int:
    """Prints what is wrong with the data set's files and with its cache, if there is one; returns the exit code."""
    found, voxels = check_sources(dataset, out, settings, workers, ProgressBar("checking"))
    faults, what = [*dataset.faults, *found], "data set, and its cache,"
    if not out.exists():
        print(f"{out}: there is no cache yet")
        what = "data set"
    else:
        faults += check_cache(out)
        if not faults and not is_current(dataset, out, settings):
            faults = [DataError(out, "is not what the data set and settings are now; run prepare again")]
    code = _print_faults(faults, what)
    _warn_of_twins(voxels if code == 0 else {})
    return code


def _print_report(report: Report) -> None:
    """Prints in one line what was done."""
    without = f", {len(report.empty)} of them without foreground" if report.empty else ""
    done = f"{len(report.prepared)} prepared, {len(report.kept)} already there{without}"
    print(f"{done}, {quantity(len(report.faults), 'fault')}")


def _print_faults(faults: Sequence[DataError], what: str) -> int:
    """Prints a line for each fault, or else that there is none; returns the exit code."""
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr, flush=True)
    if not faults:
        print(f"the {what} is in order")
    return DATA if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("prepare", description="Prepares a data set for training.")
    parser.add_argument(
        "--task",
        choices=list(TASKS),
        default="segment",
        help="classify: images with one class each; pretrain: images alone (%(default)s)",
    )
    parser.add_argument(
        "data", metavar="DATA", help="folder of the data set, list of cases (.json), or name or number under nnUNet_raw"
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="folder of the cache (default: in $SEQPAR_CACHE if set, else in seqpar-prepared near DATA)",
    )
    add = parser.add_argument
    add("--plans", default="", metavar="FILE", help="prepare as a plans.json of nnU-Net says, or FILE:CONFIGURATION")
    add("--spacing", default="", metavar="MM", help="voxel size: source, median, or R,A,S in mm (default: source, or "
        "that of --plans)")  # fmt: skip
    add("--join-labels", default="", metavar="NAME=LABELS", help="labels that become one class, as in tumour=1,2,3")
    add("--crop-to", type=int, nargs="+", default=[], metavar="VOXELS", help="three sides to which volumes are cropped")
    add("--force", action="store_true", help="let --crop-to cut off labelled voxels")
    add("--normalise", choices=NORMALISATIONS, default="", help="how intensities are normalised: by the names of "
        "modalities, or each over its whole volume (default: by-name)")  # fmt: skip
    parser.add_argument(
        "--workers",
        type=int,
        metavar="PROCESSES",
        help="worker processes; 0: this process alone (default: number of cores, at most 8)",
    )
    parser.add_argument(
        "--check", action="store_true", help="only read all files, and compare the cache with them; change nothing"
    )
    return parser


def main() -> None:
    """Prepares what the command line says and exits with its code."""
    sys.exit(run(act, prints_result="--check" in sys.argv))


if __name__ == "__main__":
    main()
