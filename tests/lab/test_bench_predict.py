"""The bench of prediction runs, and its rows say what they measured."""

from dataclasses import replace

import pytest
import torch

from lab.benches import data, predict
from lab.benches.other_libraries import WINDOWS, windows_here
from lab.benches.series import Progress, run_series
from seqpar.data.sampling.augmentation import augment
from seqpar.models.build import build_network
from seqpar.parallel.mesh import Group, Mesh
from seqpar.prediction.sliding_window import sliding_window
from seqpar.prediction.window_grid import WindowGrid

TINY = replace(predict.NETWORK, tile=(16, 16, 16), patch=4, embed_dim=12, heads=2, depth=1, decoder_width=4)
SHAPE = (28, 20, 24)


@pytest.mark.started
def test_rows_compare_a_whole_pass_with_sliding_windows() -> None:
    """Six windows of 16 voxels a side over 28 x 20 x 16: each voxel ratio is exact, whatever the times."""
    series = predict.of_network(TINY, (28, 20, 16), [predict.Way(), predict.Way(16)], 2)
    rows: list[dict] = []
    assert run_series(series, 1, rows.append, Progress())
    whole, sliding = rows
    assert (whole["name"], whole["voxels"]) == ("whole", 28 * 20 * 16)
    assert sliding["voxels"] == 6 * 16**3 and sliding["voxels_times_whole"] == sliding["voxels"] / whole["voxels"]
    assert sliding["cpu_s"] > 0 and sliding["peak_mb"] >= 0 and sliding["seam"] > 0
    assert sliding["times_whole"] == sliding["cpu_s"] / whole["cpu_s"]


@pytest.mark.started
def test_the_parts_of_a_pass_are_all_of_it_and_none_is_counted_twice() -> None:
    rows: list[dict] = []
    # what is left between operators is a difference of two clocks, and may be negative on a busy machine
    assert run_series(predict.parts_of([TINY], (28, 20, 16), 16, 1), 1, rows.append, Progress())
    whole, windows = rows
    assert (whole["prediction"], windows["prediction"]) == ("vit, whole", "vit, windows of 16")
    for row in rows:
        parts = [row[f"{name}, ns"] for name in predict.PARTS]
        assert min(parts[:-1]) > 0 and sum(parts) == pytest.approx(row["all, ns"]), row


@pytest.mark.started
def test_rows_of_other_libraries_say_whose_windows_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """nnU-Net's eight views take eight times the voxels; where it is not installed, our code computes its windows."""
    monkeypatch.setattr(predict, "windows_here", lambda: ["MONAI"])
    ways = predict.peers(16)
    rows: list[dict] = []
    series = predict.of_network(TINY, SHAPE, [predict.Way(), *ways], 2)
    assert run_series(series, 1, rows.append, Progress())
    assert [row["name"] for row in rows] == [
        "whole",
        "sliding 16, overlap 0.5, as nnU-Net, by our code",
        "sliding 16, overlap 0.25, MONAI",
        "sliding 16, overlap 0.5, as nnU-Net, by our code, mirrored",
    ]
    assert [row["voxels"] / 16**3 for row in rows[1:]] == [12, 8, 96] and min(row["cpu_s"] for row in rows) > 0
    assert series.conclude(rows) == ""
    monkeypatch.setattr(predict, "windows_here", list)
    without = predict.of_network(TINY, SHAPE, [predict.Way(), *predict.peers(16)], 2)
    assert len(without.cases) == 3 and without.conclude([]) == "MONAI is not installed: without a row."


@pytest.mark.parametrize("name", windows_here())
def test_windows_of_other_libraries_are_those_that_the_row_counts(name: str, alone: Mesh) -> None:
    """The other library asks for as many windows as the row says; nnU-Net's result is ours by its rule."""
    torch.manual_seed(0)
    image, windows = torch.randn(1, *SHAPE), list[int]()
    net = build_network(TINY, 1, 2, Group("seq")).eval()
    net.register_forward_pre_hook(lambda _, args: windows.append(len(args[0])))
    for way in [way for way in predict.peers(16) if way.by == name]:
        windows.clear()
        with torch.no_grad():
            logits = WINDOWS[name](net, image, TINY.tile, 2, way.is_mirrored)
        assert sum(windows) == len(WindowGrid.of(SHAPE, way.sliding).corners) * (8 if way.is_mirrored else 1)
        if name == "nnU-Net":
            with torch.no_grad():
                ours = torch.cat([rows.logits for rows in sliding_window([net], image, way.sliding, alone)], 1)
            torch.testing.assert_close(logits.float(), ours.float(), rtol=0, atol=2e-2)


def test_the_source_of_augmented_tiles_is_large_enough_for_every_seed() -> None:
    """A source that is too small would be cut from its other end."""
    sizes = [augment(name, data.TILE).needed_size(seed) for name in data.OURS for seed in range(200)]
    assert all(need <= there for size in sizes for need, there in zip(size, data.largest_source(), strict=True))
