"""Compares predicted label maps, or classes, with the true ones: ``python launch/evaluate.py TRUTH PREDICTION``."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from seqpar.cluster.exit_codes import DATA, run
from seqpar.data.errors import DataError
from seqpar.runs.fold_folder import expand_folds
from seqpar.runs.run_folder import read_config, tested_cases
from seqpar.runs.run_status import warn_if_killed
from seqpar.scores.comparison import Scored, compare
from seqpar.scores.label_classes import BRATS, Labels, choose_labels, labels_of_run
from seqpar.scores.label_files import Pair, dataset_at, refuse_missing, score_pairs
from seqpar.scores.label_scores import WORDS, EmptyPolicy, Scores, format_table, summarise
from seqpar.scores.summary_files import ScoringJob, csv_text, plan_scoring, summary_content, write_output
from seqpar.settings.parser import Parser
from seqpar.tasks.classify.scores import evaluate_classes, find_class_tables


def act(arguments: Sequence[str]) -> int:
    """Scores the cases of each prediction, prints what it found and, of several, which is best; returns the code."""
    options = _parse(arguments)
    warn_if_killed(*(folder for path in options.prediction for folder in (path, *path.absolute().parents[:2])))
    refuse_missing(options.prediction)
    if tables := find_class_tables(options.prediction):
        return evaluate_classes(options, tables, tested_cases(options.test_of) if options.test_of else None)
    dataset = dataset_at(options.truth)
    only, labels = None, None
    if options.test_of is not None:
        only, labels = tested_cases(options.test_of), labels_of_run(read_config(options.test_of)["dataset"])
    if labels is None or options.regions or options.brats or options.dataset:
        labels = choose_labels(options.truth, dataset, options.dataset, options.regions or (), options.brats)
    folders, any_faults, words = list[Scored](), False, f"{WORDS}\n"
    for task in plan_scoring(options.truth, options.prediction, dataset, options.json, options.csv, only):
        if len(options.prediction) > 1:
            print(f"\n{task.name}:", flush=True)
        cases, faults = _evaluate(options, task, labels, words)
        any_faults |= bool(faults)
        if cases:
            words = ""  # they have been read
            folders.append(Scored(task.name, {pair.case: scores for pair, scores in cases}))
    if len(folders) > 1:
        print(f"\n{compare(folders)}", flush=True)
    return DATA if any_faults else 0


def _evaluate(
    options: argparse.Namespace, task: ScoringJob, labels: Labels, words: str
) -> tuple[list[tuple[Pair, Scores]], list[DataError]]:
    """Prints a line per case, a table with its ``words``, the faults and one line that sums up.

    Returns the cases and the faults.
    """
    _, pairs, faults, files = task
    settings = {name: getattr(options, name) for name in ("nsd_tolerance", "lesion_wise", "empty")}
    cases: list[tuple[Pair, Scores]] = []
    for pair, result in score_pairs(pairs, labels, settings, min(options.workers, max(len(pairs), 1))):
        if isinstance(result, DataError):
            faults.append(result)
            continue
        cases.append((pair, result))
        dices = ", ".join(f"{name} {row['Dice']:.4f}" for name, row in result.items())
        print(f"{pair.case}: Dice {dices}", flush=True)
    last_line = _write(files, cases, labels, settings, faults, words) if cases else "no case could be scored"
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr, flush=True)
    print(last_line + (f"; faults {len(faults)}" if faults else ""), flush=True)
    return cases, faults


def _write(
    files: dict[str, Path],
    cases: list[tuple[Pair, Scores]],
    labels: Labels,
    settings: dict[str, Any],
    faults: list[DataError],
    words: str,
) -> str:
    """Prints the table and writes both files, a failure being one more fault; returns the line that sums up."""
    summary = summarise([scores for _, scores in cases])
    print(f"\n{format_table(summary, labels.classes)}\n{words}", flush=True)
    content = summary_content(cases, labels, summary) | {"settings": settings, "faults": list(map(str, faults))}
    texts = {"json": json.dumps(content, indent=2) + "\n", "csv": csv_text(cases, labels)}
    for kind, path in files.items():
        try:
            write_output(path, texts[kind])
        except DataError as error:
            faults.append(error)
    mean = summary["foreground_mean"]
    line = f"cases {len(cases)}, classes {len(labels.classes)}: mean Dice {mean['Dice']:.4f}, "
    line += f"HD95 {mean['HD95']:.2f} mm, NSD {mean['NSD']:.4f} at {settings['nsd_tolerance']:g} mm"
    return "; ".join(filter(None, [line, ", ".join(map(str, files.values()))]))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the command line, checked."""
    parser = Parser("evaluate", description="Compares predicted label maps, or classes, with the true ones.")
    add = parser.add_argument
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    add("truth", type=Path, metavar="TRUTH", help="data set, folder of label maps, or one; for classes labels.csv too")
    add("prediction", type=Path, nargs="+", metavar="PREDICTION", help="folder, file or run; several are compared")
    add("--dataset", type=Path, metavar="FILE", help="dataset.json with the labels (default: of TRUTH, in or above it)")
    add("--regions", type=_region, action="append", metavar="NAME=1,2", help="a class and its labels; can be repeated")
    add("--brats", choices=sorted(BRATS), help="score the regions of BraTS, in the label values of that year")
    add("--test-of", type=Path, metavar="RUN", help="score the cases that RUN kept for tests, by its labels")
    add("--nsd-tolerance", type=float, default=1.0, metavar="MM", help="tolerance of the surface Dice (%(default)s mm)")
    add("--lesion-wise", action="store_true", help="add the lesion-wise scores of BraTS 2023")
    add("--empty", choices=get_args(EmptyPolicy),
        help="class that a case lacks: leave out, or count as BraTS does (skip; brats with --brats)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="summary to write (default: summary.json in PREDICTION's folder)")
    add("--csv", type=Path, metavar="FILE", help="table to write (default: metrics.csv in PREDICTION's folder)")
    add("--workers", type=int, default=min(8, cores), metavar="PROCESSES", help="that score cases (%(default)s)")
    options = parser.parse_args(arguments)
    if options.brats and (options.dataset or options.regions):
        raise ValueError("--brats declares the labels: drop --dataset and --regions, or --brats")
    if not 0 <= options.nsd_tolerance < float("inf"):
        raise ValueError(f"--nsd-tolerance is {options.nsd_tolerance}: give mm, 0 or more")
    if options.workers < 1:
        raise ValueError(f"--workers is {options.workers}: at least 1 is needed")
    options.prediction = expand_folds(options.prediction)
    if len(options.prediction) > 1 and (options.json or options.csv):
        raise ValueError(f"--json, --csv: {len(options.prediction)} predictions have files of their own: leave it out")
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
