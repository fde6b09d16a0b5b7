"""The page about a pretraining: its error on held-out cases, and pictures of what was hidden and rebuilt."""

import argparse
import base64
import math
from pathlib import Path
from typing import Any

from seqpar.report.curves import number
from seqpar.report.record import RunRecord
from seqpar.report.run_page import FinishedPage, render_run
from seqpar.report.tables import Score, Table, TableHead, TableRow
from seqpar.text import quantity

FOLDER = Path(__file__).parent


def pretraining_page(options: argparse.Namespace, record: RunRecord) -> FinishedPage:
    """Returns the page about a run without labels; ``options``: of report."""
    if flags := [f"--{name}" for name in ("truth", "images", "positive") if getattr(options, name) is not None]:
        raise ValueError(f"{flags[0]}: {record.path} is a pretraining, which predicts no labels: remove it")
    picture, png, gaps = record.path / "validation.png", "", list[str]()
    try:
        png = base64.b64encode(picture.read_bytes()).decode()
    except OSError as error:
        gaps.append(f"There are no pictures of held-out cases: {picture} cannot be read ({error.strerror}).")
    sentence, cautions = _learned(record)
    parts: dict[str, Any] = {"errors": _errors(record), "png": png, "sentence": sentence}
    return FinishedPage(render_run(FOLDER, record, gaps, (), cautions, loss="mean squared error", **parts))


LITTLE = 0.8  # of the error of the mean intensity; above it, a pretraining has learned little


def _learned(record: RunRecord) -> tuple[str, list[str]]:
    """Returns a sentence that compares the best error with that of the mean intensity, and a caution if it is close."""
    known = [(number(row.get("loss")), number(row.get("error_of_mean"))) for row in record.held_out]
    known = [pair for pair in known if not any(map(math.isnan, pair))]
    if not known:
        return "", []
    error, of_mean = min(known)
    guess = "each patch's own mean" if record.config.get("normalised_targets") else "the mean intensity"
    sentence = f"The best error is {error:.4f}. Filling the hidden voxels with {guess} would give {of_mean:.4f}."
    little = f"Little was learned: the best error is {error:.4f}, and {guess} alone gives {of_mean:.4f}. Train longer."
    return sentence, [little] if error > LITTLE * of_mean else []


def _errors(record: RunRecord) -> Table | None:
    """Returns the errors on held-out cases, validation by validation; None before the first."""
    if not record.held_out:
        return None
    rows = [TableRow(f"{row['step']:,}", [Score(number(row.get("loss")), 4)]) for row in record.held_out]
    heads = [TableHead("After step"), TableHead("Mean squared error of hidden voxels")]
    count = int(record.held_out[-1].get("cases", 0))
    note = f"On one tile of each of {quantity(count, 'held-out case')}; the same tokens are hidden in every validation."
    return Table("metrics", heads, rows, note=note)
