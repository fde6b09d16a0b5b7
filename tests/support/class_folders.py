"""Small data sets whose volumes have one class each: bright and dim blocks, with a table."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.support.folders import OBLIQUE, save

SHAPE = (40, 24, 16)


def volume(seed: int, bright: bool) -> np.ndarray:
    """Returns a noisy block, which has a brighter cube in one place where ``bright``."""
    rng = np.random.default_rng(seed)
    image = rng.normal(300, 30, SHAPE)
    if bright:
        image[12:20, 13:19, 4:10] += 250
    return np.maximum(image, 1).round().astype(np.int16)


def class_folder(root: Path, cases: int = 8, more: Mapping[str, str] | None = None, header: str = "case,class") -> Path:
    """Writes images and labels.csv; ``more``: what follows a case's class in its line."""
    lines = [header]
    for n in range(cases):
        name, bright = f"c_{n:02d}", n % 2 == 1
        save(root / f"{name}.nii.gz", volume(n, bright), OBLIQUE)
        lines.append(f"{name},{'ill' if bright else 'healthy'}{(more or {}).get(name, '')}")
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    return root
