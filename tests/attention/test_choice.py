"""The cost model names the strategy that moves and holds least, and says why; what ranks cannot do is refused."""

from dataclasses import replace

import pytest

from seqpar.attention.cost_model import CPU, GPU, Layer, Machine, bytes_sent, cost, fastest_strategy
from seqpar.attention.strategies import Strategy, check_strategy, choose_heads_per_chunk

QUICK = Machine(bandwidth=1e9, latency=0.0, flops=1e18, overlaps=False)  # only bytes count


def layer(ranks: int, heads: int = 12, tokens: int = 32768) -> Layer:
    return Layer((tokens // ranks,) * ranks, heads, 768)


def chosen(ranks: int, heads: int = 12, keep: bool = False) -> str:
    return str(fastest_strategy(layer(ranks, heads), QUICK, keep)[0])


def test_where_only_bytes_count_the_fewest_win() -> None:
    assert chosen(2) == "gather-x"  # 3 u against 4 and 6
    assert chosen(3) == "ulysses" and chosen(3, keep=True) == "gather-x"  # 16/3 against 6, and against 4
    assert chosen(4) == "ulysses"  # 6 against 9
    assert chosen(4, keep=True) == "gather-x"  # 6 too, and it gathers what can be kept
    assert chosen(12) == "ulysses"
    assert chosen(1) == "gather-kv"


def test_ranks_that_the_heads_do_not_divide_by_do_not_idle() -> None:
    slow = replace(QUICK, bandwidth=1e12, flops=1e12)  # only work counts: 12 heads on 8 ranks would be 2 on some
    best, reasons = fastest_strategy(layer(8), slow)
    assert (
        str(best) != "ulysses"
        and cost(best, layer(8), slow).seconds < 0.8 * cost(Strategy("ulysses", 8), layer(8), slow).seconds
    )
    assert len(reasons) == 1 + 5 and str(best) in reasons[0] and any(line.startswith("hybrid:4: ") for line in reasons)


def test_across_nodes_heads_are_exchanged_inside_a_node() -> None:
    far = replace(QUICK, node=4, far_bandwidth=1e6, flops=1e13)
    assert chosen(16, heads=16) == "ulysses"
    twelve = fastest_strategy(layer(8, heads=12, tokens=8192), far)[0]
    assert twelve in (Strategy("hybrid", 4), Strategy("gather-x")) and twelve.inner <= 4


def test_the_memory_left_rules_out_what_is_larger() -> None:
    here = layer(4)
    costs = {name: cost(check_strategy(name, 4, 12, False), here, QUICK) for name in ("gather-x", "gather-kv")}
    needs = {name: c.memory(12) for name, c in costs.items()}
    assert needs["gather-x"] < needs["gather-kv"]  # it holds two of five
    assert costs["gather-x"].transient > costs["gather-kv"].transient
    one_layer = {name: c.saved + c.transient for name, c in costs.items()}
    assert one_layer["gather-kv"] < one_layer["gather-x"]
    best, reasons = fastest_strategy(here, QUICK, memory_left=one_layer["gather-kv"])
    assert str(best) == "gather-kv" and "the fastest strategy that fits into" in reasons[0]
    assert any(line.startswith("gather-x") and line.endswith("too large") for line in reasons)
    best, reasons = fastest_strategy(here, QUICK, memory_left=1.0)
    assert "the strategy that needs the least memory, but needs more than" in reasons[0]


def test_keeping_spares_bytes_and_costs_memory() -> None:
    for strategy in (Strategy("gather-kv"), Strategy("gather-x"), Strategy("hybrid", 2)):
        free, kept = (cost(strategy, layer(4), CPU, keep) for keep in (False, True))
        assert kept.forward == free.forward and kept.backward < free.backward and kept.saved > free.saved
    assert cost(Strategy("ulysses", 4), layer(4), CPU, True) == cost(Strategy("ulysses", 4), layer(4), CPU, False)


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_chosen_is_never_refused(keep: bool) -> None:
    for machine in (CPU, GPU, QUICK):
        for ranks in (1, 2, 3, 4, 6, 8, 12):
            for tokens in (216, 1728, 13824, 32768):
                for left in (None, 0.0):
                    best, _ = fastest_strategy(layer(ranks, tokens=tokens), machine, keep, left)
                    assert check_strategy(str(best), ranks, 12, keep) == best


def test_heads_that_go_together_by_wish_are_what_is_counted() -> None:
    few, many = (cost(Strategy("gather-kv"), replace(layer(4), per_chunk=n), GPU) for n in (1, 12))
    assert few.transient < many.transient and few.waiting != many.waiting
    assert cost(Strategy("ulysses", 4), replace(layer(4), per_chunk=9), GPU) == cost(
        Strategy("ulysses", 4), replace(layer(4), per_chunk=3), GPU
    )  # a rank has 3 heads


def test_messages_that_travel_under_attention_cost_less() -> None:
    together, apart = (cost(Strategy("gather-kv"), layer(4), replace(GPU, overlaps=o)) for o in (True, False))
    assert together.seconds < apart.seconds and together.forward == apart.forward


def test_all_that_is_sent_is_received() -> None:
    """What ranks send together is what the whole needs: each token's numbers go to the ranks that lack them."""
    uneven = Layer((5, 4, 4, 3), 6, 24, batch=2)
    whole = 2 * 16 * 24
    gathers = [bytes_sent(Strategy("gather-kv"), uneven, rank).forward for rank in range(4)]
    assert sum(gathers) == 2 * 3 * whole
    swaps = [bytes_sent(Strategy("ulysses", 4), uneven, rank) for rank in range(4)]
    assert sum(s.forward for s in swaps) == sum(s.backward for s in swaps)  # the adjoint moves the same


def test_chunks_are_few_where_tokens_are_few_and_even() -> None:
    assert choose_heads_per_chunk(12, 4 << 20, 2048, "cpu") == 1  # 8192 tokens in float32
    assert choose_heads_per_chunk(12, 2 << 20, 1024, "cpu") == 2
    assert choose_heads_per_chunk(12, 1 << 16, 256, "cpu") == 12
    assert choose_heads_per_chunk(12, 1 << 19, 256, "cpu") == 6  # not 8 and 4
    assert choose_heads_per_chunk(12, 4 << 20, 8192, "cuda") == 4  # a GPU wants more rows at a time
    assert choose_heads_per_chunk(1, 1, 1, "cuda") == 1


@pytest.mark.parametrize(
    "name, ranks, keep, message",
    [
        ("ring", 4, False, "attention='ring': choose auto, gather-kv, gather-x, ulysses, hybrid or hybrid:U"),
        ("ulysses:2", 4, False, "choose auto"),
        ("hybrid:x", 4, False, "choose auto"),
        ("hybrid:3", 8, False, "8 ranks allow hybrid:2, hybrid:4"),
        ("hybrid", 3, False, "3 ranks allow no hybrid: use auto"),
        ("ulysses", 4, True, "keep_kv=True has no effect with attention='ulysses'"),
    ],
)
def test_what_ranks_cannot_do_is_refused_with_what_they_can(name: str, ranks: int, keep: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_strategy(name, ranks, 12, keep)
