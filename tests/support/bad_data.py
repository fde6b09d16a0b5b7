"""Harm done to files of a data set, and what preparing it then prints."""

from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest

from seqpar.cli.prepare import act
from seqpar.cluster.exit_codes import run
from tests.support.folders import save, tree


def rewrite(path: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Replaces a file's voxels."""
    save(path, change(np.asarray(nibabel.load(path).dataobj).copy()))


def put(array: np.ndarray, value: float) -> np.ndarray:
    """Returns the array with one voxel replaced."""
    array[7, 6, 5] = value
    return array


def prepared(root: Path, out: Path, capfd: pytest.CaptureFixture[str], code: int = 3) -> str:
    """Returns what preparing prints; the exit code, silence of Python and the source's bytes are checked."""
    before = tree(root)
    assert run(act, [str(root), "--out", str(out), "--workers", "0"]) == code
    printed = capfd.readouterr()
    assert "Traceback" not in printed.out + printed.err
    assert tree(root) == before, "the source was changed"
    return printed.err
