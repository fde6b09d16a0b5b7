"""The command itself: literal lines, launchers, dry runs, output that nobody reads."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from seqpar.cli import train
from seqpar.cluster import exit_codes
from seqpar.cluster.devices import GIB, device_here
from seqpar.data.errors import DataError
from seqpar.models.build import build_network
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group
from seqpar.planner import chooser
from tests.support.configs import config_of
from tests.support.folders import nnunet
from tests.support.training_runs import status

ROOT = Path(__file__).parents[2]


@pytest.mark.started
@pytest.mark.parametrize(("more", "code"), [("", 0), ("--lr 1e30 --precision bf16", 5), ("--heads 5", 2)])
def test_a_run_whose_output_nobody_reads_any_more_goes_on_and_keeps_its_code(flags, tmp_path, more, code):
    line = shlex.join([sys.executable, "launch/train.py", *flags, *more.split(), "--out", str(tmp_path / "run")])
    piped = ["bash", "-c", f"{line} 2>&1 | head -c 1; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(piped, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, len(done.stdout)) == (code, 1)
    if code != 2:
        assert status(tmp_path / "run")["code"] == code and status(tmp_path / "run")["state"] != "running"


@pytest.mark.started
def test_the_literal_command_starts_its_ranks(flags, tmp_path):
    out = tmp_path / "run"
    started = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "launch/train.py", "--seqpar", "2", *flags[:-4],
         *["--iterations", "2", "--epochs", "1"], *flags[-4:], "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert started.returncode == 0, started.stdout + started.stderr
    first, second, *_ = started.stdout.splitlines()
    assert first.startswith("--seqpar 2: starting 2 ranks (processes) here")
    assert "2 ranks = data 1 x seq 2" in second
    assert status(out)["state"] == "finished" and (out / "validation.png").exists()


@pytest.mark.started
def test_torchrun_shows_a_users_error_last_and_alone():
    command = [sys.executable, "-m", "torch.distributed.run", "launch/train.py", "--preset", "debug", "--heads", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    said = [line.strip() for line in done.stderr.splitlines()]
    assert done.returncode == 1  # torchrun's own, whatever the rank's
    error = "error: --heads 5 does not divide --embed-dim 48: use --heads 4 (--preset debug sets --embed-dim 48)"
    assert said[-3:-1] == ["", error] and set(said[-1]) == {"="}, done.stderr
    assert said.count(error) == 2, "once when it happened, once in the end"


@pytest.mark.started
def test_ranks_that_were_started_here_keep_the_code_and_their_words_come_last(tmp_path):
    words = tmp_path / "error.json"  # as torchrun names a file to the process that starts the ranks
    line = [sys.executable, "launch/train.py", "--preset", "debug", "--seqpar", "2", "--data", str(tmp_path / "none")]
    env = {**os.environ, exit_codes.LAST_WORDS: str(words)}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr and done.stdout.count("\n") <= 6
    error = json.loads(words.read_text())["message"]["message"]
    assert f"{tmp_path}/none: does not exist" in error and done.stderr.startswith(error)


def test_what_all_ranks_refuse_one_of_them_says(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exit_codes, "FIRST_RANK_S", 0.2)
    monkeypatch.setenv(exit_codes.LAST_WORDS, str(tmp_path / "error.json"))
    second = Launcher("test", 1, 2, host="n1")
    for words, other in (("", "no"), ("no", "no"), ("no", "other")):
        if words:
            exit_codes.leave_last_words(f"error: x: {words}")
        assert exit_codes.report_unless_rank0_did(DataError("x", other), second) == 3
        silent = words == other
        assert capsys.readouterr().err == ("" if silent else f"error: rank 1 (n1): x: {other}\n")
        (tmp_path / "error.json").unlink()


def test_the_last_words_are_the_first_cause(tmp_path, monkeypatch, capsys):
    def last_words(act) -> str:
        words = tmp_path / "error.json"
        words.unlink(missing_ok=True)
        monkeypatch.setenv(exit_codes.LAST_WORDS, str(words))
        with contextlib.suppress(KeyError):
            exit_codes.run(act, [])
        return json.loads(words.read_text())["message"]["extraInfo"]["py_callstack"] if words.exists() else ""

    def refuse(arguments) -> int:
        raise ValueError("--this: do that")

    def stumble(arguments) -> int:
        exit_codes.report("first")
        raise KeyError("second")

    assert last_words(lambda arguments: 0) == ""
    assert last_words(lambda arguments: exit_codes.DATA) == "\n\nended with exit code 3: the lines above say why"
    assert last_words(refuse) == "\n\nerror: --this: do that" and "error: --this" in capsys.readouterr().err
    assert last_words(stumble) == "\n\nerror: first"
    monkeypatch.delenv(exit_codes.LAST_WORDS)
    assert exit_codes.run(refuse, []) == 2


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
    assert train.act(["--preset", "paper", "--depth", "2", "--seqpar", "4", "--patch", "4", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "per rank 3456 3456 3456 3456" in said and "4 ranks = data 1 x seq 4, to be started here" in said
    assert "  settings  --preset paper --patch 4 --seqpar 4 --depth 2" in said
    assert (
        "phantom-24 (built-in phantom brains): 24 cases, 22 to train on, 2 held out; 4 channels (T1, T1c, T2, FLAIR)"
        in said
    )
    assert not list(tmp_path.iterdir())


def test_a_dry_run_looks_at_the_data_and_at_the_memory(flags, tmp_path, monkeypatch, capsys):
    data = nnunet(tmp_path / "D", cases=5, channels=("T1", "T2"), labels={"background": 0, "tumour": 1, "cyst": 2})
    run = [*flags, "--data", str(data), "--cache", str(tmp_path / "cache"), "--seqpar", "2"]

    def rehearsed(*more: str) -> str:
        assert train.act([*run, "--dry-run", *more]) == 0
        return capsys.readouterr().out

    text = rehearsed()
    assert "D (nnU-Net raw): 5 cases, 4 to train on, 1 held out; 2 channels (T1, T2); learns 3 outputs (" in text
    assert "median 14x12x10 voxels of 1.1x1x1.3 mm" in text and ": fits" in text
    parts = build_network(config_of(run), 2, 3, Group("seq", (0, 1)), device="meta")
    sizes = [sum(p.numel() for p in part.parameters()) / 1e6 for part in (parts.encoder, parts.decoder)]
    assert "encoder {:.2f} M + decoder {:.2f} M parameters".format(*sizes) in text
    with pytest.raises(ValueError, match="--fold 7: the folds are 0 to 4"):
        rehearsed("--fold", "7")
    for place, why in ((data, "belongs to a data set"), (data / "imagesTr", "belongs to a data set")):
        with pytest.raises(DataError, match=why):
            rehearsed("--out", str(place))
    with pytest.raises(ValueError, match="no run has begun there"):
        rehearsed("--resume", "--out", str(tmp_path))
    here = device_here("cpu")
    monkeypatch.setattr(
        chooser, "device_here", lambda flag: replace(here, memory=0.2 * GIB, reserved_bytes=0.0, group_bytes=0.0)
    )
    text = rehearsed("--batch", "999")
    assert "does not fit; plan finds what does" in text and "MiB are missing" in text and "at most -" not in text
    (data / "imagesTr" / "c_002_0001.nii.gz").unlink()
    with pytest.raises(DataError, match="c_002"):
        rehearsed()
    with pytest.raises(DataError, match="does not exist"):
        train.act([*run, "--dry-run", "--data", str(tmp_path / "nowhere")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["D"], "nothing is prepared"
