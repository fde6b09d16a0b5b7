"""The fixtures of all tests."""

from collections.abc import Callable

import pytest

from seqpar.parallel.mesh import Mesh
from tests.support.ranks import alone_mesh, run_ranks  # its package caps threads before torch is imported


@pytest.fixture
def ranks() -> Callable[..., list]:
    return run_ranks


@pytest.fixture
def alone() -> Mesh:
    return alone_mesh()
