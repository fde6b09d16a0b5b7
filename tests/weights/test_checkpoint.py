"""Checkpoints: bit for bit, whole or absent whatever kills the save, and never taken for whole when damaged."""

import os
import shutil
import signal
import socket
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from seqpar.launch.runs.run_lock import RunLock, TakenOver
from seqpar.launch.weights import checkpoint
from seqpar.launch.weights.checkpoint import DamagedCheckpoint, NotSaved, Progress
from seqpar.launch.weights.states import optimizer_tensors, random_states, set_random_states
from seqpar.mesh import Group
from tests.support.training_runs import at, die

ALONE = Group("world")


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """No power is cut here, and disks of test machines are slow."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def stepped(seed: int, kind: str = "adamw", steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    makers = {
        "adamw": lambda: torch.optim.AdamW(net.parameters(), lr=0.1),
        "sgd": lambda: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    }
    optimizer = makers[kind]()
    for _ in range(steps):
        net(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def save(folder, step: int, is_best: bool = False, refuse_lost=lambda: None, **more):
    net, optimizer = stepped(step)
    progress = Progress(step, global_batch=2, **more)
    return checkpoint.save(folder, net, optimizer, progress, ALONE, "{}", is_best, refuse_lost)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_what_is_loaded_is_what_was_saved_to_the_last_bit(tmp_path, kind):
    net, optimizer = stepped(1, kind)
    progress = Progress(7, 0.5, 6, 6, 4)
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
    "before latest": at(checkpoint, "point", 0, die),
    "amid latest": at(checkpoint.os, "replace", 0, die),
    "before best": at(checkpoint, "point", 0, die, call=2),
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
    assert checkpoint.find_together(tmp_path, ALONE) == tmp_path / "step-00000001.old"
    save(tmp_path, 1, validated=1)
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_only_what_was_complete_once_counts_as_saved(tmp_path):
    (tmp_path / "step-00000001.tmp").mkdir()
    assert checkpoint.find_together(tmp_path, ALONE) is None


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
    act, kept = checkpoint.sync, list[str]()
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
        write = checkpoint.point
        monkeypatch.setattr(checkpoint, "point", lambda *of: (write(*of), other.ticket[0] or hang()))
    else:
        monkeypatch.setattr(checkpoint, "sync", sync)
    expected = NotSaved if hangs == "_write" else TakenOver  # its draft was cleared away
    with pytest.raises(expected):
        save(folder, 2, refuse_lost=own.refuse_lost)
    assert names(folder) == kept == ["best", "latest", "step-00000003", "step-00000004"]
    assert checkpoint.find(folder).name == "step-00000004"


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x80
    path.write_bytes(content)


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("spoil", [flip, cut, os.unlink])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "progress.json", "random-00000.json", "manifest.json"]
)
def test_damage_is_seen_and_the_one_before_is_taken(tmp_path, capfd, name, spoil):
    save(tmp_path, 1)
    spoil(save(tmp_path, 2) / name)
    assert checkpoint.find(tmp_path).name == "step-00000001"
    said = capfd.readouterr().err
    assert said.startswith("warning: step-00000002") and "going back to step-00000001" in said


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"step-00000009", b"../.."])
def test_a_damaged_pointer_costs_nothing(tmp_path, content):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "latest").write_bytes(content)
    assert checkpoint.find(tmp_path).name == "step-00000002"


def test_where_nothing_is_whole_that_is_said(tmp_path):
    with pytest.raises(DamagedCheckpoint, match="the folder holds none"):
        checkpoint.find(tmp_path)
    assert checkpoint.find_together(tmp_path, ALONE) is None
    cut(save(tmp_path, 1) / "model.safetensors")
    with pytest.raises(DamagedCheckpoint, match="step-00000001/model.safetensors is damaged"):
        checkpoint.find_together(tmp_path, ALONE)


def test_after_going_back_the_abandoned_course_is_cleared(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip(tmp_path / "step-00000003" / "model.safetensors")
    save(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step-00000002"] or "step-00000003" not in names(tmp_path)


def test_a_full_disk_keeps_the_last_good_one(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a small disk here; the next test stands in for it")
    try:
        save(folder, 1)
        (folder / "other").write_bytes(b"0" * (shutil.disk_usage(folder).free - 4096))
        with pytest.raises(NotSaved, match="step-00000002 could not be saved: .*; what was saved before is kept"):
            save(folder, 2)
        assert checkpoint.find(folder).name == "step-00000001"
        assert names(folder) == ["latest", "other", "step-00000001"]
        (folder / "other").unlink()
        assert save(folder, 2) == checkpoint.find(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("phase", ["_make_draft", "write_tensors", "_write_text", "point"])
def test_a_write_that_fails_is_reported_and_the_last_good_one_kept(tmp_path, monkeypatch, phase):
    save(tmp_path, 1)

    def fail(*of, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, phase, fail)
        with pytest.raises(NotSaved, match="No space left"):
            save(tmp_path, 2)
    assert checkpoint.find(tmp_path).name == "step-00000001"
    save(tmp_path, 2)
    assert checkpoint.find(tmp_path).name == "step-00000002"


def test_old_checkpoints_that_cannot_be_removed_are_a_warning_and_the_new_one_is_saved(tmp_path, monkeypatch, capfd):
    def fail(*of):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(checkpoint, "_purge", fail)
    assert save(tmp_path, 1) == checkpoint.find(tmp_path)
    assert "warning: old checkpoints" in capfd.readouterr().err


def _one_fails(mesh, folder) -> str:
    net, optimizer = stepped(1)
    progress = Progress(1)
    checkpoint.save(folder, net, optimizer, progress, mesh.world)
    if mesh.world.index == 1:
        write = checkpoint._write_text

        def fail(path, text):
            raise OSError(28, "No space left on device")

        checkpoint._write_text = fail
    try:
        checkpoint.save(folder, net, optimizer, replace(progress, step=2), mesh.world)
    except NotSaved as error:
        message = str(error)
    if mesh.world.index == 1:
        checkpoint._write_text = write
    checkpoint.save(folder, net, optimizer, replace(progress, step=3), mesh.world)
    return message


def test_a_rank_that_cannot_write_is_every_ranks_failure_and_the_next_save_works(ranks, tmp_path):
    messages = ranks(3, _one_fails, tmp_path)
    assert len(set(messages)) == 1 and "rank 1: [Errno 28] No space left" in messages[0]
    path = checkpoint.find(tmp_path)
    assert path.name == "step-00000003"
    assert sorted(file.name for file in path.glob("random-*")) == [f"random-0000{rank}.json" for rank in range(3)]


def test_another_network_is_refused_by_name(tmp_path):
    path = save(tmp_path, 1)
    net = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    with pytest.raises(ValueError, match="holds another network: 0.weight, 0.bias"):
        checkpoint.load(path, net, torch.optim.Adam(net.parameters()), 0)
