"""Every strategy is torch's attention of the whole sequence, and sends and holds what the formulas say."""

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.attention.cost_model import Layer, bytes_sent
from seqpar.attention.self_attention import ParallelAttention
from seqpar.attention.strategies import AttentionOptions, check_strategy
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Group, Mesh
from seqpar.vit.encoder import SeqParViT
from seqpar.vit.tokens import RotaryPositions
from tests.support.marks import long_case
from tests.support.ranks import relative, run_ranks, summed


@dataclass(frozen=True)
class Case:
    name: str
    tokens: int
    heads: int = 3
    batch: int = 2
    rotates: bool = False
    keep: bool = False
    per_chunk: int | None = None
    dtype: torch.dtype = torch.float64
    bound: float = 1e-12
    head_dim: int = 4


@dataclass(frozen=True)
class Found:
    """Bytes that a rank sent, forward and backward, and held between."""

    forward: int
    backward: int
    held: int


def module(case: Case, group: Group | None = None) -> ParallelAttention:
    torch.manual_seed(0)
    strategy = check_strategy(case.name, group.size if group else 1, case.heads, case.keep)
    net = ParallelAttention(
        case.heads * case.head_dim,
        case.heads,
        group=group,
        strategy=strategy,
        keep_kv=case.keep,
        heads_per_chunk=case.per_chunk,
    )
    with torch.no_grad():
        for bias in (net.q_bias, net.v_bias):
            assert bias is not None
            bias.normal_()
    return net.to(case.dtype)


def tensors(case: Case) -> tuple[Tensor, Tensor]:
    toss = torch.Generator().manual_seed(1)
    shape = case.batch, case.tokens, case.heads * case.head_dim
    x, weight = (torch.randn(shape, generator=toss, dtype=torch.float64).to(case.dtype) for _ in range(2))
    return x, weight


@cache
def torchs_own(case: Case) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns output, input gradient and parameter gradients of the same weights, in one process, by torch alone."""
    net, (x, weight), layout = module(case), tensors(case), Layout((case.tokens,), (1,))
    x.requires_grad_()
    q, k, v = (F.linear(x, w) for w in net.qkv.weight.chunk(3))
    q, v = q + net.q_bias, v + net.v_bias
    q, k, v = (t.unflatten(2, (case.heads, -1)).transpose(1, 2) for t in (q, k, v))
    if case.rotates:
        at = layout.coordinates(0)[:, 0].double()
        bands = case.head_dim // 2
        angle = at[:, None] * 10000.0 ** (-torch.arange(bands, dtype=torch.float64) / bands)
        spin = torch.polar(torch.ones_like(angle), angle)  # complex numbers, unlike ours
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.double().unflatten(-1, (-1, 2))) * spin).flatten(-2).to(t.dtype)
            for t in (q, k)
        )
    out = net.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    (out * weight).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad, {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def check(mesh: Mesh, case: Case) -> Found:
    group = mesh.seq
    layout = Layout((case.tokens,), (1,), group.size, "ordered")
    sizes, me = layout.counts, group.index
    want_out, want_dx, want_grads = torchs_own(case)
    net, (whole_x, whole_weight) = module(case, group), tensors(case)
    x = whole_x.split(sizes, 1)[me].contiguous().requires_grad_()
    rotate = RotaryPositions(layout, me, case.head_dim, x) if case.rotates else None
    storages: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    group.traffic.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = net(x, sizes, rotate)
    forward = group.traffic["attention"]
    (out * whole_weight.split(sizes, 1)[me]).sum().backward()
    backward = group.traffic["attention"] - forward
    assert x.grad is not None
    assert relative(out, want_out.split(sizes, 1)[me]) < case.bound, case
    assert relative(x.grad, want_dx.split(sizes, 1)[me]) < case.bound, case
    own = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    grads = dict(zip(own, summed(list(own.values()), group)))
    assert grads.keys() == want_grads.keys() and len(grads) == 5
    for name, want in want_grads.items():
        assert relative(grads[name], want) < case.bound, (case, name)
    return Found(forward, backward, sum(storages.values()))


def check_all(mesh: Mesh, cases: list[Case]) -> list[Found]:
    return [check(mesh, case) for case in cases]


def names(world: int) -> list[str]:
    return ["gather-kv", "gather-x", "ulysses"] + [f"hybrid:{u}" for u in range(2, world) if world % u == 0]


def any_size(world: int) -> list[Case]:
    """Tokens and heads that divide and that do not, heads fewer than ranks, all at once and in uneven chunks."""
    cases = []
    for name in names(world):
        sizes = (2 * world, world, None), (2 * world + 1, 5, 1), (3 * world - 1, 3, 2), (2 * world + 1, 3, None)
        sizes = sizes if world <= 4 else sizes[1:3]  # what divides, in one piece, is among ``dividing``
        cases += [Case(name, n, heads, per_chunk=chunk) for n, heads, chunk in sizes]
        chunks = (None, 2) if world <= 4 else (2,)
        cases += [Case(name, 2 * world + 1, 5, rotates=True, per_chunk=chunk) for chunk in chunks]
        if name != "ulysses":
            cases += [Case(name, 3 * world - 1, 5, rotates=True, keep=True, per_chunk=2)]
    if world == 8:
        cases += [Case(name, 37, 12, rotates=True) for name in ("hybrid", "hybrid:2", "hybrid:4")]
    return cases


def dividing(world: int) -> list[Case]:
    runs = [Case(name, 4 * world, 24, keep=keep) for name in names(world) for keep in (False, True)]
    return [case for case in runs if not (case.keep and case.name == "ulysses")]


def long(world: int) -> list[Case]:
    """Enough tokens for what is held to be told from what is not."""
    if world not in (2, 4):
        return []
    flags = itertools.product(names(world), (False, True), (False, True))
    runs = [Case(n, 64 * world, 4, rotates=turn, keep=keep, per_chunk=1, head_dim=8) for n, turn, keep in flags]
    return [case for case in runs if not (case.keep and case.name == "ulysses")]


def imprecise(world: int) -> list[Case]:
    if world != 4:
        return []
    precisions = ((torch.float32, 1e-5), (torch.bfloat16, 5e-2))
    return [
        Case(name, 17, 5, rotates=rotates, per_chunk=2, dtype=dtype, bound=bound)
        for name, rotates, (dtype, bound) in itertools.product(names(4), (False, True), precisions)
    ]


Results = list[dict[Case, Found]]  # of each rank


@cache
def results(world: int) -> Results:
    """Returns what all cases came to; starting ranks takes longer than a case, so that they run in one start."""
    runs = [*any_size(world), *dividing(world), *long(world), *imprecise(world)]
    for case in runs:  # once, before the ranks are forked: they inherit what is cached
        torchs_own(case)
    return [dict(zip(runs, counts)) for counts in run_ranks(world, check_all, runs, timeout=240)]


def expected(case: Case, world: int) -> list[tuple[int, int]]:
    layout = Layout((case.tokens,), (1,), world, "ordered")
    strategy = check_strategy(case.name, world, case.heads, case.keep)
    layer = Layer(layout.counts, case.heads, case.heads * case.head_dim, case.batch, case.dtype.itemsize)
    amounts = [bytes_sent(strategy, layer, rank, case.keep) for rank in range(world)]
    return [(layer.element * a.forward, layer.element * a.backward) for a in amounts]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, long_case(8)])
def test_every_strategy_is_torchs_attention_and_sends_the_exact_count(world: int) -> None:
    for rank, counts in enumerate(results(world)):
        for case in any_size(world) + imprecise(world):
            assert (counts[case].forward, counts[case].backward) == expected(case, world)[rank], case


def formula(name: str, world: int, keep: bool) -> tuple[float, float]:
    """Returns what a rank sends in units of u = tokens x embedding / ranks, from the literature."""
    kind, _, number = name.partition(":")
    if kind == "gather-x":
        return world - 1, (1 if keep else 2) * (world - 1)
    inner = {"gather-kv": 1, "ulysses": world}.get(kind) or int(number)
    swap, across = 4 * (inner - 1) / inner, 2 * (world // inner - 1)
    return swap + across, swap + (1 if keep else 2) * across


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_bytes_are_the_formulas_where_all_divides(world: int) -> None:
    u = 2 * 4 * 24 * 4 * 8  # batch, tokens of a rank, heads, width of a head, bytes
    for counts in results(world):
        for case in dividing(world):
            forward, backward = formula(case.name, world, case.keep)
            assert (counts[case].forward, counts[case].backward) == (round(forward * u), round(backward * u)), case


def test_hybrid_of_itself_takes_the_largest_divisor_of_the_heads() -> None:
    assert str(check_strategy("hybrid", 8, 12, False)) == "hybrid:4"
    assert str(check_strategy("hybrid", 12, 10, False)) == "hybrid:2"
    for counts in results(8):
        own, _, four = (counts[Case(name, 37, 12, rotates=True)] for name in ("hybrid", "hybrid:2", "hybrid:4"))
        assert own == four


@pytest.mark.parametrize("world", [2, 4])
def test_nothing_whole_is_held_unless_kept(world: int) -> None:
    """u for each of: input, q, k, v, output; gather-x holds two of them, an exchange holds the output twice."""
    local = {"gather-kv": 5, "gather-x": 2, "ulysses": 6, "hybrid:2": 6}
    u, log_sums = 2 * 64 * 32 * 8, 2 * 64 * 4 * 8
    for case in long(world):
        saved = results(world)[0][case].held
        if not case.keep:
            assert saved <= local[case.name] * u + log_sums, (case, saved / u)
        else:
            assert saved > (local[case.name] + 0.9) * u + log_sums, case  # the control: keeping is not free


def test_one_rank_has_nothing_to_keep() -> None:
    case = Case("gather-x", 64, 4, per_chunk=1, head_dim=8)
    (plain, kept) = run_ranks(1, check_all, [case, replace(case, keep=True)])[0]
    assert plain.held == kept.held


def encoder_gaps(mesh: Mesh) -> list[tuple[str, float]]:
    """Returns how far each strategy's encoder is from one process: output, input and parameter gradients."""
    tile, rank, group = (7, 4, 4), mesh.seq.index, mesh.seq
    toss = torch.Generator().manual_seed(2)
    image, weight = (torch.randn(shape, generator=toss, dtype=torch.float64) for shape in ((2, 1, *tile), (2, 112, 24)))
    plain: list[tuple[str | AttentionOptions, str]] = [(name, "none") for name in ["auto", *names(mesh.seq.size)]]
    crossings = [
        *plain,
        ("gather-x", "full"),
        (AttentionOptions("hybrid:2", heads_per_chunk=1), "attention"),
        (AttentionOptions("gather-kv", keep_kv=True, heads_per_chunk=2), "none"),
    ]

    def step(at: int, group: Group | None = None, **crossing: Any) -> tuple[SeqParViT, list[Tensor], list[Tensor]]:
        """Returns the encoder after a step, its output and input gradient there, and its parameter gradients."""
        torch.manual_seed(0)
        sizes = dict(embed_dim=24, depth=2, num_heads=3, positions="learned+rope", split="ordered")
        net = SeqParViT(1, tile, 1, group=group, **sizes, **crossing).double()  # type: ignore[arg-type]
        part = net.layout.cut(image, at).requires_grad_()
        out = net(part)
        (out * weight[:, net.layout.token_ids(at)]).sum().backward()
        assert part.grad is not None
        return net, [out, part.grad], [p.grad for p in net.parameters() if p.grad is not None]

    _, whole, want = step(0)
    ids = Layout(tile, (1, 1, 1), group.size, "ordered").token_ids(rank)
    gaps_by_name = []
    for attention, recompute in crossings:
        net, parts, grads = step(rank, group, attention=attention, recompute=recompute)
        assert net.attention_choice[0].startswith(str(net.attention)) and len(grads) == len(want) > 20
        pairs = [*zip(parts, (x[:, ids] for x in whole)), *zip(summed(grads, group), want)]
        gaps_by_name.append((str(attention), max(relative(a, b) for a, b in pairs)))
    return gaps_by_name


def test_the_encoder_is_one_process_by_every_strategy() -> None:
    for gaps_by_name in run_ranks(4, encoder_gaps, timeout=240):
        for name, gap in gaps_by_name:
            assert gap < 1e-12, name


def test_the_encoder_refuses_what_it_cannot_attend_by() -> None:
    with pytest.raises(ValueError, match="attention='ring': choose auto"):
        SeqParViT(1, 8, 4, embed_dim=24, depth=1, num_heads=3, attention="ring")
    with pytest.raises(ValueError, match="heads_per_chunk=4: choose 1 to 3"):
        SeqParViT(1, 8, 4, embed_dim=24, depth=1, num_heads=3, attention=AttentionOptions(heads_per_chunk=4))
