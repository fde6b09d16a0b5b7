"""Folders of true and predicted label maps, and evaluation of them."""

import json
import math
from pathlib import Path

import nibabel
import numpy as np

from seqpar.cli import evaluate
from seqpar.cluster.exit_codes import run

LABELS = {"background": 0, "whole": [1, 2], "core": [2]}
OBLIQUE = np.array([[-0.9, 0.3, 0, 20], [0.3, 0.9, 0, -30], [0, 0, 2.5, 5], [0, 0, 0, 1.0]])
OBLIQUE_MM = [math.sqrt(0.9), math.sqrt(0.9), 2.5]


def random_labels(seed: int, shape: tuple[int, ...] = (12, 11, 9)) -> np.ndarray:
    """Labels 0, 1, 2 in nested boxes at random places."""
    rng = np.random.default_rng(seed)
    labels = np.zeros(shape, np.uint8)
    low = rng.integers(0, 3, 3)
    labels[tuple(slice(a, a + 6) for a in low)] = 1
    labels[tuple(slice(a + 1, a + 4) for a in low)] = 2
    return labels


def save(path: Path, labels: np.ndarray, affine: np.ndarray = OBLIQUE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(labels, affine), path)
    return path


def evaluate_folders(folders: tuple[Path, Path], *options: str) -> int:
    return run(evaluate.act, [*map(str, folders), "--workers", "1", *options])


def summary_of(folders: tuple[Path, Path]) -> dict:
    return json.loads((folders[1] / "summary.json").read_text())
