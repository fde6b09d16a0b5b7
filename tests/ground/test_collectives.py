"""Each collective passes the adjoint test <Ax, y> = <x, A'y> over random shapes, and moves what it should."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from seqpar import collectives as c
from seqpar import remaps
from seqpar.halo_exchange import HaloPlan, window
from seqpar.mesh import Group, Mesh
from tests.support.ranks import relative

WORLDS = [1, 2, 3, 4, 8]


def adjoint_gap(mesh: Mesh, x: Tensor, forward: Callable[[Tensor], Tensor]) -> float:
    """Returns |<Ax, y> - <x, A'y>|, relative, with both products summed over the ranks."""
    x = x.detach().requires_grad_()
    image = forward(x)
    y = torch.randn(image.shape, dtype=image.dtype, generator=torch.Generator().manual_seed(mesh.seq.index + 99))
    (back,) = torch.autograd.grad(image, x, y)
    sides = torch.stack([(image.detach() * y).sum(), (x.detach() * back).sum()]).double()
    left, right = c.all_reduce(sides, mesh.seq)
    scale = c.all_reduce((image.detach() * y).abs().sum().double(), mesh.seq)
    return float((left - right).abs() / scale.clamp(min=1e-300))


def rows(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def uneven(world: int, dice: random.Random) -> list[int]:
    return [dice.randint(0 if world > 1 else 1, 5) for _ in range(world)]


def intervals(world: int, extent: int, dice: random.Random) -> dict[int, tuple[int, int]]:
    edges = [0, *sorted(dice.randint(0, extent) for _ in range(world - 1)), extent]
    return {q: (edges[q], edges[q + 1]) for q in range(world)}


def random_needs(world: int, extent: int, dice: random.Random) -> dict[int, tuple[int, int]]:
    return {q: tuple(sorted((dice.randint(0, extent), dice.randint(0, extent)))) for q in range(world)}  # type: ignore


def check_gather(mesh: Mesh) -> None:
    group, dice = mesh.seq, random.Random(1)
    for _ in range(6):
        sizes, dim = uneven(group.size, dice), dice.randint(0, 2)
        sizes[0] += 1
        shapes = [[2, 3, 4] for _ in sizes]
        for shape, size in zip(shapes, sizes):
            shape[dim] = size
        parts = [rows(q, *shapes[q]) for q in range(group.size)]
        whole = c.gather(parts[group.index], group, dim, sizes)
        assert torch.equal(whole, torch.cat(parts, dim))
        assert adjoint_gap(mesh, parts[group.index], lambda x: c.gather(x, group, dim, sizes)) < 1e-14
        full = rows(group.index, *[2 if d != dim else sum(sizes) for d in range(3)])
        every = [rows(q, *full.shape) for q in range(group.size)]
        mine = c.reduce_scatter(full, group, dim, sizes)
        assert relative(mine, sum(every).split(sizes, dim)[group.index]) < 1e-14
    mesh.seq.traffic.clear()


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_is_the_adjoint_of_gather_for_any_sizes(world: int, ranks: Callable[..., list]) -> None:
    ranks(world, check_gather)


def check_equal_gradients(mesh: Mesh) -> tuple[float, int]:
    group = mesh.seq
    sizes = list(range(1, group.size + 1))
    x = rows(group.index, sizes[group.index], 3).requires_grad_()
    weight = rows(77, sum(sizes), 3)
    grads = []
    for shortcut in (False, True):
        group.traffic.clear()
        (grad,) = torch.autograd.grad((c.gather(x, group, 0, sizes, shortcut) * weight).sum(), x)
        grads.append(grad)
    sent = group.traffic["gather"]
    return relative(grads[1], grads[0]), sent - (group.size - 1) * x.numel() * 8


@pytest.mark.parametrize("world", WORLDS)
def test_where_all_gradients_are_equal_the_slice_times_the_size_is_the_adjoint(
    world: int, ranks: Callable[..., list]
) -> None:
    for gap, backward_bytes in ranks(world, check_equal_gradients):
        assert gap < 1e-14 and backward_bytes == 0


def check_total(mesh: Mesh) -> None:
    group = mesh.seq
    for shape in ((), (3,), (2, 5)):
        x = rows(group.index, *shape)
        assert relative(c.all_sum(x, group), sum(rows(q, *shape) for q in range(group.size))) < 1e-14
        assert adjoint_gap(mesh, x, lambda x: c.all_sum(x, group)) < 1e-14


@pytest.mark.parametrize("world", WORLDS)
def test_sum_is_its_own_adjoint(world: int, ranks: Callable[..., list]) -> None:
    ranks(world, check_total)


def check_all_to_all(mesh: Mesh, even: bool) -> None:
    group, dice = mesh.seq, random.Random(2)
    for _ in range(5):
        counts = [[2 if even else dice.randint(0, 4) for _ in range(group.size)] for _ in range(group.size)]
        give, take = counts[group.index], [row[group.index] for row in counts]
        x = rows(group.index, sum(give), 3)
        pieces = [rows(q, sum(counts[q]), 3).split(counts[q])[group.index] for q in range(group.size)]
        assert torch.equal(c.all_to_all(x, group, give, take), torch.cat(pieces))
        assert adjoint_gap(mesh, x, lambda x: c.all_to_all(x, group, give, take)) < 1e-14


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all_reversed_is_its_adjoint(world: int, even: bool, ranks: Callable[..., list]) -> None:
    ranks(world, check_all_to_all, even)


def check_window(mesh: Mesh) -> None:
    group, dice = mesh.seq, random.Random(3)
    for turn in range(12):
        extent, dim = dice.randint(group.size, 12), dice.randint(0, 2)
        owned = intervals(group.size, extent, dice)
        needed = random_needs(group.size, extent, dice)
        if turn == 0:  # everybody needs everything: as many hops as there are ranks
            needed = dict.fromkeys(range(group.size), (0, extent))
        shape = [2, 3, 2]
        shape[dim] = extent
        whole = rows(5, *shape)
        low, high = owned[group.index]
        x = whole.narrow(dim, low, high - low)
        want = whole.narrow(dim, needed[group.index][0], needed[group.index][1] - needed[group.index][0])
        group.traffic.clear()
        plan = HaloPlan.of(group, dim, owned, needed)
        assert torch.equal(window(x, group, plan), want)
        overlaps = [min(high, b) - max(low, a) for q, (a, b) in needed.items() if q != group.index]
        expected = sum(max(0, n) for n in overlaps) * whole.numel() // extent * 8
        assert group.traffic["window"] == expected
        assert adjoint_gap(mesh, x, lambda x: window(x, group, plan)) < 1e-14


@pytest.mark.parametrize("world", WORLDS)
def test_window_brings_any_interval_and_adds_back(world: int, ranks: Callable[..., list]) -> None:
    ranks(world, check_window)


def check_margins(mesh: Mesh) -> None:
    group = mesh.seq
    owned = {q: (2 * q, 2 * q + 2) for q in range(group.size)}
    needed = {q: (max(low - 1, 0), high) for q, (low, high) in owned.items()}
    low, high = needed[group.index]
    whole, mine = rows(5, 2 * group.size, 3), slice(*owned[group.index])
    margins = ((0, group.index, 1), (1, 0, 2))
    plan = HaloPlan.of(group, 0, owned, needed, margins)
    got = window(whole[mine], group, plan, fill=7.0)
    assert torch.equal(got, torch.nn.functional.pad(whole[low:high], (0, 2, group.index, 1), value=7.0))
    assert adjoint_gap(mesh, whole[mine], lambda x: window(x, group, plan)) < 1e-14  # linear without the fill


@pytest.mark.parametrize("world", WORLDS)
def test_window_lays_margins_around_without_sending_them(world: int, ranks: Callable[..., list]) -> None:
    ranks(world, check_margins)


def check_lines(mesh: Mesh) -> None:
    """A window along one direction of a 2 x 2 grid of boxes: only the two ranks of a line exchange."""
    group = mesh.seq
    line = [q for q in range(4) if q % 2 == group.index % 2]
    owned = {line[0]: (0, 3), line[1]: (3, 5)}
    needed = {line[0]: (0, 4), line[1]: (1, 5)}
    whole = rows(group.index % 2, 5, 2)
    low, high = owned[group.index]
    a, b = needed[group.index]
    plan = HaloPlan.of(group, 0, owned, needed)
    assert torch.equal(window(whole[low:high], group, plan), whole[a:b])
    assert adjoint_gap(mesh, whole[low:high], lambda x: window(x, group, plan)) < 1e-14


def test_window_along_one_direction_of_a_grid_of_boxes(ranks: Callable[..., list]) -> None:
    ranks(4, check_lines)


def check_remap(mesh: Mesh) -> None:
    group = mesh.seq
    for turn in range(6):
        toss = torch.Generator().manual_seed(turn)
        ids = torch.randperm(17, generator=toss)
        owner = torch.randint(group.size, (17,), generator=toss)
        sources = [ids[owner[ids] == q] for q in range(group.size)]
        if turn == 0:
            targets = [torch.arange(17)] * group.size  # everybody wants everything
        else:
            wanter = torch.randint(group.size, (17,), generator=toss)
            targets = [(wanter == q).nonzero().flatten() for q in range(group.size)]
        plan = remaps.plan_remap(sources, targets, group.index)
        whole = rows(5, 2, 17, 3)
        x = whole[:, sources[group.index]]
        assert torch.equal(remaps.remap(x, group, 1, plan), whole[:, targets[group.index]])
        assert adjoint_gap(mesh, x, lambda x: remaps.remap(x, group, 1, plan)) < 1e-14
    same = remaps.plan_remap(sources, sources, group.index)
    group.traffic.clear()
    assert torch.equal(remaps.remap(x, group, 1, same), x) and group.traffic["remap"] == 0


@pytest.mark.parametrize("world", WORLDS)
def test_remap_moves_any_ownership_to_any_other(world: int, ranks: Callable[..., list]) -> None:
    ranks(world, check_remap)


def test_remap_refuses_what_nobody_owns() -> None:
    with pytest.raises(ValueError, match="no owner"):
        remaps.plan_remap([torch.tensor([0, 1])], [torch.tensor([0, 2])], 0)


def check_dtypes(mesh: Mesh, dtype: torch.dtype) -> list[torch.dtype]:
    group = mesh.seq
    sizes = [2 + q for q in range(group.size)]
    parts = [rows(q, sizes[q], 2, dtype=dtype) for q in range(group.size)]
    mine = parts[group.index].requires_grad_()
    whole = c.gather(mine, group, 0, sizes)
    assert torch.equal(whole, torch.cat(parts))
    summed = c.reduce_scatter(whole.detach(), group, 0, sizes)
    assert relative(summed.double(), parts[group.index].detach().double() * group.size) < 1e-2
    c.all_sum(whole.sum(), group).backward()
    assert mine.grad is not None and mine.grad.dtype == dtype
    return [whole.dtype, summed.dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_precision_stays_itself(dtype: torch.dtype, ranks: Callable[..., list]) -> None:
    for seen in ranks(3, check_dtypes, dtype):
        assert seen == [dtype, dtype]


def check_bytes(mesh: Mesh) -> dict[str, int]:
    group: Group = mesh.seq
    x = rows(group.index, 4, 3)
    group.traffic.clear()
    c.all_gather(x, group, 0, [4] * group.size)
    c.reduce_scatter(x.repeat(group.size, 1), group, 0, [4] * group.size)
    return dict(group.traffic)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gather_and_scatter_move_the_bytes_of_the_formula(world: int, ranks: Callable[..., list]) -> None:
    for sent in ranks(world, check_bytes):
        assert sent == {"gather": (world - 1) * 96, "scatter": (world - 1) * 96}


def test_a_gradient_of_another_shape_is_refused() -> None:
    """Autograd would sum it to fit, silently."""
    group, wrong = Group("seq"), torch.ones(2, 4, 3)
    plan = remaps.plan_remap([torch.arange(4)], [torch.arange(4)], 0)
    inputs = torch.ones(2, 4, requires_grad=True)
    outputs = {
        "gather": c.gather(inputs, group, 1, [4]),
        "sum": c.all_sum(inputs, group),
        "all_to_all": c.all_to_all(inputs, group, [2], [2]),
        "window": window(inputs, group, HaloPlan.of(group, 1, {0: (0, 4)}, {0: (0, 3)})),
        "remap": remaps.remap(inputs, group, 1, plan),
    }
    for output in outputs.values():
        node = output.grad_fn
        assert node is not None
        with pytest.raises(AssertionError):
            type(node)._forward_cls.backward(node, wrong)  # type: ignore[attr-defined]
