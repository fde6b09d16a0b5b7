"""The bench of prediction runs, and its rows say what they measured."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lab.benches import lamp, pass_profile, predict
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
    assert run_series(pass_profile.of_networks([config], (28, 20, 16), 16, 1), 1, rows.append, Progress())
    whole, windows = rows
    assert (whole["prediction"], windows["prediction"]) == ("vit, whole", "vit, windows of 16")
    for row in rows:
        parts = [row[f"{name}, ns"] for name in pass_profile.PARTS]
        assert min(parts) > 0 and sum(parts) == pytest.approx(row["all, ns"]), row


def test_rows_of_lamp_have_the_papers_figures_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three windows of 32 voxels a side, a quarter overlapping, over 64 x 32 x 32, measured in this process."""

    def here(shape, tile, config, num_classes, overlap):
        runs: list[dict] = []
        predict._measure(SimpleNamespace(send=runs.append), shape, tile, config, num_classes, overlap, False)
        return runs[0]

    monkeypatch.setattr(predict.signal, "signal", lambda *of: None)
    monkeypatch.setattr(lamp, "predict_apart", here)
    monkeypatch.setattr(lamp, "PAPER", {(2, 32): (1.5, 9.0), (2, 0): (0.5, 3.0)})
    rows: list[dict] = []
    assert run_series(lamp.of_sizes((64, 32, 32), (32,), (2,)), 1, rows.append, Progress())
    whole, windows = rows
    assert (whole["input"], windows["input"]) == ("whole", "windows of 32") and whole["times_whole"] == 1
    assert windows["voxels_times_whole"] == 3 / 2 and windows["cpu_s"] > 0
    assert [windows[name] for name in windows if "LAMP" in name] == [1.5, 3.0, 9.0, 3.0]


def test_lamps_figures_are_those_of_its_tables() -> None:
    """Of its tables 3 and 5: whole images are quickest at every size."""
    assert [lamp.PAPER[size, 64] for size in lamp.FEATURES] == [(1.21, 6.78), (1.75, 14.52), (2.53, 25.37)]
    for size in lamp.FEATURES:
        for which in (0, 1):
            assert lamp.PAPER[size, 0][which] < lamp.PAPER[size, 128][which] < lamp.PAPER[size, 64][which]
    (series,) = lamp.series()
    assert len(series.cases) == 9 and len(lamp.series(quick=True)[0].cases) == 2
