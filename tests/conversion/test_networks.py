"""Networks of others, converted, equal one process: outputs, gradients, running statistics, on 1 to 8 ranks."""

from collections.abc import Callable, Iterable

import pytest
import torch
from monai.networks import nets as monai
from torch import Tensor, nn

from seqpar.parallel.mesh import Mesh
from tests.support.converted import Answers, answers, gaps
from tests.support.marks import long_case
from tests.support.nnunet_networks import reference

MONAI: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "UNet": (lambda: monai.UNet(3, 1, 3, (4, 8, 16), (2, 2), num_res_units=1), (1, 1, 32, 16, 24)),
    "BasicUNet": (lambda: monai.BasicUNet(3, 1, 3, features=(4, 4, 8, 8, 16, 4)), (1, 1, 35, 33, 16)),
    "BasicUNet, interpolating": (
        lambda: monai.BasicUNet(3, 1, 3, features=(4, 4, 8, 8, 16, 4), upsample="nontrainable"),
        (1, 1, 34, 32, 16),
    ),
    "BasicUNet, pixel shuffle": (
        lambda: monai.BasicUNet(3, 1, 3, features=(4, 4, 8, 8, 16, 4), upsample="pixelshuffle"),
        (1, 1, 32, 32, 16),
    ),
    "DynUNet": (
        lambda: monai.DynUNet(3, 1, 3, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 16]),
        (2, 1, 16, 24, 16),
    ),
    "SegResNet": (lambda: monai.SegResNet(3, 8, 1, 3, blocks_down=(1, 1, 1), blocks_up=(1, 1)), (1, 1, 24, 16, 8)),
    "AttentionUnet": (lambda: monai.AttentionUnet(3, 1, 3, (4, 8, 16), (2, 2)), (1, 1, 16, 16, 8)),
    "VNet": (lambda: monai.VNet(3, 1, 3), (1, 1, 32, 16, 16)),
    "UNETR": (
        lambda: monai.UNETR(2, 3, (32, 32, 32), feature_size=4, hidden_size=24, mlp_dim=48, num_heads=4),
        (1, 2, 32, 32, 32),
    ),
}

SLOW = ("AttentionUnet", "UNETR", "VNet")


def residual_stage(i: int, o: int, stride: int) -> nn.Module:
    """Returns two residual blocks of torchvision's r3d_18."""
    return nn.Sequential(Residual(i, o, stride), Residual(o, o, 1))


class Residual(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv3d(i, o, 3, stride, 1, bias=False), nn.BatchNorm3d(o), nn.ReLU(inplace=True))
        self.conv2 = nn.Sequential(nn.Conv3d(o, o, 3, 1, 1, bias=False), nn.BatchNorm3d(o))
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv3d(i, o, 1, stride, bias=False), nn.BatchNorm3d(o))

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.downsample is None else self.downsample(x)
        y = self.conv2(self.conv1(x))
        y += short
        return self.relu(y)  # type: ignore[no-any-return]


def r3d_18(width: int = 4) -> nn.Module:
    """Returns the layers of torchvision's r3d_18 up to its pooling, narrower."""
    stem = (
        nn.Conv3d(3, width, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False),
        nn.BatchNorm3d(width),
        nn.ReLU(inplace=True),
    )
    stages = [residual_stage(width * max(1, 2 ** (n - 1)), width * 2**n, 1 + (n > 0)) for n in range(4)]
    return nn.Sequential(nn.Sequential(*stem), *stages)


class Own(nn.Module):
    """Somebody's own network: another scale is joined by hand, and a convolution before a norm has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 8, 3, 2, 1), nn.Conv3d(12, 3, 1)
        self.norm = nn.InstanceNorm3d(8, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        y = nn.functional.interpolate(self.norm(self.b(x)), scale_factor=2, mode="trilinear", align_corners=False)
        return self.c(torch.cat([x, y], 1))  # type: ignore[no-any-return]


OTHERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "somebody's own": (Own, (1, 1, 16, 24, 16)),
    "r3d_18": (r3d_18, (2, 3, 16, 36, 40)),
    "PlainConvUNet": (lambda: reference("PlainConvUNet"), (1, 2, 32, 16, 16)),
    "ResidualEncoderUNet": (lambda: reference("ResidualEncoderUNet"), (1, 2, 32, 16, 16)),
    "UNETR in two dimensions": (
        lambda: monai.UNETR(2, 3, (64, 48), feature_size=4, hidden_size=24, mlp_dim=48, num_heads=4, spatial_dims=2),
        (2, 2, 64, 48),
    ),
    "UNet in two dimensions": (lambda: monai.UNet(2, 1, 3, (4, 8, 16), (2, 2), num_res_units=1), (2, 1, 36, 40)),
}


def test_a_gradient_that_is_rounding_is_compared_with_the_largest() -> None:
    """That of a bias before an instance norm is zero: its own size in place of the largest would magnify rounding."""
    want = answers(*OTHERS["somebody's own"])
    names = [name for name, _ in want.module.named_parameters()]
    sizes = {name: float(gradient.abs().max()) for name, gradient in zip(names, want.gradients[1:])}
    assert {name for name, size in sizes.items() if size < 1e-9 * max(sizes.values())} == {"b.bias"}
    assert all(size > 1e-4 * max(sizes.values()) for name, size in sizes.items() if name != "b.bias")


def check(mesh: Mesh, want: Answers) -> dict[str, float]:
    return gaps(mesh, want)


EVERY = MONAI | OTHERS
NEXT = {name: (1, 3, 8, 4)[number % 4] for number, name in enumerate(EVERY)}  # where a network is compared usually


def compare(name: str, worlds: Iterable[int], ranks: Callable[..., list]) -> None:
    want = answers(*EVERY[name])
    for world in worlds:
        for found in ranks(world, check, want, timeout=240):
            assert max(found.values()) < 1e-12, (world, found)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.started) if n in SLOW else n for n in EVERY])
def test_each_network_equals_one_process_on_two_ranks_and_another_number(name: str, ranks: Callable[..., list]) -> None:
    compare(name, (2, NEXT[name]), ranks)


@pytest.mark.parametrize("name", [long_case(name) for name in EVERY])
def test_each_network_equals_one_process_on_all_numbers_of_ranks(name: str, ranks: Callable[..., list]) -> None:
    compare(name, {1, 3, 4, 8} - {NEXT[name]}, ranks)
