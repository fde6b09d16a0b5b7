"""Each collective passes the adjoint test <Ax, y> = <x, A'y> over random shapes, and moves what it should."""

import random
from collections.abc import Callable

import pytest
import torch

from seqpar.parallel import collectives as c
from seqpar.parallel import remaps
from seqpar.parallel.halo_exchange import HaloPlan, exchange_halos
from seqpar.parallel.mesh import Group, Mesh
from tests.support.adjoint import adjoint_gap, rows
from tests.support.pages import blocks, page
from tests.support.ranks import once_per_world, relative

WORLDS = [1, 2, 3, 4, 8]


def uneven(world: int, dice: random.Random) -> list[int]:
    return [dice.randint(0 if world > 1 else 1, 5) for _ in range(world)]


def gathers(mesh: Mesh) -> float:
    group, dice, gaps = mesh.seq, random.Random(1), [0.0]
    for _ in range(6):
        sizes, dim = uneven(group.size, dice), dice.randint(0, 2)
        sizes[0] += 1
        shapes = [[2, 3, 4] for _ in sizes]
        for shape, size in zip(shapes, sizes):
            shape[dim] = size
        parts = [rows(q, *shapes[q]) for q in range(group.size)]
        whole = c.gather(parts[group.index], group, dim, sizes)
        assert torch.equal(whole, torch.cat(parts, dim))
        gaps.append(adjoint_gap(mesh, parts[group.index], lambda x: c.gather(x, group, dim, sizes)))
        full = rows(group.index, *[2 if d != dim else sum(sizes) for d in range(3)])
        every = [rows(q, *full.shape) for q in range(group.size)]
        mine = c.reduce_scatter(full, group, dim, sizes)
        gaps.append(relative(mine, sum(every).split(sizes, dim)[group.index]))
    return max(gaps)


def equal_gradients(mesh: Mesh) -> tuple[float, int]:
    """Returns how far the shortcut is off, and the bytes that its backward sent."""
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


def sums(mesh: Mesh) -> float:
    group, gaps = mesh.seq, [0.0]
    for shape in ((), (3,), (2, 5)):
        x = rows(group.index, *shape)
        gaps.append(relative(c.all_sum(x, group), sum(rows(q, *shape) for q in range(group.size))))
        gaps.append(adjoint_gap(mesh, x, lambda x: c.all_sum(x, group)))
    return max(gaps)


def all_to_alls(mesh: Mesh) -> float:
    group, dice, gaps = mesh.seq, random.Random(2), [0.0]
    for even in [True, False] * 5:
        counts = [[2 if even else dice.randint(0, 4) for _ in range(group.size)] for _ in range(group.size)]
        send, receive = counts[group.index], [row[group.index] for row in counts]
        x = rows(group.index, sum(send), 3)
        pieces = [rows(q, sum(counts[q]), 3).split(counts[q])[group.index] for q in range(group.size)]
        assert torch.equal(c.all_to_all(x, group, send, receive), torch.cat(pieces))
        gaps.append(adjoint_gap(mesh, x, lambda x: c.all_to_all(x, group, send, receive)))
    return max(gaps)


def sent_bytes(mesh: Mesh) -> dict[str, int]:
    group = mesh.seq
    x = rows(group.index, 4, 3)
    group.traffic.clear()
    c.all_gather(x, group, 0, [4] * group.size)
    c.reduce_scatter(x.repeat(group.size, 1), group, 0, [4] * group.size)
    return dict(group.traffic)


shown = once_per_world(gathers, equal_gradients, sums, all_to_alls, sent_bytes)


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_is_the_adjoint_of_gather_for_any_sizes(world: int) -> None:
    assert all(rank["gathers"] < 1e-14 for rank in shown(world))


@pytest.mark.parametrize("world", WORLDS)
def test_where_all_gradients_are_equal_the_slice_times_the_size_is_the_adjoint(world: int) -> None:
    for rank in shown(world):
        gap, backward_bytes = rank["equal_gradients"]
        assert gap < 1e-14 and backward_bytes == 0


@pytest.mark.parametrize("world", WORLDS)
def test_sum_is_its_own_adjoint(world: int) -> None:
    assert all(rank["sums"] < 1e-14 for rank in shown(world))


@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all_reversed_is_its_adjoint(world: int) -> None:
    assert all(rank["all_to_alls"] < 1e-14 for rank in shown(world))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gather_and_scatter_move_the_bytes_of_the_formula(world: int) -> None:
    for rank in shown(world):
        assert rank["sent_bytes"] == {"gather": (world - 1) * 96, "scatter": (world - 1) * 96}


DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def types_of_results(mesh: Mesh) -> list[list[torch.dtype]]:
    group, seen = mesh.seq, []
    for dtype in DTYPES:
        sizes = [2 + q for q in range(group.size)]
        parts = [rows(q, sizes[q], 2, dtype=dtype) for q in range(group.size)]
        mine = parts[group.index].requires_grad_()
        whole = c.gather(mine, group, 0, sizes)
        assert torch.equal(whole, torch.cat(parts))
        summed = c.reduce_scatter(whole.detach(), group, 0, sizes)
        assert relative(summed.double(), parts[group.index].detach().double() * group.size) < 1e-2
        c.all_sum(whole.sum(), group).backward()
        assert mine.grad is not None
        seen.append([whole.dtype, summed.dtype, mine.grad.dtype])
    return seen


def test_every_precision_stays_itself(ranks: Callable[..., list]) -> None:
    for seen in ranks(3, types_of_results):
        assert seen == [[dtype] * 3 for dtype in DTYPES]


def a_collective_of_the_page(mesh: Mesh) -> float:
    names = {"torch": torch, "dist": torch.distributed}
    (code,) = blocks(page("explanation/gradient-rule"), "py")
    exec(code, names)
    x = rows(mesh.seq.index, 3, 4)
    return adjoint_gap(mesh, x, lambda x: names["SumOverRanks"].apply(x, mesh.seq.handle))  # type: ignore[attr-defined]


def test_the_collective_that_the_page_shows_has_its_true_adjoint(ranks: Callable[..., list]) -> None:
    assert max(ranks(3, a_collective_of_the_page)) < 1e-12


def test_a_gradient_of_another_shape_is_refused() -> None:
    """Autograd would sum it to fit, silently."""
    group, wrong = Group("seq"), torch.ones(2, 4, 3)
    plan = remaps.make_remap([torch.arange(4)], [torch.arange(4)], 0)
    inputs = torch.ones(2, 4, requires_grad=True)
    outputs = {
        "gather": c.gather(inputs, group, 1, [4]),
        "sum": c.all_sum(inputs, group),
        "all_to_all": c.all_to_all(inputs, group, [2], [2]),
        "window": exchange_halos(inputs, group, HaloPlan.of(group, 1, {0: (0, 4)}, {0: (0, 3)})),
        "remap": remaps.remap(inputs, group, 1, plan),
    }
    for output in outputs.values():
        node = output.grad_fn
        assert node is not None
        with pytest.raises(AssertionError):
            type(node)._forward_cls.backward(node, wrong)  # type: ignore[attr-defined]
