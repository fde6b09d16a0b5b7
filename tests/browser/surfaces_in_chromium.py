"""Surfaces of truth and prediction in a report's viewer: what is drawn, where, and what is said of it."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
import pytest

from seqpar.report.embedded_volumes import Bytes, encode, png, sheet
from tests.browser.chromium import Chromium, lacking
from tests.browser.viewer import middle, press

LACKING = lacking()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
SHAPE = (16, 12, 10)
ORANGE, BLUE = "r > b + 30", "b > r + 30"  # the colours of the first two classes, in any light
PICTURE = "document.getElementById('surface-picture')"
SPY = """window.contexts = new Set(); window.written = []; {
  const proto = HTMLCanvasElement.prototype, get = proto.getContext, text = CanvasRenderingContext2D.prototype;
  proto.getContext = function (kind, ...more) {
    if (kind !== 'webgl2') return get.call(this, kind, ...more);
    contexts.add(this); return %s; };
  const fill = text.fillText;
  text.fillText = function (words, x, y) {
    if (this.canvas.id === 'surface-picture') written.push([words, x / this.canvas.width, y / this.canvas.height]);
    fill.call(this, words, x, y); }; }"""
WEBGL, NO_WEBGL = SPY % "get.call(this, kind, ...more)", SPY % "null"
Open = Callable[..., Chromium]


def blocks() -> tuple[Bytes, Bytes]:
    """Returns a truth with a large block on the patient's left and a small one, not predicted, on the right."""
    truth = np.zeros(SHAPE, np.uint8)
    truth[2:8, 3:9, 2:8] = 1
    prediction = truth.copy()
    truth[11:14, 4:7, 3:6] = 2
    return truth, prediction


@pytest.fixture
def open_blocks(browser: Chromium, url: str, tmp_path: Path) -> Iterator[Open]:
    """A function that opens a page with these label maps as its first case, and the surfaces."""
    scripts = []
    browser.complaints.clear()
    browser.requests.clear()

    def open_them(
        truth: Bytes,
        prediction: Bytes,
        spacing: tuple[float, ...] = (1, 1, 1),
        spy: str = WEBGL,
        lost: Sequence[int] = (),
        hidden: Sequence[int] = (),
        **more: Any,
    ) -> Chromium:
        text = Path(unquote(urlparse(url).path)).read_text()
        start, told, end = re.split(r'(?<=id="volumes">)(.*?)(?=</script>)', text, maxsplit=1, flags=re.S)
        data = json.loads(told)
        truth_sheet, own_sheet = (encode(png(sheet(labels, 4))) for labels in (truth, prediction))
        present = [sorted({*np.unique(labels).tolist(), *lost} - {0}) for labels in (truth, prediction)]
        data["cases"][0] |= {"present": dict(zip(("truth", "prediction"), present)), "hidden": list(hidden)}
        data["cases"][0] |= {"shape": SHAPE, "spacing": spacing, "columns": 4, "modalities": [], "images": [],
                             "truth": truth_sheet, "prediction": own_sheet, "at": [4, 5, 5],
                             "slices": [list(range(1, side + 1)) for side in SHAPE]}  # fmt: skip
        (tmp_path / "blocks.html").write_text(start + json.dumps(data | more) + end)
        scripts.append(browser.ask("Page.addScriptToEvaluateOnNewDocument", source=spy)["identifier"])
        browser.open((tmp_path / "blocks.html").as_uri())
        assert browser.value("contexts.size") == 0, "a page opens without 3D"
        browser.value("document.querySelector('#surfaces summary').click()")
        browser.wait("contexts.size > 0")
        return browser

    yield open_them
    for script in scripts:
        browser.ask("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
    assert browser.complaints == []
    assert [asked for asked in browser.requests if not asked.startswith(("data:", "file:"))] == []


def seen(page: Chromium, colour: str, pane: int = 0, panes: int = 2) -> dict[str, float]:
    """Returns how many pixels of a pane have a colour, and where they are, in pixels from its left and top."""
    return dict(
        page.value(f"""(() => {{ const c = {PICTURE}, w = Math.floor(c.width / {panes}), h = c.height;
      const d = c.getContext('2d').getImageData({pane} * w, 0, w, h).data, xs = [], ys = [];
      for (let i = 0; i < d.length; i += 4) {{ const [r, g, b] = d.subarray(i, i + 3);
        if ({colour}) {{ xs.push((i / 4) % w); ys.push(Math.floor(i / 4 / w)); }} }}
      const far = (list) => list.reduce(([a, b], one) => [Math.min(a, one), Math.max(b, one)], [Infinity, -Infinity]);
      const [[left, right], [top, bottom]] = [far(xs), far(ys)];
      return xs.length ? {{ count: xs.length, left, right, top, bottom, width: w }} : {{ count: 0 }}; }})()""")
    )


def height(page: Chromium) -> float:
    orange = seen(page, ORANGE)
    return orange["bottom"] - orange["top"]


def letters(page: Chromium) -> dict[str, list[float]]:
    """Returns what was written on the picture since the last call, and where, as a part of its width and height."""
    return {words: place for words, *place in page.value("written.splice(0)")}


def switch(page: Chromium, number: int) -> None:
    page.value(f"document.querySelectorAll('#surface-classes input[type=checkbox]')[{number - 1}].click()")


def test_classes_are_drawn_where_they_are_and_one_that_is_lacking_is_named(open_blocks: Open) -> None:
    page = open_blocks(*blocks(), spacing=(1, 1, 1.25))
    assert seen(page, ORANGE)["count"] > 1000 and seen(page, ORANGE, 1)["count"] > 1000
    assert seen(page, BLUE)["count"] > 200 and seen(page, BLUE, 1)["count"] == 0
    told = page.value("[...document.querySelectorAll('#surface-classes label')].map(one => one.innerText.trim())")
    assert told == ["NCR", "ED (not predicted)", "ET (not in the truth, not predicted)"]
    assert "voxels of 1 × 1 × 1.25 mm." in page.value("document.getElementById('surface-note').textContent")
    assert {"truth", "prediction"} <= letters(page).keys()
    letters(page)
    page.value("m = document.getElementById('modality'); m.dispatchEvent(new Event('change'))")
    page.wait("viewer.getAttribute('aria-busy') === 'false'")
    assert letters(page) == {}, "another image of the case changes nothing"
    page.value("c = document.getElementById('case'); c.selectedIndex = 1; c.dispatchEvent(new Event('change'))")
    page.wait("viewer.getAttribute('aria-busy') === 'false'")
    assert seen(page, BLUE, 1)["count"] > 200, "the other case has the class"
    assert page.value("contexts.size") == 1


def test_a_class_that_is_too_small_for_the_page_or_not_annotated_is_not_called_absent(open_blocks: Open) -> None:
    page = open_blocks(*blocks(), lost=[2], hidden=[3])
    told = page.value("[...document.querySelectorAll('#surface-classes label')].map(one => one.innerText.trim())")
    assert told == ["NCR", "ED (prediction too small for the voxels here)", "ET (not annotated, not predicted)"]


def test_classes_truth_and_prediction_can_be_switched_off(open_blocks: Open) -> None:
    page = open_blocks(*blocks())
    both = page.value(f"{PICTURE}.toDataURL()")
    switch(page, 1)
    assert seen(page, ORANGE)["count"] == 0 and seen(page, BLUE)["count"] > 200
    assert "none of the classes" in letters(page), "the prediction has no other"
    switch(page, 1)
    assert page.value(f"{PICTURE}.toDataURL()") == both
    letters(page)
    press(page, "p")
    assert "prediction" not in letters(page) and seen(page, BLUE, panes=1)["count"] > 200
    press(page, "t")
    assert "truth and prediction are switched off" in letters(page)


def test_left_and_right_are_the_patients_and_mirrored_labels_give_a_mirrored_picture(open_blocks: Open) -> None:
    truth, prediction = blocks()
    page = open_blocks(truth, prediction)
    here, written = seen(page, BLUE), letters(page)
    assert written["R"][0] < written["L"][0] and here["right"] < here["width"] / 2, "the small block is on the right"
    page = open_blocks(truth[::-1].copy(), prediction[::-1].copy())
    there = seen(page, BLUE)
    assert there["left"] == pytest.approx(here["width"] - here["right"], abs=2)
    assert there["left"] > there["width"] / 2, "else mirroring could not be seen"
    page = open_blocks(truth, prediction, mirrored=False, sides=["PASI", "LRSI", "LRAP"])
    behind, written = seen(page, BLUE), letters(page)
    assert written["L"][0] < written["R"][0] and behind["left"] > behind["width"] / 2, "seen from the back"


def test_spacing_gives_surfaces_their_shape(open_blocks: Open) -> None:
    def height_to_width(spacing: tuple[float, ...]) -> float:
        block = seen(open_blocks(*blocks(), spacing=spacing), ORANGE)
        return (block["bottom"] - block["top"]) / (block["right"] - block["left"])

    assert height_to_width((1, 1, 1)) == pytest.approx(1, abs=0.05)
    assert height_to_width((1, 1, 2.5)) == pytest.approx(2.5, abs=0.15)


def test_surfaces_turn_and_zoom_and_an_address_keeps_the_view(open_blocks: Open) -> None:
    page = open_blocks(*blocks())
    first, small = page.value(f"{PICTURE}.toDataURL()"), height(page)
    written = []
    for _ in range(9):
        letters(page)
        press(page, "ArrowRight", on="surface-picture")
        written.append(letters(page))
    oblique, aside = written[5], written[8]
    assert oblique["AL"][0] > oblique["PR"][0]
    assert aside["A"][0] > aside["P"][0] and page.value("document.getElementById('surface-from').value") == "90,0"
    page.ask("Input.dispatchMouseEvent", type="mouseWheel", **middle(page, "surface-picture"), deltaX=0, deltaY=-60)
    page.wait("location.hash.includes('surfaces=90%2C0%2C1.1%2C')")
    assert height(page) == pytest.approx(1.1 * small, abs=2)
    switch(page, 2)
    address, pixels = page.value("location.href"), page.value(f"{PICTURE}.toDataURL()")
    page.open(address)
    page.wait("contexts.size > 0")
    assert page.value(f"{PICTURE}.toDataURL()") == pixels
    page.value("document.getElementById('surface-reset').click()")
    assert page.value(f"{PICTURE}.toDataURL()") == first
    spot = middle(page, "surface-picture")
    page.ask("Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **spot)
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1, x=spot["x"] + 40, y=spot["y"])
    page.ask("Input.dispatchMouseEvent", type="mouseReleased", button="left", x=spot["x"] + 40, y=spot["y"])
    assert "surfaces=20%2C0%2C1%2C" in page.value("location.href"), "dragging to the right shows more of the right"
    for kind, apart in (("touchStart", 40), ("touchMove", 60), ("touchEnd", 0)):
        fingers = [{"x": spot["x"] + side * apart, "y": spot["y"], "id": side} for side in (0, 1) if apart]
        page.ask("Input.dispatchTouchEvent", type=kind, touchPoints=fingers)
    page.wait("location.hash.includes('surfaces=20%2C0%2C1.5%2C')")


def test_what_is_inside_is_seen_and_the_truth_goes_over_the_prediction(open_blocks: Open) -> None:
    truth = np.zeros(SHAPE, np.uint8)
    truth[2:14, 1:11, 1:9] = 1
    solid = truth.copy()
    truth[6:10, 4:8, 3:7] = 2
    page = open_blocks(truth, solid)
    bluish = "b > 60 && g > r"
    assert seen(page, bluish)["count"] > 200 and seen(page, bluish, 1)["count"] == 0
    set_to = "s.dispatchEvent(new Event('input'))"
    page.value(f"s = document.querySelector('#surface-classes input[type=range]'); s.value = 100; {set_to}")
    assert seen(page, bluish)["count"] == 0, "the control: a solid class hides it"
    page.value(f"s = document.getElementById('surface-layout'); s.selectedIndex = 1; {set_to}")
    assert "truth (fainter) over prediction" in letters(page)


def test_without_webgl_a_sentence_stands_there(open_blocks: Open) -> None:
    page = open_blocks(*blocks(), spy=NO_WEBGL)
    assert page.value("document.getElementById('surface-view').hidden")
    assert "no WebGL" in page.value("document.getElementById('no-surfaces').innerText")


def test_a_lost_context_is_made_again_and_narrow_pages_have_room(open_blocks: Open) -> None:
    page = open_blocks(*blocks())
    before = page.value(f"{PICTURE}.toDataURL()")
    page.value("[...contexts][0].dispatchEvent(new Event('webglcontextlost'))")
    page.wait("!document.getElementById('surfaces').open")
    page.value("document.querySelector('#surfaces summary').click()")
    page.wait("contexts.size === 2")
    assert page.value(f"{PICTURE}.toDataURL()") == before
    page.ask("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False)
    page.wait(f"{PICTURE}.width < 500")
    narrow = seen(page, ORANGE)
    assert page.value("document.documentElement.scrollWidth") == 500 and narrow["count"] > 500
    page.ask("Emulation.clearDeviceMetricsOverride")


def test_a_mesh_is_closed_and_as_large_as_its_voxels(open_blocks: Open) -> None:
    """By the divergence theorem; turned inside out, its volume is negative."""
    page = open_blocks(*blocks())
    volume = """(() => { const [W, D, H] = [9, 8, 7], v = new Uint8Array(W * D * H);
      for (let h = 0; h < 5; h++) for (let d = 1; d < 7; d++) for (let w = 2; w < 9; w++) v[(h * D + d) * W + w] = 1;
      const [, found] = labelSquares(v, [W, D, H], 1); /* here */
      const { vertices, triangles } = labelMesh(found, [1, 2, 3]);
      const at = (n) => [0, 1, 2].map((k) => vertices[6 * n + k]);
      let sum = 0; for (let n = 0; n < triangles.length; n += 3) {
        const [a, b, c] = [0, 1, 2].map((k) => at(triangles[n + k])), x = cross(b, c);
        sum += (a[0] * x[0] + a[1] * x[1] + a[2] * x[2]) / 6; }
      return sum / (7 * 6 * 5 * 6); })()"""
    assert page.value(volume) == pytest.approx(1, abs=0.02)
    assert page.value(volume.replace("/* here */", "found.squares.reverse();")) == pytest.approx(-1, abs=0.02)
