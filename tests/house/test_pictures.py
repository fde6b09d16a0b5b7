"""The manual's pictures are those that their program draws now, and each is on a page."""

import importlib.util
import re
import xml.etree.ElementTree as ET
from types import ModuleType

import pytest

from tests.support.pages import PAGES, ROOT

FOLDER = ROOT / "docs" / "pictures"


def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", FOLDER / "draw.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRAW = program()


@pytest.mark.parametrize("picture", DRAW.PICTURES, ids=lambda picture: picture.__name__)
def test_a_picture_is_what_the_program_draws(picture) -> None:
    drawn, file = picture(), FOLDER / f"{picture.__name__}.svg"
    assert file.read_text() == str(drawn), "it has changed: run python docs/pictures/draw.py, and look at it"
    for part in ET.fromstring(str(drawn)).iter():
        if part.tag.endswith("rect"):
            x, y, width, height = (float(part.attrib[name]) for name in ("x", "y", "width", "height"))
            assert min(x, y) >= 0 and x + width <= drawn.width and y + height <= drawn.height


def test_each_picture_is_on_a_page() -> None:
    shown = {name for page in PAGES for name in re.findall(r"!\[[^\]]+\]\(\S*pictures/(\w+)\.svg\)", page.read_text())}
    assert shown == {picture.__name__ for picture in DRAW.PICTURES} == {file.stem for file in FOLDER.glob("*.svg")}


def test_a_timetable_waits_for_what_it_needs() -> None:
    begins = {act: begin for _, act, begin, _ in DRAW.timed("gpipe", 4, 8)}
    assert len(begins) == 2 * 4 * 8
    assert begins[DRAW.Act(True, 3, 0)] == 3.0 and begins[DRAW.Act(False, 0, 7)] == 31.0  # 33 seconds in all


def test_memory_is_that_of_the_page_about_plans() -> None:
    assert all(f">{total}<" in str(DRAW.memory()) for total in ("63.22", "36.79", "23.22", "16.92", "13.29"))
