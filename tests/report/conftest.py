"""Fixtures of the tests of reports."""

import shutil
from pathlib import Path

import pytest

from tests.support.report_page import NAMES, Page, written
from tests.support.reported_run import make_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("finished"), NAMES)


@pytest.fixture(scope="module")
def page(finished: Path) -> Page:
    return written(finished)


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "moved"))
