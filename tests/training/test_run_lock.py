"""One training at a time in a run folder: two starts at once, killed owners, other machines on the same disk."""

import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from seqpar.cli import train
from seqpar.runs.run_lock import RunLock, TakenOver
from seqpar.runs.run_owner import FIRST_NAMESPACE, RunOwner, _began
from seqpar.training import after_step, gradients, run
from tests.support.folders import child, exit_code
from tests.support.training_runs import Hook, Launch, at, die, losses, status, trained, weights


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def held(folder: Path, name: str) -> Callable[[], None]:
    """Returns what tells by a file that it was reached, and then waits for another."""

    def wait() -> None:
        (folder / f"{name} is here").touch()
        until((folder / f"{name} may go").exists)

    return wait


def reached(launch: Launch, folder: Path, name: str) -> None:
    """Waits until a launch has come to where it is ``held``."""
    end = time.monotonic() + 60
    while not (folder / f"{name} is here").exists():
        assert time.monotonic() < end, launch.said()
        time.sleep(0.01)


def let_go(folder: Path, name: str) -> None:
    (folder / f"{name} may go").touch()


def elsewhere(rank: int) -> None:
    """Makes this process one of another machine, whose processes nobody here can see."""
    true = RunOwner.this_process
    RunOwner.this_process = lambda: replace(true(), host="node7", machine="m7", boot="b7")  # type: ignore[method-assign]


def both(*hooks: Hook) -> Hook:
    def hook(rank: int) -> None:
        for one in hooks:
            one(rank)

    return hook


def locks(out: Path) -> list[Path]:
    return sorted(out.glob("lock*"))


def test_of_two_starts_at_once_one_trains_and_the_other_is_told_by_whom(flags, undisturbed, tmp_path):
    out, other = tmp_path / "run", tmp_path / "other"
    other.symlink_to(out)  # its launches have logs of their own
    first = at(run, "make_trainer", 0, held(tmp_path, "start"))
    second = at(gradients.Gradients, "_backward", 0, held(tmp_path, "step"), call=3)
    with Launch(2, flags, out, both(first, second)) as launch:
        for name, more, world in (("start", [], 1), ("step", ["--resume"], 2)):
            reached(launch, tmp_path, name)
            refused = trained(world, [*flags, *more], other, expect=6)
            owner = f"is in use by process {launch.pids[0]} on {socket.gethostname()}"
            assert owner in refused.said() and "add --take-over" in refused.said()
            assert status(out)["state"] == "running"
            let_go(tmp_path, name)
        assert launch.wait() == [0, 0], launch.said()
    assert status(out)["state"] == "finished" and not locks(out)
    assert weights(out) == weights(undisturbed(2)) and losses(out) == losses(undisturbed(2))


def test_what_a_killed_training_held_is_taken_over_on_its_own_machine(flags, undisturbed, tmp_path):
    out = tmp_path / "run"
    with Launch(
        1, [*flags, "--checkpoint-minutes", "1e-9"], out, at(gradients.Gradients, "_backward", 0, die, 4)
    ) as one:
        assert one.wait() == [-signal.SIGKILL] and len(locks(out)) == 1
    again = trained(1, ["--resume"], out)
    assert f"taken over from process {one.pids[0]} on {socket.gethostname()}, which has ended" in again.said()
    assert weights(out) == weights(undisturbed(1)) and not locks(out)


def test_on_a_shared_disk_take_over_is_needed_and_whoever_loses_the_folder_leaves_it_alone(
    flags, undisturbed, tmp_path
):
    out, other = tmp_path / "run", tmp_path / "other"
    other.symlink_to(out)

    def look_often(rank: int) -> None:
        after_step.LOOK_S = 0.0

    stay = at(gradients.Gradients, "_backward", 0, held(tmp_path, "step"), call=4)
    often, verdicts = [*flags, "--checkpoint-minutes", "1e-9"], tmp_path / "taken"
    with Launch(2, often, out, both(elsewhere, look_often, stay), SEQPAR_VERDICT=str(verdicts)) as launch:
        reached(launch, tmp_path, "step")
        refused = trained(1, ["--resume"], other, expect=6, SEQPAR_VERDICT=str(tmp_path / "refused"))
        assert f"is in use by process {launch.pids[0]} on node7" in refused.said()
        taken = trained(2, ["--resume", "--take-over"], other)
        assert "on node7, as --take-over says" in taken.said()
        let_go(tmp_path, "step")
        assert launch.wait() == [6, 6], launch.said()
    for verdict in ("refused", "taken"):  # for the job scripts: status.json is the other training's
        assert (tmp_path / verdict).read_text() == "6\n"
    assert launch.said().count("was taken over, or its lock was removed") == 1
    assert status(out)["state"] == "finished" and not locks(out)
    assert weights(out) == weights(undisturbed(2)) and losses(out) == losses(undisturbed(2))
    with pytest.raises(ValueError, match="--take-over would do nothing"):
        train.act([*flags, "--take-over"])
    trained(1, ["--resume"], out)  # it is no setting of the run: the lock of this one is asked for again


def test_only_one_of_many_takes_a_lock_whose_owner_has_ended(tmp_path):
    ended = child(lambda: RunLock(tmp_path).take())
    assert exit_code(ended) == 0 and len(locks(tmp_path)) == 1

    def race(number: int) -> None:
        lock = RunLock(tmp_path)
        (tmp_path / f"ready {number}").touch()
        until((tmp_path / "go").exists)
        lock.take()
        (tmp_path / f"won {number}").touch()
        until((tmp_path / "over").exists)
        assert not lock.is_lost()

    for _ in range(5):
        racers = [child(lambda number=number: race(number)) for number in range(6)]
        until(lambda: len(list(tmp_path.glob("ready*"))) == 6)
        (tmp_path / "go").touch()
        codes = []
        while len(codes) < 5:
            pid, code = os.wait()
            racers.remove(pid)
            codes.append(os.waitstatus_to_exitcode(code))
        (tmp_path / "over").touch()
        assert [*codes, exit_code(racers[0])] == [1] * 5 + [0] and len(list(tmp_path.glob("won*"))) == 1
        for path in tmp_path.iterdir():
            if not path.name.startswith("lock"):
                path.unlink()


def test_who_has_lost_the_folder_knows_it_and_no_number_is_given_twice(tmp_path):
    first, second, third = (RunLock(tmp_path) for _ in range(3))
    assert first.is_lost() and first.take() == "" and not first.is_lost()
    with pytest.raises(ValueError, match=f"is in use by process {os.getpid()} on"):
        second.take()
    second.take(take_over=True)
    assert first.is_lost() and not second.is_lost()
    with pytest.raises(TakenOver, match=f"was taken over by process {os.getpid()}"):
        first.refuse_lost()
    second.release()
    third.take()
    assert [lock.ticket[0] for lock in (first, second, third)] == [1, 0, 3] and first.is_lost() and not third.is_lost()
    first.release()
    assert not third.is_lost() and len(list(tmp_path.iterdir())) == 1


def test_who_finds_its_folder_moved_is_told_so(tmp_path):
    lock = RunLock(tmp_path / "run")
    lock.folder.mkdir()
    lock.take()
    lock.folder.rename(tmp_path / "renamed")
    with pytest.raises(TakenOver, match="was moved or removed: this training ends without saving; if it was moved, --"):
        lock.refuse_lost()
    with pytest.raises(TakenOver, match="was moved or removed: this sweep ends; if"):
        lock.refuse_lost("this sweep ends")


def test_a_slow_start_takes_nothing_of_what_came_after_the_lock_that_it_judged(tmp_path, monkeypatch):
    assert exit_code(child(lambda: RunLock(tmp_path).take())) == 0  # nobody holds it any more
    slow, quick, later = (RunLock(tmp_path) for _ in range(3))
    make = slow._make

    def make_late(*judged: object) -> bool:
        slow._make = make  # type: ignore[method-assign]
        quick.take()
        quick.release()
        later.take()
        return make(*judged)

    slow._make = make_late  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=f"is in use by process {os.getpid()} on"):
        slow.take()
    assert slow.is_lost() and not later.is_lost()


def test_a_lock_that_cannot_be_read_is_nobodys_to_take_without_a_word(tmp_path, monkeypatch):
    monkeypatch.setattr("seqpar.runs.run_lock._PAUSE_S", 0.0)
    (tmp_path / "lock-3.json").touch()
    with pytest.raises(ValueError, match=r"lock-3.json cannot be read"):
        RunLock(tmp_path).take()
    lock = RunLock(tmp_path)
    assert lock.take(take_over=True).startswith("a process that is not named") and lock.ticket[0] == 4
    assert [path.name for path in locks(tmp_path)] == ["lock-4.json"]


def test_a_lock_for_which_there_is_no_room_keeps_no_later_start_out(tmp_path):
    def start() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="File too large"):
            RunLock(tmp_path).take()

    assert exit_code(child(start)) == 0 and not locks(tmp_path)
    RunLock(tmp_path).take()


HIDDEN = 1 << 22  # the number of a process that another user's is, and /proc does not show; no process has it
NOW = RunOwner(
    "n1",
    1,
    "m1",
    "b1",
    FIRST_NAMESPACE,
    "77",
    job="9",
    cluster="c",
    user=5,
    attempts={"job 9 of c": 1, "torchrun x": 1},
)
GONE = {
    "its number belongs to a later process": (dict(pid=os.getpid(), began="1"), "which has ended"),
    "its number belongs to nobody": (dict(pid=HIDDEN + 1, began="1"), "which has ended"),
    "its number belongs to nobody, and when it began was not told": (dict(pid=HIDDEN + 1, began="?"), "has ended"),
    "its machine was restarted": (dict(boot="b0"), "restarted"),
    "it was requeued": (dict(host="n2", boot="b2", attempts={"job 9 of c": 0}), "launcher has started again"),
    "its job ended, says Slurm": (dict(host="n2", boot="b2", job="8", cluster="c"), "Slurm job has ended"),
    "its job waits again": (dict(host="n2", boot="b2", job="waits", cluster="c"), "Slurm job has ended"),
}
OPEN = {
    "it lives": dict(pid=os.getpid(), began="own"),
    "it lives, and when it began was not told": dict(pid=os.getpid(), began="?"),
    "it lives, and /proc hides it": dict(pid=HIDDEN, began="1"),
    "in another container": dict(namespace="pid:[2]"),
    "in a container of another machine": dict(namespace="pid:[2]", boot="b0"),
    "in a container of the same number and name on another machine": dict(namespace="both", boot="b0"),
    "another user's job, which Slurm does not show": dict(host="n2", boot="b2", job="8", cluster="c", user=6),
    "another user's chain": dict(host="n2", boot="b2", job="8", cluster="c", chain="x", user=6),
    "another user's torchrun of the same name": dict(host="n2", boot="b2", job="", attempts={"torchrun x": 0}, user=6),
    "on another machine": dict(host="n2", machine="m2", boot="b2"),
    "on another machine of the same name": dict(machine="m2", boot="b2"),
    "its job runs": dict(host="n2", boot="b2", job="runs", cluster="c"),
    "a cluster of another name": dict(host="n2", boot="b2", job="8", cluster="d"),
    "a job of this restart": dict(host="n2", boot="b2", job="9", cluster="c", attempts={"job 9 of c": 1}),
}


@pytest.fixture
def now(tmp_path, monkeypatch) -> RunOwner:
    """Returns a process in a Slurm job, as this machine and a stand-in for Slurm have it."""
    squeue = tmp_path / "squeue"
    states = "runs) echo RUNNING ;; waits) echo PENDING ;;"
    squeue.write_text(f'#!/bin/sh\ncase $3 in {states} *) echo "Invalid job id specified" >&2; exit 1 ;; esac\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    kill = os.kill

    def refuse_hidden(pid: int, number: int) -> None:
        if pid == HIDDEN:
            raise PermissionError
        kill(pid, number)

    monkeypatch.setattr(os, "kill", refuse_hidden)
    return NOW


@pytest.mark.parametrize("case", GONE)
def test_a_process_has_ended_for_certain(now, case):
    changed, why = GONE[case]
    assert why in replace(now, **changed).why_gone(now)


@pytest.mark.parametrize("case", OPEN)
def test_a_process_may_still_run(now, case):
    changed = dict(OPEN[case])
    if changed.get("began") == "own":
        changed["began"] = RunOwner.this_process().began
    if changed.get("namespace") == "both":
        changed["namespace"] = "pid:[2]"
        now = replace(now, namespace="pid:[2]")
    now = replace(now, chain=changed.get("chain", ""))
    assert replace(now, **changed).why_gone(now) == ""


def test_jobs_of_a_chain_follow_each_other_and_a_process_knows_its_own(monkeypatch):
    monkeypatch.setenv("SEQPAR_CHAIN", "seqpar-run-1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    own = RunOwner.this_process()
    assert (
        own.user == os.getuid()
        and own.attempts == {"job 7 of ": 2}
        and own.why_gone(own) == ""
        and RunOwner.from_json(own.to_json()) == own
    )
    earlier = replace(own, host="n9", machine="m9", boot="b9", job="6", attempts={})
    assert earlier.why_gone(own) == "an earlier job of this chain"
    pid = child(lambda: time.sleep(60))
    alive = replace(own, pid=pid, began=_began(pid))
    assert alive.why_gone(own) == ""
    os.kill(pid, signal.SIGKILL)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert alive.why_gone(own) == "which has ended", "nobody has collected it yet"
    assert exit_code(pid) == -signal.SIGKILL
