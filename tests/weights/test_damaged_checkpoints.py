"""Checkpoints that are damaged, or could not be written: never taken for whole, and the last good one is kept."""

import os
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from torch import nn

from seqpar.weights import checkpoint
from seqpar.weights.checkpoint import DamagedCheckpoint, NotSaved, Progress
from seqpar.weights.weight_files import write_weights
from tests.support.checkpoints import ALONE, names, save, stepped


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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"PK"),
        ("optimizer.safetensors", bytes(64)),
        ("progress.json", b"[]"),
        ("random-00000.json", b"[]"),
        ("random-00000.json", b""),
    ],
)
def test_a_file_that_cannot_be_read_is_named_whatever_the_manifest_says(tmp_path, name, content):
    path = save(tmp_path, 1)
    (path / name).write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=f"{name}: is damaged .* remove this checkpoint"):
        checkpoint.load(path, *stepped(1), 0)


def test_an_optimizer_of_another_network_is_refused(tmp_path):
    path = save(tmp_path, 1)
    write_weights(path / "optimizer.safetensors", {"other.weight/exp_avg": torch.zeros(3)})
    with pytest.raises(DamagedCheckpoint, match="holds states of other.weight, which the network lacks"):
        checkpoint.load(path, *stepped(1), 0)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"step-00000009", b"../.."])
def test_a_damaged_pointer_costs_nothing(tmp_path, content):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "latest").write_bytes(content)
    assert checkpoint.find(tmp_path).name == "step-00000002"


def test_where_nothing_is_whole_that_is_said(tmp_path):
    with pytest.raises(DamagedCheckpoint, match="the folder holds none"):
        checkpoint.find(tmp_path)
    assert checkpoint.find_on_all_ranks(tmp_path, ALONE) is None
    cut(save(tmp_path, 1) / "model.safetensors")
    with pytest.raises(DamagedCheckpoint, match="step-00000001/model.safetensors is damaged"):
        checkpoint.find_on_all_ranks(tmp_path, ALONE)


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
        with pytest.raises(NotSaved, match="step-00000002 could not be saved: .*No space left"):
            save(folder, 2)
        assert checkpoint.find(folder).name == "step-00000001"
        assert names(folder) == ["latest", "other", "step-00000001"]
        (folder / "other").unlink()
        assert save(folder, 2) == checkpoint.find(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("phase", ["_make_draft", "write_tensors", "_write_text", "write_link"])
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
