"""The page of a sweep in a browser: its table is sorted by any column, both ways, without an error."""

from pathlib import Path

import pytest

from seqpar.cli import report
from seqpar.runs.sweep_folder import read_sweep
from seqpar.sweeps.results import write_results
from tests.browser.chromium import Chromium, lacking
from tests.support.sweep_folder import make_sweep_folder

LACKING = lacking()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
ROWS = "[...document.querySelectorAll('#points tbody tr')].map(row => row.dataset.point).join()"
FIRST, SECOND, THIRD, FOURTH = (f"lr-0.00{lr}_batch-{batch}" for lr in (1, 2) for batch in (1, 2))


def test_a_click_on_a_head_sorts_the_points_and_another_one_turns_them_round(browser: Chromium, tmp_path: Path) -> None:
    out = make_sweep_folder(tmp_path)
    write_results(out, read_sweep(out))
    assert report.act([str(out)]) == 0
    browser.complaints.clear()
    browser.open((out / "report.html").as_uri())

    def click(head: str) -> list[str]:
        heads = "[...document.querySelectorAll('#points th button')]"
        browser.value(f"{heads}.find(one => one.textContent === {head!r}).click(); 1")
        return str(browser.value(ROWS)).split(",")

    assert str(browser.value(ROWS)).split(",")[:2] == [SECOND, FIRST], "the best comes first"
    assert click("point") == [FIRST, SECOND, THIRD, FOURTH]
    assert click("point") == [FOURTH, THIRD, SECOND, FIRST]
    assert click("training loss")[:3] == [SECOND, FIRST, THIRD] and click("training loss")[:3] == [THIRD, FIRST, SECOND]
    assert click("mean Dice")[-2:] == click("mean Dice")[-2:], "those without a value stay last"
    assert click("batch")[0] in (FIRST, THIRD)
    browser.ask("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False)
    assert browser.value("document.documentElement.scrollWidth") == 500, "wide tables scroll by themselves"
    browser.ask("Emulation.clearDeviceMetricsOverride")
    assert browser.complaints == []
