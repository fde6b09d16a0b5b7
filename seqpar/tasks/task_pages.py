"""The page about a run, by what it was trained for: label maps, classes of cases, or hidden parts of images."""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from seqpar.data.errors import DataError
from seqpar.report.cases import load_worst, section
from seqpar.report.images import find_images
from seqpar.report.record import RunRecord, read_scores, score_folders
from seqpar.report.run_page import page
from seqpar.tasks.classify.page import class_cases, class_page, read_class_scores
from seqpar.tasks.classify.prediction import EXPLANATIONS
from seqpar.tasks.pretrain.rebuilt_page import rebuilt_page
from seqpar.text import quantity

_NO_CASE = "<p>No case is shown.</p>"
T = TypeVar("T")


@dataclass(frozen=True)
class FinishedPage:
    """A page.

    - ``what``: what it shows, in words that end with a comma
    - ``faults``: of the two folders that were named
    """

    text: str
    what: str = ""
    faults: Sequence[str] = ()


def _of_label_maps(options: argparse.Namespace, record: RunRecord) -> FinishedPage:
    """Returns the page about a run that labels voxels; ``options``: of report."""
    scored, gaps = None, list[str]()
    if options.truth is not None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        assert record.labels is not None
        scored = score_folders(options.truth, options.prediction, record.labels, min(8, cores))
    else:
        scored = _tried(lambda: read_scores(record.path), gaps)
    cases, volumes, shown = _NO_CASE, dict[str, Any](), list[Any]()
    if scored and options.cases:
        images = find_images(record, options.images, options.truth, gaps)
        shown = load_worst(record, scored, options.cases, images, gaps)
    if scored and shown:
        cases, volumes = section(record, scored, shown, _is_neurological(options, record))
    faults: Sequence[str] = scored.faults if scored and options.truth is not None else ()
    return FinishedPage(page(record, scored, cases, volumes, gaps), f"{quantity(len(shown), 'case')} shown, ", faults)


def _of_classes(options: argparse.Namespace, record: RunRecord) -> FinishedPage:
    """Returns the page about a run that gives each case a class."""
    if options.images is not None:
        raise ValueError("--images: cases are shown as predict --explain drew them, or as prepared: leave it out")
    summary, cases, gaps = None, _NO_CASE, list[str]()
    explained = options.prediction and options.prediction / EXPLANATIONS
    if options.neurological is not None and explained and explained.is_dir():
        flag = "--neurological" if options.neurological else "--no-neurological"
        raise ValueError(f"{flag} would do nothing: {explained} has pictures as predict drew them: leave it out")
    if options.truth is not None:
        summary = read_class_scores(record, options.truth, options.prediction)
    else:
        summary = _tried(lambda: read_class_scores(record), gaps)
    if summary and options.cases:
        cases = class_cases(record, summary, options.cases, explained, _is_neurological(options, record), gaps)
    faults = summary["faults"] if summary and options.truth is not None else ()
    return FinishedPage(class_page(record, summary, cases, faults, gaps), "", faults)


def _of_pretraining(options: argparse.Namespace, record: RunRecord) -> FinishedPage:
    """Returns the page about a run without labels."""
    if flags := [f"--{name}" for name in ("truth", "images") if getattr(options, name) is not None]:
        raise ValueError(f"{flags[0]}: {record.path} is a pretraining, which predicts no labels: leave it out")
    return FinishedPage(rebuilt_page(record))


def _tried(read: Callable[[], T], gaps: list[str]) -> T | None:
    """Returns the scores of single cases; where there are none, None, and why among the gaps."""
    try:
        return read()
    except DataError as error:
        gaps.append(f"There are no scores of single cases: {error}.")
        return None


def _is_neurological(options: argparse.Namespace, record: RunRecord) -> bool:
    """Returns whether the patient's left is shown on the left."""
    return bool(record.config.get("neurological") if options.neurological is None else options.neurological)


PAGES: dict[str, Callable[[argparse.Namespace, RunRecord], FinishedPage]] = {
    "segment": _of_label_maps,
    "classify": _of_classes,
    "pretrain": _of_pretraining,
}
