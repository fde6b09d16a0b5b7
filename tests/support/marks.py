"""Cases of tests that ``make test`` leaves out."""

from typing import Any

import pytest


def long_case(*values: Any) -> Any:
    """Returns a case that computes for long: ``.ci/long``, started by hand, runs it, ``make test`` the shorter ones."""
    return pytest.param(*values, marks=pytest.mark.long)
