"""What lies beside the sources, run folders and builds, does not change what the linter asks for."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SORTED = "import numpy\nimport torch\n\nfrom seqpar import SeqParViT\nfrom tests.support.ranks import relative\n"


def complaints(folder: Path) -> str:
    """Returns what the linter says of the order of imports there."""
    line = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "I", "--output-format", "concise", "."]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True).stdout


def test_imports_are_sorted_alike_beside_folders_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text(SORTED)
    assert "All checks passed" in complaints(tmp_path)
    for name in ("runs", "build", "numpy", "torch", "monai"):
        (tmp_path / name).mkdir()
    assert "All checks passed" in complaints(tmp_path)
    (tmp_path / "tests" / "test_one.py").write_text("import torch\nimport numpy\n")
    assert "I001" in complaints(tmp_path)  # the linter does look
