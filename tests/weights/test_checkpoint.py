"""Checkpoints: bit for bit, and whole or absent whatever kills the save."""

import os
import signal
import socket

import numpy as np
import pytest
import torch

from seqpar.runs.run_lock import RunLock, TakenOver
from seqpar.weights import checkpoint
from seqpar.weights.checkpoint import NotSaved, Progress
from seqpar.weights.states import optimizer_tensors, random_states, set_random_states
from tests.support.checkpoints import ALONE, names, save, stepped
from tests.support.training_runs import at, die


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_what_is_loaded_is_what_was_saved_to_the_last_bit(tmp_path, kind):
    net, optimizer = stepped(1, kind)
    progress = Progress(7, 0.5, 6, 6, 4, 0.25)
    states = random_states()
    path = checkpoint.save(tmp_path, net, optimizer, progress, ALONE, '{"config": {"heads": 1}}')
    drawn = torch.rand(3), np.random.rand(3)
    other, empty = stepped(2, kind, steps=0)
    assert checkpoint.load(path, other, empty, 0) == progress
    assert random_states() == states
    assert torch.equal(torch.rand(3), drawn[0]) and (np.random.rand(3) == drawn[1]).all()
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    saved, loaded = optimizer_tensors(net, optimizer), optimizer_tensors(other, empty)
    assert saved.keys() == loaded.keys() and len(saved) >= 6
    assert all(torch.equal(saved[name], loaded[name]) and saved[name].dtype == loaded[name].dtype for name in saved)
    assert (path / "config.json").read_text() == '{"config": {"heads": 1}}'
    assert not [name for name in names(path) if not name.endswith((".safetensors", ".json"))], "no pickle"


def test_the_random_states_go_through_json():
    torch.rand(1), np.random.standard_normal(1)  # the latter leaves a cached number behind
    states = random_states()
    first = torch.rand(2).tolist(), np.random.standard_normal(2).tolist()
    set_random_states(states)
    assert (torch.rand(2).tolist(), np.random.standard_normal(2).tolist()) == first


def test_what_a_name_points_to_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: done.append(os.readlink(f"/proc/self/fd/{handle}")))
    for name in ("rename", "replace"):
        act = getattr(os, name)
        monkeypatch.setattr(os, name, lambda a, b, act=act: (done.append(f"renamed {b}"), act(a, b)))
    path = save(tmp_path, 1)
    draft = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    order = [done.index(str(draft / name)) for name in sorted(names(path))]
    folders = [done.index(str(draft)), done.index(f"renamed {path}"), done.index(str(tmp_path))]
    at_latest = done.index(f"renamed {tmp_path / 'latest'}")
    latest = [next(n for n, name in enumerate(done) if name.startswith(str(tmp_path / ".latest."))), at_latest]
    assert max(order) < folders[0] and [*folders, *latest] == sorted([*folders, *latest])


def test_the_newest_two_and_the_best_stay(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step, is_best=step == 2)
    assert names(tmp_path) == ["best", "latest", "step-00000002", "step-00000005", "step-00000006"]
    assert checkpoint.find(tmp_path).name == "step-00000006"
    assert checkpoint.find(tmp_path, "best").name == "step-00000002"


PHASES = {
    "before the write": at(checkpoint, "_write", 0, die),
    "amid the write": at(checkpoint, "write_tensors", 0, die, call=2),
    "before the manifest": at(checkpoint, "_commit", 0, die),
    "before the rename": at(checkpoint.os, "rename", 0, die),
    "before latest": at(checkpoint, "write_link", 0, die),
    "amid latest": at(checkpoint.os, "replace", 0, die),
    "before best": at(checkpoint, "write_link", 0, die, call=2),
    "before the purge": at(checkpoint, "_purge", 0, die),
    "amid the purge": at(checkpoint.os, "rename", 0, die, call=2),
    "amid a removal": at(checkpoint.shutil, "rmtree", 0, die),
}


def test_a_first_checkpoint_that_is_saved_again_is_found_while_it_lies_aside(tmp_path):
    save(tmp_path, 1)
    pid = os.fork()
    if pid == 0:
        at(checkpoint.os, "rename", 0, die, call=2)(0)
        save(tmp_path, 1, validated=1)
        os._exit(0)
    os.waitpid(pid, 0)
    assert not (tmp_path / "step-00000001").exists(), "killed between the two renames"
    assert checkpoint.find_on_all_ranks(tmp_path, ALONE) == tmp_path / "step-00000001.old"
    save(tmp_path, 1, validated=1)
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_best_follows_the_progress_that_a_run_resumes_from(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, is_best=step == 3)
    best = tmp_path / "best"
    assert checkpoint.restore_best(tmp_path, 3) and best.read_text() == "step-00000003"
    assert checkpoint.restore_best(tmp_path, 2) and best.read_text() == "step-00000002"
    assert not checkpoint.restore_best(tmp_path, 1) and not best.exists(), "it was removed when another was the best"
    assert checkpoint.restore_best(tmp_path, 3) and checkpoint.restore_best(tmp_path, -1) and not best.exists()
    (tmp_path / "step-00000003" / "model.safetensors").write_bytes(b"x")
    assert not checkpoint.restore_best(tmp_path, 3) and not best.exists()


def test_only_what_was_complete_once_counts_as_saved(tmp_path):
    (tmp_path / "step-00000001.tmp").mkdir()
    assert checkpoint.find_on_all_ranks(tmp_path, ALONE) is None


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step again"])
@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_any_phase_a_whole_checkpoint_is_found_and_the_next_save_clears_up(tmp_path, phase, again):
    for step in (1, 2, 3):
        save(tmp_path, step, is_best=step == 1)
    step = 3 if again else 4
    pid = os.fork()
    if pid == 0:
        PHASES[phase](0)
        save(tmp_path, step, is_best=True, validated=9)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not (again and phase in ("amid the purge", "amid a removal")):
        assert code == -signal.SIGKILL, "the phase was not reached"
    path = checkpoint.find(tmp_path)
    net, optimizer = stepped(99, steps=0)
    progress = checkpoint.load(path, net, optimizer, 0)
    assert progress.step in (3, step)
    saved = stepped(progress.step)[0].state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in net.state_dict().items()), "never a mixture"
    save(tmp_path, 5)
    save(tmp_path, 6)
    left = names(tmp_path)
    assert left[-2:] == ["step-00000005", "step-00000006"] and not [name for name in left if "tmp" in name], left
    assert not [name for name in left if name.startswith("step") and "." in name], left
    assert checkpoint.find(tmp_path).name == "step-00000006"


@pytest.mark.parametrize("hangs", ["_write", "_commit", "point", "_purge"])
def test_a_save_that_hangs_until_another_has_saved_later_steps_leaves_them_and_their_names(
    tmp_path, monkeypatch, hangs
):
    own, other = RunLock(tmp_path), RunLock(tmp_path)
    own.take()
    folder = tmp_path / "checkpoints"
    save(folder, 1, refuse_lost=own.refuse_lost)
    act, kept = checkpoint.fsync_folder, list[str]()
    place = {"_write": "random-00000.json", "_commit": ".tmp", "point": "checkpoints"}.get(hangs, "latest")

    def hang() -> None:
        other.take(take_over=True)
        monkeypatch.setattr(checkpoint, "_this_process", lambda: "elsewhere.1")
        for step in (2, 3, 4):
            save(folder, step, is_best=step == 3, refuse_lost=other.refuse_lost)
        kept.extend(names(folder))

    def sync(path) -> None:
        act(path)
        if not kept and not other.ticket[0] and path.name.endswith(place):
            hang()

    if hangs == "_purge":
        write = checkpoint.write_link
        monkeypatch.setattr(checkpoint, "write_link", lambda *of: (write(*of), other.ticket[0] or hang()))
    else:
        monkeypatch.setattr(checkpoint, "fsync_folder", sync)
    expected = NotSaved if hangs == "_write" else TakenOver  # its draft was cleared away
    with pytest.raises(expected):
        save(folder, 2, refuse_lost=own.refuse_lost)
    assert names(folder) == kept == ["best", "latest", "step-00000003", "step-00000004"]
    assert checkpoint.find(folder).name == "step-00000004"
