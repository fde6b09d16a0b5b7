"""Fixtures of the tests of prediction."""

from pathlib import Path
from typing import Any

import pytest

from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.mesh import Mesh
from seqpar.runs import trained_run
from seqpar.runs.trained_run import TrainedRun, load_nets
from tests.support.predictions import Echo, write_images


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets prediction answer with the image, whatever the run's weights are."""

    def nets(run: TrainedRun, files: Any, mesh: Mesh, mode: str = "") -> list[SegmentationNet]:
        (net,) = load_nets(run, files, mesh, mode)
        members = [tuple(run.recipe.values[n] for n in ids) for ids in run.regions.values() if run.learns_regions]
        net.decoder = Echo(run.recipe.values, tuple(members))
        return [net]

    monkeypatch.setattr(trained_run, "load_nets", nets)


@pytest.fixture
def images(tmp_path) -> Path:
    """A folder of three cases."""
    return write_images(tmp_path / "images")
