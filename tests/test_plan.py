"""The planner answers with a table and the line to run; what it says of the paper's setting, and of what fits."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from runs import tiny_data

from seqpar.environment import Start
from seqpar.launch import grouping, plan
from seqpar.launch.commandline import parse
from seqpar.launch.config import AUTO, PRESETS, Config
from seqpar.launch.devices import DEVICES, Link, device_here, measured
from seqpar.launch.plans import Run, most_tiles, plans, smallest

ROOT = Path(__file__).parent.parent
PAPER = replace(PRESETS["paper"](), patch=4, batch=1)  # "Long Sequence": ViT-B, tile 96, patch 4, batch 1, fp32
GCD = DEVICES["mi250x"]
SMALL = Config(tile=(16, 16, 16), patch=4, depth=2, embed_dim=24, heads=3, decoder_width=8, batch=1)


def test_the_paper_needs_four_ranks_where_attention_is_not_fused_and_one_here() -> None:
    """Its node has 8 ranks, so that groups are of 1, 2, 4 or 8. One layer's scores: 12 heads x 13,824² x 4 bytes."""
    found = list(plans(Run(PAPER, GCD, ranks=8), (1, 2, 4, 8)))
    assert [p.fits_unfused for p in found] == [False, False, True, True]
    assert [p.fits for p in found] == [True] * 4
    one_layer = 12 * 13824**2 * 4
    assert found[0].scores - 12 * one_layer <= 2 * one_layer and found[0].scores > 12 * one_layer > GCD.memory
    assert found[1].scores < 0.52 * found[0].scores


def test_the_command_is_taken_by_train_and_means_the_plan(capsys: pytest.CaptureFixture) -> None:
    given = ["--tile", "240", "240", "155", "--patch", "4", "--preset", "modern", "--seqpar", "4", "--no-qkv-bias"]
    assert plan.act([*given, "--device", "h200"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.split("\n\n")[1].splitlines())) <= 100, "the table is readable in 100 columns"
    assert "padded to 240x240x156" in said and "140400 tokens" in said
    line = shlex.split(said.strip().splitlines()[-1])
    assert line[:3] == ["torchrun", "--nproc-per-node", "4"] and line[3].endswith("launch/train.py")
    preset, config, _ = parse(line[4:], "debug")
    assert (preset, config.tile, config.seqpar, config.batch) == ("modern", (240, 240, 156), 4, 1)
    assert not config.qkv_bias and config.attention in ("ulysses", "gather-x", "gather-kv", "hybrid:2")


def test_sizes_that_cannot_be_say_why() -> None:
    config = replace(PAPER, tile=(32, 32, 32), patch=16)
    why = {p.config.seqpar: p.why for p in plans(Run(config, GCD, ranks=32))}
    assert "does not divide 32 ranks" in why[3] and "--seqpar 8" in why[16] and not why[8]
    assert "nodes of 8" in {p.config.seqpar: p.why for p in plans(Run(config, GCD), (6,))}[6]
    assert "--mode swap" in next(plans(Run(replace(config, mode="swap", batch=3), GCD), (2,))).why


def test_the_smallest_group_that_fits_is_chosen_and_less_memory_takes_more_ranks() -> None:
    run = Run(PAPER, GCD)
    found = list(plans(run, (1, 2, 4, 8)))
    needs = [p.total for p in found]
    assert needs == sorted(needs, reverse=True)
    for p in found:
        tight = [replace(each, device=replace(GCD, memory=p.total)) for each in found]
        assert smallest(tight).config.seqpar == p.config.seqpar
    assert smallest([replace(each, device=replace(GCD, memory=2.0**30)) for each in found]) is None


def test_the_most_tiles_fill_the_memory() -> None:
    run = Run(SMALL, replace(GCD, memory=1.2 * 2**30))
    (one,) = plans(run, (1,))
    tiles = most_tiles(run, one)
    fits, over = (next(plans(replace(run, config=replace(SMALL, batch=n)), (1,))) for n in (tiles, tiles + 1))
    assert tiles > 1 and fits.total <= 1.2 * 2**30 * 1.001 and over.total > 1.2 * 2**30 * 0.999


def test_nothing_that_fits_is_refused_with_what_takes_less() -> None:
    given = ["--tile", "512", "--patch", "8", "--seqpar", "64", "--mode", "halo", "--memory", "4", "--device", "a100"]
    with pytest.raises(ValueError, match="nothing fits: --seqpar 64 .* try --grad-checkpoint full"):
        plan.act(given)
        plan.act(
            ["--tile", "512", "--patch", "8", "--seqpar", "64", "--mode", "halo", "--memory", "4", "--device", "a100"]
        )
    with pytest.raises(ValueError, match="--classes 0: it must be at least 1"):
        plan.act(["--classes", "0"])
    with pytest.raises(ValueError, match="--measured nowhere is not what launch/doctor.py writes"):
        plan.act(["--measured", "nowhere", "--device", "a100"])


def test_what_is_kept_can_be_planned_by_every_size() -> None:
    found = plans(Run(replace(PAPER, keep_kv=True), GCD), (1, 2, 4, 8))
    assert [p.why for p in found] == [""] * 4


def test_every_flag_acts() -> None:
    """Memory, bytes or time change with what is asked for."""
    base = Run(replace(SMALL, seqpar=2), GCD, ranks=8)
    (first,) = plans(base, (2,))
    for other in (
        replace(base, channels=9),
        replace(base, outputs=9),
        replace(base, ranks=16),
        replace(base, device=DEVICES["h100"]),
        replace(base, config=replace(SMALL, accumulate=2)),
        replace(base, config=replace(SMALL, precision="bf16")),
        replace(base, config=replace(SMALL, decoder="unetr", mode="halo")),
        replace(base, config=replace(SMALL, attention="gather-kv", keep_kv=True)),
        replace(base, config=replace(SMALL, grad_checkpoint="attention")),
        replace(base, config=replace(SMALL, mlp_chunks=4)),
    ):
        (then,) = plans(other, (2,))
        assert (then.memory, then.sent, then.seconds) != (first.memory, first.sent, first.seconds), other
    whole = first.memory["gradients"]
    assert first.sent["world"] == 2 * 7 / 8 * whole
    (shared,) = plans(replace(base, config=replace(SMALL, shard_weights=True)), (2,))
    assert shared.sent["world"] == 3 * 7 / 8 * whole  # weights come twice, gradients go once
    assert shared.memory["optimiser"] == first.memory["optimiser"] // 8
    wide = replace(base, config=replace(SMALL, embed_dim=192, depth=12))
    first, shared = (
        next(plans(replace(wide, config=replace(wide.config, shard_weights=s)), (2,))) for s in (False, True)
    )
    assert shared.memory["weights"] < 0.6 * first.memory["weights"]


def test_messages_that_are_slower_take_longer_and_measured_figures_are_taken(tmp_path: Path) -> None:
    rates, file = {"float32": 10e12, "bfloat16": 80e12}, tmp_path / "doctor.json"
    group = {"size": 4, "all_gather": {"latency_s": 3e-4, "bytes_per_s": 5e9, "seconds": [[1, 1.0]]}}
    all_of_them = {**group, "size": 16, "all_reduce": {"latency_s": 1.5e-3, "bytes_per_s": 1e9}}
    found = {"device": "x", "world": 16, "nodes": 2, "memory_bytes": 40 * 2**30, "matmul_flops_per_s": rates}
    file.write_text(json.dumps({**found, "groups": {"seq": group, "data": group, "world": all_of_them}}))
    device = measured(str(file), GCD, "fp32")
    assert device.link(4) == Link(5e9, pytest.approx(1e-4)) and device.link(16) == Link(1e9, pytest.approx(1e-4))
    assert device.shares["matmul"] * device.peak["fp32"] == pytest.approx(10e12) and device.memory == 40 * 2**30
    given, slow = (next(plans(Run(PAPER, d, ranks=16), (4,))) for d in (GCD, device))
    assert slow.seconds["waiting"] > 2 * given.seconds["waiting"]
    assert slow.seconds["computing"] > 2 * given.seconds["computing"] and slow.memory == given.memory
    file.write_text(json.dumps({"device": "x", "matmul_flops_per_s": 5e12}))
    alone = measured(str(file), GCD, "fp32")
    assert alone.shares["matmul"] * GCD.peak["fp32"] == pytest.approx(5e12) and alone.links == GCD.links


def auto(config: Config, world: int, gib: float, monkeypatch: pytest.MonkeyPatch) -> Config:
    one = replace(device_here("cpu"), memory=gib * 2**30, taken=0.0, cores=4)
    monkeypatch.setattr(grouping, "device_here", lambda wish: one)
    chosen, why = grouping.choose_seqpar(replace(config, seqpar=AUTO), Start("test", 0, world), 2, 3)
    assert f"--seqpar {chosen.seqpar} is the smallest that fits" in why[0] and len(why) >= 2
    return chosen


def test_auto_takes_the_smallest_group_that_the_ranks_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL, tile=(64, 64, 64), mode="halo", embed_dim=96)
    assert auto(config, 6, 8.0, monkeypatch).seqpar == 1
    each = {p.config.seqpar: p.total for p in plans(Run(config, GCD, 2, 3), (1, 2, 3, 4))}
    monkeypatch.setattr(grouping.os, "cpu_count", lambda: 4)
    whole = device_here("cpu")
    needs = [next(plans(Run(config, replace(whole, taken=0.0, cores=4), 2, 3), (size,))).total for size in (1, 2, 3)]
    assert needs[0] > needs[1] > needs[2] and len(each) == 4
    chosen = auto(config, 6, 6 * 1.01 * needs[1] / 2**30, monkeypatch)
    assert chosen.seqpar == 2 and chosen.attention == "auto"
    with pytest.raises(ValueError, match="--seqpar auto: nothing fits"):
        auto(config, 6, 0.1, monkeypatch)


def test_train_chooses_says_and_records(tmp_path: Path) -> None:
    given = [*tiny_data(tmp_path), "--seqpar", "auto", "--out", tmp_path / "run"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, ROOT / "launch" / "train.py", *given]
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--seqpar 1 is the smallest that fits this CPU" in done.stdout
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["config"]["seqpar"] == 1 and "GiB" in record["layout"]["seqpar_choice"][0]


def test_the_script_plans_from_any_folder(tmp_path: Path) -> None:
    line = [sys.executable, ROOT / "launch" / "plan.py", "--tile", "128", "--patch", "4", "--preset", "paper"]
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "--seqpar" in done.stdout, done.stderr
