"""What a run leaves open is chosen as the planner plans it: group size, batch, how attention crosses ranks."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from seqpar.cluster.devices import Device, Link, device_here
from seqpar.parallel.launcher import Launcher
from seqpar.planner import chooser, needs
from seqpar.planner.fit import plans
from seqpar.planner.needs import RunToPlan, plan_complete_config
from seqpar.planner.needs import plan as plan_of
from seqpar.planner.step_counter import count_step, untimed
from seqpar.settings.config import Config
from seqpar.settings.parallel_settings import AUTO
from seqpar.settings.presets import PRESETS
from tests.planner.test_plan import GCD, PAPER, SMALL, doctors
from tests.support.training_runs import tiny_data, trained

CORES = replace(device_here("cpu"), cores=4)
COUNTED = functools.cache(count_step)


@pytest.fixture(autouse=True)
def shared_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts each step once for all tests here: nothing is timed when settings are chosen."""
    monkeypatch.setattr(needs, "count_step", lambda setup: COUNTED(replace(setup, clock=untimed)))


def here(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "device_here", lambda device_flag: device)


def auto(
    config: Config, launcher: Launcher, gib: float, monkeypatch: pytest.MonkeyPatch, device: Device = CORES
) -> Config:
    here(replace(device, memory=gib * 2**30, reserved_bytes=0.0, group_bytes=0.0), monkeypatch)
    chosen, why = chooser.choose_group_and_batch(replace(config, seqpar=AUTO), launcher, 2, 3)
    reasons = why["seqpar_choice"]
    assert f"--seqpar {chosen.seqpar} is the smallest that fits" in reasons[0] and len(reasons) >= 2
    return chosen


def test_auto_takes_the_smallest_group_that_the_ranks_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL, tile=(64, 64, 64), mode="halo", embed_dim=96)
    six = Launcher("test", 0, 6)
    assert auto(config, six, 8.0, monkeypatch).seqpar == 1
    monkeypatch.setattr(chooser.os, "cpu_count", lambda: 4)
    whole = replace(device_here("cpu"), reserved_bytes=0.0, group_bytes=0.0, cores=4)
    totals = [p.total for p in plans(RunToPlan(config, whole, 2, 3, timed=False), (1, 2, 3))]
    assert totals[0] > totals[1] > totals[2]
    chosen = auto(config, six, 6 * 1.01 * totals[1] / 2**30, monkeypatch)
    assert chosen.seqpar == 2 and chosen.attention == "auto"
    with pytest.raises(ValueError, match="--seqpar auto: nothing fits"):
        auto(config, six, 0.1, monkeypatch)


@pytest.mark.parametrize(("world", "nodes", "sizes"), [(3, 1, (1, 3)), (12, 2, (2, 3, 6, 12))])
def test_auto_takes_every_size_that_shares_the_nodes_that_are_there(
    world: int, nodes: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, launcher = (
        replace(SMALL, tile=(48, 48, 48), mode="halo", embed_dim=96),
        Launcher("t", 0, world, num_nodes=nodes),
    )
    run = RunToPlan(
        config, replace(GCD, reserved_bytes=0.0, group_bytes=0.0, node=world // nodes), 2, 3, ranks=world, timed=False
    )
    totals = [p.total for p in plans(run, sizes)]
    assert totals == sorted(totals, reverse=True) and totals[-1] > 0
    for size, need in zip(sizes, totals):
        assert auto(config, launcher, 1.001 * need / 2**30, monkeypatch, GCD).seqpar == size


def test_on_the_cpu_there_are_as_many_ranks_as_cores_whatever_gpus_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEQPAR_PARENT", raising=False)
    monkeypatch.setattr(chooser.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(chooser.torch.cuda, "device_count", lambda: 5)
    monkeypatch.setattr(chooser.os, "cpu_count", lambda: 3)
    sizes = (list(chooser._sizes(replace(SMALL, device=name), Launcher("alone"))) for name in ("cpu", "auto"))
    assert tuple(map(len, sizes)) == (3, 5)


def test_ranks_of_two_nodes_reach_each_other_by_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    here(GCD, monkeypatch)
    far, near = (chooser.device_of(PAPER, Launcher("test", 0, 8, num_nodes=n)).link(8) for n in (2, 1))
    assert far == GCD.far and near == GCD.links[8]


def test_the_batch_is_what_the_memory_holds_and_the_total_is_that_batchs(monkeypatch: pytest.MonkeyPatch) -> None:
    paper, alone = replace(PRESETS["paper"](), depth=2), Launcher("test")
    here(GCD, monkeypatch)
    whole, why = chooser.choose_group_and_batch(paper, alone, 2, 3)
    assert whole.batch == 32 and "and fits: " in why["batch_choice"][0]
    for mode, world in (("gather", 1), ("swap", 4)):
        small = replace(GCD, memory=4 * 2**30, node=world)
        here(small, monkeypatch)
        chosen, why = chooser.choose_group_and_batch(
            replace(paper, mode=mode, seqpar=world), Launcher("test", 0, world), 2, 3
        )
        tiles = chosen.batch
        runs = [RunToPlan(replace(chosen, batch=n), small, 2, 3, timed=False) for n in (tiles, tiles + world)]
        real, more = (plan_complete_config(run, world) for run in runs)
        assert 1 < tiles < 32 and tiles % world == 0 and real.fits and not more.fits
        assert why["batch_choice"][0].endswith(f": {real.total / 2**30:.2f} GiB of 4.00 a rank")
    here(replace(GCD, memory=2**30), monkeypatch)
    none, why = chooser.choose_group_and_batch(paper, alone, 2, 3)
    assert none.batch == 1 and "may not fit" in why["batch_choice"][0]


def test_training_attends_as_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """By batch, the numbers' size, links, and what memory the plan leaves."""
    launcher, config = Launcher("test", 0, 4), replace(PAPER, depth=3, seqpar=4, mode="halo", heads=4, embed_dim=256)
    slow, quick = (replace(GCD, links={8: link}) for link in (Link(1e7, 1e-4), Link(1e15, 0.0)))
    strategies = set()
    for device, open_config in (
        (GCD, config),
        (slow, replace(config, keep_kv=True)),
        (quick, replace(config, heads_per_chunk=1, batch=2, precision="bf16")),
        (replace(GCD, memory=2**30), config),
    ):
        here(device, monkeypatch)
        name, *why = chooser.choose_attention(open_config, launcher, 4, 4)
        p = plan_of(RunToPlan(open_config, replace(device, node=4), ranks=4, timed=False), 4)
        assert (name, tuple(why)) == (p.config.attention, p.attention_why) and why[0].startswith(name)
        assert "the fastest strategy that fits into" in why[0] or "MiB are missing" in why[0]
        strategies.add(name)
    assert len(strategies) > 2, strategies
    assert chooser.choose_attention(replace(config, attention="gather-x"), launcher, 4, 4) == ()
    assert chooser.choose_attention(replace(config, seqpar=1), launcher, 4, 4) == ()


def test_attention_is_chosen_by_measured_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here(GCD, monkeypatch)
    config, launcher = replace(PAPER, depth=2, seqpar=4, mode="halo", keep_kv=True), Launcher("test", 0, 4)
    slow, quick = (
        chooser.choose_attention(replace(config, measured=str(doctors(tmp_path, rate))), launcher, 4, 4)[0]
        for rate in (1e6, 1e15)
    )
    assert slow != quick


def test_a_run_that_goes_on_keeps_its_strategy_on_as_many_ranks() -> None:
    launcher, config = Launcher("test", 0, 4), replace(SMALL, seqpar=4)
    before = {"seqpar": 4, "strategy": "ulysses"}
    assert chooser.choose_attention(config, launcher, 2, 3, before) == ("ulysses", "ulysses, as the run began")
    for now in (replace(config, keep_kv=True), replace(config, seqpar=2)):
        assert "as the run began" not in chooser.choose_attention(now, launcher, 2, 3, before)[1]


def test_train_chooses_says_and_records(tmp_path: Path) -> None:
    run = trained(1, [*tiny_data(tmp_path), "--seqpar", "auto"], tmp_path / "run")
    assert "--seqpar 1 is the smallest that fits this CPU" in run.said()
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["config"]["seqpar"] == 1 and "GiB" in record["layout"]["seqpar_choice"][0]
    assert record["layout"]["strategy"] == "gather-kv"
