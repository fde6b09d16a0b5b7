"""A batch that is left open over a pipe is as large as the fullest place allows, whatever the whole network needs."""

from dataclasses import replace
from typing import Any

import pytest

from seqpar.cluster.devices import DEVICES, Device
from seqpar.data.preparation.fingerprint import Fingerprint
from seqpar.parallel.launcher import Launcher
from seqpar.planner import chooser
from seqpar.planner.fit import largest_batch
from seqpar.planner.needs import RunToPlan
from seqpar.planner.pipeline_plan import plan_run
from seqpar.planner.preset_from_data import plan_from_data
from seqpar.settings.config import Config

A100 = DEVICES["a100"]
ONE = Config(network="nnunet-plain", tile=(16, 16, 32), features=4, stages="333:111 333:222")
TWO = replace(ONE, pipe=2)
MOST = 6


def run_of(config: Config, device: Device = A100) -> RunToPlan:
    return RunToPlan(config, device, channels=1, outputs=3, timed=False)


def needed(batch: int, **other: Any) -> float:
    """Returns the bytes on the fullest of two places, where memory is no matter."""
    return plan_run(run_of(replace(TWO, batch=batch, **other)), 2).total


def test_the_largest_batch_is_that_of_the_fullest_place() -> None:
    device = replace(A100, memory=needed(3))
    best = largest_batch(run_of(TWO, device), 2, MOST)
    assert best.fits and 3 <= best.config.batch < MOST
    assert not plan_run(run_of(replace(TWO, batch=best.config.batch + 1), device), 2).fits
    assert largest_batch(run_of(ONE, device), 1, MOST).config.batch < best.config.batch, "the whole network needs more"
    least = largest_batch(run_of(TWO, replace(A100, memory=A100.reserved_bytes)), 2, MOST)
    assert least.config.batch == 1 and not least.fits


def test_a_run_takes_the_batch_that_fits_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual batch of a U-Net, where a rank that has all of it would have the memory for one tile."""
    device = replace(A100, memory=needed(2))
    monkeypatch.setattr(chooser, "device_of", lambda config, launcher: device)
    config, why = chooser.choose_group_and_batch(TWO, Launcher("test", 0, 2), 1, 3)
    assert config.batch == 2 and "on the fullest rank of the pipe" in why["batch_choice"][0]
    assert chooser.choose_group_and_batch(ONE, Launcher("test"), 1, 3)[0].batch == 1


def test_a_preset_that_follows_the_data_plans_stages_too() -> None:
    """Two places train a larger tile than a rank by itself: it is planned by what the fullest of them holds."""
    shapes, spacings = ((40, 40, 40),) * 20, ((1.0, 1.0, 1.0),) * 20
    data = Fingerprint(
        "D", "raw", tuple(map(str, range(20))), (), ("CT",), ("background", "organ"), (), shapes, spacings
    )
    device = replace(A100, memory=needed(2, tile=(40, 40, 40)))
    tiles = {}
    for config in (ONE, TWO):
        chosen, _ = plan_from_data(config, {"stages", "network", "pipe"}, data, device, config.pipe)
        tiles[config.pipe] = chosen.tile
    assert tiles[2] == (40, 40, 40) and sum(tiles[1]) < sum(tiles[2])
