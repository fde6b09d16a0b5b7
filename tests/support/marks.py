"""Cases of tests that ``make test`` leaves out."""

from typing import Any

import pytest


def long_case(*values: Any) -> Any:
    """Returns a case that computes for long: ``.ci/started`` runs it, ``make test`` the shorter ones only."""
    return pytest.param(*values, marks=pytest.mark.started)
