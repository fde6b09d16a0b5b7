"""The bench of U-Nets: other libraries' networks compute the same function, and rows say what they measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.benches import other_libraries, unets
from lab.benches.other_libraries import UNETS, copy_weights, unets_here
from lab.benches.plan import planned_as_published
from lab.benches.series import Progress, run_series
from seqpar.cluster.torch_setup import missing_compiler
from seqpar.decoders.unets import UNet
from seqpar.decoders.unets.nnunet import architecture_of_stages, topology
from tests.support.scripts import run_script

ARCHITECTURE = architecture_of_stages(1, 3, *topology((32, 32, 32)), features=4)


@pytest.mark.parametrize("name", [name for name in list(UNETS)[:2] if name in unets_here()])
def test_a_peer_of_the_same_layers_is_the_same_function(name: str) -> None:
    torch.manual_seed(0)
    theirs, ours = UNETS[name][1](ARCHITECTURE).double(), UNet(ARCHITECTURE).double()
    image = torch.randn(1, 1, 32, 32, 32, dtype=torch.float64)
    assert unets.logits_apart(ours, theirs, image) > 1e-3
    copy_weights(theirs, ours)
    assert unets.logits_apart(ours, theirs, image) < 1e-12


@pytest.mark.parametrize("name", unets_here())
def test_each_peer_takes_an_image_of_the_tile(name: str) -> None:
    assert UNETS[name][1](ARCHITECTURE)(torch.randn(1, 1, 32, 32, 32)).shape == (1, 3, 32, 32, 32)


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

    monkeypatch.setattr(unets, "measure_apart", measure)


def rows_of(series) -> list[dict]:
    rows: list[dict] = []
    assert run_series(series, 1, rows.append, Progress())
    return rows


def test_rows_of_unets_have_ratios_to_the_first_peer(forked) -> None:
    rows = rows_of(unets.of_tile(16, 1, features=2, peers=["torch's own modules"]))
    assert [row["net"] for row in rows] == ["torch's own modules", *unets.OURS]
    assert rows[0]["ratio"] == 1 and rows[-2]["logits apart"] < 1e-4
    assert rows[-1]["saved MB a rank"] < rows[-2]["saved MB a rank"] and rows[-1]["ranks x threads"] == "2 x 1"


@pytest.mark.skipif(missing_compiler(on_gpu=False) is not None, reason="torch finds no compiler")
def test_a_peer_is_measured_compiled_too(forked) -> None:
    plain, compiled = other_libraries.with_compiled("torch's own modules")
    rows = rows_of(unets.of_tile(16, 1, features=2, peers=[plain, compiled]))
    assert [row["net"] for row in rows[:2]] == [plain, f"{plain}, compiled"] and rows[1]["saved MB a rank"] > 0


def test_without_a_compiler_no_row_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert other_libraries.with_compiled("a", "b") == ["a", "b"]


def test_rows_of_converted_networks_compare_the_same_function(forked) -> None:
    rows = rows_of(unets.of_converted(16, 1, features=2))
    assert [row["net"] for row in rows] == [unets.ORIGINAL, unets.ALONE, unets.BY_HAND, unets.SPREAD]
    assert [row["to"] for row in rows] == [unets.ORIGINAL, unets.ORIGINAL, unets.BY_HAND, unets.BY_HAND]
    assert rows[1]["saved MB more"] == 0 and rows[3]["saved MB a rank"] < rows[0]["saved MB a rank"]
    assert [row["loss"] for row in rows] == pytest.approx([rows[0]["loss"]] * 4, rel=1e-5)


@pytest.mark.parametrize("network", ["nnU-Net", "ResEnc XL"])
def test_the_planner_meets_what_nnunet_publishes(network: str) -> None:
    """Memory to 15 %, hours to 30 %; without a GPU this is the only outside measure of the planner's GPU figures."""
    row = planned_as_published(network)
    assert abs(row["planned GB"] / row["published GB"] - 1) < 0.15
    assert abs(row["planned hours"] / row["published hours"] - 1) < 0.30
