"""Training as processes do it: equal losses on any ranks, exact resume, and every way in which a run can be ended."""

import errno
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from seqpar.data.errors import DataError
from seqpar.launch import train
from seqpar.launch.job.stop_request import Stopper
from seqpar.launch.runs.journal import read_metrics
from seqpar.launch.training import after_step, request, trainer, validation
from seqpar.launch.weights import checkpoint
from seqpar.launch.weights.files import read_weights
from tests.support.folders import nnunet
from tests.support.training_runs import Launch, at, die, losses, moments, signalled, status, tiny_data, trained, weights

ROOT = Path(__file__).parents[2]
EVERY_STEP = ["--checkpoint-minutes", "1e-9"]


@pytest.fixture(scope="session")
def flags(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("training")
    given = tiny_data(root)
    trained(1, [*given, "--iterations", "1", "--epochs", "1"], root / "first")  # prepares the cache
    return given


@pytest.fixture(scope="session")
def undisturbed(flags, tmp_path_factory):
    """Returns the folder of a run that nothing happened to, made once for each set of flags."""
    made: dict[tuple, Path] = {}

    def find(world: int, *more: str) -> Path:
        if (world, more) not in made:
            made[world, more] = tmp_path_factory.mktemp("undisturbed") / "run"
            trained(world, [*flags, *more], made[world, more])
        return made[world, more]

    return find


def farthest(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b) > 0
    return max(abs(x - y) / abs(y) for x, y in zip(a, b))


def scores(out: Path) -> list[dict]:
    return [row["dice"] for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "val"]


SPREADS = {
    "alone": (1, "--batch 4"),
    "accumulated": (1, "--batch 1 --accumulate 4"),
    "seq 2": (2, "--seqpar 2 --batch 4"),
    "seq 4, ordered": (4, "--seqpar 4 --batch 2 --accumulate 2 --split ordered"),
    "data 2 x seq 2": (4, "--seqpar 2 --batch 2"),
    "data 2, workers": (2, "--batch 1 --accumulate 2 --workers 1"),
}


@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-9), ("fp32", 1e-3)])
def test_loss_per_step_is_the_same_however_the_tiles_are_spread(flags, tmp_path, precision, bound):
    run = [*flags, *f"--precision {precision} --iterations 12 --epochs 1 --depth 2 --dropout 0.1".split()]
    run += ["--drop-path", "0.1", "--optimizer", "adamw", "--weight-decay", "0.05", "--clip", "1"]
    found = {}
    for name, (world, more) in SPREADS.items():
        if precision == "fp64" or name in ("alone", "seq 4, ordered", "data 2 x seq 2"):
            trained(world, [*run, *more.split()], tmp_path / name)
            found[name] = losses(tmp_path / name)
            assert len(found[name]) == 12
            assert farthest(found[name], found["alone"]) <= bound, name
    if precision == "fp64":
        trained(1, [*run, "--batch", "4", "--seed", "1"], tmp_path / "other seed")
        assert farthest(losses(tmp_path / "other seed"), found["alone"]) > 1e-3, "the comparison can fail"


LEFT = {
    "alone, TERM in a step": (1, "", at(trainer.Trainer, "_backward", 0, signalled(signal.SIGTERM), call=3)),
    "seq 2, USR1 to one rank": (
        2,
        "--seqpar 2",
        at(trainer.Trainer, "_backward", 1, signalled(signal.SIGUSR1), call=3),
    ),
    "seq 3, USR1 in validation": (
        3,
        "--seqpar 3 --split ordered",
        at(validation.Validation, "_predict", 2, signalled(signal.SIGUSR1), call=1),
    ),
    "seq 2, TERM between two micro-batches": (
        2,
        "--seqpar 2 --accumulate 4",
        at(trainer.Trainer, "_backward", 1, signalled(signal.SIGTERM), call=10),
    ),
    "data 2 x seq 2, TERM in a save": (
        4,
        "--seqpar 2 --checkpoint-minutes 1e-9",
        at(checkpoint, "_write", 3, signalled(signal.SIGTERM), call=3),
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_run_that_had_to_leave_goes_on_to_the_same_bits(flags, undisturbed, tmp_path, name):
    world, more, hook = LEFT[name]
    out = tmp_path / "run"

    def twice(rank: int) -> None:
        hook(rank)
        if "USR1 to one" in name and rank == 1:
            at(after_step.AfterStep, "decide", 1, signalled(signal.SIGTERM), call=3)(rank)

    left = trained(world, [*flags, *more.split()], out, expect=75, hook=twice)
    said = status(out)
    assert said["state"] == "preempted" and said["code"] == 75 and 1 < said["step"] < 6, said
    assert re.fullmatch(r"SIG(TERM|USR1)( on rank \d, agreed in \d\.\d s)?", said["why"]), said
    assert ("rank" in said["why"]) == (world > 1)
    if "micro-batches" in name:
        assert said["step"] == 2, "the step in which it came does not count"
    assert not (out / "model.safetensors").exists()
    assert f"go on with --resume --out {out}" in left.said(0)
    trained(world, ["--resume"], out)
    whole = undisturbed(world, *more.split())
    assert weights(out) == weights(whole)
    assert losses(out) == losses(whole)
    assert status(out)["state"] == "finished"
    assert scores(out) == scores(whole) and len(scores(out)) == 3, "each validation is there once"


def test_a_run_that_cannot_go_on_with_other_data_keeps_its_folder(flags, undisturbed, tmp_path):
    out, data = tmp_path / "run", nnunet(tmp_path / "Dataset002_Two", 5, ("CT", "MR"))
    trained(1, flags, out, expect=75, hook=at(after_step.AfterStep, "decide", 0, signalled(signal.SIGTERM), call=3))
    before = (out / "config.json").read_bytes()
    refused = trained(1, ["--resume", "--data", str(data), "--cache", str(tmp_path / "cache")], out, expect=2)
    assert "holds another network" in refused.said() and (out / "config.json").read_bytes() == before
    trained(1, ["--resume"], out)
    assert weights(out) == weights(undisturbed(1))


def test_what_one_rank_alone_refuses_it_says_with_its_name_and_code(flags, tmp_path):
    """A folder on a node's own disk, say, or files that are gone."""

    def refuse() -> None:
        raise DataError("/nvme/case", "no such file")

    def hook(rank: int) -> None:
        at(request, "refuse", 1, refuse)(rank)
        train.FIRST_RANK_S = 0.1

    with Launch(2, [*flags, "--seqpar", "2", "--start-timeout", "3"], tmp_path / "run", hook) as launch:
        assert launch.wait() == [1, 3]
    assert launch.said(1).startswith(f"error: rank 1 ({socket.gethostname()}): /nvme/case: no such file")


def test_what_one_rank_fails_of_while_it_loads_is_the_runs_verdict(flags, tmp_path):
    def exhaust() -> None:
        raise torch.OutOfMemoryError("HIP out of memory")

    out, more = tmp_path / "run", [*flags, "--seqpar", "2"]
    trained(2, more, out, expect=75, hook=at(after_step.AfterStep, "decide", 0, signalled(signal.SIGTERM), call=3))
    with Launch(2, ["--resume"], out, at(checkpoint, "load", 1, exhaust)) as launch:
        assert launch.wait() == [1, 4]
    assert (status(out)["state"], status(out)["code"]) == ("failed", 4)


def test_a_validation_that_is_repeated_after_a_kill_is_there_once(flags, tmp_path):
    out, slow = tmp_path / "run", ["--lr", "1e-7"]  # no second validation is the best, which would save
    trained(
        1, [*flags, *slow], out, expect=75, hook=at(after_step.AfterStep, "decide", 0, signalled(signal.SIGTERM), 4)
    )
    assert status(out)["step"] == 4
    with Launch(1, ["--resume"], out, at(trainer.Trainer, "_backward", 0, die)) as killed:
        assert killed.wait() == [-signal.SIGKILL]
    trained(1, ["--resume"], out)
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "val"] == [2, 4, 6]


def test_ranks_agree_to_leave_while_a_long_step_lasts(flags, tmp_path):
    """The main thread gets no signal while it computes; the thread beside it does."""

    def long_step() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, Stopper.SIGNALS)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(6)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, Stopper.SIGNALS)

    out = tmp_path / "run"
    trained(2, [*flags, "--seqpar", "2"], out, expect=75, hook=at(trainer.Trainer, "_backward", 1, long_step, call=3))
    said = status(out)
    seconds = re.fullmatch(r"SIGUSR1 on rank 1, agreed in (.*) s", said["why"])
    assert seconds and float(seconds[1]) < 5 and said["step"] == 3, said


def test_a_run_goes_on_with_other_ranks_and_workers(flags, tmp_path):
    run = [*flags, "--precision", "fp64", "--batch", "4", "--dropout", "0.1"]
    left = tmp_path / "left"
    hook = at(after_step.AfterStep, "decide", 1, signalled(signal.SIGUSR1), call=3)
    trained(2, [*run, "--seqpar", "2"], left, expect=75, hook=hook)
    trained(1, run, tmp_path / "whole")
    for world, more in (1, "--seqpar 1 --workers 1 --accumulate 2"), (4, "--seqpar 2"), (3, "--seqpar 3"):
        out = tmp_path / f"on {world}"
        shutil.copytree(left, out)
        trained(world, ["--resume", "--split", "ordered", *more.split()], out)
        assert farthest(losses(out), losses(tmp_path / "whole")) <= 1e-9
    with Launch(3, ["--resume", "--seqpar", "1"], left) as refused:
        assert set(refused.wait()) == {2}
    assert "4 tiles a step" in refused.said() and "1, 2, 4" in refused.said()


@pytest.mark.parametrize(("world", "more"), [(2, "--seqpar 2"), (4, "--seqpar 2")])
def test_a_run_that_loses_a_rank_at_every_moment_in_turn_ends_with_the_same_bits(
    flags, undisturbed, tmp_path, world, more
):
    more = [*more.split(), *EVERY_STEP, "--epochs", "5", "--mode", "halo"]
    out = tmp_path / "run"
    arguments = [*flags, *more]
    for moment, hook in moments(world - 1).items():
        with Launch(world, arguments, out, hook) as launch:
            codes = launch.wait(timeout=60)
            assert codes.count(-signal.SIGKILL) == 1, f"{moment} was not reached: {codes}\n{launch.said()}"
            assert codes.count(1) == world - 1, f"{moment}: {codes}\n{launch.said()}"
            assert "lost contact" in launch.said()
        assert status(out)["state"] == "failed"
        if moment not in ("in a step", "before a step is agreed"):
            checkpoint.find(out / "checkpoints")
        arguments = ["--resume"]
    trained(world, ["--resume"], out)
    whole = undisturbed(world, *more)
    assert weights(out) == weights(whole)
    assert losses(out) == losses(whole)
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names[:2] == ["best", "latest"] and len(names) <= 5, f"leftovers stay: {names}"
    assert status(out)["state"] == "finished"


def test_survivors_of_a_lost_rank_leave_at_once(flags, tmp_path):
    ended = []

    def hook(rank: int) -> None:
        at(trainer.Trainer, "_backward", 1, die, call=2)(rank)

    with Launch(4, [*flags, "--seqpar", "4"], tmp_path / "run", hook) as launch:
        while 1 not in launch.codes:
            done, code = os.waitpid(launch.pids[1], os.WNOHANG)
            if done:
                launch.codes[1] = os.waitstatus_to_exitcode(code)
            time.sleep(0.01)
        began = time.monotonic()
        os.kill(launch.pids[0], signal.SIGTERM)  # as a scheduler does that ends the job
        launch.wait()
        ended.append(time.monotonic() - began)
    assert ended[0] < 30
    assert not list((tmp_path / "run" / "checkpoints").iterdir()), "nobody saves when a peer is dead"


def test_a_loss_that_is_no_number_on_one_rank_stops_all_before_the_weights_move(flags, undisturbed, tmp_path):
    more = ["--batch", "1", *EVERY_STEP]

    def hook(rank: int) -> None:
        cast, calls = trainer.Trainer._cast, [0]

        def spoiled(self, image):
            calls[0] += 1
            return cast(self, image) * (float("nan") if calls[0] == 4 else 1)  # the first is the rehearsal's

        if rank == 1:
            trainer.Trainer._cast = spoiled

    out = tmp_path / "run"
    stopped = trained(2, [*flags, *more], out, expect=5, hook=hook)
    said = status(out)
    assert (said["state"], said["code"], said["step"]) == ("failed", 5, 2)
    assert "step 2: rank 1: loss nan on c_00" in said["why"] and "rank 0" not in said["why"]
    assert stopped.said().count("error: step 2") == 1
    assert len(losses(out)) == 2
    trained(2, ["--resume"], out)
    assert weights(out) == weights(undisturbed(2, *more))


def test_a_gradient_that_is_no_number_names_the_batch(flags, tmp_path):
    def hook(rank: int) -> None:
        backward = trainer.Trainer._backward

        def spoiled(self, micro):
            parts = backward(self, micro)
            next(self.net.parameters()).grad.fill_(float("inf"))
            return parts

        trainer.Trainer._backward = spoiled

    trained(1, flags, tmp_path / "run", expect=5, hook=hook)
    assert "the gradient is not finite; the batch held c_00" in status(tmp_path / "run")["why"]


def test_out_of_memory_says_what_to_change(flags, tmp_path):
    def exhaust() -> None:
        raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 3 GiB")

    hook = at(trainer.Trainer, "_backward", 1, exhaust, call=2)
    with Launch(2, [*flags, "--seqpar", "2"], tmp_path / "run", hook) as launch:
        assert launch.wait() == [1, 4]
    said = status(tmp_path / "run")
    assert (said["state"], said["code"]) == ("failed", 4)
    assert "out of memory on rank 1: use --batch 1 --accumulate 2" in said["why"] and said["why"] in launch.said(1)


def test_a_mistake_of_our_own_is_a_failed_run_with_a_traceback(flags, tmp_path):
    def stumble() -> None:
        raise KeyError("nothing")

    hook = at(trainer.Trainer, "_backward", 0, stumble)
    failed = trained(1, flags, tmp_path / "run", expect=1, hook=hook)
    assert "Traceback" in failed.said() and "KeyError" in status(tmp_path / "run")["why"]


def test_a_full_disk_costs_a_checkpoint_but_not_the_run(flags, undisturbed, tmp_path):
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "run"
    hook = at(checkpoint, "_write", 1, full, call=2)
    run = trained(2, [*flags, "--seqpar", "2", *EVERY_STEP], out, hook=hook)
    assert "No space left on device; what was saved before is kept; going on" in run.said(0).replace("'", "")
    assert weights(out) == weights(undisturbed(2, "--seqpar", "2"))


def test_a_picture_that_cannot_be_written_costs_a_warning_but_not_the_run(flags, undisturbed, tmp_path):
    def hook(rank: int) -> None:
        def full(*of) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        validation.draw_cases = full

    run = trained(1, flags, tmp_path / "run", hook=hook)
    assert run.said().count("cannot be written (No space left on device); training goes on") == 1
    assert weights(tmp_path / "run") == weights(undisturbed(1))


def test_a_save_that_fails_when_the_run_must_leave_is_a_failure(flags, tmp_path):
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def hook(rank: int) -> None:
        at(trainer.Trainer, "_backward", 0, signalled(signal.SIGTERM))(rank)
        at(checkpoint, "_fresh", 0, full)(rank)

    failed = trained(1, flags, tmp_path / "run", expect=1, hook=hook)
    assert status(tmp_path / "run")["state"] == "failed" and "No space left" in status(tmp_path / "run")["why"]
    assert "Traceback" not in failed.said()


def test_the_time_limit_and_a_restart_by_the_scheduler(flags, undisturbed, tmp_path):
    out = tmp_path / "run"
    trained(1, [*flags, "--time-limit", "0.0001"], out, expect=75)
    assert status(out)["why"] == "time limit" and status(out)["step"] == 1
    with Launch(1, flags, out) as again:
        assert again.wait() == [2]
    assert "holds a run already: add --resume" in again.said()
    trained(1, [*flags, "--time-limit", "60"], out, SLURM_RESTART_COUNT="1")
    assert weights(out) == weights(undisturbed(1))


def test_before_there_is_work_a_signal_ends_at_once(flags, tmp_path):
    hook = at(train, "open_data", 0, signalled(signal.SIGUSR1))
    trained(1, flags, tmp_path / "run", expect=75, hook=hook)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("more", "code"), [("", 0), ("--lr 1e30 --precision bf16", 5), ("--heads 5", 2)])
def test_a_run_whose_output_nobody_reads_any_more_goes_on_and_keeps_its_code(flags, tmp_path, more, code):
    line = shlex.join([sys.executable, "launch/train.py", *flags, *more.split(), "--out", str(tmp_path / "run")])
    piped = ["bash", "-c", f"{line} 2>&1 | head -c 1; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(piped, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, len(done.stdout)) == (code, 1)
    if code != 2:
        assert status(tmp_path / "run")["code"] == code and status(tmp_path / "run")["state"] != "running"


def test_ctrl_c_leaves_in_order_and_twice_at_once(flags, tmp_path):
    interrupt = signalled(signal.SIGINT)
    trained(1, flags, tmp_path / "a", expect=75, hook=at(trainer.Trainer, "_backward", 0, interrupt))
    assert status(tmp_path / "a")["why"] == "SIGINT"

    def twice() -> None:
        interrupt()
        interrupt()

    trained(1, flags, tmp_path / "b", expect=130, hook=at(trainer.Trainer, "_backward", 0, twice))
    assert status(tmp_path / "b")["state"] == "failed"


def test_workers_die_with_a_killed_trainer(flags, tmp_path):
    note = tmp_path / "pids"

    def hook(rank: int) -> None:
        loop = trainer.Trainer._loop

        def told(self, loader, stopper):
            note.write_text(" ".join(map(str, loader.worker_ids)))
            time.sleep(60)
            return loop(self, loader, stopper)

        trainer.Trainer._loop = told

    with Launch(1, [*flags, "--workers", "2"], tmp_path / "run", hook) as launch:
        deadline = time.monotonic() + 60
        while not (note.exists() and len(note.read_text().split()) == 2):
            assert time.monotonic() < deadline, launch.said()
            time.sleep(0.05)
        os.kill(launch.pids[0], signal.SIGKILL)
        launch.wait()
    deadline = time.monotonic() + 30
    while any(_runs(int(pid)) for pid in note.read_text().split()):
        assert time.monotonic() < deadline, "workers outlive their trainer"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


FIVE_LINES = """

import seqpar, torch
net = seqpar.load_run({run!r}, {which!r})
with torch.no_grad():
    logits = net(torch.zeros(1, 1, 16, 16, 16))
assert logits.shape == (1, 2, 16, 16, 16) and not torch.distributed.is_initialized()
"""


def test_five_lines_load_a_run_of_many_ranks_without_a_process_group(undisturbed):
    run = undisturbed(2, "--seqpar", "2")
    for which in ("best", "latest", str(run / "model.safetensors")):
        exec(FIVE_LINES.format(run=str(run), which=which), found := {})
    state = found["net"].state_dict()
    kept = read_weights(run / "model.safetensors")
    assert state and all(torch.equal(state[name], tensor) for name, tensor in kept.items())


KEYS = "step epoch loss dice_loss ce_loss lr grad_norm tokens_per_s data_wait_s peak_mem_mb"


def test_what_people_watch(flags, tmp_path):
    out = tmp_path / "run"
    run = trained(2, [*flags, "--seqpar", "2"], out, pictures=True)
    rows = read_metrics(out / "metrics.jsonl")
    train_rows, val_rows = ([row for row in rows if row["kind"] == kind] for kind in ("train", "val"))
    assert len(train_rows) == 6 and all(set(KEYS.split()) <= row.keys() for row in train_rows)
    assert all(row["loss"] == pytest.approx(row["dice_loss"] + row["ce_loss"]) for row in train_rows)
    assert [row["step"] for row in val_rows] == [2, 4, 6] and val_rows[0]["dice"].keys() == {"tumour"}
    for name in ("progress.png", "validation.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    said = run.said(0).splitlines()
    assert said[0].startswith("seqpar: preset debug (as told); 2 ranks = data 1 x seq 2, started by variables")
    assert sum(line.startswith("epoch ") for line in said) == 3, "a line per epoch in a log"
    assert str(out / "model.safetensors") in said[-2]
    assert run.said(1) == "", "only the first rank speaks, and nothing warns"
    assert "arning" not in run.said(0)


class _Terminal:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_a_terminal_sees_one_line_an_epoch_that_changes(tmp_path, monkeypatch):
    from seqpar.launch.runs.journal import Journal

    monkeypatch.setattr(sys, "stdout", terminal := _Terminal())
    journal = Journal(tmp_path, True, 0)
    for done in range(3):
        journal.progress(f"{done} of 3" + "x" * 500, last=done == 2)
    journal.say("next")
    assert terminal.text.count("\r\x1b[K") == 3 and terminal.text.count("\n") == 2
    assert max(map(len, terminal.text.split("\r\x1b[K"))) < 90, "it does not wrap"


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
