"""Pictures of classifiers: which curves there are, and that names are shown as they are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqpar.report import pictures
from seqpar.report.pictures import draw_evidence, draw_scores
from seqpar.scores.class_scores import score_classes

NAMES = ["healthy", "a$b$", "$\\frac$"]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the figures that are drawn, instead of files."""
    drawn: list[Any] = []

    def take(figure: Any, path: Path) -> None:
        figure.draw_without_rendering()
        drawn.append(figure)

    monkeypatch.setattr(pictures, "save_figure", take)
    return drawn


def summary(names: list[str]) -> dict:
    truth = np.arange(12) % len(names)
    probabilities = np.random.default_rng(0).dirichlet(np.ones(len(names)), 12)
    cases = [{"truth": names[t], "probabilities": row.tolist()} for t, row in zip(truth, probabilities)]
    return {"names": names, "metric_per_case": cases, **score_classes(truth.tolist(), probabilities, names)}


def test_two_classes_have_one_curve_and_more_have_one_each_under_their_names(figures: list[Any]) -> None:
    for names in (NAMES[:2], NAMES):
        draw_scores(Path("scores.png"), summary(names))
    for figure, names in zip(figures, (NAMES[1:2], NAMES)):
        curves, counts = figure.axes
        lines = curves.get_lines()[1:]  # behind that of chance
        assert [line.get_label().replace("\\$", "$") for line in lines] == names
        assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(names)
        shades = [text.get_color() for text in counts.texts]
        assert len(shades) == len(counts.get_xticklabels()) ** 2 and {"black", "white"} == set(shades)


def test_half_of_what_speaks_for_a_class_has_an_outline(figures: list[Any]) -> None:
    image = np.random.default_rng(0).random((9, 10, 11))
    seen = np.zeros_like(image)
    for peak in (0.0, 1.0):
        seen[3:6, 3:6, 3:6] = peak
        draw_evidence(Path("c.png"), "a$\\case$: ill 0.9", image, seen, (1.0, 1.0, 2.0), False)
    nothing, something = figures
    assert [len(panel.collections) for panel in nothing.axes] == [0] * 3
    assert [len(panel.collections) for panel in something.axes] == [2] * 3, "black below white"
    assert "0.5 outlined" in something.get_suptitle() and "outlined" not in nothing.get_suptitle()
