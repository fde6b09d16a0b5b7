"""The figures' kept results: their verdicts follow from their points, and the manual quotes them."""

import csv
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from figures import FIGURES
from lab.figures.figure import NOTED_SETTINGS, TOLERANCES, Figure, FigureRequest, Results, runs_of, scaling
from lab.figures.paper_figures import SCALES
from lab.figures.tile_figure import WHOLE
from lab.figures.verdicts import OWN_QUESTION, with_question
from seqpar.report.curves import DICE, Curve
from seqpar.settings.command_line import parse
from seqpar.settings.config import SETTINGS, Config
from seqpar.settings.presets import PRESETS, hou
from seqpar.settings.rules import why_without_effect
from seqpar.sweeps.planned_run import PlannedRun, config_of

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "launch" / "lab" / "figures" / "results"
FIGURES_PAGE = (ROOT / "docs/explanation/figures.md").read_text()
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


@dataclass(frozen=True)
class KeptTiles(KeptResults):
    """Those of figures 16 and 18, whose curves are named by the sizes of their tiles; the settings are today's."""

    def curves(self, quantity: str, *labels: str) -> list[Curve]:
        every = zip(self.runs, super().curves(quantity))
        return [replace(curve, label=label) for label, curve in every if label in (labels or self.runs)]

    def config(self, label: str = "") -> Config:
        config = config_of_today(self.number, label or next(iter(self.runs)))
        if label != WHOLE:
            return config
        (*_, name) = super().curves(DICE)
        sides = re.findall(r"\d+", name.label)
        return replace(config, tile=tuple(map(int, sides)), batch=1)


@cache
def today(number: int) -> dict[str, list[PlannedRun]]:
    """Returns the runs that ``--scale laptop`` would make now."""
    figure = FIGURES[number]
    order = FigureRequest("laptop", {"data": "Dataset996_PhantomVessels"} if figure.data else {})
    return runs_of(figure, order, SCALES)


@cache
def config_of_today(number: int, label: str) -> Config:
    return config_of(today(number)[label][0])


def verdicts(number: int) -> list[str]:
    _, _, *lines = (KEPT / f"figure-{number}.txt").read_text().splitlines()
    return lines[: lines.index("")]


@pytest.mark.parametrize("number", [5, 6, 7, 8, 10, 13, 16, 18])
def test_verdicts_follow_from_the_points(number: int) -> None:
    figure: Figure = FIGURES[number]
    is_named_by_size = number in (16, 18)
    labels = today(number) if is_named_by_size else [name for quantity, name, *_ in points(number) if quantity == DICE]
    within = TOLERANCES["fp32" if number == 7 else "fp64"]  # the arithmetic of its runs
    kind = KeptTiles if is_named_by_size else KeptResults
    results = kind(dict.fromkeys(labels, ()), reach=0.25, number=number, within=within)
    assert with_question(figure.judge(results)) == verdicts(number)


def test_seconds_to_a_dice_follow_from_the_points() -> None:
    question, verdict = verdicts(14)
    assert question == OWN_QUESTION
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
HOU = {  # by the paper of Hou et al. or its release, of its lowest resolution
    "features": "256", "dropout": "0.5", "batch": "16", "epochs": "1000", "iterations": "500", "lr": "0.003",
    "optimizer": "adafactor", "schedule": "step", "warmup": "0", "precision": "bf16", "synthesis": "0.5",
}  # fmt: skip
OF_ITS_FIGURE = {7: {**STATED, "tile": "128", "batch": "16"}, 18: HOU}
NOTED = re.compile(r"([a-z-]+) ([^ ,]+)(?: \((?:paper|Hou et al.): ([^)]+)\))?")


def kept_note(number: int) -> str:
    """Returns the settings that were recorded when a figure was made."""
    (note,) = re.findall(r"^--scale .* seeds?: (.+)$", (KEPT / f"figure-{number}.txt").read_text(), re.M)
    return str(note)


@pytest.mark.parametrize("number", range(5, 20))
def test_a_note_compares_with_what_the_paper_states_of_the_figure(number: int) -> None:
    note = kept_note(number)
    noted = NOTED.findall(note)
    stated, published = OF_ITS_FIGURE.get(number, STATED), FIGURES[number].published
    assert {name: theirs for name, _, theirs in noted} == {name: stated.get(name, "") for name, *_ in noted}
    flags = [[f"--{name}", *[ours] * (ours != "yes")] for name, ours, _ in noted]
    flags += [["--global-batch", "0"]] * (number == 18)  # else it is the batch
    assert scaling(parse([word for flag in flags for word in flag], published.preset)[1], published) == note
    own = {"dropout", "synthesis", "clip"} if number == 18 else {"dice", "fold", "clip"}
    assert own <= {name for name, *_ in noted}, "of the loss and the tiles too"


@pytest.mark.parametrize("number", [5, 6, 7, 8])
def test_at_the_papers_scale_only_what_it_does_not_state_is_noted(number: int) -> None:
    figure = FIGURES[number]
    (first, *_), *_ = runs_of(figure, FigureRequest("paper"), SCALES).values()
    assert scaling(config_of(first), figure.published) == "phantoms 24, epochs 400"


def test_at_the_papers_scale_figure_18_is_the_training_of_hou_et_al() -> None:
    figure = FIGURES[18]
    every = runs_of(figure, FigureRequest("paper", {"data": "Task03_Liver"}), SCALES)
    configs = {label: config_of(run) for label, (run,) in every.items()}
    for config in configs.values():
        names = ("tile", "spacing", "features", "network", "data")
        own = {name: getattr(config, name) for name in names}
        tiles = 8 if config.tile == (512, 512, 512) else 16
        preset = replace(hou(), **own, global_batch=tiles)
        assert config == preset, "all else is the preset's: rate, schedule, steps, dropout, synthesis, precision"
    assert scaling(configs["coarse"], figure.published) == "data Task03_Liver, epochs 1000"
    without_data = config_of(runs_of(figure, FigureRequest("paper"), SCALES)["coarse"][0])
    assert (without_data.synthesis, without_data.synthesis_per) == (0.5, "tile"), "brains have no labelled organ"
    on_groups = replace(configs["coarse"], batch=2)
    assert "batch" not in scaling(on_groups, figure.published), "it is that of all groups"


def rows_of_the_manual() -> dict[int, list[str]]:
    """Returns what the page says of each figure: the paper, what is seen here, whether it is reproduced."""
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", FIGURES_PAGE, re.M)
    return {int(number): cells for number, *cells in rows}


def test_the_verdicts_of_the_manual_are_those_that_are_kept() -> None:
    rows = rows_of_the_manual()
    for number in (5, 6, 7, 8, 16, 18):
        says, sees, answer = rows[number]
        paper, claim = says.split(": ", 1) if number > 8 else ("The paper", says)
        kept = [re.sub(r"(?<=\d)x(?=\d)", " × ", line) for line in verdicts(number)]
        assert kept[-3:] == [f"{paper} says: {claim}", f"We see: {sees}", f"Reproduced: {answer}"]
    for number in rows.keys() - {5, 6, 7, 8, 16, 18}:
        assert verdicts(number)[0] == OWN_QUESTION and rows[number][::2] == ["–", "–"]


def test_the_numbers_of_the_manual_are_those_that_are_kept() -> None:
    rows = rows_of_the_manual()
    assert set(rows) == set(FIGURES)
    for number in range(9, 20):
        numbers = re.findall(r"\d+\.\d+(?:e-\d+)?", rows[number][1])
        missing = [one for one in numbers if one not in " ".join(verdicts(number)) and one != "0.3"]
        assert not missing, f"figure {number}: {missing}"


def first_of_today(number: int) -> Config:
    """Returns the settings of the first curve that ``--scale laptop`` would draw now."""
    return config_of_today(number, next(iter(today(number))))


def test_the_manual_names_the_figures_that_todays_settings_would_draw_otherwise() -> None:
    changed = [n for n in FIGURES if scaling(first_of_today(n), FIGURES[n].published) != kept_note(n)]
    (text,) = re.findall(r"^Figures ([\d, toand]+) were run with other settings", FIGURES_PAGE, re.M)
    spans = [list(map(int, span.split(" to "))) for span in re.split(", | and ", text)]
    assert changed == [n for first, *last in spans for n in range(first, max([first, *last]) + 1)]


NOT_NOTED: dict[str, set[Any]] = {  # what the notes leave out of the kept figures' settings, where it is not a paper's
    "join_labels": {"tumour=1,2,3"}, "targets": {"regions"}, "dice_background": {False}, "interpolation": {"linear"},
    "spacing": {"1.3,1.45,1.27", "2.6,2.9,2.54"}, "deep_supervision": {True}, "mode": {"halo", "gather"},
    "global_batch": {0}, "workers": {1}, "val_every": {1, 2}, "val_cases": {2}, "val_overlap": {0.25},
    "val_window": {"both"},
}  # fmt: skip


def test_settings_that_the_notes_leave_out_are_those_of_the_kept_figures() -> None:
    """A setting that laptop gets later, or another value of one, has to be noted, or the page to name the figures."""
    found: dict[str, set[Any]] = {}
    for number, figure in FIGURES.items():
        config, published = first_of_today(number), figure.published
        theirs = replace(PRESETS[published.preset](), **published.settings)
        for name in SETTINGS.keys() - set(NOTED_SETTINGS):
            if getattr(config, name) != getattr(theirs, name) and not why_without_effect(config, name):
                found.setdefault(name, set()).add(getattr(config, name))
    assert found == NOT_NOTED
