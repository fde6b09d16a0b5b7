"""Fixtures of the tests in a browser: one browser, one report, and a page that may not complain."""

from collections.abc import Iterator

import pytest

from seqpar.cli import report
from tests.browser.chromium import Chromium, find
from tests.browser.viewer import NAMES
from tests.support.reported_run import make_run


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = make_run(tmp_path_factory.mktemp("run"), NAMES)
    assert report.act([str(run)]) == 0
    return (run / "report.html").as_uri()


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    program = find()
    assert program
    chromium = Chromium(program)
    yield chromium
    chromium.close()


@pytest.fixture
def page(browser: Chromium, url: str) -> Iterator[Chromium]:
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(url)
    yield browser
    assert browser.complaints == []
    assert [asked for asked in browser.requests if not asked.startswith(("data:", "file:"))] == []
