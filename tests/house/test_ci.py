"""Steps of .ci: all are run; where a program from outside is missing they say so, and fail where CI=true."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, page, shown_commands

NO_STEPS = ("run", "need.sh", "lanes.sh", "phantoms")  # phantoms: minutes of training, started by hand
STEPS = {
    "browser": (["chromium"], "Chromium is not installed (Debian: chromium)", "tests/browser/report_in_chromium.py"),
    "slurm": (
        ["shellcheck", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue", "sinfo"],
        "slurmctld is not installed (Debian: slurm-wlm)",
        "tests/slurm/jobs_on_slurm.py",
    ),
}


@pytest.mark.parametrize("failing", [None, "one", "three"])
def test_all_steps_are_run_two_at_a_time_and_none_fails_unseen(failing: str | None, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        code = 3 if name == failing else 0
        beginning = f"echo began {name} >> order; echo this is {name}; sleep 0.5; echo so far {name}"
        (tmp_path / name).write_text(f"#!/bin/bash\n{beginning}; echo ended {name} >> order; exit {code}\n")
        (tmp_path / name).chmod(0o755)
    script = f"set -euo pipefail; . {ROOT}/.ci/lanes.sh; lanes 2 ./one './two with a word' ./three; echo the next"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == (1 if failing else 0) and ("the next" in done.stdout) == (failing is None)
    order = (tmp_path / "order").read_text().split("\n")
    assert sorted(order[:2]) == ["began one", "began two"] and "began three" in order[3:], order
    for name, line in {"one": "./one", "two": "./two with a word", "three": "./three"}.items():
        said = rf"this is {name}\nso far {name}\n{line}{' failed' * (name == failing)}: \d+ s, \d+ s of a processor\n"
        assert re.search(said, done.stdout), done.stdout


def test_what_make_test_leaves_out_is_a_step() -> None:
    """By a mark: what starts processes or a compiler, or computes for long."""
    assert '-m "not started and not long"\n' in (ROOT / "Makefile").read_text()
    assert '-m "started and not long"\n' in (ROOT / ".ci" / "started").read_text()
    assert "-m long\n" in (ROOT / ".ci" / "long").read_text()


BY_HAND = {"long"}  # .ci/run says why


def test_every_step_is_run_and_its_tests_are_not_those_of_make_test() -> None:
    steps = {path.name: path.read_text() for path in (ROOT / ".ci").iterdir() if path.name not in NO_STEPS}
    named = {"accept", "commands", "dicom", "docs", "gpu", "long", "nnunet", "started", "tune", "tutorials"}
    assert {*named, *STEPS} == set(steps)
    text = (ROOT / ".ci" / "run").read_text()
    run = shlex.split(text[text.index("\nlanes ") :])
    assert {"make lint", "make train"} <= {*run} and "\nmake test\n" in text
    assert "pip install" in text[: text.index("\nlanes ")] and "[tune,docs,tools]" in text, "two would install at once"
    assert all((f".ci/{name}" in run) != (name in BY_HAND) for name in steps)
    assert all((ROOT / ".ci" / name).stat().st_mode & 0o111 for name in steps)
    assert "launch/doctor.py --accept --device cpu" in steps.pop("accept")  # an act, whose exit code says all
    for name in ("started", "long"):  # by a mark
        steps.pop(name)
    for name, text in steps.items():
        files = [file for found in re.findall(r"tests/[\w/*]+\.py", text) for file in ROOT.glob(found)]
        own = [file for file in files if not file.name.startswith("test_")]
        assert own and all("def test_" in file.read_text() for file in own), name


PHANTOMS = {"liver": {"liver": 0.9, "lesion": 0.6}, "organs": {"chiasm": 0.5, "mandible": 0.9, "absent": None}}
TRAINED = """#!/usr/bin/env bash
echo "$*" >> "$(dirname "$0")/calls"
case $1 in
    -c) exec {python} "$@" ;;
    launch/train.py)
        while [ "$1" != --out ]; do shift; done
        mkdir -p "$2" && cp "$(dirname "$0")/$(basename "$2")" "$2/metrics.jsonl" ;;
esac
"""


@pytest.mark.parametrize("worse", [{}, {"lesion": 0.4}, {"liver": 0.8}, {"chiasm": 0.2}], ids=str)
def test_phantoms_that_are_learned_too_little_fail(worse: dict[str, float], tmp_path: Path) -> None:
    """The page's flags are those that are tried; an organ that no case shows counts for nothing."""
    for kind, dice in PHANTOMS.items():
        rows = [{"kind": "val", "dice": dict.fromkeys(dice, 0.0)}, {"kind": "train"}]
        rows.append({"kind": "val", "dice": dice | {name: worse[name] for name in dice if name in worse}})
        (tmp_path / kind).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "python").write_text(TRAINED.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)
    env = {**os.environ, "PYTHON": str(tmp_path / "python")}
    done = subprocess.run([ROOT / ".ci" / "phantoms"], env=env, capture_output=True, text=True)
    assert done.returncode == (1 if worse else 0), done.stdout + done.stderr
    if worse:
        return
    assert "liver 0.900 lesion 0.600 mean 0.750" in done.stdout and "mean 0.700" in done.stdout
    lines = shown_commands(page("how-to/phantoms"), "launch/train.py")
    tried = [call.split() for call in (tmp_path / "calls").read_text().splitlines() if "train.py" in call]
    assert len(lines) == len(tried) == 2
    for line, words in zip(lines, tried):
        assert {word for word in line.split()[1:] if not word.startswith("phantoms/")} <= set(words), line


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The only folder with programs: no tool, nobody who may install one, and a Python whose pytest says its files."""
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    stubs = {"id": "echo 1000", "python": f'[ "$2" = pytest ] && echo "pytest $*" || exec {sys.executable} "$@"'}
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def step(name: str, bare: Path, **env: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(bare), "PYTHON": str(bare / "python"), **env}
    return subprocess.run([ROOT / ".ci" / name], env=env, capture_output=True, text=True)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_without_its_tool_fails_where_ci_is_true_and_else_says_that_it_was_skipped(
    name: str, bare: Path
) -> None:
    _, why, tests = STEPS[name]
    failed, skipped = step(name, bare, CI="true"), step(name, bare)
    assert failed.returncode == 1 and "cannot run: " in failed.stderr and why in failed.stderr
    assert skipped.returncode == 0 and "skipped: " in skipped.stdout and why in skipped.stdout, skipped.stderr
    assert not any(tests in done.stdout + done.stderr for done in (failed, skipped))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_with_its_tool_runs_its_tests(name: str, bare: Path) -> None:
    programs, _, tests = STEPS[name]
    for program in programs:
        (bare / program).symlink_to("/bin/true")
    done = step(name, bare)
    if "root only" in done.stdout or "no device" in done.stdout:
        pytest.skip(done.stdout)
    for again in (done, step(name, bare, CI="true")):
        assert again.returncode == 0 and tests in again.stdout, again.stdout + again.stderr
