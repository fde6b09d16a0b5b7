"""The report's viewer in a browser: it works without an error, and its controls change what is seen."""

import base64
import os
from pathlib import Path

import pytest

from tests.browser.chromium import Chromium, lacking
from tests.browser.viewer import NAMES, PLANE, TOLD, middle, press

LACKING = lacking()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)


def test_what_must_be_noticed_is_noticed(browser: Chromium, url: str) -> None:
    """The control: an error on the console, and a load that the page's own policy refuses."""
    browser.open(url)
    browser.value("console.error('noticed'); new Image().src = 'https://example.invalid/x.png'; 1")
    browser.wait("true")
    browser.ask("Page.navigate", url="about:blank")
    complaints = " ".join(browser.complaints)
    browser.complaints.clear()
    assert "noticed" in complaints and "Content Security Policy" in complaints


def test_wheel_keys_and_slider_change_the_slice(page: Chromium) -> None:
    seen = [(page.value(TOLD), page.value(PLANE))]
    page.ask("Input.dispatchMouseEvent", type="mouseWheel", **middle(page, "plane-2"), deltaX=0, deltaY=60)
    page.wait(f"{TOLD} !== {seen[-1][0]!r}")
    seen.append((page.value(TOLD), page.value(PLANE)))
    press(page, "PageDown")
    seen.append((page.value(TOLD), page.value(PLANE)))
    page.value("s = document.getElementById('slice-2'); s.value = 13; s.dispatchEvent(new Event('input'))")
    seen.append((page.value(TOLD), page.value(PLANE)))
    assert len({text for text, _ in seen}) == len({pixels for _, pixels in seen}) == 4
    entry = "JSON.parse(document.getElementById('volumes').textContent).cases[0]"
    in_file = page.value(f"'axial ' + {entry}.slices[2][13] + ' / 22'")  # the file has 22 slices, the crop fewer
    assert seen[-1][0].startswith(in_file) and page.value(f"{entry}.shape[2]") < 22


def test_overlays_can_be_switched_off_and_on(page: Chromium) -> None:
    both = page.value(PLANE)
    page.ask("Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **middle(page, "truth"))
    page.ask("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **middle(page, "truth"))
    without_truth = page.value(PLANE)
    press(page, "p")
    bare = page.value(PLANE)
    press(page, "t")
    without_prediction = page.value(PLANE)
    press(page, "p")
    assert len({both, without_truth, bare, without_prediction}) == 4
    assert page.value(PLANE) == both


def test_a_click_moves_the_other_planes(page: Chromium) -> None:
    before = page.value("[0, 1].map(n => document.getElementById('told-' + n).textContent).join()")
    spot = {name: value + 20 for name, value in middle(page, "plane-2").items()}
    for kind in ("mousePressed", "mouseReleased"):
        page.ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **spot)
    assert page.value("[0, 1].map(n => document.getElementById('told-' + n).textContent).join()") != before


def test_case_and_modality_can_be_chosen(page: Chromium) -> None:
    first = page.value(PLANE)
    page.value("m = document.getElementById('modality'); m.value = 'T1'; m.dispatchEvent(new Event('change'))")
    page.wait("viewer.getAttribute('aria-busy') === 'false'")
    second = page.value(PLANE)
    page.value("c = document.getElementById('case'); c.selectedIndex = 1; c.dispatchEvent(new Event('change'))")
    page.wait("viewer.getAttribute('aria-busy') === 'false'")
    assert len({first, second, page.value(PLANE)}) == 3
    assert page.value("document.getElementById('modality').value") == "T1"
    names = page.value("[...document.getElementById('case').options].map(o => o.text)")
    assert sorted(names) == sorted(NAMES)


def test_an_address_remembers_the_view(page: Chromium, url: str) -> None:
    page.value("s = document.getElementById('slice-2'); s.value = 5; s.dispatchEvent(new Event('input'))")
    press(page, "t")
    address, pixels = page.value("location.href"), page.value(PLANE)
    assert address.startswith(url + "#")
    page.open(address)
    assert page.value(TOLD).startswith("axial 9 / ") and page.value(PLANE) == pixels


def test_the_viewer_shows_the_voxels_of_the_case(page: Chromium) -> None:
    """The outline of a ball's slice: coloured pixels lie where the label does, and nowhere without overlays."""
    count = """(() => { const c = document.getElementById('plane-2'), d = c.getContext('2d')
      .getImageData(0, 0, c.width, c.height).data; let n = 0;
      for (let i = 0; i < d.length; i += 4) n += Math.abs(d[i] - d[i + 2]) > 60; return n; })()"""
    assert page.value(count) > 50
    press(page, "t")
    press(page, "p")
    assert page.value(count) == 0


def test_screenshots_can_be_taken_in_light_dark_and_print(page: Chromium, tmp_path: Path) -> None:
    """Their paper differs; $SEQPAR_SCREENSHOTS names a folder in which they are kept to be looked at."""
    folder = Path(os.environ.get("SEQPAR_SCREENSHOTS", tmp_path))
    seen = set()
    for name, media, scheme in (("light", "screen", "light"), ("dark", "screen", "dark"), ("print", "print", "dark")):
        preferred = [{"name": "prefers-color-scheme", "value": scheme}]
        page.ask("Emulation.setEmulatedMedia", media=media, features=preferred)
        shot = page.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        (folder / f"report-{name}.png").write_bytes(base64.b64decode(shot))
        paper = page.value("getComputedStyle(document.body).backgroundColor")
        hidden = page.value("getComputedStyle(viewer).display === 'none'")
        seen.add((paper, hidden))
    page.ask("Emulation.setEmulatedMedia", media="")
    assert len(seen) == 3
    assert ("rgb(255, 255, 255)", True) in seen  # paper is white, and nobody scrolls on it


def test_a_picture_of_a_case_fits_a_narrow_page(page: Chromium) -> None:
    page.ask("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False)
    svg = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' width='900' height='500'/>"
    page.value(f"document.querySelector('.case').insertAdjacentHTML('beforeend', `<img src=\"{svg}\">`)")
    page.wait("document.querySelector('.case > img').naturalWidth === 900")
    width, own = page.value("(e => [e.width, e.parentElement.clientWidth])(document.querySelector('.case > img'))")
    assert width == own < 500 and page.value("document.documentElement.scrollWidth") == 500
    page.ask("Emulation.clearDeviceMetricsOverride")
