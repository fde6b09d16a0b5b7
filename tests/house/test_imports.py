"""A program imports what it needs: modules of ours are counted in a new process after a whole run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNT = """
import atexit, json, runpy, sys
sys.argv = sys.argv[1:]
def write():
    modules = [name for name, module in sys.modules.items() if getattr(module, "__file__", None)]
    print("modules:", json.dumps(modules))
atexit.register(write)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def imported(program: str, *arguments: str) -> set[str]:
    """Returns the modules that a program has imported when it ends."""
    ran = subprocess.run(
        [sys.executable, "-c", COUNT, f"seqpar.cli.{program}", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout.rpartition("modules: ")[2]))


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "seqpar"}


def test_phantoms_are_made_without_torch_and_most_of_the_package(tmp_path: Path) -> None:
    modules = imported("phantom", "--out", str(tmp_path), "--cases", "2", "--size", "16", "16", "16", "--workers", "2")
    assert len(ours(modules)) <= 60 and "torch" not in modules
    assert {"seqpar.data.phantom.brain", "numpy"} <= modules  # the control


@pytest.mark.started
def test_a_training_imports_what_its_task_needs(tmp_path: Path) -> None:
    run = ("--preset", "debug", "--device", "cpu", "--iterations", "1", "--epochs", "1", "--val-every", "1")
    modules = imported("train", *run, "--out", str(tmp_path / "run"))
    assert len(ours(modules)) <= 275
    unused = ("weights.pretrained", "training.folds", "training.stage_choice", "vit.masked_autoencoder", "cli.tune")
    assert not {f"seqpar.{name}" for name in unused} & modules
    assert {"seqpar.training.trainer", "seqpar.vit.encoder"} <= modules  # the control

    images = tmp_path / "images"
    imported("phantom", "--out", str(images), "--cases", "1", "--size", "16", "16", "16", "--workers", "1")
    scans = next(images.rglob("imagesTr"), images)
    found = imported("predict", str(tmp_path / "run"), "-i", str(scans), "-o", str(tmp_path / "found"))
    assert "sympy" not in found and "seqpar.prediction.sliding_window" in found
