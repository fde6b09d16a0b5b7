"""Each operation on boxes equals torch's own on the joined volume: output, input gradient, parameter gradients."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from seqpar.parallel.mesh import Mesh
from seqpar.spatial import convolution, norms, pooling
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.memory_format import miopen_takes_channels_last
from tests.support.boxes import Case, Maker, check_cases, draw_cases
from tests.support.marks import long_case
from tests.support.ranks import RanksFailed

CASES = {2: 100, 3: 80, 4: 50, 8: 40}  # 270 of each operation; a case costs a message for each two ranks
NORMS = {2: 30, 3: 20, 4: 15, 8: 10}  # 75 of each norm, which has 1 to 12 settings, and sums over boxes of any shape


def draw(dice: random.Random, low: int, high: int) -> tuple[int, int, int]:
    return dice.randint(low, high), dice.randint(low, high), dice.randint(low, high)


def conv(dice: random.Random) -> tuple[int, nn.Module]:
    groups = dice.choice([1, 1, 2])
    strides, dilations, kernels = draw(dice, 1, 3), draw(dice, 1, 2), draw(dice, 1, 4)
    padding: str | tuple[int, int, int] = draw(dice, 0, 3)
    if dice.random() < 0.2:
        strides, padding = (1, 1, 1), dice.choice(["same", "valid"])
    elif dice.random() < 0.2:
        strides, padding, kernels, groups = (1, 1, 1), (0, 0, 0), (1, 1, 1), 1
    keep, bias = dice.random() < 0.5, dice.random() < 0.7
    options = {"stride": strides, "padding": padding, "dilation": dilations, "groups": groups, "bias": bias}
    return 2, convolution.Conv3d(2, 2 * dice.randint(1, 2), kernels, **options, keep_window=keep)


def transposed(dice: random.Random) -> tuple[int, nn.Module]:
    strides, dilations, kernels = draw(dice, 1, 3), draw(dice, 1, 2), draw(dice, 1, 4)
    paddings = tuple(dice.randint(0, min(2, d * (k - 1))) for k, d in zip(kernels, dilations))
    extra = tuple(dice.randint(0, max(s, d) - 1) for s, d in zip(strides, dilations))
    keep, bias, groups = dice.random() < 0.5, dice.random() < 0.7, dice.choice([1, 1, 2])
    options = {"stride": strides, "padding": paddings, "dilation": dilations, "output_padding": extra}
    return 2, convolution.ConvTranspose3d(2, 2, kernels, **options, groups=groups, bias=bias, keep_window=keep)


def max_pool(dice: random.Random) -> tuple[int, nn.Module]:
    kernels, dilations = draw(dice, 1, 4), draw(dice, 1, 2)
    padding = tuple(dice.randint(0, (d * (k - 1) + 1) // 2) for k, d in zip(kernels, dilations))
    return 2, pooling.MaxPool3d(kernels, draw(dice, 1, 3), padding, dilations, ceil_mode=dice.random() < 0.5)


def avg_pool(dice: random.Random) -> tuple[int, nn.Module]:
    kernels = draw(dice, 1, 4)
    padding = tuple(dice.randint(0, k // 2) for k in kernels)
    counted, override, ceil = dice.random() < 0.5, dice.choice([None, None, 3]), dice.random() < 0.5
    return 2, pooling.AvgPool3d(kernels, draw(dice, 1, 3), padding, ceil, counted, override)


def upsample(dice: random.Random) -> tuple[int, nn.Module]:
    factor = draw(dice, 1, 3) if dice.random() < 0.5 else dice.randint(1, 3)
    return 2, pooling.Upsample(scale_factor=factor, mode=dice.choice(["nearest", "nearest-exact", "trilinear"]))


def instance_norm(dice: random.Random) -> tuple[int, nn.Module]:
    affine, tracked = dice.random() < 0.5, dice.random() < 0.5
    return 3, norms.InstanceNorm3d(3, affine=affine, track_running_stats=tracked, momentum=0.3)


def batch_norm(dice: random.Random) -> tuple[int, nn.Module]:
    affine, tracked, momentum = dice.random() < 0.5, dice.random() < 0.5, dice.choice([0.1, 0.5, None])
    return 3, norms.BatchNorm3d(3, affine=affine, track_running_stats=tracked, momentum=momentum)


def group_norm(dice: random.Random) -> tuple[int, nn.Module]:
    return 6, norms.GroupNorm(dice.choice([1, 2, 3, 6]), 6, affine=dice.random() < 0.5)


def layer_norm(dice: random.Random) -> tuple[int, nn.Module]:
    return 3, norms.ChannelLayerNorm(3, bias=dice.random() < 0.5)


def global_mean(dice: random.Random) -> tuple[int, nn.Module]:
    return 3, pooling.GlobalMean()


MAKERS = {
    "convolutions": [conv, transposed],
    "resampling": [max_pool, avg_pool, upsample],
    "norms": [instance_norm, batch_norm, group_norm, layer_norm, global_mean],
}


def check_each(mesh: Mesh, drawn: dict[str, list[Case]]) -> dict[str, tuple[int, int]]:
    return {name: check_cases(mesh, cases) for name, cases in drawn.items()}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("world", [long_case(world) if world == 8 else world for world in CASES])
def test_on_boxes_each_equals_torchs_own_on_the_joined_volume(
    world: int, kind: str, ranks: Callable[..., list]
) -> None:
    count = (NORMS if kind == "norms" else CASES)[world]
    drawn = {maker.__name__: draw_cases(maker, world, count) for maker in MAKERS[kind]}
    for checked in ranks(world, check_each, drawn, timeout=300):
        assert checked == dict.fromkeys(drawn, (count, min(3, int(math.log2(world)))))


def alone(kind: type[Any], *sizes: Any, **options: Any) -> Maker:
    """Returns an operation that acts on each box as if it were the volume."""

    class Alone(kind):
        def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:
            y, _ = super().forward(x)
            return y, grid and grid.scaled(y.shape[2] // x.shape[2])

    def maker(dice: random.Random) -> tuple[int, nn.Module]:
        return 2, Alone(*sizes, **options)

    return maker


@pytest.mark.parametrize(
    "maker",
    [
        alone(convolution.Conv3d, 2, 2, 3, padding=1),
        alone(pooling.MaxPool3d, 3, 1, 1),
        alone(pooling.Upsample, scale_factor=2, mode="trilinear"),
        alone(norms.InstanceNorm3d, 2),
        alone(norms.GroupNorm, 1, 2),
    ],
)
def test_the_comparison_sees_boxes_that_know_nothing_of_each_other(maker: Maker, ranks: Callable[..., list]) -> None:
    with pytest.raises(RanksFailed, match=r"AssertionError: \([0-9.]+, Alone"):
        ranks(2, check_cases, draw_cases(maker, 2, 1))


def test_amds_library_takes_channels_last_as_it_is_told_or_as_torchs_version_does() -> None:
    new, old = 3_005_000, 3_004_000
    for told, takes in (("1", True), ("0", False)):
        env = {"PYTORCH_MIOPEN_SUGGEST_NHWC": told}
        assert all(
            miopen_takes_channels_last(env, torch_version, new) is takes for torch_version in ("2.10.0", "2.13.0")
        )
    defaults = [miopen_takes_channels_last({}, f"2.{minor}.0+rocm7.1", new) for minor in (8, 9, 10, 12, 13)]
    assert defaults == [False, False, True, True, False]
    assert not miopen_takes_channels_last({}, "2.10.0", old)
