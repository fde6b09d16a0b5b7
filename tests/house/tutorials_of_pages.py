"""The tutorials run as they are written, and print and draw what their pages show: a step of .ci of its own."""

from pathlib import Path

import pytest
from PIL import Image

from tests.support.tutorials import PAGES, differences, follow, pictures


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_prints_what_its_page_shows(page: Path, tmp_path: Path) -> None:
    _, steps = follow(page, tmp_path)
    assert len(steps) >= 3
    assert differences(steps) == []
    for kept, drawn in pictures(page).items():
        assert Image.open(tmp_path / drawn).size == Image.open(kept).size
