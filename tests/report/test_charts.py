"""The charts of pages: their axes."""

from typing import Any

import pytest

from seqpar.report import plots
from seqpar.report.curves import Diagram, Line


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
