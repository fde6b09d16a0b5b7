"""Fixtures of the tests of evaluation."""

import json
from pathlib import Path

import pytest

from tests.support.label_folders import LABELS, random_labels, save


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A raw data set of three cases, and predictions of them."""
    truth, prediction = tmp_path / "labelsTr", tmp_path / "predicted"
    for case in range(3):
        save(truth / f"case_{case}.nii.gz", random_labels(case))
        save(prediction / f"case_{case}.nii.gz", random_labels(case + 10))
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": LABELS}))
    return truth, prediction
