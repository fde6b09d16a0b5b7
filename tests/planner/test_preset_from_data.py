"""--preset auto: what it takes for a data set and a device, as nnU-Net plans, and what is left as typed."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from seqpar.cli import plan
from seqpar.cli import plan as plan_act
from seqpar.cluster.devices import DEVICES, GIB, MIB, Device, device_here
from seqpar.data.preparation.fingerprint import Fingerprint
from seqpar.models.build import family_of
from seqpar.planner import preset_from_data
from seqpar.planner.needs import RunToPlan, plan_complete_config
from seqpar.planner.preset_from_data import plan_from_data
from seqpar.planner.tile_choice import better_tile, cube_in_mm, shape_at, smaller_tiles, suited_tile, target_spacing
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.tasks.training_data import tile_line
from seqpar.training.run_request import RunRequest
from tests.support.folders import nnunet

THIN = ((512, 512, 30),) * 20, ((0.8, 0.8, 5.0),) * 19 + ((0.7, 0.7, 3.0),)
BRAIN = ((240, 240, 155),) * 24, ((1.0, 1.0, 1.0),) * 24
CPU = replace(device_here("cpu"), memory=16 * GIB)
GPU = replace(DEVICES["a100"], memory=24 * GIB)


def fingerprint(shapes: Any, spacings: Any, channels: int = 1) -> Fingerprint:
    names = tuple(f"case {n}" for n in range(len(shapes)))
    channel_names = tuple(f"channel {n}" for n in range(channels))
    return Fingerprint("D", "nnU-Net raw", names, (), channel_names, ("background", "organ"), (), shapes, spacings)


def chosen(data: Any, device: Device, *flags: str, ranks: int = 1) -> tuple[Config, list[str]]:
    _, config, names = parse(["--preset", "auto", *flags], "laptop", on_gpu=not device.cores)
    config, why = plan_from_data(config, names, fingerprint(*data), device, ranks)
    return config, [line for lines in why.values() for line in lines]


def test_the_spacing_is_the_median_and_finer_where_voxels_are_far_longer() -> None:
    assert target_spacing(fingerprint(*BRAIN)) is None, "all alike: nothing is resampled"
    sizes = ((1.0, 1.0, 5.0),) * 5 + ((1.0, 1.0, 4.0),) * 3 + ((2.0, 2.0, 5.0),)
    few_slices, many_slices = ((300, 300, 40),) * 9, ((300, 300, 200),) * 9
    assert target_spacing(fingerprint(few_slices, sizes)) == (1.0, 1.0, 4.0), "the 10th percentile, as in nnU-Net"
    assert target_spacing(fingerprint(many_slices, sizes)) == (1.0, 1.0, 5.0)
    mixed = ((1.0, 1.0, 5.0),) * 5 + ((1.0, 1.0, 0.2),) * 4
    assert target_spacing(fingerprint(few_slices, mixed)) == (1.0, 1.0, 1.0), "not below the other directions"
    assert shape_at(fingerprint(few_slices, sizes), (2.0, 1.0, 4.0)) == (150, 300, 50)


def test_a_tile_is_as_long_in_mm_in_every_direction_as_the_cases_allow() -> None:
    assert cube_in_mm(64**3, (240, 240, 155), (1, 1, 1)) == pytest.approx([64, 64, 64])
    sides = cube_in_mm(64**3, (512, 512, 100), (1, 1, 4))
    assert sides[0] == pytest.approx(4 * sides[2]) and math.prod(sides) == pytest.approx(64**3)
    assert cube_in_mm(64**3, (512, 512, 16), (1, 1, 4)) == pytest.approx([128, 128, 16]), "the rest is spread"
    assert cube_in_mm(64**3, (20, 20, 20), (1, 1, 1)) == [20, 20, 20]
    assert suited_tile(64**3, (512, 512, 30), (0.8, 0.8, 5), (8, 8, 2)) == (120, 120, 18)
    tiles = list(smaller_tiles((96, 96, 32), (240, 240, 30), (8, 8, 8)))
    assert tiles[:2] == [(96, 96, 32), (96, 96, 24)] and tiles[-1] == (16, 16, 16)
    assert all(sum(a) - sum(b) == 8 for a, b in zip(tiles, tiles[1:]))


def test_a_tile_that_does_not_suit_is_told_apart() -> None:
    unit = (8, 8, 8)
    assert better_tile((96, 96, 96), (240, 240, 155), (1, 1, 1), unit) is None
    assert better_tile((96, 96, 96), (512, 512, 30), (0.8, 0.8, 5), unit) == (
        (176, 176, 32),
        "its third side, 96, is longer than theirs, 30",
    )
    tile, why = better_tile((96, 96, 96), (512, 512, 120), (0.8, 0.8, 5), unit) or ((), "")
    assert why == "it is 77 x 77 x 480 mm" and tile == (176, 176, 32)
    assert better_tile((176, 176, 32), (512, 512, 120), (0.8, 0.8, 5), unit) is None
    assert better_tile((96, 96, 24), (100, 100, 20), (1, 1, 1), unit) is None, "flat, as the cases are"


def line_of(request: RunRequest, data: Any) -> str:
    return tile_line(request.config, request.flags, request.preset, data)


def test_a_preset_s_tile_that_does_not_suit_is_said_with_the_better_one() -> None:
    """At the start, of the prepared cases; in a dry run, of the headers; not where it was typed or planned."""
    _, config, flags = parse([], "modern")
    request, headers = RunRequest(config, "modern", "", flags=frozenset(flags)), fingerprint(*THIN)
    line = line_of(request, headers)
    assert line.startswith(
        "note: --tile 96 96 96, the preset's, does not suit cases of 512x512x30 voxels of 0.8x0.8x5 mm"
    )
    assert line.endswith("as its third side, 96, is longer than theirs, 30: --tile 176 176 32 does, or --preset auto")
    assert line_of(request, fingerprint(*BRAIN)) == ""
    for changes in (
        {"flags": frozenset({"tile"})},
        {"flags": frozenset({"plans"})},
        {"preset": "auto"},
        {"preset": "nnunet"},
    ):
        assert line_of(replace(request, **changes), headers) == ""
    properties = SimpleNamespace(shape=(512, 512, 30), spacing=(0.8, 0.8, 5.0))
    cases = {"a": SimpleNamespace(properties=properties)}
    prepared: Any = SimpleNamespace(dataset=SimpleNamespace(cases=cases))
    assert line_of(request, prepared) == line


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow networks and small tiles, which are counted sooner."""
    monkeypatch.setattr(preset_from_data, "WIDTHS", ((96, 1, 4), (24, 1, 2)))
    monkeypatch.setattr(preset_from_data, "USUAL_VOXELS", 32**3)
    monkeypatch.setattr(preset_from_data, "MOST_VOXELS", 64**3)
    monkeypatch.setattr(preset_from_data, "CPU_VOXELS", 32**3)
    monkeypatch.setattr(preset_from_data, "MOST_BATCH", 4)


@pytest.mark.parametrize("network", [(), ("--network", "nnunet-plain", "--features", "4")], ids=["vit", "unet"])
def test_a_plan_fits_and_a_larger_tile_or_batch_would_not(network: tuple[str, ...], small, monkeypatch) -> None:
    if not network:
        monkeypatch.setattr(preset_from_data, "MOST_VOXELS", 128**3)  # an eighth of them with a patch of 8 8 1
    device = replace(GPU, memory=(60 if network else 120) * MIB, reserved_bytes=0.0, group_bytes=0.0)
    config, why = chosen(THIN, device, *network)
    kind = family_of(config)
    assert len(why) == 5 and why[0].startswith("auto: ") and all(line.startswith("  ") for line in why[1:])
    assert f"--batch {config.batch}:" in why[4] and "--tile " + " ".join(map(str, config.tile)) in why[3]
    assert not [side for side, step in zip(config.tile, kind.unit(config)) if side % step]

    def total(**changes: Any) -> float:
        return plan_complete_config(RunToPlan(replace(config, **changes), device, 1, 2, timed=False), 1).total

    assert total() <= device.memory
    assert config.batch == 4 or device.memory < total(batch=config.batch + 1)
    assert "the largest such that two fit" in why[3]
    if kind.attends:
        shape = shape_at(fingerprint(*THIN), (0.8, 0.8, 5.0))
        longer = min(range(3), key=lambda at: config.tile[at] / shape[at])  # what the next larger tile has more of
        tile = tuple(side + step * (at == longer) for at, (side, step) in enumerate(zip(config.tile, config.patch)))
        assert total(tile=tile, batch=2) > device.memory
    assert config.spacing == "0.8,0.8,5" and math.prod(config.tile) < 64**3 * 1.1
    assert config.patch == (8, 8, 1) if kind.attends else config.stages.startswith("331:111 331:221")


def test_what_is_typed_stays_and_the_rest_is_planned_around_it(small) -> None:
    sizes = ("--tile", "64", "64", "16", "--patch", "8", "--spacing", "1,1,4", "--batch", "3")
    config, why = chosen(THIN, CPU, *sizes, "--embed-dim", "48", "--decoder-width", "4")
    assert (config.tile, config.spacing, config.batch, config.embed_dim) == ((64, 64, 16), "1,1,4", 3, 48)
    assert config.patch == (8, 8, 8) and config.decoder_width == 4
    assert sum("as given" in line for line in why) == 4
    planned_alone, _ = chosen(THIN, CPU)
    assert (planned_alone.spacing, planned_alone.patch, planned_alone.embed_dim) == ("0.8,0.8,5", (8, 8, 1), 96)


def test_a_typed_tile_decides_how_wide_the_network_is(small) -> None:
    roomy = replace(GPU, reserved_bytes=0.0, group_bytes=0.0)
    wide, why = chosen(BRAIN, roomy, "--tile", "64")
    assert wide.embed_dim == 96 and why[2].endswith("the widest that fits with the tile of 64")
    need = plan_complete_config(RunToPlan(replace(wide, batch=2), roomy, 1, 2, timed=False), 1).total
    narrow, why = chosen(BRAIN, replace(roomy, memory=need - 1), "--tile", "64")
    assert narrow.embed_dim == 24 and why[2].endswith("the narrowest: wider ones do not fit with the tile of 64")
    assert ": the widest that fits with a usual tile (" in chosen(BRAIN, roomy)[1][2]


def test_a_curriculum_is_planned_for_by_its_largest_tile(small) -> None:
    """Its tiles stay; an nnU-Net's stages are those of the first one, for the spacing of the cases."""
    roomy = replace(GPU, reserved_bytes=0.0, group_bytes=0.0)
    wide, why = chosen(BRAIN, roomy, "--curriculum", "16:3,64:2")
    assert wide.embed_dim == 96 and why[2].endswith("the widest that fits with the tile of 64") and len(why) == 4
    assert why[3] == "  tiles and batches of --curriculum, as given; the largest is 64x64x64"
    need = plan_complete_config(RunToPlan(replace(wide, batch=2), roomy, 1, 2, timed=False), 1).total
    assert chosen(BRAIN, replace(roomy, memory=need - 1), "--curriculum", "16:3,64:2")[0].embed_dim == 24
    flat = ((64, 64, 12),) * 6, ((0.8, 0.8, 5.0),) * 6
    u_net, why = chosen(flat, roomy, "--network", "nnunet-plain", "--curriculum", "32x32x8:1,whole:1")
    assert u_net.stages.startswith("331:111 331:221") and why[3].endswith("the largest is 64x64x12")
    assert why[2] == "  nnunet-plain, as published"
    assert chosen(flat, roomy, "--network", "nnunet-plain", "--features", "4")[1][2].endswith(", features as given")


def test_a_tile_that_is_too_large_all_the_same_is_not_said_to_fit(small) -> None:
    config, why = chosen(BRAIN, replace(GPU, memory=MIB))
    assert config.tile == (16, 16, 16) and why[3].endswith("the smallest there is, though two may not fit")


@pytest.mark.started
def test_more_memory_and_more_ranks_take_wider_networks_and_larger_tiles(small) -> None:
    here, tile = replace(GPU, reserved_bytes=0.0, group_bytes=0.0), ("--tile", "32", "32", "32", "--batch", "1")
    sizes = [chosen(BRAIN, replace(here, memory=memory * MIB), *tile)[0] for memory in (5, 200)]
    assert [config.embed_dim for config in sizes] == [24, 96]
    assert "may not fit: use a larger --seqpar" in chosen(BRAIN, replace(here, memory=MIB), *tile[:4])[1][4]
    least, device = ("--embed-dim", "24", "--heads", "2", "--depth", "1"), replace(here, memory=100 * MIB)
    few, many = (chosen(BRAIN, device, *least, "--seqpar", str(n), ranks=n)[0] for n in (1, 2))
    assert math.prod(few.tile) < math.prod(many.tile)


def test_the_planner_takes_it_for_another_device(tmp_path, capsys) -> None:
    data = nnunet(tmp_path / "D", cases=5, channels=("T1", "T2"))
    line = ["--preset", "auto", "--data", str(data), "--device", "h100", "--seqpar", "1", "--depth", "1"]
    assert plan_act.act(line) == 0
    said = capsys.readouterr().out
    assert said.startswith("auto: 5 cases, median 14x12x10 voxels of 1.1x1x1.3 mm") and "2 channels, 2 classes" in said
    assert "75 GiB of H100" in said and "--preset modern" in said.splitlines()[-1]


def test_the_tiles_of_a_step_are_at_most_a_share_of_all_voxels() -> None:
    """As many as four here; all groups and every accumulation count, as nnU-Net's batch is that of all devices."""
    line = ("--tile", "32", "--patch", "16", "--embed-dim", "12", "--heads", "1", "--depth", "1", "--decoder", "plain")
    data, batches = (((64, 64, 64),) * 10, ((1.0, 1.0, 1.0),) * 10), dict[str, int]()
    for ranks, more in ((1, ()), (2, ()), (2, ("--accumulate", "2")), (2, ("--seqpar", "2")), (8, ())):
        config, why = chosen(data, GPU, *line, *more, ranks=ranks)
        batches[f"{ranks} {' '.join(more)}".strip()] = config.batch
    assert batches == {"1": 4, "2": 2, "2 --accumulate 2": 1, "2 --seqpar 2": 4, "8": 1}
    assert why[4].endswith("the minimum, though more than 5% of the data set's voxels in a step of 8 tiles")


@pytest.mark.parametrize("flag", ["--channels", "--classes"])
def test_what_the_data_say_is_not_typed(flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} would do nothing: --preset auto takes it from --data"):
        plan.act(["--preset", "auto", "--device", "a100", flag, "3"])
