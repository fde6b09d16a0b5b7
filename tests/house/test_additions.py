"""What the page says about adding things is all it takes: done word for word in a copy, which then trains."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from seqpar.runs.journal import read_metrics
from tests.support.pages import ROOT, blocks
from tests.support.training_runs import tiny_data

PAGE = ROOT / "docs" / "how-to" / "add-your-own.md"
NAMES = {  # the list next to which each addition goes, and the name that the page gives it there
    "decoders/named_decoders.py": "linear",
    "seqpar/scores/label_scores.py": "Precision",
    "seqpar/data/sampling/extra_steps.py": "salt",
    "seqpar/losses/named_losses.py": "jaccard",
    "seqpar/optimization/optimizers.py": "nadam",
}
FLOORS = (
    "every_module_has_a_room_and_every_room_exists",
    "imports_point_down",
    "neither_files_nor_rooms_form_a_circle",
)


def additions() -> tuple[dict[str, str], dict[str, str]]:
    """Returns the page's new files by path, and what it adds to existing ones."""
    files, lines = dict[str, str](), dict[str, str]()
    for block in blocks(PAGE, "python"):
        head, _, body = block.partition("\n")
        if match := re.match(r"# in ([\w/]+\.py)", head):
            lines[match[1]] = body
        elif match := re.fullmatch(r"# ([\w/]+\.py)", head):
            files[match[1]] = body
    return files, lines


def added(text: str, lines: str) -> str:
    """Returns a file with the additional imports, an entry at the beginning of its list, and a function before it."""
    imports, entry = ("".join(re.findall(line, lines, re.M)) for line in (r"^from .+\n", r'^    "[\w-]+": .+,\n'))
    rest = lines.replace(imports, "").replace(entry, "")
    (opening,) = re.findall(r"^[A-Z_]+(?:: .+)? = \{\n(?=    \")", text, re.M)[-1:]
    text = text.replace(opening, f"{rest}{opening}{entry}")
    last = [match.end() for match in re.finditer(r"^(?:from|import) [^()\n]+\n", text, re.M)][-1]
    return text[:last] + imports + text[last:]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Returns a copy of the files that git knows, with the page's additions."""
    place = tmp_path_factory.mktemp("copy")
    listing = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    known = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    names = [name for name in known if name and (ROOT / name).exists()]
    packed = subprocess.run(["tar", "-cf", "-", *names], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-xf", "-"], cwd=place, input=packed.stdout, check=True)
    files, lines = additions()
    for name, body in files.items():
        assert not (place / name).exists(), f"{name} is not new"
        (place / name).write_text(body)
    for name, more in lines.items():
        (place / name).write_text(added((place / name).read_text(), more))
    return place


def run(place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=place, env={"PATH": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(place)},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def test_each_takes_one_new_file_at_most_and_one_entry() -> None:
    files, lines = additions()
    assert set(lines) == set(NAMES) and len(files) == len(lines) - 1
    for path, more in lines.items():
        assert re.findall(r'^    "([\w-]+)": .+,$', more, re.M) == [NAMES[path]]
        compile(added((ROOT / path).read_text(), more), path, "exec")
    for body in files.values():
        compile(body, "page", "exec")


@pytest.mark.started
def test_all_of_them_train_three_steps(copy, tmp_path) -> None:
    flags = [*tiny_data(tmp_path), "--iterations", "3", "--epochs", "1", "--out", str(tmp_path / "run"), "--batch-dice"]
    added = ["--decoder", "linear", "--augment", "light+salt", "--loss", "jaccard", "--optimizer", "nadam"]
    done = run(copy, "launch/train.py", *flags, *added)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [(row["loss"], row["jaccard_loss"]) for row in rows if row["kind"] == "train"]
    assert len(losses) == 3 and all(total == term for total, term in losses) and len(set(losses)) == 3
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    chosen = [config[name] for name in ("decoder", "augment", "loss", "optimizer")]
    assert chosen == ["linear", "light+salt", "jaccard", "nadam"]
    summary = json.loads((tmp_path / "run" / "validation" / "summary.json").read_text())
    assert "Precision" in summary["mean"]["1"]


@pytest.mark.started
def test_a_step_acts_where_a_recipe_names_it_and_changes_no_other_draw(copy) -> None:
    code = """
import numpy as np
from seqpar.data.sampling.augmentation import augment
image, label = np.random.default_rng(0).normal(size=(1, 30, 30, 30)).astype("f4"), np.zeros((30, 30, 30), "u1")
plain, salted = (augment(name, (8, 8, 8)) for name in ("light", "light+salt"))
same = [np.array_equal(plain(image, label, seed)[0], salted(image, label, seed)[0]) for seed in range(60)]
assert [not equal for equal in same] == ["salt" in salted.plan(seed) for seed in range(60)] or print(same)
assert 3 < same.count(False) < 25
"""
    done = run(copy, "-c", code)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


@pytest.mark.started
def test_the_copy_keeps_the_floors(copy) -> None:
    tests = [f"tests/house/test_floors.py::test_{name}" for name in FLOORS]
    done = run(copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests)
    assert done.returncode == 0, done.stdout + done.stderr
