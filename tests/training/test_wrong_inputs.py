"""A ParallelModel says in terms of its arguments what is wrong with a tensor."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqpar
from seqpar import DiceCE, ParallelModel

TILE = (16, 16, 16)


def model(kind: str) -> ParallelModel:
    plain = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.Conv3d(4, 3, 1))
    return ParallelModel(
        seqpar.UNETR(1, 3, TILE, 2, 12, 24, 2, patch=8, depth=1) if kind == "UNETR" else seqpar.convert(plain)
    )


def image(*shape: int) -> Tensor:
    return torch.randn(shape or (1, 1, *TILE), generator=torch.Generator().manual_seed(0))


def label(*shape: int) -> Tensor:
    return torch.randint(3, shape or (1, 1, *TILE), generator=torch.Generator().manual_seed(0))


WRONG: dict[str, tuple[Any, Any, str]] = {
    "whole numbers": (
        label(),
        label(),
        r"an image of torch.int64 came, and the weights are of torch.float32: give",
    ),
    "half": (image().half(), label(), r"an image of torch.float16 came.*or compute under torch.autocast"),
    "double": (image().double(), label(), r"an image of torch.float64 came"),
    "four axes": (image(1, *TILE), label(), r"shape \(1, 16, 16, 16\)"),
    "no samples": (image(0, 1, *TILE), label(0, 1, *TILE), r"an image of shape \(0, 1, 16, 16, 16\) has no voxels"),
    "an array": (image().numpy(), label().numpy(), "ndarray: give a tensor"),
    "a label of other sides": (image(), label(1, 1, 16, 16, 8), r"\(1, (1, )?16, 16, 8\)"),
    "a label of other samples": (image(), label(2, 1, *TILE), r"\(2, 16, 16, 16\) do not match"),
    "a label of fractions": (image(), label().float(), "give label.long()"),
    "a label without output": (image(), label() + 7, "label: Target . is out of bounds.*Give numbers of outputs"),
}


@pytest.mark.parametrize("kind", ["UNETR", "converted"])
def test_wrong_tensors_are_value_errors_of_arguments(kind: str) -> None:
    trained = model(kind)
    for what, (x, y, words) in WRONG.items():
        with pytest.raises(ValueError, match=words) as caught:
            trained.loss(DiceCE(), x, y)
        assert "--" not in str(caught.value), what
    with pytest.raises(ValueError, match="loss_fn is a str: give a function"):
        trained.loss("dice", image(), label())  # type: ignore[arg-type]
    assert torch.isfinite(trained.loss(DiceCE(), image(), label()))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(trained.loss(DiceCE(), image(), label()))


@pytest.mark.parametrize("kind", ["UNETR", "converted"])
@pytest.mark.parametrize("trains", [True, False])
def test_calls_refuse_them_too(kind: str, trains: bool) -> None:
    called = model(kind).train(trains)
    for what in ("whole numbers", "half", "four axes", "no samples", "an array"):
        with pytest.raises(ValueError, match=WRONG[what][2]):
            called(WRONG[what][0])


def test_predictions_refuse_what_is_no_volume() -> None:
    net = model("converted").eval()
    wrong = {"volume is a list": [1, 2], "has no voxels": image(0, 1, *TILE), "is needed": image(*TILE)}
    for words, volume in wrong.items():
        with pytest.raises(ValueError, match=words):
            seqpar.predict(net, volume, TILE)  # type: ignore[type-var]


def test_other_objects_are_refused_by_argument() -> None:
    with pytest.raises(ValueError, match="module is a int"):
        seqpar.convert(3)  # type: ignore[arg-type]
    with seqpar.init_mesh() as mesh, pytest.raises(ValueError, match="mesh is a Group"):
        ParallelModel(seqpar.convert(nn.Conv3d(1, 1, 1)), mesh.seq)  # type: ignore[arg-type]
    for size in ("2", None, 1.5):
        with pytest.raises(ValueError, match=r"seq=.*whole number of ranks"):
            seqpar.init_mesh(seq=size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^seq=2 does not fit 1 started rank"):
        seqpar.init_mesh(seq=2)
