"""Failures of a run: lost ranks, losses that are not finite, full memory and disks, mistakes."""

import errno
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from seqpar.cli import predict
from seqpar.cluster import exit_codes, stop_agreement
from seqpar.data.errors import DataError
from seqpar.data.files import write_json
from seqpar.report.cautions import changed_on_the_way
from seqpar.report.record import read_record
from seqpar.runs.run_folder import read_status
from seqpar.runs.run_lock import RunLock
from seqpar.runs.run_log import RunLog
from seqpar.runs.run_status import StatusFile
from seqpar.settings.config import Config
from seqpar.tasks.segment import validation
from seqpar.training import after_step, failure, gradients, run_request, setup, trainer
from seqpar.weights import checkpoint, weight_files
from tests.support.folders import nnunet
from tests.support.training_runs import Launch, at, die, losses, moments, signalled, status, trained, weights

EVERY_STEP = ["--checkpoint-minutes", "1e-9"]


def test_what_one_rank_alone_refuses_it_says_with_its_name_and_code(flags, tmp_path):
    """A folder on a node's own disk, say, or files that are gone."""

    def refuse() -> None:
        raise DataError("/nvme/case", "no such file")

    def hook(rank: int) -> None:
        at(run_request, "check_lessons", 1, refuse)(rank)
        exit_codes.FIRST_RANK_S = 0.1

    with Launch(2, [*flags, "--seqpar", "2", "--start-timeout", "3"], tmp_path / "run", hook) as launch:
        assert launch.wait() == [1, 3]
    assert launch.said(1).startswith(f"error: rank 1 ({socket.gethostname()}): /nvme/case: no such file")


def test_what_one_rank_fails_of_while_it_loads_is_the_runs_verdict(flags, tmp_path):
    def exhaust() -> None:
        raise torch.OutOfMemoryError("HIP out of memory")

    out, more = tmp_path / "run", [*flags, "--seqpar", "2"]
    trained(2, more, out, expect=75, hook=at(after_step.AfterStep, "decide", 0, signalled(signal.SIGTERM), call=3))
    step = status(out)["step"]
    with Launch(2, ["--resume"], out, at(checkpoint, "load", 1, exhaust)) as launch:
        assert launch.wait() == [1, 4]
    assert [status(out)[name] for name in ("state", "code", "step", "steps")] == ["failed", 4, step, 6] and step


def test_a_start_that_fails_before_its_first_step_leaves_a_finished_run_finished(flags, tmp_path):
    def exhaust() -> None:
        raise torch.OutOfMemoryError("HIP out of memory")

    out = tmp_path / "run"
    trained(2, [*flags, "--seqpar", "2"], out)
    before = status(out)
    with Launch(2, ["--resume", "--epochs", "5"], out, at(checkpoint, "load", 1, exhaust)) as launch:
        assert launch.wait() == [1, 4]
    assert before["state"] == "finished" and status(out) == before
    trained(2, ["--resume", "--epochs", "5"], out)
    assert (status(out)["state"], status(out)["step"]) == ("finished", before["step"] // 3 * 5)


WITH_GROUPS = ("in a step", "in validation", "before a write", "amid a write")  # survivors wait for two others and more


@pytest.mark.started
@pytest.mark.parametrize(("world", "epochs", "names"), [(2, "5", tuple(moments(1))), (4, "3", WITH_GROUPS)])
def test_a_run_that_loses_a_rank_at_every_moment_in_turn_ends_with_the_same_bits(
    flags, undisturbed, tmp_path, world, epochs, names
):
    """Two ranks at every moment; data 2 x seq 2 in what groups do with each other, the last rank lost or the first."""
    more = ["--seqpar", "2", *EVERY_STEP, "--epochs", epochs, "--mode", "halo"]
    out = tmp_path / "run"
    arguments = [*flags, *more]
    for moment, hook in ((name, moments(world - 1)[name]) for name in names):
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
    left = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert left[:2] == ["best", "latest"] and len(left) <= 5, f"leftovers stay: {left}"
    assert status(out)["state"] == "finished"


def test_survivors_of_a_lost_rank_leave_at_once(flags, tmp_path):
    ended = []

    def hook(rank: int) -> None:
        at(gradients.Gradients, "_backward", 1, die, call=2)(rank)

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
        cast, calls = gradients.Gradients._cast, [0]

        def spoiled(self, image):
            calls[0] += 1
            return cast(self, image) * (float("nan") if calls[0] == 4 else 1)  # the first is the rehearsal's

        if rank == 1:
            gradients.Gradients._cast = spoiled

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
        backward = gradients.Gradients._backward

        def spoiled(self, micro, step, loss_of):
            parts = backward(self, micro, step, loss_of)
            next(self.net.parameters()).grad.fill_(float("inf"))
            return parts

        gradients.Gradients._backward = spoiled

    trained(1, flags, tmp_path / "run", expect=5, hook=hook)
    assert "the gradient is not finite; the batch held c_00" in status(tmp_path / "run")["why"]


def test_out_of_memory_says_what_to_change(flags, tmp_path):
    def exhaust() -> None:
        raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 3 GiB")

    hook = at(gradients.Gradients, "_backward", 1, exhaust, call=2)
    with Launch(2, [*flags, "--seqpar", "2"], tmp_path / "run", hook) as launch:
        assert launch.wait() == [1, 4]
    said = status(tmp_path / "run")
    assert (said["state"], said["code"]) == ("failed", 4)
    assert "out of memory on rank 1: use --batch 1 --accumulate 2" in said["why"] and said["why"] in launch.said(1)


@pytest.mark.parametrize(("free", "says"), [(4, "other processes hold 116.0 of the GPU's 140.0 GiB"), (100, "")])
def test_a_gpu_that_others_fill_is_told(free: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * 2**30, 140 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20 * 2**30)
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 82.00 MiB. GPU 0 has a total capacity of 140 GiB"
    )
    code, text, is_own = failure._judge(error, Config(batch=2), 0)
    others = f"{says}; end those that are not of this run, take another GPU, or " if says else ""
    means = "use --batch 1 --accumulate 2 (CUDA out of memory. Tried to allocate 82.00 MiB)"
    assert (code, text, is_own) == (4, f"out of memory on rank 0: {others}{means}", True)


def test_a_mistake_of_our_own_is_a_failed_run_with_a_traceback(flags, tmp_path):
    def stumble() -> None:
        raise KeyError("nothing")

    hook = at(gradients.Gradients, "_backward", 0, stumble)
    failed = trained(1, flags, tmp_path / "run", expect=1, hook=hook)
    assert "Traceback" in failed.said() and "KeyError" in status(tmp_path / "run")["why"]


@pytest.mark.parametrize("stuck", ["syncing", "writing", "logging", "returning the lock"])
def test_a_disk_that_does_not_answer_holds_up_no_rank_that_fails(flags, tmp_path, stuck):
    places = {"syncing": (os, "fsync"), "writing": (StatusFile, "write"), "logging": (RunLog, "line")}
    place, name = places.get(stuck, (RunLock, "release"))

    def stumble() -> None:
        stop_agreement.WAIT_S = stop_agreement.LEAST_S = 0.5
        setattr(place, name, lambda *of, **more: time.sleep(100))
        raise KeyError("nothing")

    hook = at(gradients.Gradients, "_backward", 0, stumble)
    with Launch(1, flags, tmp_path / "run", hook) as launch:
        assert launch.wait(30) == [1]
    assert "Traceback" in launch.said(), "on stderr, whatever the log file does"
    assert stuck == "logging" or "KeyError" in launch.said()
    assert status(tmp_path / "run")["state"] == ("running" if stuck == "writing" else "failed")


def test_what_a_killed_run_was_writing_is_cleared_when_its_folder_is_opened(flags, tmp_path):
    out = tmp_path / "run"
    (out / "validation").mkdir(parents=True)
    host = socket.gethostname()
    gone = [out / f".progress.png.{host}.{2**22 + 1}.tmp", out / "validation" / f".c_000.nii.gz.{host}.{2**22 + 1}.tmp"]
    gone.append(out / ".status.json.another.host.7.tmp")
    stay = [out / f".progress.png.{host}.{os.getpid()}.tmp", out / ".status.json.another.host.8.tmp", out / ".mine.tmp"]
    for path in gone + stay:
        path.touch()
    os.utime(gone[-1], (0, 0))
    setup.open_folder(StatusFile(out), RunLock(out), Config(out=str(out)), RunLog(active=False))
    assert not [path for path in gone if path.exists()] and all(path.exists() for path in stay)
    assert status(out)["state"] == "running"


def test_a_full_disk_costs_a_checkpoint_but_not_the_run(flags, undisturbed, tmp_path):
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "run"
    hook = at(checkpoint, "_write", 1, full, call=2)
    run = trained(2, [*flags, "--seqpar", "2", *EVERY_STEP], out, hook=hook)
    assert re.search(
        "No space left on device; the checkpoint of step 1 is kept, 0:.. old; going on, next try in", run.said(0)
    )
    assert weights(out) == weights(undisturbed(2, "--seqpar", "2"))


def test_a_disk_that_becomes_read_only_costs_what_came_after_the_last_checkpoint(flags, undisturbed, tmp_path):
    def refuse(*of, **more):
        raise OSError(errno.EROFS, "Read-only file system")

    def become_read_only() -> None:
        for owner, name in ((os, "replace"), (os, "rename"), (os, "mkdir"), (Path, "mkdir"), (Path, "touch")):
            setattr(owner, name, refuse)

    out = tmp_path / "run"
    hook = at(gradients.Gradients, "_backward", 0, become_read_only, call=3)
    with Launch(2, [*flags, "--seqpar", "2", *EVERY_STEP], out, hook) as launch:
        assert launch.wait() == [1, 1]
    said = [line for line in (launch.said(0) + launch.said(1)).splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "Read-only file system; the checkpoint of step 2 is kept: make the disk " in said[0]
    assert "checkpoint of step 2 is kept, 0:" in launch.said(0) and "Traceback" not in launch.said()
    trained(2, ["--resume"], out)
    assert weights(out) == weights(undisturbed(2, "--seqpar", "2")) and len(losses(out)) == 6


def test_a_full_disk_ends_a_run_of_which_nothing_is_kept(flags, tmp_path):
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "run"
    with Launch(2, [*flags, "--seqpar", "2", *EVERY_STEP], out, at(checkpoint, "_write", 1, full)) as launch:
        assert launch.wait() == [3, 3]
    said = [line for line in (launch.said(0) + launch.said(1)).splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "checkpoints: holds no checkpoint, and " in said[0]
    assert "step-00000001 could not be saved: rank 1: [Errno 28] No space left on device; make room" in said[0]
    assert (status(out)["state"], status(out)["code"], status(out)["step"]) == ("failed", 3, 1)


def test_final_weights_that_cannot_be_written_are_named_and_come_with_the_next_start(flags, undisturbed, tmp_path):
    def full(*of, **more) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def hook(rank: int) -> None:
        weight_files.save_file = full

    out = tmp_path / "run"
    with Launch(2, [*flags, "--seqpar", "2"], out, hook) as launch:
        assert launch.wait() == [3, 3]
    said = [line for line in (launch.said(0) + launch.said(1)).splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and f"error: {out}/model.safetensors: cannot be written (Error while serializing" in said[0]
    assert "the checkpoint of step 6 is kept: make room and continue by " in said[0]
    assert f"launch/train.py --resume --out {out}" in said[0]
    assert (status(out)["state"], status(out)["code"], status(out)["step"]) == ("failed", 3, 6)
    trained(2, [*flags, "--seqpar", "2", "--again"], out)  # not a new folder
    assert weights(out) == weights(undisturbed(2, "--seqpar", "2"))


def test_a_picture_that_cannot_be_written_costs_a_warning_but_not_the_run(flags, undisturbed, tmp_path):
    def hook(rank: int) -> None:
        def full(*of) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        validation.draw_cases = full

    run = trained(1, flags, tmp_path / "run", hook=hook)
    assert run.said().count("cannot be written (No space left on device); training continues") == 1
    assert weights(tmp_path / "run") == weights(undisturbed(1))


def test_workers_die_with_a_killed_trainer(flags, tmp_path):
    note = tmp_path / "pids"

    def hook(rank: int) -> None:
        loop = trainer.Trainer._loop

        def note_and_wait(self, loader, stopper):
            note.write_text(" ".join(map(str, loader.worker_ids)))
            time.sleep(60)
            return loop(self, loader, stopper)

        trainer.Trainer._loop = note_and_wait

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


def test_a_failed_run_says_so_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = StatusFile(tmp_path)
    file.write("running")
    monkeypatch.setattr("seqpar.runs.run_status.write_json", full)
    file.write_unless_over("failed", "no room", 3)
    assert {**read_status(tmp_path), "time": 0} == {
        "state": "failed", "step": 0, "steps": 0, "why": "no room", "code": 3, "time": 0
    }  # fmt: skip
    with pytest.raises(OSError, match="No space left"):
        file.write("running")


def test_a_run_without_a_validation_is_named_where_its_weights_are_taken(flags, tmp_path, capfd):
    out, images = tmp_path / "run", nnunet(tmp_path / "Dataset003_New", 1) / "imagesTr"
    trained(1, flags, out, expect=75, hook=at(after_step.AfterStep, "decide", 0, signalled(signal.SIGTERM), call=2))
    line, warning = (
        [str(out), "-i", str(images), "-o", str(tmp_path / "found"), "--device", "cpu"],
        "has not been validated",
    )
    assert exit_codes.run(predict.act, line) == 0
    assert (
        f"warning: {out} {warning}, so none of its weights are the best: the latest are taken" in capfd.readouterr().err
    )
    assert exit_codes.run(predict.act, [*line, "--checkpoint", "latest"]) == 0
    assert warning not in capfd.readouterr().err
    trained(1, ["--resume"], out)
    assert exit_codes.run(predict.act, line) == 0 and warning not in capfd.readouterr().err


def test_settings_for_a_finished_run_that_no_step_would_take_are_refused(flags, tmp_path):
    """Else it would record them, and pages show them as those that it was trained with."""
    out = tmp_path / "run"
    trained(1, [*flags, "--epochs", "1", "--iterations", "2"], out)
    before = (out / "config.json").read_bytes()
    said = trained(1, ["--resume", "--lr", "0.5"], out, expect=2).said()
    assert "no step is left after step 2 that would use --lr" in said and "-> 0.5: leave that out" in said
    assert (out / "config.json").read_bytes() == before
    write_json(out / "status.json", {**status(out), "state": "preempted"})  # within the last validation
    trained(1, ["--resume", "--lr", "0.5"], out, expect=2)
    trained(1, ["--resume", "--workers", "1"], out)
    trained(1, ["--resume", "--lr", "0.5", "--loss", "ce", "--epochs", "2"], out)
    (told,) = changed_on_the_way(read_record(out))
    assert "--loss dice-ce -> ce from step 2. Below are the last ones. The curve of the loss is of two kinds." in told
