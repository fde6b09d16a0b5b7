"""Figures 9 to 14 and 16 on journals that are made up: their words, bars and lines are those of the journals."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import figures
from lab.figures import length_figure, question_figures, tile_figure, vessel_figure, window_figure
from lab.figures.costs import RunCost
from lab.figures.equal_parameters import count_parameters
from lab.figures.figure import FigureRequest, Results, runs_of
from lab.figures.figure_files import write_figure
from lab.figures.paper_figures import SCALES
from seqpar.data.phantom.anatomy import FIELD_OF_VIEW
from seqpar.data.phantom.brain import DEFAULT_SIZE, make_case
from seqpar.models.build import build_on_meta
from seqpar.parallel.mesh import Group
from seqpar.report.curves import Bars, Diagram, points_of
from seqpar.sweeps.planned_run import config_of
from seqpar.sweeps.scaling_plan import plan_of
from tests.support.folders import save, write_json

DEBUG = FigureRequest("debug")


def made_up(number: int, root: Path, reach: float = 0.8) -> Results:
    """Returns results of a figure whose n-th arm (from 1) has Dice 0.3 + 0.1 n, memory 100 n and steps of n seconds."""
    runs = dict[str, list[Path]]()
    for n, (label, (planned,)) in enumerate(runs_of(figures.FIGURES[number], DEBUG, SCALES).items(), 1):
        out = root / planned.name
        config = json.loads(config_of(planned).to_json())
        write_json(
            out / "config.json", {"config": config, "layout": {"parameters": {"net": n}, "ranks": planned.ranks}}
        )
        rows = [{"kind": "train", "step": s, "loss": 1.0, "seconds": n, "peak_mem_mb": 100.0 * n} for s in range(4)]
        dice = {"kind": "val", "loss": 1.0, "windows": {"sliding": 0.4, "whole": 0.6}}
        rows += [{**dice, "step": step, "dice": {"a": (0.3 + 0.1 * n) * step / 4}} for step in (2, 4)]
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs[label] = [out]
    return Results(runs, reach)


def test_figure_9_tells_shares_of_gathers_memory_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question_figures, "planned_cost", lambda run: RunCost(50.0, 5.0))
    results = made_up(9, tmp_path)
    lines = question_figures.judge_modes(results)
    assert lines[0].startswith("Modes: SeqPar 1, Gather, halo, swap coincide: largest difference of the training loss")
    assert "do not coincide: largest difference of the Dice 0.3, between SeqPar 1 and swap at step 4" in lines[2]
    assert lines[3] == (
        "Modes: halo takes of Gather's memory measured 1.50, planned 1.00; of its time measured 1.50, planned 1.00"
    )
    assert "swap takes of Gather's memory measured 2.00" in lines[4]
    memory = question_figures.draw_modes(results)[2]
    assert isinstance(memory, Bars) and memory.values["swap"] == {"measured": 400.0, "planned": 50.0}


def test_networks_are_compared_at_equal_parameters() -> None:
    """As nearly as a number of channels allows: with one more or fewer, they are further apart."""
    runs = runs_of(figures.FIGURES[13], DEBUG, SCALES)
    configs = {label: config_of(one) for label, (one,) in runs.items()}
    target = count_parameters(configs["no skips (Primus)"])
    for label, name in (("no skips (plain)", "decoder_width"), ("U-Net (nnU-Net's plain)", "features")):
        channels = getattr(configs[label], name)
        counts = [count_parameters(replace(configs[label], **{name: channels + more})) for more in (-1, 0, 1)]
        assert min(counts, key=lambda count: abs(count - target)) == counts[1] and counts[0] < counts[2]
    assert 0.98 < count_parameters(configs["no skips (plain)"]) / target < 1.02
    shared = {one.name for of_arm in runs_of(figures.FIGURES[10], DEBUG, SCALES).values() for one in of_arm}
    assert shared < {one.name for of_arm in runs.values() for one in of_arm}


def test_figures_10_and_13_rank_networks(tmp_path: Path) -> None:
    lines = figures.FIGURES[13].judge(made_up(13, tmp_path))
    assert lines[0].startswith("Networks: parameters: no skips (plain) 1, skips (UNETR) 2")
    assert "U-Net (nnU-Net's plain) is highest, by 0.1" in lines[1]
    assert lines[-1].startswith("Networks: to Dice 0.4: no skips (plain) 4 s (step 4), skips (UNETR) 8 s (step 4)")


def test_figure_14_tells_who_reaches_a_dice(tmp_path: Path) -> None:
    results = made_up(14, tmp_path, reach=0.8)
    (line,) = question_figures.judge_reach(results)
    assert "skips (UNETR), patch 8 never" in line and "no skips (Primus), patch 16 20 s (step 4)" in line
    curves, bars = question_figures.draw_reach(results)
    assert isinstance(curves, Diagram) and isinstance(bars, Bars) and bars.quantity == "seconds to Dice 0.8"
    assert bars.values["no skips (Primus), patch 16"] == {"seconds to Dice": 20.0}
    assert bars.values["skips (UNETR), patch 8"] == {}
    write_figure(figures.FIGURES[14], results, "debug", tmp_path)
    assert "no skips (Primus), patch 16" in (tmp_path / "figure-14.csv").read_text()
    assert "CAUTION" not in (tmp_path / "figure-14.txt").read_text()
    for number, run in enumerate(runs[0] for runs in results.runs.values()):
        content = json.loads((run / "config.json").read_text())
        described = {"name": "d", "prepared": "p", "digests": {"case_a": str(number)}, "files": {"case_a": str(number)}}
        (run / "config.json").write_text(json.dumps(content | {"dataset": described}))
    told = "CAUTION: 1 case, such as case_a, changed between these trainings: they cannot be compared"
    assert told in "\n".join(write_figure(figures.FIGURES[14], results, "debug", tmp_path))


def test_figure_11_puts_measured_points_beside_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = made_up(11, tmp_path)
    plans = {(ranks, tokens): RunCost(800.0 / ranks, 2.0) for ranks in (1, 2, 64) for tokens in (64, 512, 1728)}
    monkeypatch.setattr(length_figure, "planned", lambda results: plans)
    assert length_figure.measured(results)[2, 512] == RunCost(500.0, 5.0)
    lines = length_figure.judge(results)
    assert lines[0] == "Lengths: planned MiB of a rank to measured: 0.50 to 8.00"
    assert "1,728 tokens need 800 MiB on 1 rank and 12.5 on each of 64 (planned)" in lines[2]
    memory, _ = length_figure.draw(results)
    assert memory.log and [line.only_points for line in memory.lines] == [False] * 3 + [True] * 3
    assert ["MiB of a rank", "SeqPar 4, measured", 0, "tokens of a tile", "512", "600.0"] in list(points_of([memory]))


def test_figure_12_compares_windows_of_one_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_case = {"sliding": window_figure.Prediction(4.0, 3.0), "whole": window_figure.Prediction(1.0, 1.1)}
    monkeypatch.setattr(window_figure, "predictions", lambda run: of_case)
    lines = window_figure.judge(made_up(12, tmp_path))
    assert "sliding windows 0.400, whole pass 0.600; whole pass is highest, by 0.2" in lines[0]
    assert "takes 0.25 of the time of sliding windows" in lines[2]
    assert "3 times as much as elsewhere (sliding windows), 1.1 times" in lines[3]
    bars = window_figure.draw(made_up(12, tmp_path))[-1]
    assert isinstance(bars, Bars) and bars.values["whole pass"] == {"measured": 1.1}
    none = {kind: window_figure.Prediction(1.0, math.nan) for kind in of_case}
    monkeypatch.setattr(window_figure, "predictions", lambda run: none)
    assert "there are no borders in it" in window_figure.judge(made_up(12, tmp_path))[3]
    assert len(window_figure.draw(made_up(12, tmp_path))) == 3


def test_figure_16_compares_tiles_at_equal_voxels_a_step(tmp_path: Path) -> None:
    """Runs of equally many steps, named by the sizes that they took; a tile as large as the cases is said to be one."""
    for scale, sides in tile_figure.SIDES.items():
        runs = runs_of(figures.FIGURES[16], FigureRequest(scale), SCALES)
        small, large, whole = (config_of(one) for (one,) in runs.values())
        assert (small.tile, large.tile) == tuple((side,) * 3 for side in sides)
        assert small.steps == large.steps == whole.steps and whole.curriculum == f"whole:{small.epochs}:1"
        assert 0.7 < large.batch * sides[1] ** 3 / (small.batch * sides[0] ** 3) < 1.4
    typed = runs_of(figures.FIGURES[16], FigureRequest("debug", {"epochs": 5}), SCALES)
    assert {config_of(one).steps for (one,) in typed.values()} == {40} and len(typed) == 3
    results = made_up(16, tmp_path)
    config = tmp_path / runs_of(figures.FIGURES[16], DEBUG, SCALES)["whole volumes"][0].name / "config.json"
    content = json.loads(config.read_text())
    for tile, held in (((80, 96, 80), False), ((48, 48, 48), True)):
        write_json(config, {**content, "config": {**content["config"], "tile": tile, "batch": 1}})
        lines = tile_figure.judge(results)
        assert f"tile 32x32x32 0.39 million, tile 48x48x48 0.44 million, whole ({'x'.join(map(str, tile))})" in lines[0]
        assert "is highest" in lines[1] and "whole" in lines[1].rsplit(";", 2)[-2]
        assert ("tile 48x48x48 holds whole cases" in lines[-4]) == held
        assert lines[-3] == "LAMP says: larger inputs give a higher Dice"
    assert {line.label for diagram in tile_figure.draw(results) for line in diagram.lines} == set(
        tile_figure.sizes(results).values()
    )


def test_figure_18_has_the_published_network_at_each_resolution_and_on_slabs(tmp_path: Path) -> None:
    for scale, sides in tile_figure.CUBES.items():
        runs = runs_of(figures.FIGURES[18], FigureRequest(scale), SCALES)
        *cubes, slab = configs = [config_of(one) for (one,) in runs.values()]
        assert [config.tile for config in cubes] == [(side,) * 3 for side in sides]
        assert slab.tile == (sides[-1], sides[-1], 5) and slab.spacing == cubes[-1].spacing
        assert [config.network for config in configs] == ["unet-hou"] * len(sides) + ["unet-hou-2d"]
        widths = [build_on_meta(config, Group("seq"), 4, 2).unet.architecture.features for config in configs]
        assert {own[-1] for own in widths} == {1024 if scale == "paper" else 32}, "the coarsest level is that of all"
        assert {(config.loss, config.loss_weights) for config in configs} == {("lesion-dice-ce", (0.45, 0.45, 0.1))}
    spacings = [config_of(one).spacing for (one,) in runs_of(figures.FIGURES[18], DEBUG, SCALES).values()]
    coarse, middle = (np.array(spacing.split(","), float) for spacing in spacings[:2])
    assert np.allclose(coarse, 2 * middle, rtol=1e-3)
    lines = figures.FIGURES[18].judge(made_up(18, tmp_path))
    assert "tile 16x16x16 0.400" in lines[0] and "2D 48x48x5 is highest" in lines[0] and len(lines) == 7
    assert lines[-3:] == [
        "The paper of Hou et al. says: a higher resolution gives a higher Dice",
        "We see: Dice after 4 steps: tile 16x16x16 0.400, tile 32x32x32 0.500, tile 48x48x48 0.600; tile 48x48x48 "
        "against tile 16x16x16, Dice above by 0.2 (one seed)",
        "Reproduced: cannot tell at this scale",
    ]


def test_figure_16_at_laptop_has_tiles_within_whole_cases_of_as_many_voxels() -> None:
    """A built-in brain, cropped and resampled, is larger than a tile of 96 in every direction."""
    runs = runs_of(figures.FIGURES[16], FigureRequest("laptop"), SCALES)
    small, large, whole = (config_of(one) for (one,) in runs.values())
    sides = [int(side.max() - side.min()) + 1 for side in np.nonzero(make_case(whole.seed, 1).image.any(0))]
    spacing = map(float, whole.spacing.split(","))
    resampled = [side * mm / n / to for side, mm, n, to in zip(sides, FIELD_OF_VIEW, DEFAULT_SIZE, spacing)]
    assert small.tile == (64,) * 3 and large.tile == (96,) * 3 and min(resampled) > 96
    assert tuple(16 * math.ceil(round(side) / 16) for side in resampled) == tile_figure.WHOLE_BRAINS
    budgets = [small.batch * 64**3, large.batch * 96**3, math.prod(tile_figure.WHOLE_BRAINS)]
    assert max(budgets) < 1.05 * min(budgets) and small.steps == large.steps == whole.steps
    assert all(config.join_labels and config.phantoms == 12 for config in (small, large, whole))
    of_data = runs_of(figures.FIGURES[16], FigureRequest("laptop", {"data": "/DATA"}), SCALES)
    flags = [flag for (one,) in of_data.values() for flag in one.flags]
    assert "--data" in flags and not {"--spacing", "--phantoms", "--join-labels"} & set(flags)


@pytest.mark.started
def test_a_whole_volume_is_planned_by_the_size_of_the_cases() -> None:
    (whole,) = runs_of(figures.FIGURES[16], DEBUG, SCALES)["whole volumes"]
    (small,) = runs_of(figures.FIGURES[16], DEBUG, SCALES)["small tiles"]
    one_tile = replace(config_of(small), batch=1)
    assert plan_of(config_of(whole), 1).total > 1.5 * plan_of(one_tile, 1).total


def test_figure_19_measures_the_centre_line_in_the_label_maps_of_the_last_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(vessel_figure.CASES, "debug", 1)
    figure = figures.FIGURES[19]
    order = figure.with_data(DEBUG)
    assert (Path(order.typed["data"]) / "labelsTr" / "phantom_00000.nii.gz").is_file()
    assert figure.with_data(FigureRequest("debug", {"data": "/D"})).typed == {"data": "/D"}
    planned = runs_of(figure, order, SCALES)
    assert all(config_of(run).data == order.typed["data"] for (run,) in planned.values())
    assert all("vessels" not in run.name for (run,) in planned.values())
    results, truth = made_up(19, tmp_path), np.zeros((16, 8, 8), np.uint8)
    truth[2:14, 4, 4] = 1
    save(tmp_path / "truth.nii.gz", truth)
    for n, (run,) in enumerate(results.runs.values()):
        found = truth.copy()
        found[2 : 2 + 2 * n, 4, 4] = 0  # of twelve voxels
        case = {"reference_file": str(tmp_path / "truth.nii.gz"), "prediction_file": "c.nii.gz"}
        row = {"1": {"Dice": 0.5}}
        content = {"metric_per_case": [{**case, "metrics": row}], "mean": row, "classes": {"vessel": "1"}}
        write_json(run / "validation" / "summary.json", content)
        save(run / "validation" / "c.nii.gz", found)
        dataset = {"labels": {"background": 0, "vessel": 1}, "values": [0, 1], "regions": {}, "ignore_label": None}
        write_json(run / "config.json", json.loads((run / "config.json").read_text()) | {"dataset": dataset})
    bars = figure.draw(results)[-1]
    assert isinstance(bars, Bars)
    shares = [kinds["seed 0"] for kinds in bars.values.values()]
    assert shares == pytest.approx([1, 10 / 12, 8 / 12, 6 / 12, 4 / 12], abs=0.1) and shares == sorted(shares)[::-1]
    lines = figure.judge(results)
    assert "cldice is highest" in lines[0] and "centred tiles is highest" in lines[5]
    assert len(lines) == 10
