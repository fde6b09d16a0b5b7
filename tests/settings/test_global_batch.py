"""The tiles of a step over all ranks: said before a run, and held while ``--seqpar`` grows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from seqpar.cli import plan, train
from seqpar.cluster.devices import DEVICES
from seqpar.parallel.launcher import Launcher
from seqpar.planner.batch_size import describe_global_batch, hold_global_batch
from seqpar.planner.fit import plans
from seqpar.planner.needs import RunToPlan
from seqpar.runs.run_folder import describe_run
from seqpar.settings.config import Config
from seqpar.settings.presets import debug, laptop
from seqpar.training.run_request import read_request
from seqpar.training.setup import first_lines
from tests.support.folders import write_json
from tests.support.training_runs import losses, trained

SIZES = "--preset debug --tile 16 --patch 8 --depth 1 --embed-dim 12 --heads 2 --decoder-width 4"
SMALL = Config(tile=(16, 16, 16), patch=4, depth=2, embed_dim=24, heads=3, decoder_width=8)
GCD = DEVICES["mi250x"]


def request(line: str, world: int = 1) -> Config:
    return read_request([*SIZES.split(), *line.split()], Launcher("test", 0, world)).config


@pytest.mark.parametrize(
    ("line", "world", "expected"),
    [
        ("--seqpar 1 --batch 4", 8, (4, 1)),  # the batch fits as it is
        ("--seqpar 2 --batch 4", 8, (4, 2)),
        ("--seqpar 8 --batch 4", 8, (4, 8)),
        ("--seqpar 8", 8, (2, 16)),  # the preset's batch is 2
        ("--seqpar 4 --accumulate 2", 8, (8, 2)),
        ("--seqpar 4 --mode swap --batch 8", 8, (8, 2)),
    ],
)
def test_a_sweep_over_seqpar_holds_it_by_accumulation(line: str, world: int, expected: tuple[int, int]) -> None:
    config = request(f"{line} --global-batch 32", world)
    assert (config.batch, config.accumulate) == expected
    assert world // config.seqpar * config.batch * config.accumulate == 32
    free = request(line, world)
    tiles = world // free.seqpar * free.batch * free.accumulate
    assert (tiles == 32) == (expected == (4, 1)), "the control: it is not held by itself"


def test_a_sweep_begins_with_flags_that_do_nothing_on_one_rank_and_says_so() -> None:
    line = "--split ordered --attention gather-kv --keep-kv --mode nogather --heads-per-chunk 1 --batch 2"
    said = {}
    for world in (1, 2):
        asked = read_request([*SIZES.split(), *line.split(), "--seqpar", str(world)], Launcher("test", 0, world))
        said[world] = first_lines(asked, Launcher("test", 0, world)).splitlines()
    flags = "--split ordered, --mode nogather, --attention gather-kv, --keep-kv, --heads-per-chunk 1"
    idle = f"{flags}: no effect with --seqpar 1"
    assert said[1][-1] == idle and not any("no effect" in text for text in said[2])
    assert read_request([*SIZES.split(), "--lr", "1"], Launcher("alone")).idle == "", "presets are not told"


def test_what_does_not_make_it_is_refused_with_what_does() -> None:
    with pytest.raises(
        ValueError, match="32: 3 sequence groups .*: use --global-batch 30 or .* 33, or one of these numbers of .*: 1"
    ):
        request("--global-batch 32", 3)
    with pytest.raises(
        ValueError, match="--batch 3: --global-batch 32 is 8 tiles a step for each of 4 groups: use --b"
    ):
        request("--global-batch 32 --batch 3", 4)
    with pytest.raises(ValueError, match=r"--global-batch -1: it must be in \[0"):
        request("--global-batch -1")


def test_tiles_that_share_their_dice_stay_together() -> None:
    config = replace(laptop(), global_batch=8)
    assert config.batch_dice and (hold_global_batch(config, 1).batch, hold_global_batch(config, 2).batch) == (8, 4)
    assert hold_global_batch(config, 2, {"batch": 2}).accumulate == 2, "unless it is asked for"


def test_tiles_that_batch_norm_sees_stay_together() -> None:
    for network, expected in (("unet-hou", (8, 1)), ("nnunet-plain", (2, 4))):
        config = replace(debug(), network=network, batch=2, batch_dice=False, global_batch=8)
        held = hold_global_batch(config, 1)
        assert (held.batch, held.accumulate) == expected
        said = describe_global_batch(config, held, 1)
        assert said.endswith("by the batch, because batch norm keeps tiles together") == (expected == (8, 1))


def test_the_first_lines_say_what_makes_it() -> None:
    def said(line: str) -> str:
        here = Launcher("test", 0, 2)
        return first_lines(read_request([*SIZES.split(), *line.split()], here), here).splitlines()[0]

    assert said("--seqpar 2 --global-batch 8") == "--global-batch 8: 1 group x batch 2 x accumulate 4, by accumulation"
    assert said("--global-batch 4") == "--global-batch 4: 2 groups x batch 2 x accumulate 1, as without this flag"
    assert said("--global-batch 8 --batch-dice") == (
        "--global-batch 8: 2 groups x batch 4 x accumulate 1, by the batch, because --batch-dice keeps tiles together"
    )


def test_tiles_that_swap_cannot_share_are_refused_without_a_batch_that_it_refuses_too() -> None:
    with pytest.raises(
        ValueError, match="is 6 tiles a step for each of 1 group, which must divide by --seqpar 4: .* 4"
    ):
        request("--seqpar 4 --mode swap --batch 4 --global-batch 6", 4)
    assert request("--seqpar 4 --mode halo --global-batch 6", 4).accumulate == 3, "the control"


def test_accumulation_by_both_of_its_names_is_refused() -> None:
    for line in ("--accumulate 4 --micro-batches 2", "--micro-batches=4 --accumulate 4"):
        with pytest.raises(ValueError, match="--accumulate and --micro-batches are two names of one setting"):
            request(line, 2)
    assert request("--micro-batches 4", 2).accumulate == request("--accumulate 4", 2).accumulate == 4


def test_a_run_that_goes_on_keeps_its_own(tmp_path: Path) -> None:
    out = ["--resume", "--out", str(tmp_path)]
    write_json(tmp_path / "config.json", describe_run(replace(debug(), batch=2), "debug", {}, {"data": 4}))
    for line in ([], ["--global-batch", "8"]):
        config = read_request([*out, *line], Launcher("alone")).config
        assert config.batch * config.accumulate == 8
    with pytest.raises(ValueError, match="--global-batch 4: the run in .* has 8 tiles a step"):
        read_request([*out, "--global-batch", "4"], Launcher("alone"))


def test_the_plan_says_it_and_holds_it_either_way(capsys: pytest.CaptureFixture) -> None:
    def said(*more: str) -> str:
        assert plan.act(["--tile", "16", "--depth", "1", "--patch", "8", "--device", "a100", *more]) == 0
        return " ".join(capsys.readouterr().out.split())

    free = said("--ranks", "2", "--batch", "2")
    for size, groups in ((1, "2 groups"), (2, "1 group")):
        assert f"seqpar {size}: global batch {4 // size} tiles = {groups} x batch 2 x accumulate 1" in free
    assert "--global-batch N fixes it" in free
    printed = said("--ranks", "2", "--batch", "2", "--global-batch", "4")
    assert "seqpar 2: global batch 4 tiles = 1 group x batch 2 x accumulate 2" in printed and "fixes it" not in printed
    wider = said("--groups", "3", "--batch", "2", "--seqpar", "4")
    assert "seqpar 4: global batch 6 tiles = 3 groups x batch 2 x accumulate 1" in wider
    assert "srun -N 2 -n 12 python" in wider
    with pytest.raises(ValueError, match="--groups 0: it must be in"):
        said("--groups", "0")


def test_more_groups_are_more_ranks_and_accumulation_takes_its_time() -> None:
    config = replace(SMALL, batch=2)
    one, two = plans(RunToPlan(config, GCD, groups=4), (1, 2))
    assert (one.ranks, two.ranks) == (4, 8)
    (twice,) = plans(RunToPlan(replace(config, global_batch=16), GCD, groups=4), (1,))
    assert twice.config.accumulate == 2
    assert twice.seconds["computing"] == pytest.approx(2 * one.seconds["computing"])


def test_a_dry_run_says_it(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert train.act([*SIZES.split(), "--seqpar", "2", "--global-batch", "6", "--dry-run"]) == 0
    assert "steps     50; global batch 6 tiles = 1 group x batch 2 x accumulate 3" in capsys.readouterr().out


def test_runs_of_a_sweep_take_the_same_steps(tmp_path: Path) -> None:
    from tests.support.training_runs import tiny_data

    flags = [*tiny_data(tmp_path), "--precision", "fp64", "--global-batch", "4", "--epochs", "1"]
    for world, size in ((1, 1), (2, 2), (2, 1)):
        trained(world, [*flags, "--seqpar", str(size)], tmp_path / f"{world} {size}")
    first, *others = (losses(tmp_path / name) for name in ("1 1", "2 2", "2 1"))
    assert all(other == pytest.approx(first, rel=1e-12) for other in others)
    kept = json.loads((tmp_path / "2 1" / "config.json").read_text())["config"]
    assert (kept["global_batch"], kept["batch"], kept["accumulate"]) == (4, 2, 1)
