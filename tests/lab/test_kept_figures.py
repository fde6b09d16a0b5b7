"""The figures' kept results: their verdicts follow from their points, and the manual quotes them."""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from figures import FIGURES
from lab.figures.figure import TOLERANCES, Figure, FigureRequest, Results, runs_of, scaling
from lab.figures.paper_figures import SCALES
from seqpar.report.curves import DICE, Curve
from seqpar.settings.command_line import parse
from seqpar.sweeps.planned_run import config_of

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "launch" / "lab" / "figures" / "results"
Points = dict[tuple[str, str, str, int], list[tuple[float, float]]]  # by quantity, curve, axis and seed


def points(number: int) -> Points:
    every: Points = {}
    with (KEPT / f"figure-{number}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if not row["seed_or_kind"].isdigit():
                continue  # a bar
            key = (row["quantity"], row["curve"], row["over"], int(row["seed_or_kind"]))
            every.setdefault(key, []).append((float(row["place"]), float(row["value"])))
    return every


@dataclass(frozen=True)
class KeptResults(Results):
    """Results whose curves are read from a table of points in place of journals."""

    number: int = 0
    within: float = TOLERANCES["fp64"]

    def curves(self, quantity: str, *labels: str) -> list[Curve]:
        every = points(self.number)
        known = list(dict.fromkeys(curve for name, curve, over, _ in every if (name, over) == (quantity, "step")))
        return [self._curve(every, quantity, label) for label in labels or known]

    @staticmethod
    def _curve(every: Points, quantity: str, label: str) -> Curve:
        seeds = sorted({seed for name, curve, _, seed in every if (name, curve) == (quantity, label)})
        rows = [every[quantity, label, "step", seed] for seed in seeds]
        seconds = every.get((quantity, label, "seconds of training", seeds[0]), ())
        steps = tuple(int(step) for step, _ in rows[0])
        return Curve(label, steps, tuple(tuple(v for _, v in row) for row in rows), tuple(s for s, _ in seconds))

    @property
    def tolerance(self) -> float:
        return self.within

    def parameters(self, label: str) -> int:
        (line,) = (line for line in verdicts(self.number) if ": parameters: " in line)
        (count,) = re.findall(rf" {re.escape(label)} ([\d,]+)(?:, |$)", line)
        return int(count.replace(",", ""))


def verdicts(number: int) -> list[str]:
    _, _, *lines = (KEPT / f"figure-{number}.txt").read_text().splitlines()
    return lines[: lines.index("")]


@pytest.mark.parametrize("number", [5, 6, 7, 8, 10, 13])
def test_verdicts_follow_from_the_points(number: int) -> None:
    figure: Figure = FIGURES[number]
    labels = (curve for quantity, curve, *_ in points(number) if quantity == DICE)
    within = TOLERANCES["fp32" if number == 7 else "fp64"]  # the arithmetic of its runs
    results = KeptResults(dict.fromkeys(labels, ()), reach=0.25, number=number, within=within)
    assert figure.judge(results) == verdicts(number)


def test_seconds_to_a_dice_follow_from_the_points() -> None:
    (verdict,) = verdicts(14)
    every = {curve: rows for (quantity, curve, over, _), rows in points(14).items() if quantity == DICE}
    assert len(every) == 7
    for curve, rows in every.items():
        seconds = next((place for place, dice in rows if dice >= 0.3), None)
        assert f" {curve} {'never' if seconds is None else f'{seconds:.3g} s'}" in verdict, curve


def test_figures_are_kept_with_commit_command_and_machine() -> None:
    for number in range(5, 20):
        text = (KEPT / f"figure-{number}.txt").read_text()
        assert re.search(r"`python launch/figures.py .*--scale laptop.*` at [0-9a-f]{7}.*cores", text), number
        assert (KEPT / f"figure-{number}.csv").stat().st_size < 250_000
    assert "3 seeds" in (KEPT / "figure-15.txt").read_text(), "one says nothing of what pretraining brings"
    assert all(path.stat().st_size < 250_000 for path in KEPT.iterdir())


STATED = {  # by the paper, of its base case
    "network": "vit", "tile": "96", "patch": "16", "decoder": "plain", "depth": "12", "embed-dim": "768", "heads": "12",
    "decoder-width": "128", "batch": "32", "iterations": "50", "lr": "0.0001", "precision": "fp32", "dice": "squared",
    "fold": "90:10", "foreground": "0", "augment": "paper", "loss": "dice-ce",
}  # fmt: skip
OF_ITS_FIGURE = {7: {"tile": "128", "batch": "16"}}
NOTED = re.compile(r"([a-z-]+) ([^ ,]+)(?: \(paper: ([^)]+)\))?")


@pytest.mark.parametrize("number", range(5, 20))
def test_a_note_compares_with_what_the_paper_states_of_the_figure(number: int) -> None:
    (note,) = re.findall(r"^--scale .* seeds?: (.+)$", (KEPT / f"figure-{number}.txt").read_text(), re.M)
    noted = NOTED.findall(note)
    stated = {**STATED, **OF_ITS_FIGURE.get(number, {})}
    assert {name: theirs for name, _, theirs in noted} == {name: stated.get(name, "") for name, *_ in noted}
    flags = [[f"--{name}", *[ours] * (ours != "yes")] for name, ours, _ in noted]
    assert scaling(parse([word for flag in flags for word in flag], "paper")[1], FIGURES[number].stated) == note
    assert {"dice", "fold", "clip"} <= {name for name, *_ in noted}, "of the loss and the tiles too"


@pytest.mark.parametrize("number", [5, 6, 7, 8])
def test_at_the_papers_scale_only_what_it_does_not_state_is_noted(number: int) -> None:
    figure = FIGURES[number]
    (first, *_), *_ = runs_of(figure, FigureRequest("paper"), SCALES).values()
    assert scaling(config_of(first), figure.stated) == "phantoms 24, epochs 400"


def rows_of_the_manual() -> dict[int, list[str]]:
    """Returns what the page says of each figure: the paper, what is seen here, whether it is reproduced."""
    rows = re.findall(
        r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", (ROOT / "docs/explanation/figures.md").read_text(), re.M
    )
    return {int(number): cells for number, *cells in rows}


def test_the_verdicts_of_the_manual_are_those_that_are_kept() -> None:
    rows = rows_of_the_manual()
    for number in (5, 6, 7, 8):
        (says, sees, answer), start = rows[number], len("The paper says: ")
        assert verdicts(number)[-3][start:] == says
        assert verdicts(number)[-2:] == [f"We see: {sees}", f"Reproduced: {answer}"]


def test_the_numbers_of_the_manual_are_those_that_are_kept() -> None:
    rows = rows_of_the_manual()
    assert set(rows) == set(FIGURES)
    for number in range(9, 20):
        numbers = re.findall(r"\d+\.\d+(?:e-\d+)?", rows[number][1])
        missing = [one for one in numbers if one not in " ".join(verdicts(number)) and one != "0.3"]
        assert not missing, f"figure {number}: {missing}"
