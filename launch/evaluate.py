"""Compares predicted label maps with the true ones: python launch/evaluate.py TRUTH PREDICTION."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import Dataset
from seqpar.launch.evaluation.classes import (
    BRATS,
    Labels,
    find_declaration,
    of_brats,
    of_classes,
    of_dataset,
    read_labels_of,
)
from seqpar.launch.evaluation.label_files import Pair, dataset_at, match, score_pairs
from seqpar.launch.evaluation.scores import Empty, Scores, summarise, table
from seqpar.launch.evaluation.summary_files import document, rows_of, write
from seqpar.launch.job.exit_codes import DATA, run


def region(text: str) -> tuple[str, tuple[int, ...]]:
    """Returns a region's name and labels from NAME=1,2,3."""
    name, _, values = text.partition("=")
    try:
        labels = tuple(sorted({int(value) for value in values.split(",")}))
    except ValueError:
        labels = ()
    if not name or not labels:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE,VALUE…, such as TC=1,3")
    return name, labels


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the command line, checked."""
    p = argparse.ArgumentParser(prog="evaluate.py", description=__doc__, allow_abbrev=False)
    p.add_argument("truth", type=Path, help="data set, folder of NIfTI label maps, or one file")
    p.add_argument("prediction", type=Path, help="folder with files named as the cases, or one file")
    p.add_argument("--dataset", type=Path, help="dataset.json with the labels (else: of TRUTH, in or above it)")
    p.add_argument("--regions", type=region, action="append", metavar="NAME=1,2", help="a class; repeat")
    p.add_argument("--brats", choices=sorted(BRATS), help="its regions in the label values of that year")
    p.add_argument("--nsd-tolerance", type=float, default=1.0, help="of the surface Dice, mm (%(default)s)")
    p.add_argument("--lesion-wise", action="store_true", help="add the lesion-wise scores of BraTS 2023")
    p.add_argument("--empty", choices=get_args(Empty), help="how empty masks count (skip; brats for --brats)")
    p.add_argument("--json", type=Path, help="where to write (summary.json in the prediction's folder)")
    p.add_argument("--csv", type=Path, help="where to write (metrics.csv in the prediction's folder)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    p.add_argument("--workers", type=int, default=min(8, cores), help="processes (%(default)s)")
    options = p.parse_args(arguments)
    if options.brats and (options.dataset or options.regions):
        raise ValueError("--brats declares the labels: drop --dataset and --regions, or --brats")
    if not 0 <= options.nsd_tolerance < float("inf"):
        raise ValueError(f"--nsd-tolerance is {options.nsd_tolerance}: give mm, 0 or more")
    if options.workers < 1:
        raise ValueError(f"--workers is {options.workers}: at least 1 is needed")
    folder = options.prediction if options.prediction.is_dir() else options.prediction.parent
    options.json, options.csv = options.json or folder / "summary.json", options.csv or folder / "metrics.csv"
    options.empty = options.empty or ("brats" if options.brats else "skip")
    return options


def choose_labels(options: argparse.Namespace, dataset: Dataset | None) -> Labels:
    """Returns the labels that the command line or the data set declares."""
    if options.brats:
        return of_brats(options.brats)
    if dataset is not None and not options.dataset:
        declared: Labels | None = of_dataset(dataset)
    else:
        path = options.dataset or find_declaration(options.truth)
        declared = read_labels_of(path) if path else None
    if not options.regions:
        if not declared:
            where = f"there is no dataset.json in {options.truth} or above it"
            raise ValueError(f"{where}: declare the labels by --dataset, --regions or --brats")
        return declared
    if len({name for name, _ in options.regions}) < len(options.regions):
        raise ValueError("--regions names a region twice")
    labels = of_classes(dict(options.regions))
    if declared:
        return Labels(labels.classes, labels.declared | declared.declared, declared.ignore)
    return labels


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code; prints a line per case, the table, what is wrong, and one line that sums up."""
    options = parse(arguments)
    dataset = dataset_at(options.truth)
    pairs, faults = match(options.truth, options.prediction, dataset)
    for folder in (options.json.parent, options.csv.parent):  # now, rather than after an hour of distances
        if folder.exists() and not os.access(folder, os.W_OK):
            raise DataError(folder, "cannot be written to: choose other places by --json and --csv")
    labels = choose_labels(options, dataset)
    settings = {name: getattr(options, name) for name in ("nsd_tolerance", "lesion_wise", "empty")}
    cases: list[tuple[Pair, Scores]] = []
    for pair, result in score_pairs(pairs, labels, settings, min(options.workers, max(len(pairs), 1))):
        if isinstance(result, DataError):
            faults.append(result)
            continue
        cases.append((pair, result))
        found = ", ".join(f"{name} {row['Dice']:.4f}" for name, row in result.items())
        print(f"{pair.case}: Dice {found}", flush=True)
    closing = "no case could be scored"
    if cases:
        summary = summarise([scores for _, scores in cases])
        print(f"\n{table(summary, labels.classes)}\n", flush=True)
        content = document(cases, labels, summary) | {"settings": settings, "faults": list(map(str, faults))}
        texts = json.dumps(content, indent=2) + "\n", rows_of(cases, labels)
        for path, text in zip((options.json, options.csv), texts):
            try:
                write(path, text)
            except DataError as error:
                faults.append(error)
        mean = summary["foreground_mean"]
        closing = f"cases {len(cases)}, classes {len(labels.classes)}: mean Dice {mean['Dice']:.4f}, "
        closing += f"HD95 {mean['HD95']:.2f} mm, NSD {mean['NSD']:.4f} at {options.nsd_tolerance:g} mm"
        closing += f"; {options.json}, {options.csv}"
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr, flush=True)
    print(closing + (f"; faults {len(faults)}" if faults else ""), flush=True)
    return DATA if faults else 0


def main() -> None:
    """Returns never: the console script."""
    sys.exit(run(act))


if __name__ == "__main__":
    main()
