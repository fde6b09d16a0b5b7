"""The fixtures of all tests."""

import gc
import os
from collections.abc import Callable, Iterator

import pytest

from seqpar.data.preparation import recipe_survey
from seqpar.parallel.mesh import Mesh
from tests.support.ranks import alone_mesh, run_ranks  # its package caps threads before torch is imported

os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's name; at 15, its default, sweeps wait for other tests
os.register_at_fork(after_in_child=gc.freeze)  # a collection would touch, and so copy, all that comes from its parent


def pytest_collection_finish() -> None:
    """Spares what has been imported from each later collection, which would walk over a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def ranks() -> Callable[..., list]:
    return run_ranks


@pytest.fixture
def alone() -> Mesh:
    return alone_mesh()


@pytest.fixture(scope="session", autouse=True)
def _few_samples() -> Iterator[None]:
    """Lets preparations of CT draw a million voxels in place of a hundred, which take a second or two each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_survey, "SAMPLED_VOXELS", 1_000_000)
        yield
