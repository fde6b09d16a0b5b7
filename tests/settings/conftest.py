"""Fixtures of the settings tests."""

import pytest

from tests.support.training_runs import tiny_data


@pytest.fixture(scope="session")
def flags(tmp_path_factory) -> list[str]:
    return tiny_data(tmp_path_factory.mktemp("config"))
