"""The page about a pretraining: its error on held-out cases, and pictures of what was hidden and rebuilt."""

import argparse
import base64
from pathlib import Path

from seqpar.report.curves import number
from seqpar.report.record import RunRecord
from seqpar.report.run_page import FinishedPage, render_run
from seqpar.report.tables import Score, Table, TableHead, TableRow

FOLDER = Path(__file__).parent


def pretraining_page(options: argparse.Namespace, record: RunRecord) -> FinishedPage:
    """Returns the page about a run without labels; ``options``: of report."""
    if flags := [f"--{name}" for name in ("truth", "images") if getattr(options, name) is not None]:
        raise ValueError(f"{flags[0]}: {record.path} is a pretraining, which predicts no labels: remove it")
    picture, png, gaps = record.path / "validation.png", "", list[str]()
    try:
        png = base64.b64encode(picture.read_bytes()).decode()
    except OSError as error:
        gaps.append(f"There are no pictures of held-out cases: {picture} cannot be read ({error.strerror}).")
    return FinishedPage(render_run(FOLDER, record, gaps, errors=_errors(record), png=png))


def _errors(record: RunRecord) -> Table | None:
    """Returns the errors on held-out cases, validation by validation; None before the first."""
    if not record.held_out:
        return None
    rows = [TableRow(f"{row['step']:,}", [Score(number(row.get("loss")), 4)]) for row in record.held_out]
    heads = [TableHead("After step"), TableHead("Mean squared error of what is hidden")]
    count = record.held_out[-1].get("cases", "–")
    note = f"On a tile of each of {count} held-out cases; the same tokens are hidden every time."
    return Table("metrics", heads, rows, note=note)
