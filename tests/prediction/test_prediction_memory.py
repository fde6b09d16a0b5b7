"""Logits of all classes lie nowhere at once: each rank holds its share and a slab, as planned."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import pytest
import torch
from torch import Tensor

from seqpar.cli import plan
from seqpar.data.preparation.prepared_case import TargetGrid
from seqpar.data.preparation.transforms import resample
from seqpar.models.build import build_network
from seqpar.parallel.mesh import Mesh
from seqpar.planner.memory_counter import MemoryCounter
from seqpar.prediction import window_grid
from seqpar.prediction.logits_to_labels import slabs_to_labels
from seqpar.prediction.prediction_memory import footprint
from seqpar.prediction.sliding_window import sliding_window, whole_volume
from seqpar.prediction.window_grid import Sliding, WindowGrid, rows_at_once
from seqpar.settings.config import Config

CLASSES, SHAPE, TILE = 105, (16, 16, 20), (4, 16, 20)
LARGER = (20, 18, 24)
CASES = [("whole", SHAPE), ("whole", LARGER), ("sliding", LARGER)]


@dataclass
class Prediction:
    """What a rank held and sent, what was planned, and what it predicted."""

    most: int
    planned: int
    label_bytes: int
    ids: Tensor
    probability_rows: list[tuple[int, int]]


def logits_of(mesh: Mesh, window: str):
    config = Config(network="nnunet-plain", stages="333:111 333:222", features=2, tile=TILE, mode="auto")
    net = build_network(config, 1, CLASSES, mesh.seq).eval()
    image = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(0))
    sliding = Sliding(TILE) if window == "sliding" else None
    slabs = whole_volume([net], image, mesh) if sliding is None else sliding_window([net], image, sliding, mesh)
    return net, sliding, slabs


def predict(mesh: Mesh, cases: list[tuple[str, tuple[int, ...]]], writes: bool = False) -> list[Prediction]:
    window_grid.BYTES_AT_ONCE = 1  # so that a step takes one row; this process ends with the test
    predictions = []
    for window, to_shape in cases:
        rows_written = list[tuple[int, int]]()

        def write_rows(first: int, rows: Tensor, rows_written=rows_written) -> None:
            assert abs(float(rows.sum(0).mean()) - 1) < 1e-5
            rows_written.append((first, rows.shape[1]))

        net, sliding, slabs = logits_of(mesh, window)
        mesh.world.traffic.clear()
        with MemoryCounter() as alive:
            ids = slabs_to_labels(slabs, SHAPE, TargetGrid(to_shape), mesh, (), write_rows if writes else None)
        planned = footprint(net, SHAPE, CLASSES, mesh.world.size, to_shape, sliding=sliding)
        sent = mesh.world.traffic["labels"]
        predictions.append(Prediction(alive.most, planned.total - planned.weights, sent, ids, rows_written))
    return predictions


@pytest.mark.started
def test_a_rank_holds_its_share_of_the_logits_and_a_slab(ranks: Callable[..., list], alone: Mesh) -> None:
    """105 classes on 4 ranks, a row of each at a time, beside one process that holds all of them."""
    wanted = []
    for window, to_shape in CASES:
        whole = torch.cat([slab.logits for slab in logits_of(alone, window)[2]], 1)
        wanted.append(resample(whole, to_shape).argmax(0))
    size = CLASSES * prod(SHAPE) * 4
    assert whole.nbytes == size
    every = ranks(4, predict, CASES)
    for number, (_, to_shape) in enumerate(CASES):
        assert sum(rank[number].label_bytes for rank in every) == 3 * prod(to_shape), "a byte a voxel, to 3 others"
        most, planned = max(rank[number].most for rank in every), every[0][number].planned
        assert 0.98 * most <= planned <= 1.4 * most, (CASES[number], planned / most)
    for rank in every:
        for (window, to_shape), prediction, ids in zip(CASES, rank, wanted):
            slab = 4 * CLASSES * prod(to_shape[1:]) * 4
            assert prediction.most <= size / 4 + slab, (window, to_shape, prediction.most, size / 4, slab)
            assert prediction.ids.dtype == torch.uint8 and (prediction.ids != ids).float().mean() < 1e-3


def test_probabilities_come_row_by_row_on_the_first_rank(ranks: Callable[..., list]) -> None:
    first, *others = ranks(4, predict, CASES[1:2], True)
    assert all(not rank[0].probability_rows for rank in others)
    row = CLASSES * prod(LARGER[1:]) * 4
    assert first[0].most <= CLASSES * prod(SHAPE) + 5 * row, "a quarter of the logits, a slab, and a row"
    rows = sorted(first[0].probability_rows)
    assert rows == [(row, 1) for row in range(LARGER[0])]


def test_a_step_takes_as_many_rows_as_its_bytes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_grid, "BYTES_AT_ONCE", 4 * 3 * 5 * 7 * 2)
    assert rows_at_once(3, (5, 7)) == 2 and rows_at_once(3, (5, 7), 8) == 1 and rows_at_once(300, (5, 7)) == 1
    grid = WindowGrid((11, 4, 4), (8, 4, 4), ((0, 3), (0,), (0,)), 2, slab_rows=4)
    assert [bounds[0] for bounds in grid.bounds] == [0, 3, 7] and grid.bounds[-1] == (7, 9, 11)
    assert [grid.num_complete(windows) for windows in (0, 1, 2)] == [0, 1, 3]


def test_a_plan_of_prediction_says_what_windows_and_a_whole_pass_take(capsys: pytest.CaptureFixture) -> None:
    """105 classes at 512 x 512 x 600: 61.5 GiB of logits, of which a rank of four holds a quarter at most."""
    line = "--network nnunet-plain --tile 128 --volume 512 512 600 --classes 105 --channels 1 --predict"
    assert plan.act([*line.split(), "--device", "mi250x", "--seqpar", "4"]) == 0
    said = capsys.readouterr().out
    assert "61.5 GiB" in said
    (row,) = [line.split() for line in said.splitlines() if line.split()[:1] == ["4"]]
    by_window, whole = (float(cell.rstrip("!")) for cell in (row[2], row[4]))
    assert by_window < 61.5 / 4 < whole
