"""Windows or the whole volume: validation measures both, the run records the better, and predict takes it."""

import json
from pathlib import Path

import pytest

from seqpar.launch import predict
from seqpar.launch.inference.predictor import Predictor
from seqpar.launch.inference.sliding_window import BEYOND, beyond_training
from seqpar.launch.runs.journal import Journal, read_metrics
from seqpar.launch.runs.run_folder import write_window
from tests.support.configs import NoStop, config_of, trainer_of
from tests.support.folders import tree
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
    assert f"--window {better}" in both.text and all(f"{dice:.3f}" in both.text for dice in scores.values())


def test_a_run_records_the_better_and_predict_follows_it(flags, tmp_path, capsys):
    run, images = tmp_path / "run", write_images(tmp_path / "images")
    trained(2, [*flags, *SMALLER, "--seqpar", "2", "--val-window", "both", "--epochs", "2"], run)
    record = json.loads((run / "window.json").read_text())
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "val"]
    best = max(rows, key=lambda row: max(row["windows"].values()))
    assert (record["window"], record["dice"], record["step"]) == (best["window"], best["windows"], best["step"])
    assert {path.parent.name for path in run.glob("validation*/summary.json")} == {"validation", "validation-whole"}
    for window in ("whole", "sliding"):
        write_window(run, {window: 0.9, "sliding": 0.5, "whole": 0.5} | {window: 0.9}, 2)
        assert predicted(run, images, tmp_path / window) == window
        assert Predictor.from_run(run).settings.window == window
        text = capsys.readouterr()
        assert f"--window {window}; mean Dice in the run's validation: {window} 0.900" in text.out
        assert "warning" not in text.err, "it was measured"
        if window == "whole":
            with pytest.raises(ValueError, match="--overlap: a whole pass, which .* found better than sliding windows"):
                act(tmp_path, run, "--overlap", "0.2", out="refused")
    assert tree(tmp_path / "whole") != tree(tmp_path / "sliding")
    assert predicted(run, images, tmp_path / "named", "--window", "whole") == "whole"
    (run / "window.json").write_text("{")
    with pytest.raises(ValueError, match="window.json is damaged .*: remove it"):
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
    assert not beyond_training(net, (beyond, beyond, beyond)) and beyond_training(net, (8, 8, beyond + 1))
    write_window(run, {"whole": 0.9}, 1)
    assert act(tmp_path, run) == 0 and "warning" not in capsys.readouterr().err
