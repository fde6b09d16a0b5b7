"""The benches of memory, of the encoder and of a rank's own work run, and their rows say what they measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench
from lab.benches import attention, encoder, memory, memory_by_ranks, plan, rank
from lab.benches.series import Progress, run_series
from seqpar.cluster.devices import gpu_by_name
from seqpar.models.build import build_network
from seqpar.parallel.mesh import Group, Mesh
from seqpar.parallel.rendezvous import fake_group
from seqpar.planner.feasibility import check_feasible
from tests.support.ranks import run_ranks

TINY = replace(memory.SMALL, tile=(16, 16, 16), embed_dim=24, depth=2, heads=2, decoder_width=4)


def step(mesh: Mesh, changes: dict) -> dict[str, float]:
    return memory.step(replace(TINY, **changes), mesh, 1)


def test_options_hold_less_and_shards_a_share() -> None:
    """Of each token a block holds 13 widths by gather-x, one where all is recomputed; a shard is half the weights."""
    changes = {"all": {}, "full": {"grad_checkpoint": "full"}, "shards": {"shard_weights": True, "precision": "bf16"}}
    rows = {}
    for name, more in changes.items():
        runs = run_ranks(2, step, {"seqpar": 2, **more})[:1]
        rows[name] = memory.row(memory.Case(name, TINY, 2), runs, runs)
    width = 4 * 24 * 64 / 2 / 2**20  # of a rank's tokens
    fewer = rows["all"]["held MiB a rank"] - rows["full"]["held MiB a rank"]
    assert fewer / TINY.depth == pytest.approx(12 * width, rel=0.04)
    share = (
        rows["shards"]["weights, gradients, states MiB a rank"] / rows["all"]["weights, gradients, states MiB a rank"]
    )
    assert 0.5 <= share < 0.52
    parameters = sum(p.numel() for p in build_network(TINY, 1, 2, Group("seq"), device="meta").parameters())
    all_of_them = 4 * 4 * parameters / 2**20  # weights, gradients, and Adam's two moments
    assert rows["all"]["weights, gradients, states MiB a rank"] == pytest.approx(all_of_them, rel=1e-3)
    assert all(row["peak MiB, all ranks"] > 0 and row["s a step"] > 0 and row["tokens"] == 64 for row in rows.values())
    assert rows["all"]["peak ratio"] == rows["all"]["time ratio"] == 1
    assert all(list(row) == list(rows["all"]) for row in rows.values()), "one table has one set of columns"


def both_steps(mesh: Mesh) -> tuple[float, float]:
    """Returns what is held for backward of a part, alike for weights as they are and in shards."""
    config = replace(TINY, seqpar=2, attention="gather-kv")
    return tuple(memory.step(replace(config, shard_weights=s), mesh, 1)["held"] for s in (False, True))  # type: ignore[return-value]


def test_gathered_weights_do_not_count_as_held() -> None:
    for plain, sharded in run_ranks(2, both_steps):
        assert plain == sharded > 0


def attention_times(mesh: Mesh, auto: str) -> list[dict]:
    attention.fastest_strategy = lambda *how: (auto, ())  # this process ends with the test
    attention.attention_peers = lambda *how: {}
    return list(attention.measure_times(mesh, 2, 64))


@pytest.mark.parametrize("auto", ["gather-x", "ulysses"])
def test_attention_is_compared_with_what_begins_and_ends_with_the_same(auto: str) -> None:
    runs: dict[str, list] = {}
    for line in run_ranks(2, attention_times, auto)[0]:
        runs.setdefault(line["case"], []).append(line)
    every = [attention.time_row(2, 64, case, runs) for case in runs]
    assert {row["turns"] for row in every} == {2} and all(list(row) == list(every[0]) for row in every)
    rows = {row["strategy"]: row["ratio"] for row in every}
    assert rows[f"{auto}, projected (auto)"].startswith("1.000 ") and "gather-kv, projected" in rows
    assert all(ratio for name, ratio in rows.items() if "projected" in name)
    assert bool(rows["gather-kv"]) == ("ulysses (auto)" in rows) == (auto == "ulysses")


def test_the_plan_is_benched_on_nets_by_which_it_was_not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in plan.EVERY:
        check_feasible(config)
    assert len(plan.OTHERS) >= 4 and not set(plan.OTHERS) & set(plan.CASES)
    run = {"planned_s": 1.1, "planned_bytes": 2e6, "processor": 1.0, "clock": 2.0, "alive": 1e6}
    row = plan._row(plan.OTHERS[0], [run, {**run, "processor": 3.0}])
    assert (row["error"], row["error to the clock"], row["calibrated"]) == ("+10%", "-45%", "on others")
    assert (row["planned MB"], row["alive MB"]) == (2, 1)
    four = next(config for config in plan.OTHERS if config.seqpar == 4)
    monkeypatch.setattr(plan, "usable_cores", lambda: 2)
    assert plan._row(four, [run])["error"] == "-45%", "two ranks a core: each works in half of the seconds"
    rows = [plan._row(config, [run]) for config in (plan.CASES[0], plan.OTHERS[0], plan.OTHERS[0])]
    rows[2]["error"] = "-30%"
    assert plan.spread_of_errors(rows) == (
        "Errors on others, 1 rank, 2 nets: mean 20 %, worst 30 %; to the clock mean 45 %, worst 45 %. "
        "all, 1 rank, 3 nets: mean 17 %, worst 30 %; to the clock mean 45 %, worst 45 %."
    )
    for quick, configs in ((True, plan.OTHERS), (False, plan.EVERY)):
        (series,) = plan.series(quick)
        assert len(set(series.cases)) == len(configs), "each net has a name of its own"


def test_large_rows_can_run() -> None:
    for config in (*(case.config for case in memory.LARGE), memory_by_ranks.VOLUME):
        check_feasible(config)
    assert 60 * 60 * 39 == 140400
    with pytest.raises(ValueError, match="--large is only for memory, pretrain"):
        bench.act(["step", "--large"])


@pytest.mark.started
def test_a_case_is_measured_in_new_processes_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    rows: list[dict] = []
    (series,) = memory.large_series([memory.Case("alone", TINY, 1, 1)])
    assert run_series(series, 1, rows.append, Progress())
    (row,) = rows
    assert row["held MiB a rank"] == run_ranks(1, step, {})[0]["held"] / 2**20 and row["tokens"] == 64


def masked_step(mesh: Mesh) -> dict[str, float]:
    return memory.step(replace(TINY, task="pretrain", tile=(32, 32, 32), seqpar=mesh.seq.size), mesh, 1)


def test_a_step_of_pretraining_is_measured_beside_what_one_process_holds() -> None:
    """A rank's share is at most a half and 0.05; what is counted for one process is what that holds."""
    shares = []
    for ranks in (1, 2):
        config = replace(TINY, task="pretrain", tile=(32, 32, 32), seqpar=ranks)
        runs = run_ranks(ranks, masked_step)[:1]
        row = memory_by_ranks.masked_row(memory.Case("tiny", config, ranks, 1), runs, runs)
        assert (row["tokens"], row["visible"]) == (512, 128) and row["s a step"] > 0
        shares.append(row["share of one process"])
    assert shares[0] == pytest.approx(1, abs=0.01) and 0.4 < shares[1] <= 0.55


STAGES = replace(memory_by_ranks.STAGES, tile=(32, 32, 32), embed_dim=12, heads=1, decoder_width=4)


def stages_step(mesh: Mesh, window: int) -> dict[str, float]:
    return memory.step(replace(STAGES, window=window, seqpar=mesh.seq.size), mesh, 1)


@pytest.mark.parametrize("window", [0, 4])
def test_a_step_of_stages_is_measured_beside_what_one_process_holds(window: int) -> None:
    """A rank's share, encoder and decoder, is at most a half and 0.05; the control: each rank decodes the whole."""
    shares = []
    for ranks in (1, 2):
        config = replace(STAGES, window=window, seqpar=ranks)
        runs = run_ranks(ranks, stages_step, window)[:1]
        row = memory_by_ranks.stages_row(memory.Case("tiny", config, ranks), runs, runs)
        assert row["tokens"] == 512 and ("in windows of 4" in row["net"]) == bool(window)
        shares.append(row["share of one process"])
    assert shares[0] == pytest.approx(1, abs=0.05) and 0.4 < shares[1] <= 0.55
    (whole, _) = run_ranks(2, gathered_step)
    assert whole["held"] > 0.6 * memory_by_ranks.held_by_one(STAGES)


def gathered_step(mesh: Mesh) -> dict[str, float]:
    return memory.step(replace(STAGES, mode="gather", seqpar=2), mesh, 1)


def encoders(mesh: Mesh) -> dict[str, float]:
    return encoder._worker("ours", encoder.Size(16, 8, 24, 1, 2), mesh)


def test_an_encoder_is_measured_on_its_ranks() -> None:
    """Voxels, 16 widths of each token in the block, 13 by gather-x, and two behind it; half of all that on two."""
    (one,), (first, _) = run_ranks(1, encoders), run_ranks(2, encoders)
    voxels, width = 4 * 16**3, 4 * 24 * 2**3
    assert one["saved"] == pytest.approx(voxels + 18 * width, rel=0.02)
    assert first["saved"] == pytest.approx((voxels + 15 * width) / 2, rel=0.02)
    assert min(one["seconds"], first["seconds"]) > 0


def a_rank_of(mesh: Mesh, ranks: int) -> dict:
    work = replace(rank.SMALL, tile=(16, 16, 16), embed_dim=24, heads=2, ranks=ranks, steps=1)
    return rank.measure(work, fake_group(ranks), torch.device("cpu"))


def test_a_ranks_own_work_is_measured_without_the_others() -> None:
    runs = {ranks: run_ranks(1, a_rank_of, ranks)[0] for ranks in (1, 4)}
    assert runs[4]["attention"] in ("gather-x", "gather-kv", "ulysses", "hybrid:2")
    assert all(run["s a step"] > 0 and run["MFU"] == run["peak GiB"] == "" for run in runs.values())
    json.dumps(runs)
    (series,) = rank.series(quick=True)
    full = {**dict.fromkeys(rank.MEASURED, ""), "s a step": rank.FULL}
    four = [{**runs[4], "s a step": seconds} for seconds in (3.0, 10.0, 2.0)]
    rows = [series.row(case, dict(zip(series.cases, [[full], four]))) for case in series.cases]
    assert [row["s a step"] for row in rows] == [rank.FULL, 3.0] and [row["rank of"] for row in rows] == [1, 4]
    assert list(rows[0]) == list(rows[1])


def test_operations_are_the_formula_and_a_ranks_share() -> None:
    work = rank.Work()
    whole = rank.operations(32768, 32768, work)
    by_hand = 12 * (24 * 32768 * 768**2 + 4 * 32768**2 * 768) * 3 + 2 * 2 * 32768 * 64 * 768
    assert whole == by_hand
    assert rank.operations(8192, 32768, work) == whole / 4


def test_dense_rates_are_known_by_the_devices_name() -> None:
    names = "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "AMD Instinct MI250X", "Tesla T4"
    assert [d and d.peak["bf16"] for d in map(gpu_by_name, names)] == [989e12, 312e12, 191.5e12, None]


def test_long_sequences_take_fewer_turns() -> None:
    assert [attention.fewer_turns(60, tokens) for tokens in (1024, 2048, 8192)] == [60, 15, 5]
    assert attention.fewer_turns(1, 8192) == 1
