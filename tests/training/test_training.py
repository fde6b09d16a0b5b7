"""Training: equal losses on any ranks, exact resume on others, and what a run leaves for people."""

import json
import re
import shutil
import signal
import sys
import time

import pytest
import torch

from seqpar.cluster.stop_request import StopRequest
from seqpar.data.errors import DataError
from seqpar.data.files import write_json
from seqpar.parallel.launcher import Launcher
from seqpar.runs.journal import read_metrics
from seqpar.runs.run_folder import read_config
from seqpar.runs.run_status import edited_settings, warn_of_weights
from seqpar.runs.trained_run import find_weights, read_run
from seqpar.training import after_step
from seqpar.training.run_request import read_request
from seqpar.weights.weight_files import read_weights
from tests.support.configs import NoStop, config_of, trainer_of
from tests.support.training_runs import Launch, at, farthest, losses, signalled, status, trained

SPREADS = {
    "alone": (1, "--batch 4"),
    "accumulated": (1, "--batch 1 --accumulate 4"),
    "seq 2": (2, "--seqpar 2 --batch 4"),
    "seq 4, ordered": (4, "--seqpar 4 --batch 2 --accumulate 2 --split ordered"),
    "data 2 x seq 2": (4, "--seqpar 2 --batch 2"),
    "data 2, workers": (2, "--batch 1 --accumulate 2 --workers 1"),
}


@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-9), ("fp32", 1e-3)])
def test_loss_per_step_is_the_same_however_the_tiles_are_spread(flags, tmp_path, precision, bound):
    steps = 8 if precision == "fp64" else 6
    run = [*flags, *f"--precision {precision} --iterations {steps} --epochs 1 --depth 2 --dropout 0.1".split()]
    run += ["--drop-path", "0.1", "--optimizer", "adamw", "--weight-decay", "0.05", "--clip", "1"]
    losses_of = {}
    for name, (world, more) in SPREADS.items():
        if precision == "fp64" or name in ("alone", "data 2 x seq 2"):
            trained(world, [*run, *more.split()], tmp_path / name)
            losses_of[name] = losses(tmp_path / name)
            assert len(losses_of[name]) == steps
            assert farthest(losses_of[name], losses_of["alone"]) <= bound, name
    if precision == "fp64":
        trained(1, [*run, "--batch", "4", "--seed", "1"], tmp_path / "other seed")
        assert farthest(losses(tmp_path / "other seed"), losses_of["alone"]) > 1e-3, "the comparison can fail"


def test_a_run_goes_on_with_other_ranks_and_workers(flags, tmp_path):
    run = [*flags, "--precision", "fp64", "--batch", "4", "--dropout", "0.1"]
    left = tmp_path / "left"
    hook = at(after_step.AfterStep, "decide", 1, signalled(signal.SIGUSR1), call=3)
    trained(2, [*run, "--seqpar", "2"], left, expect=75, hook=hook)
    trained(1, run, tmp_path / "whole")
    for world, more in (1, "--seqpar 1 --workers 1 --accumulate 2"), (4, "--seqpar 2"), (3, "--seqpar 3"):
        out = tmp_path / f"on {world}"
        shutil.copytree(left, out)
        trained(world, ["--resume", "--split", "ordered", *more.split()], out)
        assert farthest(losses(out), losses(tmp_path / "whole")) <= 1e-9
    began, went_on = read_config(tmp_path / "on 1")["history"]
    assert (began["step"], began["ranks"], began["changed"]) == (0, 2, {})
    changed = {"seqpar": [2, 1], "split": ["spatial", "ordered"], "workers": [0, 1]}
    changed |= {"batch": [4, 2], "accumulate": [1, 2]}
    assert (went_on["step"], went_on["ranks"], went_on["changed"]) == (status(left)["step"], 1, changed)
    with Launch(3, ["--resume", "--seqpar", "1"], left) as refused:
        assert set(refused.wait()) == {2}
    assert "4 tiles a step" in refused.said() and "1, 2, 4" in refused.said()


def test_settings_that_somebody_edited_in_a_runs_config_are_announced_and_recorded_or_refused(flags, tmp_path, capfd):
    trained(1, [*flags, "--epochs", "1"], tmp_path)
    written = read_config(tmp_path)

    def edit(**settings: object) -> None:
        write_json(tmp_path / "config.json", {**written, "config": {**written["config"], **settings}})

    edit(lr=0.5)
    announced = "changed since this run was last started: --epochs 1 -> 2, --lr 0.01 -> 0.5"
    assert announced in trained(1, ["--resume", "--epochs", "2"], tmp_path).said()
    assert read_config(tmp_path)["history"][1]["changed"] == {"lr": [0.01, 0.5], "epochs": [1, 2]}
    assert "changed since" not in trained(1, ["--resume"], tmp_path).said(), "the last checkpoint has it"
    warn_of_weights(tmp_path)
    assert "differs" not in capfd.readouterr().err
    once = read_config(tmp_path)
    start = {**once["history"][-1], "changed": {"lr": [0.5, 0.3]}}  # announced, and killed before it was saved
    killed = {**once, "history": [*once["history"], start], "config": {**once["config"], "lr": 0.3}}
    assert edited_settings(tmp_path, killed) == {}
    twice = {**killed, "config": {**killed["config"], "lr": 0.9}}
    assert edited_settings(tmp_path, twice) == {"lr": [0.3, 0.9]}
    write_json(tmp_path / "config.json", twice)
    for typed, changes in (("0.7", {"lr": [0.3, 0.7]}), ("0.3", {})):
        line = ["--resume", "--out", str(tmp_path), "--lr", typed]
        assert read_request(line, Launcher("alone")).changes == changes
    write_json(tmp_path / "config.json", {**once, "config": {**once["config"], "val_mirror": "W"}})
    warn_of_weights(tmp_path)
    assert (
        f"{tmp_path}/config.json differs from that of the last checkpoint: --val-mirror none -> W."
        in capfd.readouterr().err
    )
    edit(optimizer="sgd")
    told = f"{tmp_path}/config.json: has --optimizer sgd, and the run's last checkpoint --optimizer adam, which cannot"
    assert told in trained(1, ["--resume", "--epochs", "3"], tmp_path, expect=3).said()


def test_checkpoints_of_another_run_are_refused(flags, tmp_path):
    trained(1, [*flags, "--epochs", "1"], tmp_path)
    written = read_config(tmp_path)
    began = {**written["history"][0], "time": "2020-01-01 00:00:00"}
    write_json(tmp_path / "config.json", {**written, "history": [began]})
    said = trained(1, ["--resume", "--epochs", "2"], tmp_path, expect=3).said()
    of_other = f"{tmp_path}/checkpoints/step-[0-9]+: belongs to another run than config.json describes"
    assert re.search(of_other, said)
    with pytest.raises(DataError, match=of_other):
        find_weights(read_run(tmp_path))


FIVE_LINES = """

import seqpar, torch
net = seqpar.load_run({run!r}, {which!r})
with torch.no_grad():
    logits = net(torch.zeros(1, 1, 16, 16, 16))
assert logits.shape == (1, 2, 16, 16, 16) and not torch.distributed.is_initialized()
"""


def test_five_lines_load_a_run_of_many_ranks_without_a_process_group(undisturbed):
    run = undisturbed(2, "--seqpar", "2")
    for which in ("best", "latest", str(run / "model.safetensors")):
        exec(FIVE_LINES.format(run=str(run), which=which), names := {})
    state = names["net"].state_dict()
    kept = read_weights(run / "model.safetensors")
    assert state and all(torch.equal(state[name], tensor) for name, tensor in kept.items())


KEYS = "step epoch loss dice_loss ce_loss lr grad_norm tokens_per_s seconds data_wait_s peak_mem_mb"


def test_what_people_watch(flags, tmp_path):
    out = tmp_path / "run"
    hook = at(StopRequest, "close", 1, lambda: time.sleep(2))  # the store would be gone, as on a busy machine
    run = trained(2, [*flags, "--seqpar", "2"], out, pictures=True, hook=hook)
    rows = read_metrics(out / "metrics.jsonl")
    train_rows, val_rows = ([row for row in rows if row["kind"] == kind] for kind in ("train", "val"))
    assert len(train_rows) == 6 and all(set(KEYS.split()) <= row.keys() for row in train_rows)
    assert all(row["loss"] == pytest.approx(row["dice_loss"] + row["ce_loss"]) for row in train_rows)
    assert [row["step"] for row in val_rows] == [2, 4, 6] and val_rows[0]["dice"].keys() == {"tumour"}
    assert all(0 < row["seconds"] < 60 for row in rows), "what the report adds up"
    layout = json.loads((out / "config.json").read_text())["layout"]
    assert len(layout["devices"]) == 2 and all(layout["devices"])
    weights = sum(tensor.numel() for tensor in read_weights(out / "model.safetensors").values())
    assert sum(layout["parameters"].values()) == weights
    for name in ("progress.png", "validation.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    said = run.said(0).splitlines()
    assert said[0].startswith("seqpar: preset debug (from the command line); 2 ranks = data 1 x seq 2, ")
    assert said[0].endswith("x seq 2, started with RANK and WORLD_SIZE") and said[1].startswith("  tile ")
    assert sum(line.startswith("epoch ") for line in said) == 3, "a line per epoch in a log"
    assert [line.split("  ")[1] for line in said if line.startswith("epoch ")][-1] == "0:00 left"
    data = next(number for number, line in enumerate(said) if line.startswith("data: Dataset001_Tiny (nnU-Net raw)"))
    assert "5 cases: 4 to train on, 1 held out (fold 0)" in said[data]
    assert re.fullmatch(r"  label tumour  in 5 of 5 cases, [\d.]+% of the voxels", said[data + 3])
    assert (
        sum("soft Dice on training tiles" in line for line in said)
        == sum("global: over the voxels" in line for line in said)
        == 1
    )
    assert any(str(out / "model.safetensors") in line for line in said)
    assert said[-2].startswith("next: python ") and f"predict.py {out} -i IMAGES -o PREDICTIONS" in said[-2]
    assert f"report.py {out}" in said[-1]
    logged = (out / "train.log").read_text().splitlines()
    assert [line[20:] for line in logged[1:]] == said, "the log file has what was printed, with the time before it"
    assert run.said(1) == "", "only the first rank speaks"
    (warning,) = [line for line in run.said(0).splitlines() if "arning" in line]
    assert warning.startswith("warning: At the best validation, the mean Dice of tumour is 0.000: ")


class _Terminal:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_a_terminal_sees_one_line_an_epoch_that_changes(tmp_path, monkeypatch):
    from seqpar.runs.journal import Journal

    monkeypatch.setattr(sys, "stdout", terminal := _Terminal())
    journal = Journal(tmp_path, True, 0)
    for done in range(3):
        journal.progress([f"{done} of 3" + "x" * 500, "1:02:03 left", "y" * 500], last=done == 2)
    journal.say("next")
    assert terminal.text.count("\r\x1b[K") == 3 and terminal.text.count("\n") == 2
    lines = terminal.text.split("\r\x1b[K")
    assert max(map(len, lines)) < 90, "it does not wrap"
    assert all("x  1:02:03 left" in line for line in lines[1:]), "the time that is left is never cut"


def test_validation_shows_how_far_each_case_is(flags, tmp_path, alone, monkeypatch):
    trainer = trainer_of(config_of(flags, "--fold", "all", "--val-cases", "2"), alone, tmp_path)
    shown = []
    monkeypatch.setattr(trainer.journal, "progress", lambda fields, last=False: shown.append(fields))
    trainer.validation.run(trainer.net, trainer.journal, NoStop())
    bars = "·" * 12, "█" * 12  # one window holds a case here
    wanted = [
        f"validating case {number}/2 {bar} {share}% of it" for number in (1, 2) for bar, share in zip(bars, (0, 100))
    ]
    assert [fields[0] for fields in shown] == wanted
    assert [fields[1] for fields in shown][::3] == ["? left", "0:00 left"]
