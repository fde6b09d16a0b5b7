"""Windows as arithmetic: rows in memory, weights, settings; labels of logits."""

import itertools

import pytest
import torch

from seqpar.prediction.logits_to_labels import to_labels
from seqpar.prediction.window_grid import Sliding, WindowGrid, window_starts, window_weights
from tests.support.volumes import TILE


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.6, 0.99])
def test_windows_and_weights_are_those_of_monai(overlap: float) -> None:
    utils = pytest.importorskip("monai.data.utils")
    from monai.inferers.utils import _get_scan_interval

    for side, tile in itertools.product(range(1, 40, 3), (1, 2, 7, 16)):
        if side >= tile:
            stride = _get_scan_interval((side,), (tile,), 1, (overlap,))
            theirs = [at[0].start for at in utils.dense_patch_slices((side,), (tile,), stride)]
            assert list(window_starts(side, tile, overlap)) == theirs
    for kind in ("gaussian", "constant"):
        theirs = utils.compute_importance_map((5, 24, 16), kind, 0.125)
        assert torch.equal(window_weights((5, 24, 16), kind), theirs)


def test_memory_is_that_of_the_rows_under_a_window() -> None:
    """Each row has one owner, rows come in order, and those that lie open are fewer than two tiles hold."""
    shapes = [(50, 9, 9), (5, 9, 9), (64, 30, 8)]
    for shape, overlap, num_ranks in itertools.product(shapes, (0.0, 0.5, 0.7), (1, 3, 16)):
        window_grid = WindowGrid.of(shape, Sliding(TILE, overlap), num_ranks)
        rows = [row for bounds in window_grid.bounds for row in range(bounds[0], bounds[-1])]
        assert rows == list(range(shape[0])) and all(len(bounds) == num_ranks + 1 for bounds in window_grid.bounds)
        opened: set[int] = set()
        for window in range(len(window_grid.corners)):
            for rank in range(num_ranks):
                opened |= {slab for slab, _ in window_grid.pieces(window, tuple((0, side) for side in TILE), rank)}
            assert min(opened) >= window_grid.num_complete(window)  # what is finished is not touched again
            opened -= set(range(window_grid.num_complete(window + 1)))
            open_rows = sum(window_grid.bounds[slab][-1] - window_grid.bounds[slab][0] for slab in opened)
            assert open_rows < 2 * TILE[0]
        assert not opened and window_grid.num_complete(len(window_grid.corners)) == len(window_grid.bounds)


def test_labels_are_the_largest_or_the_regions_in_their_order() -> None:
    logits = torch.tensor([[0.1, 2.0, -1.0, 1.0], [0.3, -1.0, -1.0, 1.0]]).reshape(2, 1, 2, 2)
    assert to_labels(logits).flatten().tolist() == [1, 0, 0, 0]
    assert to_labels(logits, (2, 1)).flatten().tolist() == [1, 2, 0, 1]
    assert to_labels(logits, (1, 2)).flatten().tolist() == [2, 1, 0, 2]
    with pytest.raises(ValueError, match="regions_class_order"):
        to_labels(logits, (1, 2, 3))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"overlap": 1.0}, "overlap=1.0: "),
        ({"overlap": -0.1}, "^overlap=-0.1: "),
        ({"weights": "flat"}, "gaussian or constant"),
        ({"batch": 0}, "^batch=0: "),
        ({"mirror": (0, 0)}, "mirror .0, 0"),
        ({"mirror": (3,)}, "mirror .3"),
    ],
)
def test_wrong_settings_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sliding(**{"tile": TILE, **change})
