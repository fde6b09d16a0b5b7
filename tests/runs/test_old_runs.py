"""A run of the version before the rooms: it resumes, predicts and reports here as it did there.

``golden/old_run/interrupted`` is its folder after 10 of 20 steps on two ranks (float64, halo, dropout, AdamW).
``finished.jsonl`` is what that version then recorded up to the end; ``labels`` are its predictions at both steps.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from seqpar.cli import predict, prepare, report
from seqpar.data.volumes import read_volume
from seqpar.runs.journal import read_metrics
from tests.support.folders import image_array, save
from tests.support.training_runs import status, tiny_data, trained

OLD = Path(__file__).parents[1] / "golden" / "old_run"
OLD_CACHE = Path(__file__).parents[1] / "golden" / "old_cache"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    tiny_data(root)
    return root


@pytest.fixture(scope="module")
def resumed(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(OLD / "interrupted", out)
    flags = ["--data", str(data / "Dataset001_Tiny"), "--cache", str(data / "cache")]
    launch = trained(2, ["--resume", *flags], out)
    assert "resumed at step 10 of 20" in launch.said(0)
    return out


def assert_same_labels(run: Path, which: str, images: Path, expected: Path, out: Path) -> None:
    assert predict.act([str(run), "-i", str(images), "-o", str(out), "--checkpoint", which, "--device", "cpu"]) == 0
    names = sorted(path.name for path in expected.iterdir())
    assert len(names) == 5
    for name in names:
        labels, old = (np.asarray(read_volume(folder / name).array) for folder in (out, expected))
        assert old.any() and not old.all() and np.array_equal(labels, old), name


def test_an_old_run_resumes_to_the_same_losses(resumed):
    rows, old = read_metrics(resumed / "metrics.jsonl"), read_metrics(OLD / "finished.jsonl")
    assert [(row["kind"], row["step"]) for row in rows] == [(row["kind"], row["step"]) for row in old]
    assert len([row for row in rows if row["kind"] == "train"]) == 20
    for row, known in zip(rows, old):
        for name, value in known.items():
            assert row[name] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), name
    assert status(resumed)["state"] == "finished"


@pytest.mark.parametrize("which", ["best", "latest"])
def test_an_old_checkpoint_predicts_the_same_label_maps(which, data, tmp_path):
    images = data / "Dataset001_Tiny" / "imagesTr"
    assert_same_labels(OLD / "interrupted", which, images, OLD / "labels" / "step_10", tmp_path / "out")


def test_a_resumed_old_run_predicts_the_same_label_maps(resumed, data, tmp_path):
    images = data / "Dataset001_Tiny" / "imagesTr"
    assert_same_labels(resumed, "latest", images, OLD / "labels" / "step_20", tmp_path / "out")


@pytest.mark.parametrize("finished", [False, True])
def test_an_old_run_is_reported(finished, request, tmp_path):
    run = request.getfixturevalue("resumed") if finished else OLD / "interrupted"
    page = tmp_path / "report.html"
    assert report.act([str(run), "--out", str(page)]) == 0
    text = page.read_text()
    assert "tumour" in text and ("c_000" in text or not finished)


def test_an_old_cache_is_read_until_its_files_change(tmp_path, capsys):
    """``golden/old_cache`` is a data set of two cases with the cache that an earlier version made of it."""
    shutil.copytree(OLD_CACHE, tmp_path / "old")
    data, cache = tmp_path / "old" / "Dataset001_Tiny", tmp_path / "old" / "cache"
    index = json.loads((cache / "cache.json").read_text())
    stamps = {name: time for case in index["cases"].values() for name, _, time in case["sources"]}
    for path in data.glob("*Tr/*.nii.gz"):
        os.utime(path, ns=(stamps[path.name], stamps[path.name]))  # which git does not keep
    line = [str(data), "--out", str(cache), "--workers", "0"]
    assert prepare.act([*line, "--check"]) == 0 and "data set, and its cache, is in order" in capsys.readouterr().out
    assert prepare.act(line) == 0 and "0 prepared, 2 already there" in capsys.readouterr().out
    save(data / "imagesTr" / "c_001_0000.nii.gz", image_array(3))
    assert prepare.act(line) == 0 and "0 prepared" not in capsys.readouterr().out
