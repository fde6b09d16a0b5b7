"""Each kept figure and table of a bench names a commit of this history, so that its program can be read."""

import re
import subprocess

import pytest

from tests.support.pages import ROOT

LAB = ROOT / "launch" / "lab"
MADE_BY = re.compile(r"` at ([0-9a-f]{7,40})\b")  # after the command


def every_result() -> dict[str, list[str]]:
    """Returns the texts of each file of results, one of each of its figures or tables, by the file's path."""
    figures = {path: [path.read_text()] for path in LAB.glob("figures/results/*.txt")}
    benches = {
        path: re.split(r"^(?=## )", path.read_text(), flags=re.M)[1:] for path in LAB.glob("benches/results/*.md")
    }
    return {path.relative_to(LAB).as_posix(): texts for path, texts in (figures | benches).items()}


@pytest.fixture(scope="module")
def history() -> list[str]:
    """The commits from which this one comes."""
    listing = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode or shallow.stdout.strip() != "false":
        pytest.skip("this copy has no history")
    return listing.stdout.split()


def test_every_figure_and_table_names_a_commit_of_this_history(history: list[str]) -> None:
    short = {commit[:length] for commit in history for length in range(7, 41)}
    named = {path: [re.findall(MADE_BY, text) for text in texts] for path, texts in every_result().items()}
    assert len(named) > 15 and all(named.values())
    lacking = [path for path, tables in named.items() if not all(len(one) == 1 and one[0] in short for one in tables)]
    assert not lacking, "measure again what names another commit"
