"""The library's own collectives, which GPUs take, bring what pairs of messages bring: on gloo, which has them too."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from seqpar.attention import head_exchange, partition
from seqpar.parallel import collectives as c
from seqpar.parallel import remaps
from seqpar.parallel.mesh import Group, Mesh
from tests.support.adjoint import rows


def by_library(x: Tensor, group: Group) -> bool:
    return group.size > 1 and group.places is None


def exchanged(mesh: Mesh) -> list[Tensor]:
    """Returns what rows, labels of two bytes, remapped rows and attention by exchanged heads become, and bytes sent."""
    group, dice, results = mesh.seq, random.Random(2), list[Tensor]()
    group.traffic.clear()
    for _ in range(4):
        counts = [[dice.randint(0, 4) for _ in range(group.size)] for _ in range(group.size)]
        send, receive = counts[group.index], [row[group.index] for row in counts]
        x = rows(group.index, sum(send), 3)
        results += [c.all_to_all(x, group, send, receive)]
        results += [c.exchange_rows((x * 100).to(torch.int16), group, send, receive)]
    ids = torch.randperm(17, generator=torch.Generator().manual_seed(3))
    sources, targets = ids.chunk(group.size), torch.arange(17).chunk(group.size)
    own = rows(5, 17, 2)[sources[group.index]]
    results.append(remaps.remap(own, group, 0, remaps.make_remap(sources, targets, group.index)))
    sizes = [len(part) for part in torch.arange(11).chunk(group.size)]
    for heads, per_chunk in ((5, None), (3, 1)):
        qkv = rows(group.index, 2, sizes[group.index], 3, heads, 4).requires_grad_()
        out = head_exchange.attend_by_head_exchange(qkv, group, sizes, group.size, per_chunk=per_chunk)
        (grad,) = torch.autograd.grad(out.square().sum(), qkv)
        results += [out.detach(), grad]
    return [*results, torch.tensor(sorted(group.traffic.values()))]


def check_both(mesh: Mesh) -> bool:
    want = exchanged(mesh)
    c.is_by_library = partition.is_by_library = by_library
    return all(torch.equal(mine, others) for mine, others in zip(exchanged(mesh), want, strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_the_librarys_all_to_all_brings_what_pairs_bring(world: int, ranks: Callable[..., list]) -> None:
    assert all(ranks(world, check_both))
