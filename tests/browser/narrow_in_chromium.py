"""Pictures on a narrow page: none is wider than the page, nothing scrolls sideways, and their words can be read."""

import base64
import io
import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from seqpar.cli import report
from seqpar.report.planes import FileSlices
from seqpar.runs.sweep_folder import read_sweep
from seqpar.sweeps.results import write_results
from seqpar.tasks.pretrain.validation import RebuiltTile, draw_tiles
from tests.browser.chromium import Chromium, lacking
from tests.support.reported_run import make_run
from tests.support.sweep_folder import make_sweep_folder

LACKING = lacking()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
SMALLEST = 8 / 72 * 150  # pixels of a picture's smallest letters: 8 points at 150 pixels an inch
SCROLLING = """[...document.querySelectorAll('body *')].filter(one => one.scrollWidth > one.clientWidth + 1 &&
  getComputedStyle(one).overflowX !== 'visible').map(one => one.className)"""


def test_the_picture_of_a_sweep_is_read_without_scrolling(browser: Chromium, tmp_path: Path) -> None:
    out = make_sweep_folder(tmp_path)
    write_results(out, read_sweep(out))
    assert report.act([str(out)]) == 0
    check(browser, out / "report.html", "section > img")


def test_rebuilt_patches_are_seen_without_scrolling(browser: Chromium, tmp_path: Path) -> None:
    run = make_run(tmp_path, ["one", "two"])
    content = json.loads((run / "config.json").read_text())
    content["config"]["task"] = "pretrain"
    (run / "config.json").write_text(json.dumps(content))
    rows = [{"kind": "train", "step": 0, "loss": 1.0}, {"kind": "val", "step": 1, "loss": 1.0, "error_of_mean": 1.1}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    image, slices = np.random.default_rng(0).random((16, 16, 16)), FileSlices(range(1, 17), 16)
    tile = RebuiltTile("one", image, image**2, image > 0.5, (1.0, 1.0, 1.0), slices, 0.5, 0.6, modality="FLAIR")
    draw_tiles(run / "validation.png", [tile] * 3, "after step 150, the best so far", False)
    assert report.act([str(run)]) == 0
    check(browser, run / "report.html", "figure > img")


def test_a_wide_table_has_a_shade_where_there_is_more_of_it(browser: Chromium, tmp_path: Path) -> None:
    out = make_sweep_folder(tmp_path)
    assert report.act([str(out)]) == 0
    browser.ask("Emulation.setDeviceMetricsOverride", width=500, height=1200, deviceScaleFactor=1, mobile=False)
    browser.open((out / "report.html").as_uri())
    box = browser.value("wide = document.querySelector('.wide'); wide.getBoundingClientRect().toJSON()")

    def grey(left: float) -> float:  # of the lightest pixel below the letters of the last row
        clip = {"x": left, "y": box["bottom"] - 5, "width": 2, "height": 3, "scale": 1}
        shot = browser.ask("Page.captureScreenshot", clip=clip)["data"]
        return float(matplotlib.image.imread(io.BytesIO(base64.b64decode(shot)), format="png")[..., :3].max())

    edges = box["left"], box["right"] - 2
    at_first = [grey(edge) for edge in edges]
    browser.value("wide.scrollLeft = (wide.scrollWidth - wide.clientWidth) / 2")
    between = [grey(edge) for edge in edges]
    browser.value("wide.scrollLeft = wide.scrollWidth")
    at_last = [grey(edge) for edge in edges]
    browser.ask("Emulation.clearDeviceMetricsOverride")
    assert at_first[0] == 1 and at_first[1] < 0.8 and max(between) < 0.8 and at_last[0] < 0.8 and at_last[1] == 1


def check(browser: Chromium, page: Path, picture: str) -> None:
    browser.ask("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False)
    browser.complaints.clear()
    browser.open(page.as_uri())
    sizes = "[one.width, one.naturalWidth, one.parentElement.clientWidth]"
    width, drawn, room = browser.value(f"(one => {sizes})(document.querySelector('{picture}'))")
    wide = set(browser.value(SCROLLING))
    whole = browser.value("document.documentElement.scrollWidth")
    browser.ask("Emulation.clearDeviceMetricsOverride")
    assert whole == 500 and width == room < 500, "it fills the page's width and no more"
    assert wide <= {"wide"}, "only tables scroll"
    assert SMALLEST * width / drawn > 8, "pixels of the smallest letters"
    assert browser.complaints == []
