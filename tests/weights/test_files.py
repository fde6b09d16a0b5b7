"""Files of weights are read whole or refused by name, written whole or not at all, and wrappers are taken off."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from seqpar.data.errors import DataError
from seqpar.parallel.mesh import Group
from seqpar.weights import checkpoint
from seqpar.weights.monai_weights import load_monai
from seqpar.weights.weight_files import read_weights, unwrap, write_weights
from tests.support.foreign_weights import HEADS, TILE, image, out, tiny_unetr


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "backbone.", "module._orig_mod.", "model.net."])
def test_nests_and_prefixes_are_taken_off(prefix: str) -> None:
    state = tiny_unetr()
    saved = {"epoch": 3, "state_dict": {prefix + name: tensor for name, tensor in state.items()}}
    assert unwrap(saved).keys() == state.keys()
    one, other = (out(load_monai(weights, TILE, HEADS), image(*TILE)) for weights in (saved, state))
    assert torch.equal(one, other)


def test_files_come_back_as_they_went(tmp_path: Path) -> None:
    net = load_monai(tiny_unetr(), TILE, HEADS)
    write_weights(tmp_path / "net.safetensors", net)
    back = read_weights(tmp_path / "net.safetensors")
    assert back.keys() == net.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in net.state_dict().items())
    torch.save({"state_dict": tiny_unetr(), "epoch": 1}, tmp_path / "net.pt")
    assert read_weights(tmp_path / "net.pt").keys() == tiny_unetr().keys()
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["net.pt", "net.safetensors"]


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.safetensors"
    write_weights(path, nn.Linear(2, 2))
    before = path.read_bytes()

    def stop(tensors: dict, part: Path, metadata: dict) -> None:
        Path(part).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(sys.modules["seqpar.weights.weight_files"], "save_file", stop)
    with pytest.raises(OSError, match="disk full"):
        write_weights(path, nn.Linear(3, 3))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


class Surprise:
    """Leaves a trace where it is unpickled."""

    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("ran"),))


def test_files_that_are_no_weights_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_weights("whole.safetensors", nn.Linear(9, 9))
    torch.save({"w": torch.zeros(99)}, "whole.pt")
    torch.save({"w": Surprise()}, "code.pt")
    torch.save(torch.zeros(3), "bare.pt")
    Path("text.pt").write_text("no weights at all")
    Path("empty.pt").touch()
    Path("junk.pt").write_bytes(b"\x80\x02he.")  # an object of the past that there is not
    for name in ("whole.safetensors", "whole.pt"):
        Path(f"cut.{name}").write_bytes(Path(name).read_bytes()[:200])
    for name in (
        "bare.pt",
        "code.pt",
        "text.pt",
        "empty.pt",
        "junk.pt",
        "cut.whole.safetensors",
        "cut.whole.pt",
        "absent.pt",
    ):
        with pytest.raises(ValueError, match=re.escape(name)):
            read_weights(name)
    with pytest.raises(ValueError, match=r"code.pt: it holds more than tensors \(getattr\); save only") as refused:
        read_weights("code.pt")
    assert "weights_only" not in str(refused.value), "torch's advice is to run it"
    with pytest.raises(ValueError, match="text.pt: it is no file of weights"):
        read_weights("text.pt")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "tensor, why",
    [
        (torch.ones(2, dtype=torch.int32), "its tensor odd.weight is of type int32"),
        (torch.ones(2, dtype=torch.bool), "its tensor odd.weight is of type bool"),
        (torch.tensor([1, float("nan")]), "its tensor odd.weight has NaN or infinite values"),
        (torch.tensor([1, float("-inf")], dtype=torch.bfloat16), "its tensor odd.weight has NaN or infinite values"),
    ],
)
def test_tensors_that_are_no_weights_are_refused_by_name(tmp_path: Path, tensor: torch.Tensor, why: str) -> None:
    path, good = tmp_path / "w.safetensors", {"a.weight": torch.ones(2), "a.num_batches_tracked": torch.tensor(3)}
    write_weights(path, good)
    assert read_weights(path).keys() == good.keys()
    write_weights(path, {**good, "odd.weight": tensor})
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: {why}"):
        read_weights(path)


def test_a_file_without_tensors_is_refused_by_name(tmp_path: Path) -> None:
    write_weights(tmp_path / "none.safetensors", {})
    torch.save({"state_dict": {}, "epoch": 3}, tmp_path / "none.pt")
    for name in ("none.safetensors", "none.pt"):
        with pytest.raises(DataError, match=f"{name}: holds no tensors; give a state dict"):
            read_weights(tmp_path / name)


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_weights_can_be_read_by_whom_the_umask_says(tmp_path: Path, umask: int) -> None:
    net = nn.Linear(2, 2)
    optimizer, before = torch.optim.Adam(net.parameters()), os.umask(umask)
    try:
        saved = checkpoint.save(tmp_path / "checkpoints", net, optimizer, checkpoint.Progress(), Group("world"))
        for size in (2, 3):  # new, and in place of an older file
            write_weights(tmp_path / "net.safetensors", nn.Linear(size, size))
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "net.safetensors", *saved.iterdir())}
    assert {"net.safetensors", "model.safetensors", "optimizer.safetensors", "progress.json"} < modes.keys()
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)
