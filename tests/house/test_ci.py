"""Steps of .ci that need a program from outside: where it is missing they say so, and fail where CI=true."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = {
    "browser": (["chromium"], "Chromium is not installed (Debian: chromium)", "tests/browser/report_in_chromium.py"),
    "slurm": (
        ["shellcheck", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue", "sinfo"],
        "slurmctld is not installed (Debian: slurm-wlm)",
        "tests/slurm/jobs_on_slurm.py",
    ),
}


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
