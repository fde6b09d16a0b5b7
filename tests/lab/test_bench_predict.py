"""The bench of prediction runs, and its rows say what they measured."""

from dataclasses import replace

import pytest

from lab.benches import predict
from lab.benches.series import Progress, run_series


@pytest.mark.started
def test_rows_compare_a_whole_pass_with_sliding_windows() -> None:
    """Six windows of 16 voxels a side over 28 x 20 x 16: each voxel ratio is exact, whatever the times."""
    config = replace(predict.NETWORK, tile=(16, 16, 16), patch=4, embed_dim=12, heads=2, depth=1, decoder_width=4)
    series = predict.of_network(config, (28, 20, 16), (16,), 2)
    rows: list[dict] = []
    assert run_series(series, 1, rows.append, Progress())
    whole, sliding = rows
    assert (whole["name"], whole["voxels"]) == ("whole", 28 * 20 * 16)
    assert sliding["voxels"] == 6 * 16**3 and sliding["voxels_times_whole"] == sliding["voxels"] / whole["voxels"]
    assert sliding["cpu_s"] > 0 and sliding["peak_mb"] >= 0 and sliding["seam"] > 0
    assert sliding["times_whole"] == sliding["cpu_s"] / whole["cpu_s"]


@pytest.mark.started
def test_the_parts_of_a_pass_are_all_of_it_and_none_is_counted_twice() -> None:
    config = replace(predict.NETWORK, tile=(16, 16, 16), patch=4, embed_dim=12, heads=2, depth=1, decoder_width=4)
    rows: list[dict] = []
    # what is left between operators is a difference of two clocks, and may be negative on a busy machine
    assert run_series(predict.parts_of([config], (28, 20, 16), 16, 1), 1, rows.append, Progress())
    whole, windows = rows
    assert (whole["prediction"], windows["prediction"]) == ("vit, whole", "vit, windows of 16")
    for row in rows:
        parts = [row[f"{name}, ns"] for name in predict.PARTS]
        assert min(parts[:-1]) > 0 and sum(parts) == pytest.approx(row["all, ns"]), row
