"""The planner looks for memory by itself: in ways that keep the numbers, of few sizes, and says each row at once."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from seqpar.cli import plan
from seqpar.cluster.devices import DEVICES
from seqpar.losses import voxels
from seqpar.planner import memory_saving, needs, printer, step_counter
from seqpar.planner.fit import plans
from seqpar.planner.needs import Plan, RunToPlan
from seqpar.planner.step_counter import StepSetup, count_step, count_whole_step
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.settings.presets import PRESETS

GCD = DEVICES["mi250x"]
PAPER = replace(PRESETS["paper"](), batch=1, depth=1, tile=(64, 64, 64), patch=4)
# gathered, each rank would hold a decoder of the whole tile
LARGE = ["--tile", "96", "--patch", "4", "--depth", "1", "--embed-dim", "96", "--heads", "4", "--decoder-width", "256"]


def pretended(totals: dict[str, float], memory: float, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Lets plans need ``totals`` bytes on one rank, by mode, shared by the ranks; returns the list of those counted."""
    counted = list[Config]()

    def planned(run: RunToPlan, ranks: int) -> Plan:
        counted.append(run.config)
        config = run.config
        need = totals.get(config.mode, 0.0) / config.seqpar / (1 + 9 * (config.grad_checkpoint == "full"))
        parts = dict.fromkeys(("weights", "gradients", "optimizer", "input", "decoder", "transient", "apart"), 0.0)
        parts["tokens"] = need
        return Plan(config, replace(run.device, memory=memory), ranks, parts, {"seq": 0.0, "world": 0.0})

    for module in (needs, memory_saving):
        monkeypatch.setattr(module, "plan_complete_config", planned)
    return counted


def test_ways_keep_what_the_command_line_names_and_add_up() -> None:
    every = [way for way, _ in memory_saving.memory_savings(PAPER, ())]
    assert every[0] == {"mode": "auto"} and "shard_weights" not in every[-2] and every[-1]["shard_weights"]
    assert all(one.items() - {("grad_checkpoint", "attention")} <= more.items() for one, more in zip(every, every[1:]))
    for named in ("mode", "mlp_chunks", "grad_checkpoint", "shard_weights"):
        assert not [way for way, _ in memory_saving.memory_savings(PAPER, {named}) if named in way]
    for mode in ("nogather", "halo", "auto"):  # the first computes something else, the others need no more
        assert not [way for way, _ in memory_saving.memory_savings(replace(PAPER, mode=mode), ()) if "mode" in way]
    full = replace(PAPER, grad_checkpoint="full", mlp_chunks=9, shard_weights=True, mode="halo")
    assert list(memory_saving.memory_savings(full, ())) == []
    *_, (way, _) = memory_saving.memory_savings(replace(PAPER, network="nnunet-plain"), ())
    assert way == {"mode": "auto", "grad_checkpoint": "full", "shard_weights": True}, "a U-Net has no attention, no MLP"


def test_the_smallest_group_that_fits_is_found_among_few(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64)
    for smallest in (1, 4, 64, 128):
        counted = pretended({"halo": 64.0}, 64.0 / smallest, monkeypatch)
        rows = list(memory_saving.search_with_savings(RunToPlan(replace(PAPER, mode="halo"), GCD), sizes))
        fitting = [p.config.seqpar for p in rows if p.fits]
        assert (min(fitting) if fitting else 128) == smallest and len(counted) == len(rows) <= 4, smallest
    counted = pretended({"halo": 64.0}, 1.0, monkeypatch)
    assert not list(memory_saving.search_with_savings(RunToPlan(PAPER, GCD, ranks=3), (2, 4))) and not counted, (
        "what cannot be is not counted"
    )


def test_ranks_that_share_a_machine_are_searched_by_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = pretended({"halo": 64.0}, 1.0, monkeypatch)
    list(memory_saving.search_with_savings(RunToPlan(replace(PAPER, mode="halo"), replace(GCD, cores=8)), (1, 2, 4)))
    assert [config.seqpar for config in counted] == [1]


def test_a_plan_takes_the_first_way_in_which_something_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pretended({"gather": 64e9 * 12, "auto": 64e9 * 10}, 1.5e9, monkeypatch)
    monkeypatch.setattr(
        printer, "recommendation", lambda run, best, rows, preset: [f"{best.config.mode} {best.config.seqpar}"]
    )
    sizes = ["--patch", "4", "--tile", "64", "--depth", "1", "--device", "a100"]
    assert plan.act(sizes) == 0
    text = capsys.readouterr().out
    asked, first, *_, last = text.split("\n\n--")
    assert "as asked, --seqpar 64 needs 11.2 GiB on a rank of A100, which has 1.4; most is for" in asked
    assert "! exceeds the 1.4 GiB of the device" in asked and asked.count("!\n") == 0
    assert first.startswith("mode auto  (adds: ") and "--mlp-chunks 8 --grad-checkpoint full  (adds:" in last
    assert "taken: --mode auto --mlp-chunks 8 --grad-checkpoint full, which does not change the result" in last
    assert text.strip().endswith("auto 48")
    with pytest.raises(ValueError, match="nothing fits: --seqpar 64 needs .*: try --precision bf16, a larger --patch"):
        plan.act([*sizes, "--grad-checkpoint", "attention"])
    with pytest.raises(ValueError, match="nothing fits: --seqpar 1 "):
        plan.act([*sizes, "--seqpar", "1"])


def test_rows_are_there_as_soon_as_they_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    real, seen = printer.plans, list[str]()

    def watched(*of: Any) -> Iterator[Plan]:
        for p in real(*of):
            seen.append(capsys.readouterr().out)
            yield p

    monkeypatch.setattr(printer, "plans", watched)
    assert plan.act(["--tile", "32", "--patch", "8", "--depth", "2", "--ranks", "4", "--device", "a100"]) == 0
    last = capsys.readouterr().out
    assert [text.split()[0] for text in seen] == ["plan:", "1", "2"] and last.split()[0] == "4"


def test_what_fits_only_in_boxes_is_planned_so(capsys: pytest.CaptureFixture) -> None:
    """With real counts: 3.4 GiB where every rank decodes the whole tile, 3 where it decodes its box."""
    device = ["--channels", "1", "--device", "a100", "--memory", "3.4", "--seqpar", "8", "--attention", "gather-x"]
    assert plan.act([*LARGE, *device]) == 0
    text = capsys.readouterr().out
    assert "A100: 3.2 GiB, 19.5 TFLOP/s (the maker's figures; --memory 3.4)" in text and "80 GB" not in text
    assert (
        "as asked, --seqpar 8 needs 3.4 GiB" in text and "taken: --mode auto, which does not change the result" in text
    )
    _, config, _ = parse(text.strip().splitlines()[-1].split()[4:], "debug")
    assert (config.mode, config.mlp_chunks, config.seqpar) == ("auto", 1, 8)


def test_a_loss_in_many_runs_is_counted_by_three_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a loss stands for all that are like it: operations, seconds and the worst moment are those of all."""
    config = Config(tile=(32, 16, 16), patch=4, depth=1, embed_dim=24, heads=3, decoder_width=8, batch=2)
    setup = StepSetup(config, clock=lambda operation: operation.size + 0.5)
    count = count_whole_step.__wrapped__
    at_once = count(setup)
    monkeypatch.setattr(voxels, "GPU_RUN", 3000)
    few = count(setup)
    monkeypatch.setattr(voxels, "representative_pieces", lambda pieces, x: iter(pieces))
    every = count(setup)
    assert few == every and few != at_once


def test_a_step_is_counted_once_for_all_devices_that_are_as_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(tile=(16, 16, 16), patch=4, depth=2, embed_dim=24, heads=3, decoder_width=8, batch=1, seed=5)
    counted = list[StepSetup]()
    real = step_counter._count_whole_step
    monkeypatch.setattr(step_counter, "_count_whole_step", lambda setup: counted.append(setup) or real(setup))
    quick = replace(GCD, launch_seconds=1e-6)
    times = []
    for device, number in ((GCD, 2), (replace(GCD, memory=4e9), 2), (quick, 4)):
        rows = list(plans(RunToPlan(config, device), (1, 2)))
        times.append([p.seconds["computing"] for p in rows])
        assert len(counted) == number, "one process alone is what the first size counts"
    assert times[0] == times[1] and times[2] < times[0]


def test_a_large_batch_is_extrapolated_from_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As decoded alike: 40 tiles against 40 that were counted, in boxes and in whole samples."""
    config = Config(tile=(16, 16, 16), patch=8, depth=1, embed_dim=12, heads=2, decoder_width=4, mode="auto", seqpar=2)
    for batch, few in ((40, [16, 32]), (41, [15, 31])):
        setup, counted = StepSetup(replace(config, batch=batch)), list[int]()
        whole = count_whole_step(setup)
        with monkeypatch.context() as patched:
            watched = lambda setup: counted.append(setup.config.batch) or count_whole_step(setup)  # noqa: E731
            patched.setattr(step_counter, "count_whole_step", watched)
            short = count_step(setup)
        assert counted == few
        for name in ("tokens", "decoder", "input", "weights", "optimizer", "transient"):
            assert getattr(short, name) == pytest.approx(getattr(whole, name), rel=0.02), (batch, name)
        assert short.sent.total() == pytest.approx(whole.sent.total(), rel=1e-9)
