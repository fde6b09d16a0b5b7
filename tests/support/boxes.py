"""Operations on boxes, held against torch's own on the joined volume."""

import copy
import itertools
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Group, Mesh
from seqpar.spatial import pooling
from seqpar.spatial.box_grid import BoxGrid


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
    """Returns cases that torch itself and we accept, the same for the same arguments."""
    dice, cases = random.Random(f"{maker.__name__} {world}"), []
    for seed in itertools.count():
        torch.default_generator.manual_seed(seed)
        channels, module = maker(dice)
        edges, batch, last = random_edges(world, dice), dice.randint(1, 2), dice.random() < 0.5
        with suppress(ValueError, RuntimeError):  # as a kernel that is larger than the volume
            if not leaves_a_rank_without_output(module, edges, (batch, channels), world):
                whole = numbers(seed, batch, channels, *(e[-1] for e in edges))
                cases.append(make_case(module.double().train(), edges, whole, world, last))
        if len(cases) == count:
            return cases
    raise AssertionError


def leaves_a_rank_without_output(
    module: nn.Module, edges: tuple[tuple[int, ...], ...], sizes: tuple[int, int], world: int
) -> bool:
    """Returns whether we refuse the boxes for that, which is before any message and without any data."""
    grid = BoxGrid(edges, Group("seq", tuple(range(world))))
    part = torch.empty(*sizes, *(high - low for low, high in grid.box), device="meta")
    try:
        copy.deepcopy(module).to("meta")(part, grid)
    except ValueError as error:
        assert "leaves a rank without output" in str(error) or "has no output" in str(error), error
        return True
    return False


def check_cases(mesh: Mesh, cases: list[Case]) -> tuple[int, int]:
    """Returns how many cases were checked, and in how many kinds of cut."""
    ours = []
    for case in cases:
        difference, dweights = gap(case, mesh.seq)
        assert difference < 1e-10, (difference, case.module, case.edges, case.whole.shape)
        ours.append(dweights)
    every = all_reduce(torch.cat(ours), mesh.seq).split([len(one) for one in ours])
    for case, dweights in zip(cases, every):
        difference = apart(dweights, case.gradients[1])
        assert difference < 1e-10, (difference, case.module, case.edges, case.whole.shape)
    return len(cases), len({sum(len(edges) > 2 for edges in case.edges) for case in cases})
