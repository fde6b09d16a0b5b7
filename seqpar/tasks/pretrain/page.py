"""The page about a pretraining: its error on held-out cases, and pictures of what was hidden and rebuilt."""

import argparse
import base64
from pathlib import Path
from typing import Any

from seqpar.report.curves import number
from seqpar.report.record import RunRecord, what_was_learned
from seqpar.report.run_page import FinishedPage, render_run
from seqpar.report.tables import Score, Table, TableHead, TableRow
from seqpar.text import quantity

FOLDER = Path(__file__).parent


def pretraining_page(options: argparse.Namespace, record: RunRecord) -> FinishedPage:
    """Returns the page about a run without labels; ``options``: of report."""
    if flags := [f"--{name}" for name in ("truth", "prediction", "images", "positive") if getattr(options, name)]:
        raise ValueError(f"{flags[0]}: {record.path} is a pretraining, which predicts no labels: remove it")
    picture, png, gaps = record.path / "validation.png", "", list[str]()
    try:
        png = base64.b64encode(picture.read_bytes()).decode()
    except OSError as error:
        gaps.append(f"There are no pictures of held-out cases: {picture} cannot be read ({error.strerror}).")
    sentence, caution = what_was_learned(record.held_out, bool(record.config.get("normalised_targets")))
    parts: dict[str, Any] = {"errors": _errors(record), "png": png, "sentence": sentence}
    cautions = [caution] if caution else []
    return FinishedPage(render_run(FOLDER, record, gaps, (), cautions, loss="mean squared error", **parts))


def _errors(record: RunRecord) -> Table | None:
    """Returns the errors on held-out cases, validation by validation; None before the first."""
    if not record.held_out:
        return None
    rows = [TableRow(f"{row['step']:,}", [Score(number(row.get("loss")), 4)]) for row in record.held_out]
    heads = [TableHead("After step"), TableHead("Mean squared error of hidden voxels")]
    count = int(record.held_out[-1].get("cases", 0))
    note = f"On one tile of each of {quantity(count, 'held-out case')}; the same tokens are hidden in every validation."
    return Table("metrics", heads, rows, note=note)
