"""Compares predicted label maps, or classes, with the true ones: ``python launch/evaluate.py TRUTH PREDICTION``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from seqpar.cluster.exit_codes import run
from seqpar.runs.fold_folder import expand_folds
from seqpar.runs.run_status import warn_if_killed
from seqpar.scores.label_classes import BRATS
from seqpar.scores.label_files import refuse_missing
from seqpar.scores.label_scores import EmptyPolicy
from seqpar.settings.parser import Parser
from seqpar.tasks.lookup import task_of_predictions


def act(arguments: Sequence[str]) -> int:
    """Scores the cases of each prediction, prints the scores and, of several, which is best; returns the exit code."""
    options = _parse(arguments)
    warn_if_killed(*(folder for path in options.prediction for folder in (path, *path.absolute().parents[:2])))
    refuse_missing(options.prediction)
    return task_of_predictions(options.prediction).evaluate(options)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the command line, checked."""
    parser = Parser("evaluate", description="Compares predicted label maps, or classes, with the true ones.")
    add = parser.add_argument
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    add(
        "truth",
        type=Path,
        metavar="TRUTH",
        help="data set, folder of label maps, or a label map; for classes also labels.csv",
    )
    add("prediction", type=Path, nargs="+", metavar="PREDICTION", help="folder, file or run; several are compared")
    add("--dataset", type=Path, metavar="FILE", help="dataset.json with the labels (default: of TRUTH, in or above it)")
    add("--regions", type=_region, action="append", metavar="NAME=1,2", help="a class and its labels; can be repeated")
    add("--brats", choices=sorted(BRATS), help="score the regions of BraTS, in the label values of that year")
    add("--test-of", type=Path, metavar="RUN", help="score the cases that RUN kept for tests, with its labels")
    add("--nsd-tolerance", type=float, default=1.0, metavar="MM", help="tolerance of the surface Dice (%(default)s mm)")
    add("--lesion-wise", action="store_true", help="add the lesion-wise scores of BraTS 2023")
    add("--empty", choices=get_args(EmptyPolicy),
        help="classes that a map lacks: skip those that both maps lack, or score all as BraTS does (skip; brats with "
        "--brats)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="summary to write (default: summary.json in PREDICTION's folder)")
    add("--csv", type=Path, metavar="FILE", help="table to write (default: metrics.csv in PREDICTION's folder)")
    add("--workers", type=int, default=min(8, cores), metavar="PROCESSES", help="processes that score (%(default)s)")
    options = parser.parse_args(arguments)
    if options.brats and (options.dataset or options.regions):
        raise ValueError("--brats declares the labels: drop --dataset and --regions, or --brats")
    if not 0 <= options.nsd_tolerance < float("inf"):
        raise ValueError(f"--nsd-tolerance is {options.nsd_tolerance}: give mm, 0 or more")
    if options.workers < 1:
        raise ValueError(f"--workers is {options.workers}: at least 1 is needed")
    options.prediction = expand_folds(options.prediction)
    if len(options.prediction) > 1 and (options.json or options.csv):
        raise ValueError(f"--json, --csv: {len(options.prediction)} predictions have files of their own: remove it")
    options.empty = options.empty or ("brats" if options.brats else "skip")
    return options


def _region(text: str) -> tuple[str, tuple[int, ...]]:
    """Returns a region's name and labels from NAME=1,2,3."""
    name, _, values = text.partition("=")
    try:
        labels = tuple(sorted({int(value) for value in values.split(",")}))
    except ValueError:
        labels = ()
    if not name or not labels:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE,VALUE…, such as TC=1,3")
    return name, labels


def main() -> None:
    sys.exit(run(act))


if __name__ == "__main__":
    main()
