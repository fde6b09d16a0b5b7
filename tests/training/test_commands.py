"""The command itself: literal lines, launchers, dry runs, output that nobody reads."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seqpar.launch import train
from tests.support.training_runs import status

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("more", "code"), [("", 0), ("--lr 1e30 --precision bf16", 5), ("--heads 5", 2)])
def test_a_run_whose_output_nobody_reads_any_more_goes_on_and_keeps_its_code(flags, tmp_path, more, code):
    line = shlex.join([sys.executable, "launch/train.py", *flags, *more.split(), "--out", str(tmp_path / "run")])
    piped = ["bash", "-c", f"{line} 2>&1 | head -c 1; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(piped, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, len(done.stdout)) == (code, 1)
    if code != 2:
        assert status(tmp_path / "run")["code"] == code and status(tmp_path / "run")["state"] != "running"


def test_the_literal_command_starts_its_ranks(flags, tmp_path):
    out = tmp_path / "run"
    started = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "launch/train.py", "--seqpar", "2", *flags[:-4],
         *["--iterations", "2", "--epochs", "1"], *flags[-4:], "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert started.returncode == 0, started.stdout + started.stderr
    first, second, *_ = started.stdout.splitlines()
    assert first.startswith("--seqpar 2 needs 2 ranks and 1 was started: starting 2 here")
    assert "2 ranks = data 1 x seq 2" in second
    assert status(out)["state"] == "finished" and (out / "validation.png").exists()


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"SLURM_JOB_ID": "7"}, "srun -n 4 python .*train.py --seqpar 4 --patch 4"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"},
            "torchrun --nproc-per-node 4 .*train.py --seqpar 4 --patch 4",
        ),
    ],
)
def test_under_a_launcher_it_says_the_line_to_use(monkeypatch, env, line):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=line):
        train.act(["--seqpar", "4", "--patch", "4"])


def test_a_dry_run_writes_nothing(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(signal, "signal", lambda *of: pytest.fail("a dry run needs no handlers"))
    assert train.act(["--preset", "paper", "--seqpar", "4", "--patch", "4", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "per rank 3456 3456 3456 3456" in said and "4 ranks = data 1 x seq 4" in said
    assert not list(tmp_path.iterdir())
