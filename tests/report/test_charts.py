"""The charts of pages: their axes."""

from pathlib import Path
from typing import Any

import pytest

from seqpar.report import plots
from seqpar.report.curves import Diagram, Line, training_diagrams
from seqpar.report.images import about_windows
from seqpar.report.record import RunRecord


@pytest.mark.parametrize("values", [(0.68, 0.7), (0.91, 0.95), (1.31, 1.35), (3.37,), (1.9, 0.6), (-0.5, -0.7)])
def test_the_highest_value_lies_below_a_tick(values: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    figures, make_figure = list[Any](), plots.make_figure
    monkeypatch.setattr(plots, "_inline", lambda *_: "")
    monkeypatch.setattr(plots, "make_figure", lambda *size: figures.append(make_figure(*size)) or figures[0])
    line = Line("loss", range(len(values)), [list(values)], dots=True)
    plots.draw_chart(Diagram("Loss", "step", [line], low=0.0 if values[0] > 0 else None))
    (plot,) = figures[0].axes
    low, high = plot.get_ylim()
    ticks = [tick for tick in plot.get_yticks() if low - 1e-9 <= tick <= high + 1e-9]
    assert low <= min(values) and max(values) <= max(ticks) == pytest.approx(high), (ticks, low, high)


def test_the_loss_on_held_out_cases_names_the_terms_that_it_lacks() -> None:
    terms = {"ce_loss": 0.2, "dice_loss": 0.7}
    train = [{"step": 0, "loss": 1.0, "lr": 0.1, "skeleton_recall_loss": 0.1, **terms}]
    held_out = [{"step": 1, "loss": 0.9, "cases": 3, "dice": {"a": 0.5}, **terms}]
    training, validation = training_diagrams(train, held_out)[0].lines
    assert (training.label, validation.label) == ("training", "held out (n = 3), without skeleton recall loss")
    for row in (held_out[0] | {"skeleton_recall_loss": 0.1}, {"step": 1, "loss": 0.9, "cases": 3}):
        assert training_diagrams(train, [row])[0].lines[1].label == "held out (n = 3)", "all, or an earlier version"


def test_curves_of_both_kinds_of_window_are_of_one() -> None:
    """A loss that falls both ways must not seem to rise because the other way was better at a step."""
    each = [{"whole": (0.9, 0.4), "sliding": (1.1, 0.3)}, {"whole": (0.8, 0.5), "sliding": (0.95, 0.6)}]
    rows = list[dict[str, Any]]()
    for step, own in enumerate(each):
        window = max(own, key=lambda name: own[name][1])
        parts = {name: {"loss": loss, "dice": {"a": dice}} for name, (loss, dice) in own.items()}
        rows.append({"step": step, **parts[window], "window": window, "by_window": parts})
    assert [row["window"] for row in rows] == ["whole", "sliding"]
    losses, dices = training_diagrams([], rows)
    assert losses.lines[1].rows == [[1.1, 0.95]] and losses.lines[1].label == "held out, in windows"
    assert dices.lines[0].rows == [[0.3, 0.6]] and dices.quantity.endswith(", in windows")


def test_a_chart_says_in_which_windows_validations_predicted() -> None:
    rows = [{"step": n, "loss": 1.0, "dice": {"a": 0.5}, "window": "whole"} for n in (1, 2)]
    alike, mixed = (
        training_diagrams([], own)[-1].quantity for own in (rows, [rows[0], rows[1] | {"window": "sliding"}])
    )
    assert alike.endswith(", in one pass") and mixed == alike.replace("in one pass", "in one pass or in windows")


def test_runs_that_predict_in_different_ways_are_named() -> None:
    def run(window: str, *rows: str) -> RunRecord:
        held_out = tuple({"step": n, "dice": {}, **({"window": row} if row else {})} for n, row in enumerate(rows))
        return RunRecord(Path(), {"config": {"val_window": window}}, None, {}, held_out=held_out)

    flips = run("both", "sliding", "whole")
    for row, dice in zip(flips.held_out, (0.4, 0.5)):
        row |= {"loss": 1.0, "dice": {"n": dice}, "by_window": {"whole": {"loss": 0.9}, "sliding": {"loss": 1.1}}}
    assert about_windows({"a": flips, "b": run("whole", "")}) == [], "its curves are of one way"
    alike = {"a": run("sliding", ""), "b": run("both", "sliding"), "c": run("whole")}  # c has not been validated
    assert about_windows(alike) == [] == about_windows({"a": run("whole", "")})
    (told,) = about_windows({**alike, "d": run("both", "whole", "sliding"), "e": run("whole", "")})
    assert told.endswith(
        "ways: in windows (a, b); in one pass or in windows (d); in one pass (e). That alone changes losses and scores."
    )
