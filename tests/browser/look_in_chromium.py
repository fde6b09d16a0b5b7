"""How planes are looked at in a report's viewer: sides, grey levels, zoom, fill, and what is written on them."""

import json
import re
import shutil
from pathlib import Path

import pytest

from seqpar.cli import report
from tests.browser.chromium import Chromium, lacking
from tests.browser.viewer import PLANE, TOLD, middle, press
from tests.support.reported_run import make_run

LACKING = lacking()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
PIXELS = """(() => { const c = document.getElementById('plane-2'), d = c.getContext('2d')
  .getImageData(0, 0, c.width, c.height).data, grey = [], coloured = [];
  for (let y = 0; y < c.height; y += 4) for (let x = 0; x < c.width; x += 4) {
    const i = 4 * (y * c.width + x);
    if (Math.abs(d[i] - d[i + 2]) > 40) coloured.push([x / c.width, y / c.height]); else grey.push(d[i]); }
  const mean = (list, at) => list.reduce((sum, one) => sum + (at === undefined ? one : one[at]), 0) / list.length;
  return { grey: mean(grey), black: grey.filter(g => g === 0).length / grey.length, count: coloured.length,
           x: mean(coloured, 0), y: mean(coloured, 1) }; })()"""


def look(page: Chromium, **settings: float) -> dict[str, float]:
    for name, value in settings.items():
        page.value(f"e = document.getElementById('{name}'); e.value = {value}; e.dispatchEvent(new Event('input'))")
    return dict(page.value(PIXELS))


def test_window_and_level_change_greys_as_on_a_workstation(page: Chromium) -> None:
    press(page, "t")
    press(page, "p")
    usual = look(page)
    assert look(page, level=250)["grey"] < usual["grey"] - 20, "a higher level darkens"
    assert look(page, level=20)["grey"] > usual["grey"] + 20
    narrow = look(page, level=128, window=10)
    assert narrow["black"] > usual["black"], "a narrow window cuts more off"
    page.value("document.getElementById('reset').click()")
    assert look(page) == usual


def test_without_images_nothing_offers_to_change_their_greys(page: Chromium, tmp_path: Path) -> None:
    hidden = "[...document.querySelectorAll('#viewer label')].filter(e => e.hidden).map(e => e.textContent.trim())"
    told = "document.getElementById('look').textContent"
    assert not {"Window", "Level"} & set(page.value(hidden)) and page.value(told).startswith("Window ")
    run, found = make_run(tmp_path, ["case_a"]), tmp_path / "found"
    found.mkdir()
    shutil.copy(next(tmp_path.glob("data/*/*-seg.nii.gz")), found / "new.nii.gz")
    assert report.act([str(run), "--prediction", str(found)]) == 0
    page.open((run / "report-found.html").as_uri())
    assert {"Window", "Level"} <= set(page.value(hidden))
    assert page.value(told) == "Only labels: the images are not known."


def test_fill_and_outlines_have_their_own_strength(page: Chromium) -> None:
    usual = look(page)
    bare = look(page, fill=0)
    assert bare["count"] < usual["count"], "what is inside is tinted from the start"
    assert look(page, fill=60)["count"] > 2 * bare["count"]
    assert look(page, fill=0, lines=0)["count"] == 0
    assert look(page, fill=25, lines=100) == usual


def test_zoom_enlarges_around_the_place_where_the_planes_meet(page: Chromium) -> None:
    """A click in a zoomed plane comes to the voxel that is seen there."""
    far = look(page, fill=100)
    near = look(page, zoom=2)
    assert near["count"] > 3 * far["count"]
    shown = "document.getElementById('told-{}').textContent"
    before = [int(page.value(shown.format(dim)).split()[1]) for dim in (0, 1)]
    spot = middle(page, "plane-2")
    box = page.value("document.getElementById('plane-2').getBoundingClientRect().toJSON()")
    shape = page.value("JSON.parse(document.getElementById('volumes').textContent).cases[0].shape")
    voxel = [2 * box["width"] / shape[0], 2 * box["height"] / shape[1]]  # pixels of a voxel at zoom 2
    press_at = {"x": spot["x"] + 3 * voxel[0], "y": spot["y"] - 2 * voxel[1]}
    for kind in ("mousePressed", "mouseReleased"):
        page.ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **press_at)
    after = [int(page.value(shown.format(dim)).split()[1]) for dim in (0, 1)]
    assert abs(after[0] - (before[0] + 3)) <= 1, "to the right is the patient's left, to which the file's slices count"
    assert abs(after[1] - (before[1] + 2)) <= 1


def test_ctrl_and_wheel_zoom(page: Chromium) -> None:
    slice_before = page.value(TOLD)
    place = middle(page, "plane-2")
    page.ask("Input.dispatchMouseEvent", type="mouseWheel", **place, deltaX=0, deltaY=-60, modifiers=2)
    page.wait("document.getElementById('zoom').value === '1.5'")
    assert page.value(TOLD) == slice_before


def test_planes_tell_their_spacing_and_an_address_keeps_the_look(page: Chromium, url: str) -> None:
    width, depth, _ = page.value("JSON.parse(document.getElementById('volumes').textContent).cases[0].spacing")
    assert page.value(TOLD).endswith(f"· pixels of {width:.3g} × {depth:.3g} mm") and width != depth
    look(page, window=90, level=100, zoom=3, fill=20)
    address, pixels = page.value("location.href"), page.value(PLANE)
    page.open(address)
    assert page.value(PLANE) == pixels
    page.open(url)
    assert page.value(PLANE) != pixels


def test_the_patients_left_is_on_the_right_unless_wanted_otherwise(browser: Chromium, tmp_path: Path) -> None:
    """The label's ball lies off the middle towards the patient's left in this run, shifted in its predictions."""
    run, seen = make_run(tmp_path, ["one", "two"]), {}
    for name, flag in (("radiological", "--no-neurological"), ("neurological", "--neurological")):
        assert report.act([str(run), flag, "--out", str(tmp_path / f"{name}.html")]) == 0
        browser.open((tmp_path / f"{name}.html").as_uri())
        seen[name] = look(browser, fill=100)
        seen[name] |= {"sides": browser.value("JSON.parse(document.getElementById('volumes').textContent).sides[2]")}
    assert seen["radiological"]["sides"] == "RLAP" and seen["neurological"]["sides"] == "LRAP"
    assert seen["radiological"]["x"] + seen["neurological"]["x"] == pytest.approx(1, abs=0.02)
    assert abs(seen["radiological"]["x"] - 0.5) > 0.02, "else the comparison could not fail"
    assert seen["radiological"]["y"] == pytest.approx(seen["neurological"]["y"], abs=0.02)


def test_the_value_under_the_cursor_is_told_in_the_files_numbers(page: Chromium) -> None:
    spot, readout = middle(page, "plane-2"), "document.getElementById('value').textContent"
    before = page.value(readout)
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", **spot)
    told = page.value(readout)
    name, sign, value = told.split(" · ")[0].split()
    assert (name, sign) == ("FLAIR", "≈") and 60 < float(value) < 200, "a body of about 100, labels of 140"
    assert "truth: " in told and "prediction: " in told and told != before
    assert "Window " in page.value("document.getElementById('look').textContent")


def open_with_area(page: Chromium, url: str, folder: Path, name: str) -> None:
    """Opens the page with an area in each case's viewer, which is where the truth has its label."""
    start, told, rest = re.split(r'(?<=id="volumes">)(.*)(?=</script>)', Path(url[7:]).read_text(), maxsplit=1)
    volumes = json.loads(told)
    for case in volumes["cases"]:
        case["areas"][name] = case["truth"]
    (folder / "report.html").write_text(start + json.dumps(volumes) + rest)
    page.open((folder / "report.html").as_uri())


def test_where_readers_disagree_is_a_layer_with_a_key(page: Chromium, url: str, tmp_path: Path) -> None:
    """The truth's label stands for a dispute: violet only where it is, and told under the cursor."""
    open_with_area(page, url, tmp_path, "disputed")
    assert look(page, lines=0, fill=0)["count"] > 0
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", **middle(page, "plane-2"))
    assert "readers disagree" in page.value("document.getElementById('value').textContent")
    press(page, "r")
    assert look(page)["count"] == 0 and "disputed=0" in page.value("location.href")


def test_what_the_truth_leaves_unlabelled_is_hatched_and_has_a_key(page: Chromium, url: str, tmp_path: Path) -> None:
    """Its stripes can be told from every grey: they are the only difference that the key makes."""
    open_with_area(page, url, tmp_path, "ignored")
    striped = page.value("document.getElementById('plane-2').toDataURL()")
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", **middle(page, "plane-2"))
    assert "truth: unlabelled" in page.value("document.getElementById('value').textContent")
    press(page, "u")
    assert page.value("document.getElementById('plane-2').toDataURL()") != striped and "ignored=0" in page.value(
        "location.href"
    )
    page.open(url)
    before = page.value("document.getElementById('plane-2').toDataURL()")
    press(page, "u")
    assert page.value("document.getElementById('plane-2').toDataURL()") == before, "nothing is unlabelled here"


def test_a_map_whose_maximum_is_outside_the_body_says_so_above_the_planes(
    page: Chromium, url: str, tmp_path: Path
) -> None:
    shown = "(one => !one.hidden && one.offsetHeight > 0 && one.textContent)(document.getElementById('heat-caution'))"
    assert page.value(shown) is False, "cases without a caution"
    text = Path(url[7:]).read_text()
    assert '"heat_caution": ""' in text
    (tmp_path / "report.html").write_text(text.replace('"heat_caution": ""', '"heat_caution": "It is outside."', 1))
    page.open((tmp_path / "report.html").as_uri())
    assert page.value(shown) == "It is outside."
    page.value("c = document.getElementById('case'); c.selectedIndex = 1; c.dispatchEvent(new Event('change'))")
    page.wait("document.getElementById('viewer').getAttribute('aria-busy') === 'false'")
    assert page.value(shown) is False, "the other case has none"


def test_each_plane_has_a_slider_that_can_be_moved(page: Chromium) -> None:
    """Also next to a long text, such as that of pixels with three digits."""
    widths = page.value("""[0, 1, 2].map(dim => { document.getElementById('told-' + dim).textContent = 'x'.repeat(60);
      const slider = document.getElementById('slice-' + dim), plane = document.getElementById('plane-' + dim);
      return [slider.offsetWidth, plane.offsetWidth]; })""")
    assert all(slider >= 0.9 * plane > 50 for slider, plane in widths), widths


def test_ct_has_presets_of_window_and_level(page: Chromium, url: str, tmp_path: Path) -> None:
    """Those that the image's values do not reach say so; other images begin with all of their greys."""
    assert page.value("document.getElementById('preset').parentElement.hidden")
    start, told, rest = re.split(r'(?<=id="volumes">)(.*)(?=</script>)', Path(url[7:]).read_text(), maxsplit=1)
    volumes = json.loads(told)
    for number, case in enumerate(volumes["cases"]):
        case["unit"] = "HU"
        case["ranges"] = {name: [-100, 155 + 100 * number] for name in case["ranges"]}
    (tmp_path / "report.html").write_text(start + json.dumps(volumes) + rest)
    page.open((tmp_path / "report.html").as_uri())
    page.wait("document.getElementById('preset').options.length === 6")
    off = page.value("[...document.getElementById('preset').options].filter(o => o.disabled).map(o => o.text)")
    assert [text.split(":")[0] for text in off] == ["lung", "bone"] and "keeps −100 to 155 HU" in off[0]
    page.value("p = document.getElementById('preset'); p.value = 'brain'; p.dispatchEvent(new Event('change'))")
    shown = "document.getElementById('preset').value + ': ' + document.getElementById('look').textContent"
    assert page.value(shown) == "brain: Window 80 HU, level 40 HU."
    page.value("c = document.getElementById('case'); c.selectedIndex = 1; c.dispatchEvent(new Event('change'))")
    page.wait("document.getElementById('viewer').getAttribute('aria-busy') === 'false'")
    name, window, level = re.fullmatch(r"(.*): Window (\d+) HU, level (\d+) HU\.", page.value(shown)).groups()
    assert name == "brain" and abs(int(window) - 80) < 2 and abs(int(level) - 40) < 2, "another case keeps it"
    page.value("w = document.getElementById('window'); w.value = 90; w.dispatchEvent(new Event('input'))")
    assert page.value(shown).startswith("hand: Window ")
