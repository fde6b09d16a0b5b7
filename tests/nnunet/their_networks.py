"""Networks of nnU-Net and torchvision, from their own packages, are converted exactly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dynamic_network_architectures.architectures import unet
from torch import Tensor, nn

from seqpar.parallel.mesh import Mesh
from tests.support.converted import Answers, answers, gaps
from tests.support.ranks import run_ranks

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
SIZES: dict[str, Any] = {
    "features_per_stage": (4, 8, 16), "conv_op": nn.Conv3d, "kernel_sizes": ((1, 3, 3), 3, 3), "strides": (1, 2, 2),
    "conv_bias": True, "norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"eps": 1e-5, "affine": True},
    "nonlin": nn.LeakyReLU, "deep_supervision": True,
}  # fmt: skip


def r3d_18() -> Callable[[], Any]:
    """Returns torchvision's function, also from a build for another torch: this network needs no compiled operator."""
    try:
        from torchvision.models import video
    except RuntimeError:
        for name in ("nms", "qnms"):
            OPERATORS.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        from torchvision.models import video
    return video.r3d_18  # type: ignore[no-any-return]


class BeforePooling(nn.Module):
    """r3d_18 without its pooling and its last layer."""

    def __init__(self) -> None:
        super().__init__()
        net = r3d_18()()
        self.layers = nn.Sequential(net.stem, net.layer1, net.layer2, net.layer3, net.layer4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "PlainConvUNet": (
        lambda: unet.PlainConvUNet(2, 3, n_conv_per_stage=2, num_classes=3, n_conv_per_stage_decoder=2, **SIZES),
        (1, 2, 24, 16, 20),
    ),
    "ResidualEncoderUNet": (
        lambda: unet.ResidualEncoderUNet(
            2, 3, n_blocks_per_stage=(1, 2, 2), num_classes=3, n_conv_per_stage_decoder=1, **SIZES
        ),
        (1, 2, 24, 16, 20),
    ),
    "r3d_18": (BeforePooling, (1, 3, 16, 32, 32)),
}


def check(mesh: Mesh, want: Answers) -> dict[str, float]:
    return gaps(mesh, want)


@pytest.mark.parametrize("name", NETWORKS)
def test_their_networks_equal_one_process(name: str) -> None:
    torch.set_num_threads(1)
    want = answers(*NETWORKS[name])
    for world in (1, 2, 3, 4, 8):
        for found in run_ranks(world, check, want, timeout=240):
            assert max(found.values()) < 1e-12, (world, found)
