"""Each operation on boxes equals torch's own on the joined volume: output, input gradient, parameter gradients."""

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqpar.collectives import all_reduce
from seqpar.mesh import Group, Mesh
from seqpar.spatial import convolution, norms, pooling
from seqpar.spatial.box_grid import BoxGrid
from tests.support.ranks import RanksFailed

WORLDS = [2, 3, 4, 8]
CASES = 150


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_edges(world: int, dice: random.Random, widest: int = 5) -> tuple[tuple[int, ...], ...]:
    """Returns unequal cuts along one to three dimensions, each of two voxels at least.

    In a smaller one, torch's dilated max-pooling writes out of bounds where it sees nothing but padding.
    """
    parts = [1, 1, 1]
    left = world
    while left > 1:
        prime = next(p for p in range(2, left + 1) if left % p == 0)
        parts[dice.randrange(3)] *= prime
        left //= prime
    widths = ([dice.randint(1, widest) if n > 1 else dice.randint(2, widest + 2) for _ in range(n)] for n in parts)
    return tuple((0, *itertools.accumulate(row)) for row in widths)


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


@dataclass
class Case:
    """An operation on a spread volume, and torch's own answers on the joined one."""

    module: nn.Module
    edges: tuple[tuple[int, ...], ...]
    whole: Tensor
    output: Tensor
    towards: list[Tensor]  # the loss's gradient at the output; one for each rank where the output is not spread
    gradients: list[Tensor]  # of the input, then of all parameters together
    buffers: list[Tensor]  # afterwards
    order: torch.memory_format  # of the boxes


def make_case(
    module: nn.Module, edges: tuple[tuple[int, ...], ...], whole: Tensor, world: int, last: bool = False
) -> Case:
    before = copy.deepcopy(module)
    output, _ = module(whole.requires_grad_())
    own = world if isinstance(module, pooling.GlobalMean) else 1
    towards = [numbers(7 + q, *output.shape) for q in range(own)]
    dx, *dweights = torch.autograd.grad(output, [whole, *module.parameters()], sum(towards))  # type: ignore[arg-type]
    answers = output.detach(), towards, [dx, together(dweights)], list(module.buffers())
    return Case(before, edges, whole.detach(), *answers, torch.channels_last_3d if last else torch.contiguous_format)


def together(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.float64), *(t.flatten() for t in tensors)])


def box(grid: BoxGrid) -> tuple[Any, ...]:
    return (..., *(slice(*side) for side in grid.box))


def gap(case: Case, group: Group) -> tuple[float, Tensor]:
    """Returns the largest distance to torch's own of output, input gradient and buffers; the parameter gradients."""
    grid = BoxGrid(case.edges, group)
    part = case.whole[box(grid)].clone(memory_format=case.order).requires_grad_()
    y, after = case.module(part, grid)
    if after is not None:
        assert after.extents == case.output.shape[2:] and after.group is group, (case.module, case.edges)
        wanted, towards = case.output[box(after)], case.towards[0][box(after)]
    else:
        wanted, towards = case.output, case.towards[group.index]
    dpart, *dweights = torch.autograd.grad(y, [part, *case.module.parameters()], towards)
    pairs = [(y.detach(), wanted), (dpart, case.gradients[0][box(grid)]), *zip(case.module.buffers(), case.buffers)]
    return max(apart(ours, torchs) for ours, torchs in pairs), together(dweights)


def apart(a: Tensor, b: Tensor) -> float:
    """Returns max |a - b|, relative where the values are large."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(((a - b).abs() / b.abs().clamp(min=1)).max())


Maker = Callable[[random.Random], tuple[int, nn.Module]]


def draw_cases(maker: Maker, world: int, count: int) -> list[Case]:
    """Returns cases that torch itself accepts, the same for the same arguments."""
    dice, cases = random.Random(f"{maker.__name__} {world}"), []
    while len(cases) < count:
        torch.default_generator.manual_seed(len(cases))
        channels, module = maker(dice)
        edges = random_edges(world, dice)
        whole = numbers(len(cases), dice.randint(1, 2), channels, *(e[-1] for e in edges))
        with suppress(ValueError, RuntimeError):  # as a kernel that is larger than the volume
            cases.append(make_case(module.double().train(), edges, whole, world, dice.random() < 0.5))
    return cases


def check_cases(mesh: Mesh, cases: list[Case], count: int) -> tuple[int, int]:
    """Returns how many cases were checked until there were ``count`` accepted ones, and in how many kinds of cut."""
    ours, checked = [], []
    for case in cases:
        if len(ours) == count:
            break
        try:
            found, dweights = gap(case, mesh.seq)
        except ValueError as error:
            assert "would hold no output" in str(error), error
            continue
        assert found < 1e-10, (found, case.module, case.edges, case.whole.shape)
        ours.append(dweights)
        checked.append(case)
    every = all_reduce(torch.cat(ours), mesh.seq).split([len(one) for one in ours])
    for case, dweights in zip(checked, every):
        found = apart(dweights, case.gradients[1])
        assert found < 1e-10, (found, case.module, case.edges, case.whole.shape)
    return len(checked), len({sum(len(edges) > 2 for edges in case.edges) for case in checked})


def check_each(mesh: Mesh, drawn: dict[str, list[Case]]) -> dict[str, tuple[int, int]]:
    return {name: check_cases(mesh, cases, CASES) for name, cases in drawn.items()}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("world", WORLDS)
def test_on_boxes_each_equals_torchs_own_on_the_joined_volume(
    world: int, kind: str, ranks: Callable[..., list]
) -> None:
    count = CASES if kind == "norms" else 4 * CASES  # some are refused: a rank would hold no output
    drawn = {maker.__name__: draw_cases(maker, world, count) for maker in MAKERS[kind]}
    for checked in ranks(world, check_each, drawn, timeout=300):
        assert checked == dict.fromkeys(drawn, (CASES, min(3, int(math.log2(world)))))


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
    with pytest.raises(RanksFailed, match="assert 0\\.|assert [1-9]"):
        ranks(2, check_cases, draw_cases(maker, 2, 1), 1)


def check_one_voxel(mesh: Mesh) -> tuple[int, int]:
    edges = (tuple(range(mesh.seq.size + 1)), (0, 1), (0, 1))
    whole = numbers(1, 2, 3, mesh.seq.size, 1, 1)
    module = norms.InstanceNorm3d(3, affine=True).double()
    return check_cases(mesh, [make_case(module, edges, whole, mesh.seq.size)], 1)


@pytest.mark.parametrize("world", WORLDS)
def test_instance_norm_of_one_voxel_on_each_rank(world: int, ranks: Callable[..., list]) -> None:
    assert ranks(world, check_one_voxel) == [(1, 1)] * world


def check_data_norm(mesh: Mesh, spread_out: bool) -> float:
    """Batch norm over two data ranks, with and without boxes, against one process with the whole batch."""
    whole, towards = numbers(1, 4, 3, 5, 2, 2).requires_grad_(), numbers(2, 4, 3, 5, 2, 2)
    alone, ours = norms.BatchNorm3d(3).double(), norms.BatchNorm3d(3, data=mesh.data).double()
    reference, _ = alone(whole)
    dx, *dweights = torch.autograd.grad(reference, [whole, *alone.parameters()], towards)
    grid = BoxGrid(((0, 2, 5), (0, 2), (0, 2)), mesh.seq) if spread_out else None
    where = (slice(2 * mesh.data.index, 2 * mesh.data.index + 2), *(box(grid) if grid else (...,)))
    part = whole.detach()[where].clone().requires_grad_()
    y, after = ours(part, grid)
    assert after is grid
    dpart, *dparts = torch.autograd.grad(y, [part, *ours.parameters()], towards[where])
    sums = [all_reduce(d, mesh.world if grid else mesh.data) for d in dparts]
    pairs = [(y.detach(), reference.detach()[where]), (dpart, dx[where]), *zip(sums, dweights)]
    pairs += [(mine.double(), other.double()) for mine, other in zip(ours.buffers(), alone.buffers())]
    return max(apart(*pair) for pair in pairs)


@pytest.mark.parametrize("spread_out", [True, False])
def test_batch_norm_over_the_data_group_too(spread_out: bool, ranks: Callable[..., list]) -> None:
    assert max(ranks(4 if spread_out else 2, check_data_norm, spread_out, seqpar=2 if spread_out else 1)) < 1e-12


def check_running(mesh: Mesh) -> list[Tensor]:
    module = norms.BatchNorm3d(3, momentum=None)
    grid = BoxGrid(((0, 1, 4, 6), (0, 3), (0, 3)), mesh.seq)
    for step in range(3):
        module(numbers(step, 2, 3, 6, 3, 3).float()[box(grid)], grid)
    module.eval()
    y, _ = module(torch.ones(1, 3, *grid.sides), grid)
    return [*module.buffers(), y[:, :, 0, 0, 0]]


def test_running_statistics_are_the_same_bits_on_all_ranks(ranks: Callable[..., list]) -> None:
    first, *others = ranks(3, check_running)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))
