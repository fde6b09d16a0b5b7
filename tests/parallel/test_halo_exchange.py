"""Halos and remaps bring any interval and any row, are held against the whole tensor, and pass the adjoint test."""

import random
from collections.abc import Callable

import pytest
import torch

from seqpar.parallel import remaps
from seqpar.parallel.halo_exchange import HaloPlan, exchange_halos, start_halo_exchange
from seqpar.parallel.mesh import Mesh
from tests.support.adjoint import adjoint_gap, rows
from tests.support.ranks import once_per_world

WORLDS = [1, 2, 3, 4, 8]


def intervals(world: int, extent: int, dice: random.Random) -> dict[int, tuple[int, int]]:
    edges = [0, *sorted(dice.randint(0, extent) for _ in range(world - 1)), extent]
    return {q: (edges[q], edges[q + 1]) for q in range(world)}


def random_needs(world: int, extent: int, dice: random.Random) -> dict[int, tuple[int, int]]:
    return {q: tuple(sorted((dice.randint(0, extent), dice.randint(0, extent)))) for q in range(world)}  # type: ignore


def windows(mesh: Mesh) -> float:
    group, dice, gaps = mesh.seq, random.Random(3), [0.0]
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
        assert torch.equal(exchange_halos(x, group, plan), want)
        overlaps = [min(high, b) - max(low, a) for q, (a, b) in needed.items() if q != group.index]
        expected = sum(max(0, n) for n in overlaps) * whole.numel() // extent * 8
        assert group.traffic["window"] == expected
        gaps.append(adjoint_gap(mesh, x, lambda x: exchange_halos(x, group, plan)))
    return max(gaps)


def margins_around(mesh: Mesh) -> float:
    group = mesh.seq
    owned = {q: (2 * q, 2 * q + 2) for q in range(group.size)}
    needed = {q: (max(low - 1, 0), high) for q, (low, high) in owned.items()}
    low, high = needed[group.index]
    whole, mine = rows(5, 2 * group.size, 3), slice(*owned[group.index])
    margins = ((0, group.index, 1), (1, 0, 2))
    plan = HaloPlan.of(group, 0, owned, needed, margins)
    got = exchange_halos(whole[mine], group, plan, fill=7.0)
    assert torch.equal(got, torch.nn.functional.pad(whole[low:high], (0, 2, group.index, 1), value=7.0))
    return adjoint_gap(mesh, whole[mine], lambda x: exchange_halos(x, group, plan))  # linear without the fill


def remapped(mesh: Mesh) -> float:
    group, gaps = mesh.seq, [0.0]
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
        plan = remaps.make_remap(sources, targets, group.index)
        whole = rows(5, 2, 17, 3)
        x = whole[:, sources[group.index]]
        assert torch.equal(remaps.remap(x, group, 1, plan), whole[:, targets[group.index]])
        gaps.append(adjoint_gap(mesh, x, lambda x: remaps.remap(x, group, 1, plan)))
    same = remaps.make_remap(sources, sources, group.index)
    group.traffic.clear()
    assert torch.equal(remaps.remap(x, group, 1, same), x) and group.traffic["remap"] == 0
    return max(gaps)


shown = once_per_world(windows, margins_around, remapped)


@pytest.mark.parametrize("world", WORLDS)
def test_window_brings_any_interval_and_adds_back(world: int) -> None:
    assert all(rank["windows"] < 1e-14 for rank in shown(world))


@pytest.mark.parametrize("world", WORLDS)
def test_window_lays_margins_around_without_sending_them(world: int) -> None:
    assert all(rank["margins_around"] < 1e-14 for rank in shown(world))


@pytest.mark.parametrize("world", WORLDS)
def test_remap_moves_any_ownership_to_any_other(world: int) -> None:
    assert all(rank["remapped"] < 1e-14 for rank in shown(world))


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
    assert torch.equal(exchange_halos(whole[low:high], group, plan), whole[a:b])
    assert adjoint_gap(mesh, whole[low:high], lambda x: exchange_halos(x, group, plan)) < 1e-14


def test_window_along_one_direction_of_a_grid_of_boxes(ranks: Callable[..., list]) -> None:
    ranks(4, check_lines)


def test_remap_refuses_what_nobody_owns() -> None:
    with pytest.raises(ValueError, match="no rank owns"):
        remaps.make_remap([torch.tensor([0, 1])], [torch.tensor([0, 2])], 0)


def halos_seen_in_transit(mesh: Mesh) -> list[torch.Tensor]:
    """Returns windows of 2 x 2 boxes as work sees them that overlaps with their exchange, in memory that held NaN."""
    group, seen = mesh.seq, list[torch.Tensor]()
    plans = []
    for dim, stride in enumerate((2, 1)):  # rank 2 i + j holds box (i, j)
        first = group.index - group.index // stride % 2 * stride
        line = (first, first + stride)
        owned, needed = dict(zip(line, ((0, 2), (2, 4)))), dict(zip(line, ((0, 3), (1, 4))))
        plans.append(HaloPlan.of(group, dim, owned, needed, ((0, 1, 0),) if dim else ()))
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    start_halo_exchange(rows(5, 2, 2), group, plans, while_waiting=lambda window: seen.append(window.clone()))
    return seen


def test_halos_in_transit_are_never_what_the_memory_held_before(ranks: Callable[..., list]) -> None:
    for (window,) in ranks(4, halos_seen_in_transit):
        assert window.shape == (4, 3) and window.isfinite().all(), window
