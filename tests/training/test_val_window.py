"""Windows or the whole volume: validation measures both, the run records the better, and predict takes it."""

import json
import math
import os
from pathlib import Path
from statistics import fmean

import pytest
import torch
import torch.nn.functional as F

from seqpar.cli import predict
from seqpar.prediction import logits_to_labels
from seqpar.prediction.logits_to_labels import TEMPERATURES, best_temperature, negative_likelihoods, step_between
from seqpar.prediction.predictor import Predictor
from seqpar.prediction.sliding_window import BEYOND, warn_beyond_training
from seqpar.prediction.window_grid import WINDOWS
from seqpar.runs.journal import Journal, read_metrics
from seqpar.runs.run_lock import RunLock, TakenOver
from seqpar.tasks.segment import validation
from tests.support.checkpoints import write_window
from tests.support.configs import NoStop, config_of, trainer_of
from tests.support.folders import tree, write_json
from tests.support.predictions import act, make_run, write_images
from tests.support.training_runs import trained

SMALLER = ["--tile", "8", "--patch", "4", "--val-cases", "2", "--fold", "all"]  # than the volumes


def predicted(run: Path, images: Path, out: Path, *more: str) -> str:
    """Returns the window by which the images were predicted."""
    assert predict.act([str(run), "-i", str(images), "-o", str(out), *more]) == 0
    return json.loads((out / "prediction.json").read_text())["settings"]["window"]


def test_both_are_measured_as_each_is_alone_and_the_better_is_kept(flags, tmp_path, alone):
    def result(window: str):
        trainer = trainer_of(config_of([*flags, *SMALLER], "--val-window", window), alone, tmp_path)
        trainer.net.decoder.classes.bias.data.zero_()  # else a fresh network sees nothing but background
        return trainer.validation.run(trainer.net, Journal(tmp_path, False, 0), NoStop())

    both, *single = map(result, ("both", "sliding", "whole"))
    scores = {window: one.score for window, one in zip(("sliding", "whole"), single)}
    assert scores["sliding"] != scores["whole"], "the comparison can fail"
    better = max(scores, key=lambda window: scores[window])
    assert both.windows == scores and list(both.windows)[0] == better == both.row["window"]
    assert both.score == max(scores.values()) and both.row["windows"] == scores
    (same,) = (one for one in single if better in one.windows)
    assert both.row["dice"] == same.row["dice"] and both.row["loss"] == same.row["loss"] and "window" not in same.row
    alone_temperatures = {window: one.temperatures[window] for window, one in zip(("sliding", "whole"), single)}
    assert both.temperatures == alone_temperatures
    for window, one in zip(("sliding", "whole"), single):
        assert both.row["by_window"][window] == {key: one.row[key] for key in ("loss", "dice", "global_dice")}
    assert f"--window {better}" in both.text and all(f"{dice:.3f}" in both.text for dice in scores.values())


@pytest.mark.parametrize("order", [WINDOWS, WINDOWS[::-1]])
def test_label_maps_and_scores_of_a_run_are_of_the_better_window(flags, order, tmp_path, alone, monkeypatch):
    monkeypatch.setattr(validation, "WINDOWS", order)  # with one of these, the second is the better
    trainer = trainer_of(config_of([*flags, *SMALLER], "--val-window", "both"), alone, tmp_path)
    trainer.net.decoder.classes.bias.data.zero_()
    for left in ("validation-sliding", "validation-whole"):  # by an earlier validation
        (tmp_path / left).mkdir()
        write_json(tmp_path / left / "summary.json", {"digests": {"another-fold": "0", "../config": "0"}})
        (tmp_path / left / "another-fold.nii.gz").touch()
    result = trainer.validation.run(trainer.net, Journal(tmp_path, True, 0), NoStop(), keep=True)
    better, worse = result.windows
    assert result.windows[better] > result.windows[worse]
    assert {one.name for one in tmp_path.glob("validation*/")} == {"validation", f"validation-{worse}"}
    for folder, window in (("validation", better), (f"validation-{worse}", worse)):
        content = json.loads((tmp_path / folder / "summary.json").read_text())
        assert content["window"] == window
        assert content["foreground_mean"]["Dice"] == pytest.approx(result.windows[window], abs=1e-6)
        for case in content["metric_per_case"]:
            assert Path(case["prediction_file"]).is_file() and Path(case["prediction_file"]).parent.name == folder
        assert set(content["digests"]) == {file.name[:-7] for file in (tmp_path / folder).glob("*.nii.gz")} != set()


def test_a_class_that_one_window_has_no_dice_of_does_not_decide_which_is_better():
    """A few false voxels of a class that no case has are no reason for the other window."""

    def result(window: str, dice: dict[str, float | None]) -> validation.ValidationResult:
        return validation.ValidationResult(
            {"loss": 1.0, "dice": dice, "global_dice": dice},
            window,
            fmean(n for n in dice.values() if n is not None),
            {window: 0.5},
        )

    sliding, whole = result("sliding", {"a": 0.6, "b": None}), result("whole", {"a": 0.7, "b": 0.0})
    better = validation._better([sliding, whole])
    assert list(better.windows) == ["whole", "sliding"] and better.windows["whole"] == 0.7 and better.score == 0.35
    assert better.text.endswith("by --window whole, the better in mean Dice over a: whole 0.700, sliding 0.600")
    equal = validation._better([sliding, result("whole", {"a": 0.6, "b": 0.6})])
    assert "by --window sliding, as good as the other in mean Dice over a: sliding 0.600" in equal.text
    nothing = validation._better([sliding, result("whole", {"a": None, "b": 0.5})])
    assert nothing.text.endswith(
        "sliding, the better in mean Dice, each over other classes: sliding 0.600, whole 0.500"
    )


def temperature(mesh, flags: list[str], folder: Path) -> float:
    """Returns what a fresh network's validation fits, whose logits are tripled."""
    trainer = trainer_of(config_of([*flags, *SMALLER], "--seqpar", str(mesh.seq.size)), mesh, folder)
    for values in trainer.net.decoder.classes.state_dict().values():
        values *= 3
    result = trainer.validation.run(trainer.net, Journal(folder, False, 0), NoStop())
    return result.temperatures["sliding"]


def test_the_temperature_does_not_depend_on_the_ranks(flags, tmp_path, ranks, alone, monkeypatch):
    monkeypatch.setattr(logits_to_labels, "MOST_VOXELS", 110)  # so that most voxels of a case are left out
    expected = temperature(alone, flags, tmp_path)
    assert min(TEMPERATURES) < expected < max(TEMPERATURES)
    for world, seqpar in ((2, 1), (2, 2), (4, 2)):
        found = ranks(world, temperature, flags, tmp_path, seqpar=seqpar)
        assert found == pytest.approx([expected] * world, rel=1e-5)


@pytest.mark.parametrize("regions", [(), ((1, 2), (2,))])
def test_the_temperature_is_the_one_of_least_loss(regions):
    """Labels are drawn by the probabilities of logits that were then multiplied by 2.5, and some are ignored."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(2 if regions else 3, 6000)
    shares = torch.cat([1 - logits[:1].sigmoid(), logits[:1].sigmoid()]) if regions else logits.softmax(0)
    truth = torch.multinomial(shares.T, 1)[:, 0]
    truth = truth + (truth * torch.rand(6000) < truth * logits[-1].sigmoid()).long() * truth if regions else truth
    ignored = torch.rand(6000) < 0.3
    given = torch.where(ignored, 0, truth)

    def loss(heat: float) -> float:
        scaled, kept = 2.5 * logits[:, ~ignored].double() / heat, given[~ignored]
        if regions:
            inside = torch.stack([sum(kept == n for n in region) for region in regions]).double()
            return float(F.binary_cross_entropy_with_logits(scaled, inside, reduction="sum"))
        return float(F.cross_entropy(scaled.T, kept, reduction="sum"))

    sums = negative_likelihoods(2.5 * logits, torch.where(ignored, 3, truth), regions, 3)
    assert sums.tolist() == pytest.approx([loss(heat) for heat in TEMPERATURES], rel=1e-5)
    fine = [2 ** (step / 200) for step in range(-100, 500)]
    assert best_temperature(sums.tolist()) == pytest.approx(min(fine, key=loss), rel=0.005)
    assert regions or best_temperature(sums.tolist()) == pytest.approx(2.5, rel=0.1)


def test_a_temperature_needs_voxels_and_finite_logits_and_has_ends():
    assert best_temperature([0.0] * len(TEMPERATURES)) is None
    assert best_temperature([math.nan] * len(TEMPERATURES)) is None
    assert best_temperature(list(map(float, range(1, len(TEMPERATURES) + 1)))) == 0.25
    assert best_temperature(list(map(float, range(len(TEMPERATURES), 0, -1)))) == 8


def test_a_run_records_the_better_and_predict_follows_it(flags, tmp_path, capsys):
    run, images = tmp_path / "run", write_images(tmp_path / "images")
    trained(2, [*flags, *SMALLER, "--seqpar", "2", "--val-window", "both", "--epochs", "2"], run)
    record = json.loads((run / "window.json").read_text())
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "val"]
    best = max(rows, key=lambda row: (max(row["windows"].values()), -row["loss"]))
    assert (record["window"], record["dice"], record["step"]) == (best["window"], best["windows"], best["step"])
    other = f"validation-{[*rows[-1]['windows']][1]}"
    assert {path.parent.name for path in run.glob("validation*/summary.json")} == {"validation", other}
    assert record["whole_grid"] == [3, 2, 2], "of the largest held-out volume, in patches of 4"
    assert set(record["temperatures"]) == {"sliding", "whole"}
    own = ("--uncertainty", "--temperature", "run")
    for window, value in record["temperatures"].items():
        predicted(run, images, tmp_path / f"own-{window}", *own, "--window", window)
        settings = json.loads((tmp_path / f"own-{window}" / "prediction.json").read_text())["settings"]
        assert settings["temperature"] == value
    capsys.readouterr()
    for window in ("whole", "sliding"):
        write_window(run, {window: 0.9, "sliding": 0.5, "whole": 0.5} | {window: 0.9}, 2, [3, 5, 3])
        assert predicted(run, images, tmp_path / window) == window
        assert Predictor.from_run(run).settings.window == window
        text = capsys.readouterr()
        assert (
            f"--window {window}; mean Dice in the run's validation, over classes scored both ways: {window} 0.900"
            in text.out
        )
        assert "warning" not in text.err, "it was measured"
        if window == "whole":
            with pytest.raises(ValueError, match="--overlap: a whole pass, which .* found better than sliding windows"):
                act(tmp_path, run, "--overlap", "0.2", out="refused")
    assert tree(tmp_path / "whole") != tree(tmp_path / "sliding")
    assert predicted(run, images, tmp_path / "named", "--window", "whole") == "whole"
    assert "warning: --window whole is the worse of both" in capsys.readouterr().err
    write_window(run, {"whole": 0.9, "sliding": 0.5}, 2, [2, 2, 2])
    assert predicted(run, images, tmp_path / "larger") == "whole"
    warned = capsys.readouterr().err
    assert "2x2x2, and validation measured passes of up to 2x2x2: more than 2 times as many" in warned
    assert "the worse of both" not in warned
    (run / "window.json").write_text("{")
    with pytest.raises(ValueError, match="window.json: is damaged .*: remove it"):
        act(tmp_path, run, out="damaged")
    (run / "window.json").unlink()
    assert predicted(run, images, tmp_path / "none") == "sliding"


def test_a_whole_pass_far_beyond_the_trained_tile_is_warned_of_with_both_sizes(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    write_images(tmp_path / "images")
    assert act(tmp_path, run, "--window", "whole") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [line.split()[1] for line in warnings] == ["c_002:"], "the others are cropped to less"
    assert "5x2x3 tokens in one pass, but the network was trained on 2x2x2: more than 2 times as many" in warnings[0]
    assert "--window sliding" in warnings[0] and "--val-window both" in warnings[0]
    net, beyond = Predictor.from_run(run).nets[0], int(BEYOND) * 8
    assert not warn_beyond_training(net, (beyond, beyond, beyond)) and warn_beyond_training(net, (8, 8, beyond + 1))
    for grid, warns in (([], True), ([2, 2, 2], True), ([3, 2, 2], False)):
        write_window(run, {"whole": 0.9}, 1, grid)
        assert act(tmp_path, run) == 0 and ("warning: c_002" in capsys.readouterr().err) == warns, grid


def test_a_run_that_no_longer_measures_whole_passes_keeps_no_scores_of_them(flags, tmp_path):
    run, out = ["--val-window", "both", "--epochs", "1"], tmp_path / "run"
    trained(1, [*flags, *SMALLER, *run], out)
    (other,) = out.glob("validation-*")
    assert (other / "summary.json").exists()
    (other / ".c_000.nii.gz.another.host.7.tmp").touch()
    os.utime(other / ".c_000.nii.gz.another.host.7.tmp", (0, 0))
    trained(1, ["--resume", "--val-window", "sliding", "--epochs", "2"], out)
    assert not other.exists() and (out / "validation" / "summary.json").exists()


def test_the_better_window_is_not_written_into_a_folder_that_was_taken_over(flags, tmp_path, alone, monkeypatch):
    lock = RunLock(tmp_path)
    lock.take()
    trainer = trainer_of(config_of([*flags, *SMALLER], "--val-every", "1"), alone, tmp_path)
    trainer.journal = Journal(tmp_path, False, 0)
    trainer.after_step.lock = lock
    monkeypatch.setattr(trainer.after_step, "save", lambda *_: RunLock(tmp_path).take(take_over=True) or True)
    trainer.progress.step = trainer.config.iterations
    with pytest.raises(TakenOver):
        trainer._end_epoch(NoStop())
    assert not (tmp_path / "window.json").exists()


def test_the_voxels_of_a_temperature_are_of_all_planes_of_a_case():
    assert step_between(64**3, 64**2) == 1
    for shape in ((256, 512, 512), (300, 300, 301), (97, 510, 300)):
        step, (rows, deep, high) = step_between(math.prod(shape), shape[1] * shape[2]), shape
        chosen = range(0, rows * deep * high, step)
        assert 2**20 / 2 < len(chosen) <= 2**20
        assert {voxel % high for voxel in chosen[: 4 * high]} == set(range(high))
