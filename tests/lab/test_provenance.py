"""Each kept figure and table of a bench names a commit of this history, so that its program can be read."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.pages import ROOT

LAB = ROOT / "launch" / "lab"
# Commits of an earlier history, which no clone has: what names them is to be measured again, and to leave this list.
LOST = {
    "benches/results": {
        "0881ddc", "0d91d73", "111b525", "1d660a8", "32ee341", "636ab67", "642678f", "6b9fa44", "7c6c75c", "ff79661",
    },
    "figures/results": {"1d660a8", "53a02c4", "8dfb1a8", "fc978fd"},
}  # fmt: skip

NAMES = re.compile(r"` at ([0-9a-f]{7,40})\b")  # after the command
UNNAMED = {"memory": 2}  # tables without a commit, which are to be measured again


def named(folder: Path) -> set[str]:
    """Returns the commits that the results of a folder name after the command that made them."""
    texts = [path.read_text() for path in folder.iterdir() if path.suffix in (".md", ".txt")]
    return {commit for text in texts for commit in re.findall(NAMES, text)}


@pytest.fixture(scope="module")
def history() -> list[str]:
    """The commits from which this one comes."""
    listing = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode or shallow.stdout.strip() != "false":
        pytest.skip("this copy has no history")
    return listing.stdout.split()


@pytest.mark.parametrize("folder", LOST)
def test_results_name_commits_of_this_history(folder: str, history: list[str]) -> None:
    every = named(LAB / folder)
    missing = {commit for commit in every if not any(known.startswith(commit) for known in history)}
    assert len(every) > 3 and missing == LOST[folder], "measure anew what names other commits; drop those named no more"


def test_every_figure_and_table_names_its_commit() -> None:
    figures = [path.read_text() for path in (LAB / "figures" / "results").glob("*.txt")]
    assert len(figures) == 13 and all(len(NAMES.findall(text)) == 1 for text in figures)
    unnamed = dict[str, int]()
    for path in sorted((LAB / "benches" / "results").glob("*.md")):
        tables = re.split(r"^## ", path.read_text(), flags=re.M)[1:]
        unnamed[path.stem] = sum(len(NAMES.findall(table)) != 1 for table in tables)
    assert {bench: count for bench, count in unnamed.items() if count} == UNNAMED
