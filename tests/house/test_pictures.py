"""The manual's pictures are complete, on a page, and say what the code and the pages say."""

import re
import xml.etree.ElementTree as ET

import pytest

from seqpar.pipeline.schedule import Act
from tests.support.growth_picture import growth, newest_rows, panels
from tests.support.manual_pictures import DRAWINGS, memory, pictures, timed
from tests.support.pages import PAGES


@pytest.mark.parametrize("draw", DRAWINGS, ids=lambda draw: draw.__name__)
def test_nothing_is_drawn_beyond_the_border(draw) -> None:
    drawing = draw()
    for part in ET.fromstring(str(drawing)).iter():
        if part.tag.endswith("rect"):
            x, y, width, height = (float(part.attrib[name]) for name in ("x", "y", "width", "height"))
            assert min(x, y) >= 0 and x + width <= drawing.width and y + height <= drawing.height
        elif part.tag.endswith("text") and part.attrib["text-anchor"] == "start":
            pixels = 6.0 if "small" in part.attrib["class"] else 7.2  # of a letter, about
            assert float(part.attrib["x"]) + pixels * len(part.text or "") <= drawing.width, part.text


def test_each_picture_is_on_a_page() -> None:
    shown = {name for page in PAGES for name in re.findall(r"!\[[^\]]+\]\(\S*/pictures/(\w+\.svg)\)", page.read_text())}
    assert shown == pictures().keys()


def test_a_timetable_waits_for_what_it_needs() -> None:
    begins = {act: begin for _, act, begin, _ in timed("gpipe", 4, 8)}
    assert len(begins) == 2 * 4 * 8
    assert begins[Act(True, 3, 0)] == 3.0 and begins[Act(False, 0, 7)] == 31.0  # of 33


def test_memory_is_that_of_the_page_about_plans() -> None:
    assert all(f">{total}<" in str(memory()) for total in ("57.72", "33.93", "21.68", "16.09", "12.84"))


def test_growth_shows_each_figure_of_the_newest_table() -> None:
    shown = {panel.title: panel.lines for panel in panels()}
    for row in newest_rows():
        place = float(row["ranks"])
        if row["grows"] == "ranks" and row["ranks"] != "1":
            for title, column in (("MiB sent by a rank", "sent MiB"), ("peak MiB of a rank", "peak MiB")):
                assert (place, float(row[column])) in shown[title][row["of"]]
        elif row["grows"] == "tokens" and row["s"]:
            assert (float(row["tokens"]), float(row["s"])) in shown["TFLOP and seconds"]["seconds"]
    steps = shown["seconds of a step, planned"]
    assert {name: [ranks for ranks, _ in points] for name, points in steps.items()} == {
        name: [1, 8, 64, 512] for name in ("H100", "MI250X die")
    }
    points = [point for lines in shown.values() for line in lines.values() for point in line]
    assert str(growth()).count("<circle") == len(points) > 70
