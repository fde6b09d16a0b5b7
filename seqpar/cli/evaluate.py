"""Compares predicted label maps, or classes, with the true ones: ``python launch/evaluate.py TRUTH PREDICTION``."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from seqpar.cluster.exit_codes import run
from seqpar.data.errors import DataError
from seqpar.prediction.prediction_folder import warn_if_predicting
from seqpar.runs.fold_folder import expand_folds
from seqpar.runs.run_status import warn_if_killed
from seqpar.scores.label_classes import BRATS
from seqpar.scores.label_files import list_label_files, refuse_missing
from seqpar.scores.label_scores import EmptyPolicy
from seqpar.settings.field import AT_LEAST_A_PROCESS
from seqpar.settings.parser import Parser, check_numbers
from seqpar.tasks.lookup import task_of_predictions
from seqpar.weights.nnunet_results import is_results


def act(arguments: Sequence[str]) -> int:
    """Scores the cases of each prediction, prints the scores and, of several, which is best; returns the exit code."""
    options = _parse(arguments)
    warn_if_killed(*(folder for path in options.prediction for folder in (path, *path.absolute().parents[:2])))
    warn_if_predicting(*options.prediction)
    refuse_missing(options.prediction)
    return task_of_predictions(options.prediction).evaluate(options)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the command line, checked."""
    parser = Parser("evaluate", description="Compares predicted label maps, or classes, with the true ones.")
    add = parser.add_argument
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    add("truth", type=Path, metavar="TRUTH", help="data set, folder of label maps, or a label map; for classes also "
        "labels.csv")  # fmt: skip
    add("prediction", type=Path, nargs="+", metavar="PREDICTION", help="folder, file, run, or nnU-Net's "
        "results folder; several are compared")  # fmt: skip
    add("--dataset", type=Path, metavar="FILE", help="dataset.json with the labels, or its folder (default: of TRUTH, "
        "in or above it)")  # fmt: skip
    add("--regions", type=_region, action="append", metavar="NAME=1,2", help="a class and its labels; can be repeated")
    add("--brats", choices=sorted(BRATS), help="score the regions of BraTS, in the label values of that year")
    add("--test-of", type=Path, metavar="RUN", help="score the cases that RUN kept for tests, with its labels")
    add("--nsd-tolerance", type=float, default=1.0, metavar="MM", help="tolerance of the surface Dice (%(default)s mm)")
    add("--lesion-wise", action="store_true", help="add the lesion-wise scores of BraTS 2023, with margins in mm")
    add("--centreline", action="store_true", help="add the share of the true centre line that is predicted")
    add("--calibration", action="store_true", help="add each class's calibration, of the probabilities that --npz "
        "wrote, and draw it next to the summary")  # fmt: skip
    add("--empty", choices=get_args(EmptyPolicy),
        help="classes that a map lacks: skip those that both maps lack, or score all as BraTS does (skip; brats with "
        "--brats)")  # fmt: skip
    add("--common", action="store_true", help="score only the cases that TRUTH and PREDICTION share, and do not "
        "mention others (nnU-Net's --chill)")  # fmt: skip
    add("--find-best", nargs="?", type=Path, const=Path(), metavar="FILE", help="say which "
        "of several predictions is best, averages of two with --npz included, and learn its postprocessing, as "
        "nnUNetv2_find_best_configuration does; FILE to write (default: postprocessing.json in the best)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="summary to write (default: summary.json in PREDICTION's folder)")
    add("--csv", type=Path, metavar="FILE", help="table to write (default: metrics.csv in PREDICTION's folder)")
    add("--workers", type=int, default=min(8, cores), metavar="PROCESSES", help="processes that score "
        "(default: number of cores, at most 8)")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.brats and (options.dataset or options.regions):
        raise ValueError("--brats declares the labels: drop --dataset and --regions, or --brats")
    if not 0 <= options.nsd_tolerance < float("inf"):
        raise ValueError(f"--nsd-tolerance is {options.nsd_tolerance}: give mm, 0 or more")
    check_numbers(options, workers=AT_LEAST_A_PROCESS)
    runs = [(run, path) for path in options.prediction for run in _folds_of(path)]
    options.prediction, options.groups = [run for run, _ in runs], dict(runs)
    if len(options.prediction) > 1 and (options.json or options.csv):
        raise ValueError(f"--json, --csv: {len(options.prediction)} predictions have files of their own: remove it")
    options.empty = options.empty or ("brats" if options.brats else "skip")
    return options


def _folds_of(path: Path) -> list[Path]:
    """Returns the runs of a folder of five folds, the validations of an nnU-Net results folder, or the path."""
    if not is_results(path) or list_label_files(path):  # nnU-Net puts its plans next to predictions, too
        return expand_folds([path])
    folders = sorted(folder for folder in path.glob("fold_*/validation") if list_label_files(folder))
    numbered = [folder for folder in folders if re.fullmatch(r"fold_\d+", folder.parent.name)]
    chosen = numbered or [folder for folder in folders if folder.parent.name == "fold_all"]
    if not chosen:
        raise DataError(path, "has no fold_N/validation with label maps: let nnU-Net finish, or give predictions")
    return chosen


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
