"""Runs that have to leave: by signals, by time, by the scheduler; resumed they end with the same bits."""

import errno
import json
import os
import re
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from seqpar.cli import train
from seqpar.parallel.processes import LEAVE_SIGNALS
from seqpar.runs.journal import read_metrics
from seqpar.tasks.case_validation import ValidationResult
from seqpar.tasks.segment import validation
from seqpar.tasks.segment.segmentation import Segmentation
from seqpar.training import after_step, gradients, trainer
from seqpar.training.trainer import CURVES_EVERY_S, Trainer
from seqpar.weights import checkpoint
from tests.support.folders import nnunet
from tests.support.marks import long_case
from tests.support.training_runs import Launch, at, die, losses, scores, signalled, status, trained, weights

LEFT = {
    "alone, HUP in a step": (1, "", at(gradients.Gradients, "_backward", 0, signalled(signal.SIGHUP), call=3)),
    "seq 2, USR1 to one rank": (
        2,
        "--seqpar 2",
        at(gradients.Gradients, "_backward", 1, signalled(signal.SIGUSR1), call=3),
    ),
    "seq 3, USR1 in validation": (
        3,
        "--seqpar 3 --split ordered",
        at(validation.SegmentationValidation, "_predict", 2, signalled(signal.SIGUSR1), call=1),
    ),
    "seq 2, TERM between two micro-batches": (
        2,
        "--seqpar 2 --accumulate 4",
        at(gradients.Gradients, "_backward", 1, signalled(signal.SIGTERM), call=10),
    ),
    "data 2 x seq 2, TERM in a save": (
        4,
        "--seqpar 2 --checkpoint-minutes 1e-9",
        at(checkpoint, "_write", 3, signalled(signal.SIGTERM), call=3),
    ),
}


@pytest.mark.parametrize(
    "name", [long_case(name) if name.startswith(("data 2", "seq 2, TERM between")) else name for name in LEFT]
)
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
    assert re.fullmatch(r"SIG(TERM|USR1|HUP)( on rank \d, agreed in \d\.\d s)?", said["why"]), said
    assert ("rank" in said["why"]) == (world > 1)
    if "micro-batches" in name:
        assert said["step"] == 2, "the step in which it came does not count"
    assert not (out / "model.safetensors").exists()
    start = f"torchrun --nproc-per-node {world}" if "data 2" in name else "python"
    assert f"; to continue: {start} launch/train.py --resume --out {out}\n" in left.said(0)
    trained(world, ["--resume"], out)
    whole = undisturbed(world, *more.split())
    assert weights(out) == weights(whole)
    assert losses(out) == losses(whole)
    assert status(out)["state"] == "finished"
    assert scores(out) == scores(whole) and len(scores(out)) == 3, "each validation is there once"


def test_a_run_that_cannot_go_on_with_other_data_keeps_its_folder(flags, undisturbed, tmp_path):
    out, data = tmp_path / "run", nnunet(tmp_path / "Dataset002_Two", 5, ("CT", "MR"))
    trained(1, flags, out, expect=75, hook=at(after_step.AfterStep, "decide", 0, signalled(signal.SIGTERM), call=3))
    before, step = (out / "config.json").read_bytes(), status(out)["step"]
    other = ["--resume", "--data", str(data), "--cache", str(tmp_path / "cache")]
    refused = trained(1, other, out, expect=3)
    assert "has the channels CT, MR, but the run in" in refused.said() and (out / "config.json").read_bytes() == before
    assert (status(out)["state"], status(out)["step"]) == ("failed", step)
    trained(1, ["--resume"], out)
    assert weights(out) == weights(undisturbed(1))
    finished = (out / "status.json").read_bytes()
    trained(1, other, out, expect=3, SEQPAR_VERDICT=str(tmp_path / "verdict"))
    assert (out / "status.json").read_bytes() == finished and (tmp_path / "verdict").read_text() == "3\n"


def test_a_validation_that_is_repeated_after_a_kill_is_there_once(flags, tmp_path):
    out, slow = tmp_path / "run", ["--lr", "1e-30"]  # no second validation is the best, which would save
    trained(
        1, [*flags, *slow], out, expect=75, hook=at(after_step.AfterStep, "decide", 0, signalled(signal.SIGTERM), 4)
    )
    assert status(out)["step"] == 4
    with Launch(1, ["--resume"], out, at(gradients.Gradients, "_backward", 0, die)) as killed:
        assert killed.wait() == [-signal.SIGKILL]
    trained(1, ["--resume"], out)
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "val"] == [2, 4, 6]


def test_ranks_agree_to_leave_while_a_long_step_lasts(flags, tmp_path):
    """The main thread gets no signal while it computes; the thread beside it does."""

    def long_step() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, LEAVE_SIGNALS)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(6)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVE_SIGNALS)

    out = tmp_path / "run"
    trained(
        2, [*flags, "--seqpar", "2"], out, expect=75, hook=at(gradients.Gradients, "_backward", 1, long_step, call=3)
    )
    said = status(out)
    seconds = re.fullmatch(r"SIGUSR1 on rank 1, agreed in (.*) s", said["why"])
    assert seconds and float(seconds[1]) < 5 and said["step"] == 3, said


@pytest.mark.parametrize(
    ("call", "code", "why"),
    [
        (1, 3, "holds no checkpoint, and "),
        (2, 1, "the checkpoint of step 1 is kept: make room and continue by python launch/train.py --resume --out "),
    ],
)
def test_a_save_that_fails_when_the_run_must_leave_is_a_failure(flags, tmp_path, call, code, why):
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def hook(rank: int) -> None:
        at(gradients.Gradients, "_backward", 0, signalled(signal.SIGTERM), call=call)(rank)
        at(checkpoint, "_make_draft", 0, full, call=call)(rank)

    flags = [*flags, "--checkpoint-minutes", "1e-9"]
    failed = trained(1, flags, tmp_path / "run", expect=code, hook=hook)
    said = status(tmp_path / "run")
    assert said["state"] == "failed" and "No space left" in said["why"] and why in said["why"]
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


def test_before_there_is_work_a_signal_ends_at_once_and_the_same_command_begins(flags, undisturbed, tmp_path):
    out, told = tmp_path / "run", "stopped before training began; run the same command again"
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
        left = trained(1, flags, out, expect=128 + number, hook=at(Segmentation, "open_data", 0, signalled(number)))
        assert told in left.said(0) and not out.exists()

    def twice() -> None:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    trained(1, flags, out, expect=128 + signal.SIGTERM, hook=at(Segmentation, "open_data", 0, twice))
    trained(1, flags, out, expect=75, hook=at(after_step.AfterStep, "decide", 0, signalled(signal.SIGTERM), call=3))
    before = (out / "status.json").read_bytes()
    leave = at(Segmentation, "open_data", 0, signalled(signal.SIGTERM))
    left = trained(1, ["--resume"], out, expect=75, hook=leave)  # what was saved before can be resumed
    assert told.replace("began", "continued") in left.said(0) and (out / "status.json").read_bytes() == before
    trained(1, ["--resume"], out)
    assert weights(out) == weights(undisturbed(1))


def test_ctrl_c_leaves_in_order_and_twice_at_once(flags, tmp_path):
    interrupt = signalled(signal.SIGINT)
    trained(1, flags, tmp_path / "a", expect=75, hook=at(gradients.Gradients, "_backward", 0, interrupt))
    assert status(tmp_path / "a")["why"] == "SIGINT"

    def twice() -> None:
        interrupt()
        interrupt()

    trained(1, flags, tmp_path / "b", expect=130, hook=at(gradients.Gradients, "_backward", 0, twice))
    assert status(tmp_path / "b")["state"] == "failed"


FLAT = "--lr 1e-30 --epochs 8 --patience 2 --seqpar 2"


def test_a_run_that_becomes_no_better_ends_as_finished(flags, tmp_path):
    """The first of equal validations is the best, and the second after it the last, whether the run was left or not."""
    whole, left = tmp_path / "whole", tmp_path / "left"
    said = trained(2, [*flags, *FLAT.split()], whole).said(0)
    leave = at(after_step.AfterStep, "decide", 1, signalled(signal.SIGTERM), call=5)
    trained(2, [*flags, *FLAT.split()], left, expect=75, hook=leave)
    trained(2, ["--resume"], left)
    for out in (whole, left):
        ended = {name: status(out)[name] for name in ("state", "step", "steps", "why", "code")}
        why = "no better mean Dice in 2 validations"
        assert ended == {"state": "finished", "step": 6, "steps": 16, "why": why, "code": 0}
        assert json.loads((out / "validation" / "summary.json").read_text())["step"] == 6, "not where it was to end"
        assert len(scores(out)) == 3 and len(list((out / "validation").glob("*.nii.gz"))) == 1
        assert (out / "model.safetensors").exists()
    assert "at step 2; ended at step 6 of 16: no better mean Dice in 2 validations (--patience)" in said
    assert weights(whole) == weights(left)
    trained(2, ["--resume"], left)
    assert len(losses(left)) == 6, "it has ended, and does not begin again"
    trained(2, ["--resume", "--patience", "3"], left)
    assert status(left)["step"] == 8, "more patience goes on"


@pytest.mark.parametrize("more, why", [("--val-every 0", "--val-every 0 valid"), ("--curriculum 16:2", "every lesson")])
def test_patience_without_validations_is_refused(more, why):
    with pytest.raises(ValueError, match=f"--patience.*{why}"):
        train.act(["--preset", "debug", "--dry-run", "--patience", "2", *more.split()])


@pytest.mark.parametrize("world", [1, 2])
def test_a_file_named_stop_ends_a_run_after_its_step(flags, undisturbed, tmp_path, world):
    out, more = tmp_path / "run", ["--seqpar", str(world)]
    put = at(after_step.AfterStep, "decide", world - 1, lambda: (out / "stop").touch(), call=3)
    left = trained(world, [*flags, *more], out, expect=75, hook=put)
    assert status(out)["state"] == "preempted" and status(out)["step"] < 6
    assert f"(file {out}/stop" in left.said(0) and not (out / "stop").exists()
    trained(world, ["--resume"], out)
    assert weights(out) == weights(undisturbed(world, *more))


def test_a_folder_named_stop_stops_nothing(flags, tmp_path):
    (tmp_path / "run/stop").mkdir(parents=True)
    trained(1, flags, tmp_path / "run")
    assert status(tmp_path / "run")["state"] == "finished"


def test_of_equally_good_validations_the_one_with_the_lower_loss_is_kept(tmp_path):
    """Without a training: only the end of epochs, with given results."""
    said, saved, losses = [], [], iter((0.9, 0.7, 0.8, float("nan")))
    nothing = lambda *_, **__: None  # noqa: E731
    journal = SimpleNamespace(attempt=nothing, record=nothing, say=said.append, picture=nothing)
    run = SimpleNamespace(
        progress=checkpoint.Progress(),
        config=SimpleNamespace(val_every=1, iterations=2, steps=20),
        steps=range(20),
        journal=journal,
        gradients=SimpleNamespace(gathered=nullcontext),
        validation=SimpleNamespace(run=lambda *_: ValidationResult({"loss": next(losses)}, "validated", 0.5, {})),
        net=None,
        out=tmp_path,
        after_step=SimpleNamespace(refuse_taken_over=nothing),
        _curves_at=time.monotonic(),
        _measured_on="all",
        _is_anew=False,
        _is_flat=lambda step: False,
        _save=lambda: saved.append(run.progress.step) or True,
    )
    for run.progress.step in (2, 4, 6, 8):
        assert Trainer._end_epoch(run, None)
    assert saved == [2, 4] and (run.progress.best_step, run.progress.best_loss) == (4, 0.7)
    assert journal.best_step == 4, "the picture of a validation compares it with that"
    assert [line for line in said if line != "validated"] == [
        "as good as after step 2, with a lower validation loss: step 4 is the best now"
    ]
    run.progress.best_loss, losses = None, iter((0.1,))
    run.progress.step = 10
    assert Trainer._end_epoch(run, None) and saved == [2, 4], "a checkpoint that records no loss keeps its best"
    run.progress.best_loss, run._save, losses = 0.7, lambda: False, iter((0.1, 0.1))
    for run.progress.step, best in (
        (12, 4),
        (20, 20),
    ):  # at the end the weights are saved in any case, or the run fails
        assert (
            Trainer._end_epoch(run, None)
            and run.progress.best_step == best
            and run.progress.validated == run.progress.step
        )
    assert said[-1] == "as good as after step 4, with a lower validation loss: step 20 is the best now"
    assert any(
        "the weights of step 12, the best so far, were not saved: step 4 stays the best" in line for line in said
    )


def test_a_best_validation_that_is_made_up_at_the_end_is_saved_or_the_run_fails() -> None:
    """It is validated before any step; a save that failed there was a warning, and `best` named earlier weights."""
    saved, run = list[bool](), SimpleNamespace(progress=checkpoint.Progress(step=20))

    def validate(_: object) -> bool:
        run.progress.best_step = run.progress.validated = run.progress.step
        return True

    run.config, run.steps = SimpleNamespace(iterations=2, steps=20), range(20)
    run._end_epoch, run._save = validate, lambda must=False: saved.append(must)
    assert Trainer._loop(run, None, None) and saved == [True]


def test_a_run_that_goes_back_to_an_earlier_checkpoint_takes_its_best(flags, tmp_path, monkeypatch) -> None:
    """The last of three validations is the best, and its checkpoint is lost."""
    measure, out, scores = validation.SegmentationValidation.run, tmp_path / "run", iter((0.1, 0.2, 0.3))
    monkeypatch.setattr(
        validation.SegmentationValidation,
        "run",
        lambda *of: replace(measure(*of), score=next(scores), windows={"sliding": 0.5}),
    )
    trained(1, [*flags, "--epochs", "3", "--val-every", "1"], out)
    steps = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert (out / "checkpoints" / "best").read_text() == steps[-1]
    shutil.rmtree(out / "checkpoints" / steps[-1])
    scores = iter((0.0, 0.0))
    assert "going back to" in trained(1, ["--resume", "--device", "cpu", "--epochs", "4"], out).said()
    assert (out / "checkpoints" / "best").read_text() == steps[-2]
    assert json.loads((out / "window.json").read_text())["step"] == int(steps[-2].removeprefix("step-"))


def test_a_picture_that_cannot_be_drawn_ends_no_training(flags, tmp_path) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("invalid literal for int() with base 10: 'abc'")

    def hook(rank: int) -> None:
        trainer.draw_progress = fails

    said = trained(1, [*flags, "--epochs", "2", "--val-every", "1"], tmp_path / "run", hook=hook).said()
    line = "warning: a picture cannot be drawn (ValueError: invalid literal for int() with base 10: 'abc')"
    assert said.count(line) == 1 and status(tmp_path / "run")["state"] == "finished"


def test_short_epochs_do_not_wait_for_curves() -> None:
    drawn = list[int]()
    run = SimpleNamespace(
        progress=SimpleNamespace(step=2, validated=2),
        config=SimpleNamespace(val_every=1, iterations=2, steps=20),
        _curves_at=time.monotonic(),
        _is_anew=False,
        _draw_curves=lambda: drawn.append(1),
    )
    assert Trainer._end_epoch(run, None) and not drawn
    run._curves_at -= CURVES_EVERY_S + 1
    assert Trainer._end_epoch(run, None) and drawn == [1]


def test_only_the_rank_that_prints_reads_the_folder_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a classification, whose last words depend on its scores; other hosts may not see the folder."""
    nothing = lambda *_, **__: None  # noqa: E731
    read, said = list[Path](), list[str]()
    monkeypatch.setattr(trainer, "run_on_rank0", nothing)
    for is_active in (False, True):
        run = SimpleNamespace(
            gradients=SimpleNamespace(whole_tensors=nothing),
            net=SimpleNamespace(state_dict=nothing),
            mesh=SimpleNamespace(is_first=is_active, world=None),
            after_step=SimpleNamespace(refuse_taken_over=nothing),
            progress=checkpoint.Progress(step=1, best=0.5, best_step=1),
            config=SimpleNamespace(task="segment", patience=0, steps=1),
            journal=SimpleNamespace(active=is_active, say=said.append),
            task=SimpleNamespace(score="mean Dice", next_lines=lambda out: read.append(out) or ["next: it"]),
            out=tmp_path,
            _draw_curves=nothing,
            _write_status=nothing,
            _has_score=True,
        )
        Trainer._finish(run)
        assert len(read) == len(said) == is_active
