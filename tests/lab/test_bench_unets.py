"""The benches of U-Nets and of labels: peers are the same function, and rows say what they measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.benches import halo_share, labels, unets
from lab.benches.series import Progress, run_series
from lab.benches.unet_peers import PEERS, copy_weights, peers_here
from seqpar.decoders.unets import UNet
from seqpar.decoders.unets.nnunet import architecture_of_stages, topology
from tests.support.scripts import run_script

ARCHITECTURE = architecture_of_stages(1, 3, *topology((32, 32, 32)), features=4)


@pytest.mark.parametrize("name", [name for name in list(PEERS)[:2] if name in peers_here()])
def test_a_peer_of_the_same_layers_is_the_same_function(name: str) -> None:
    torch.manual_seed(0)
    theirs, ours = PEERS[name][1](ARCHITECTURE).double(), UNet(ARCHITECTURE).double()
    image = torch.randn(1, 1, 32, 32, 32, dtype=torch.float64)
    assert unets.logits_apart(ours, theirs, image) > 1e-3
    copy_weights(theirs, ours)
    assert unets.logits_apart(ours, theirs, image) < 1e-12


@pytest.mark.parametrize("name", peers_here())
def test_each_peer_takes_an_image_of_the_tile(name: str) -> None:
    assert PEERS[name][1](ARCHITECTURE)(torch.randn(1, 1, 32, 32, 32)).shape == (1, 3, 32, 32, 32)


FORKED = """
import os, runpy, sys
os.environ["OMP_NUM_THREADS"] = "1"
sys.argv[1:] = {arguments!r}
with open("rank" + os.environ["RANK"], "w") as sys.stdout:
    runpy.run_module("lab.benches.{bench}", run_name="__main__")
"""


@pytest.fixture
def forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures in forked processes; that benches start new ones is shown in ``test_bench_memory``."""

    def measure(bench: str, arguments: Sequence[str], ranks: int, threads: int) -> dict[str, Any]:
        run_script(ranks, FORKED.format(bench=bench, arguments=list(arguments)), tmp_path)
        return json.loads((tmp_path / "rank0").read_text().splitlines()[-1])

    for module in (halo_share, labels, unets):
        monkeypatch.setattr(module, "measure_apart", measure)


def rows_of(series) -> list[dict]:
    rows: list[dict] = []
    assert run_series(series, 1, rows.append, Progress())
    return rows


def test_rows_of_unets_have_ratios_to_the_first_peer(forked) -> None:
    rows = rows_of(unets.of_tile(16, 1, features=2, peers=["torch's own modules"]))
    assert [row["net"] for row in rows] == ["torch's own modules", *unets.OURS]
    assert rows[0]["ratio"] == 1 and rows[-2]["logits apart"] < 1e-4
    assert rows[-1]["saved MB a rank"] < rows[-2]["saved MB a rank"] and rows[-1]["ranks x threads"] == "2 x 1"


def test_rows_of_halos_are_planned_first_and_measured_then(forked) -> None:
    first, then = halo_share.series(quick=True)
    (planned, *_), (measured, *_) = rows_of(first), rows_of(then)
    assert measured["how"] == "measured, 2 CPU cores" and planned["ranks"] == 128
    assert float(planned["statistics"].rstrip("%")) < 20, "three numbers a channel to 127 ranks are no 127 delays"
    for row in (measured, planned):
        assert 0 < float(row["halos"].rstrip("%")) < 100 and row["MB of halos a rank"] > 0 and row["s a step"] > 0


def test_planned_halos_wait_for_no_measuring_and_stand_beside_what_was_published(monkeypatch) -> None:
    """Also where nothing can be measured; a plan is made once, however many turns there are."""

    def measure(*arguments: Any) -> dict[str, float]:
        raise AssertionError("planned rows measure nothing")

    made: list[str] = []
    original = halo_share.planned
    monkeypatch.setattr(halo_share, "measure_apart", measure)
    monkeypatch.setattr(halo_share, "planned", lambda case: made.append(case.name) or original(case))
    for quick in (False, True):
        first, *others = halo_share.series(quick)
        assert others and first.turns == 1 and first.turn_s <= 60
        rows: list[dict] = []
        assert run_series(first, 3, rows.append, Progress())
        assert {row["Hou et al."] for row in rows} == {halo_share.PAPER} and len(rows) == len(first.cases)
        assert {(row["image"], row["ranks"]) for row in rows} <= {("256x256x256", 128), ("512x512x512", 256)}
    assert len(made) == len(halo_share.PLANNED) + 2


def test_rows_of_labels_compare_bytes_with_all_that_is_held(forked) -> None:
    at_once, slabs = rows_of(labels.of_shapes((32, 32, 32), (40, 40, 40), 20, (2,), 1))
    assert (at_once["labels"], slabs["labels"]) == labels.WAYS
    assert at_once["alive MB"] > 20 * 32**3 * 4 / 1e6 and slabs["to all held"] < 0.6
