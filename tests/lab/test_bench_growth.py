"""The bench of growth: what it counts is what formulas say, and what limits a step is named."""

import math
from dataclasses import replace

import pytest
import torch

from lab.benches import growth, rank
from lab.benches.attention import HEADS, WIDTH
from lab.benches.series import Progress, run_series
from seqpar.cluster.devices import GIB, Link
from seqpar.parallel.mesh import Mesh
from tests.support.ranks import run_ranks

OWN = 64  # tokens of a rank


def counted(mesh: Mesh, ranks: int) -> dict[str, growth.Run]:
    """Returns what each strategy and peer comes to; this process ends with the test, and its group with it."""
    return {run["case"]: run for run in growth.count_attention(ranks, ranks * OWN)}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_work_and_bytes_of_each_strategy_are_the_formulas(ranks: int) -> None:
    """Heads that do not divide by 8 ranks leave some with 2 of 12: that is a third more work for these."""
    (runs,) = run_ranks(1, counted, ranks)
    assert list(runs) == growth.strategies(ranks) and runs["gather-kv"]["limit"] == ""
    u, whole, states = OWN * WIDTH * 4, OWN * ranks, OWN * HEADS * 4  # bytes of a rank's tokens; tokens; a sum a head
    most_heads = math.ceil(HEADS / ranks)
    share = most_heads * ranks / HEADS  # of an even one
    others, half = ranks - 1, ranks // 2
    ring = (6 * ranks - 4) * u  # keys and values twice to the others, their gradients all the way round
    ulysses = 3 * (HEADS - most_heads) * u / HEADS + others * most_heads * u / HEADS
    ulysses += (HEADS - most_heads) * u / HEADS + 3 * others * most_heads * u / HEADS
    expected = {  # bytes sent, and the share of even work
        "gather-kv": (6 * others * u, 1.0),
        "gather-x, projected": (3 * others * u, 1.0),
        "ulysses": (ulysses, share),
        "hybrid:2": (4 * u + 6 * (half - 1) * u, 1.0),
        "DeepSpeed Ulysses": (ulysses, share),
        "torch ring, all-gather": (ring, 1.0),
        "torch ring, all-to-all": (ring, 1.0),
    }
    for name, run in runs.items():
        sent, work = expected[name]
        assert run["sent"] == pytest.approx(sent, abs=1), name
        assert run["attention"] == pytest.approx(14 * OWN * whole * WIDTH * work), name
        widths = 2 if name.startswith("gather-x") else 4 * work  # tokens or q, k and v, and the output
        assert run["held"] == pytest.approx(widths * u + states * work), name
    gathered = 2 * ranks * u  # keys and values of all ranks
    # all of these heads are one chunk: gathered, their gradients, and as much again in transit
    assert runs["gather-kv"]["peak"] == (7 * u + 4 * gathered if ranks > 1 else 11 * u) + states
    assert runs["gather-kv"]["operations"] == runs["gather-kv"]["attention"]
    if ranks > 1:
        projected = runs["gather-x, projected"]
        kept_whole = 2 * WIDTH**2 * 2 * (OWN + 2 * (whole - OWN) + OWN)  # keys and values forward, and again backward
        assert projected["operations"] - projected["attention"] > kept_whole
    if "torch ring, all-gather" in runs:
        assert runs["torch ring, all-gather"]["peak"] > gathered + 4 * u


def test_an_unknown_collective_is_not_taken_for_one_that_sends_nothing() -> None:
    sent = growth.SentBytes(1, 4)
    assert sent._of("send", [[torch.zeros(3), torch.zeros(2)]]) == 20
    assert sent._of("all_gather_into_tensor", [torch.zeros(3)]) == 36
    assert sent._of("all_to_all_single", [torch.zeros(4), None, []]) == 12
    assert sent._of("all_to_all_single", [torch.zeros(4), None, [0, 1, 3, 0]]) == 12
    assert sent._of("alltoall_base_", [None, torch.zeros(8), None, None, []]) == 24
    with pytest.raises(NotImplementedError, match="broadcast_"):
        sent._of("broadcast_", [[torch.zeros(3)]])


def test_an_encoders_attention_grows_with_the_square_of_its_tokens_and_its_memory_with_them() -> None:
    net = replace(growth.NET, embed_dim=24, heads=3)
    short, long = (growth.count_encoder(replace(net, tile=(4 * side, 16, 16))) for side in (4, 16))
    for run, tokens in ((short, 64), (long, 256)):
        assert run["attention"] == 14 * tokens**2 * 24 * net.depth
        linear = 3 * 2 * 12 * tokens * 24**2 * net.depth + 2 * 2 * 64 * tokens * 24
        assert run["operations"] - run["attention"] == linear
        again = 2 * tokens**2 * 24 * net.depth  # backward computes the scores a second time
        assert run["operations"] == rank.operations(tokens, tokens, net) + again
        assert run["peak"] > run["held"]
    assert long["attention"] == 16 * short["attention"]
    assert long["held"] == 4 * short["held"] and long["peak"] == pytest.approx(4 * short["peak"], rel=0.03)


STEP = growth.Case("both", 8, 512, "h100", (64, 64, 64))


def test_what_limits_a_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(case: growth.Case = STEP, **changes: object) -> str:
        monkeypatch.setitem(growth.DEVICES, "h100", replace(usual, **changes))
        limited: str = growth.plan_step(case)["limit"]
        return limited

    usual = growth.DEVICES["h100"]
    assert limit(memory=GIB) == "memory: 4 of 1 GiB"
    assert limit(links={8: Link(1e6, 1e-5)}) == "links, 100% of the time"
    rates = {"launch_seconds": 0.0, "bandwidth": 1e18, "links": {8: Link(1e18, 0.0)}, "far": Link(1e18, 0.0)}
    shares = {**usual.shares, growth.ATTENTION: 1e-6}
    assert limit(**rates, shares=shares) == "attention's products, 100% of the time"
    assert limit(**rates, shares={**usual.shares, growth.CONVOLUTION: 1e-6}) == "convolutions, 100% of the time"
    uneven = replace(STEP, attention="ulysses")
    assert limit(uneven, **rates, shares=shares) == "heads: 12 for 8 ranks; attention's products, 100% of the time"
    assert limit(uneven, links={8: Link(1e6, 1e-5)}) == "links, 100% of the time"
    even = limit(replace(uneven, ranks=4), **rates, shares=shares)
    assert even == "attention's products, 100% of the time"


def test_a_planned_steps_work_is_the_formula() -> None:
    """One rank of 8 has an eighth of attention's work; of Ulysses, two of twelve heads, a third more."""
    config = growth.STEP
    whole = 14 * STEP.tokens**2 * config.embed_dim * config.depth
    even, uneven = (growth.plan_step(replace(STEP, attention=name)) for name in ("gather-kv", "ulysses"))
    assert even["attention"] == pytest.approx(whole / 8)
    assert uneven["attention"] == pytest.approx(whole / 6)


def test_rows_say_what_was_chosen_and_have_no_seconds_where_no_core_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in growth.cases_of(True) if case.grows != "tokens"]
    monkeypatch.setattr(growth, "cases_of", lambda quick: cases)
    monkeypatch.setattr(growth, "usable_cores", lambda: 0)
    (series,) = growth.series(quick=True)
    rows: list[dict] = []
    assert run_series(series, 1, rows.append, Progress())
    assert [row["ranks"] for row in rows] == [case.ranks for case in cases] and len(rows) > 10
    ours = [row for row in rows if row["grows"] == "ranks"]
    assert [row["of"] for row in ours][:2] == ["any strategy", "gather-kv"]
    assert {row["s"] for row in ours} == {""} and ours[0]["TFLOP"] == ours[0]["of attention"]
    alone, shared = [row for row in rows if row["grows"] == "both"]
    assert alone["of"] == "step of 128 voxels a side, h100"
    assert shared["of"].startswith("step of 256 voxels a side, h100, auto: ") and shared["s"] > alone["s"] > 0
