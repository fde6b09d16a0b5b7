"""Settings of a resumed run: what it keeps, what may change, and its tiles per step."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from seqpar.data.errors import DataError
from seqpar.parallel.launcher import Launcher
from seqpar.planner.batch_size import keep_global_batch
from seqpar.planner.feasibility import check_feasible
from seqpar.runs.run_folder import describe_run, read_config
from seqpar.runs.run_status import append_start
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.settings.presets import PRESETS
from seqpar.settings.rules import refuse_settings_without_effect, settings_on_resume
from seqpar.training import run_request
from seqpar.training.run import describe_finished
from seqpar.training.setup import first_lines
from tests.support.configs import config_of
from tests.support.folders import nnunet, write_json
from tests.support.pages import ROOT


def test_a_run_that_goes_on_keeps_its_network_and_takes_new_wishes(flags):
    saved = config_of(flags)
    _, now, names = parse(["--out", "x", "--resume", "--epochs", "9", "--workers", "3"], "laptop")
    config = settings_on_resume(saved, now, names - {"resume"})
    assert (config.epochs, config.workers, config.depth, config.resume) == (9, 3, saved.depth, True)
    _, now, names = parse(["--out", "x", "--resume", "--depth", "7"], "laptop")
    with pytest.raises(ValueError, match="--depth cannot change .* --weights x/model.safetensors"):
        settings_on_resume(saved, now, names)
    _, now, names = parse(["--out", "x", "--resume", "--tile", "8"], "laptop")
    with pytest.raises(ValueError, match=r"--tile cannot change when .*began with --tile 16 16 16\): positions"):
        settings_on_resume(saved, now, names)


def test_a_fine_tuned_run_goes_on_with_the_line_that_began_it_and_without_the_file(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({"weight": torch.zeros(1)}, tmp_path / "w.safetensors")
    line = [*flags, "--weights", "w.safetensors"]
    saved = config_of(line)
    check_feasible(saved)
    monkeypatch.chdir("/")
    (tmp_path / "w.safetensors").unlink()
    for weights, fits in (("w.safetensors", False), (str(tmp_path / "w.safetensors"), True)):
        _, now, names = parse([*flags, "--weights", weights, "--resume"], "debug")
        if fits:
            config = settings_on_resume(saved, now, names - {"resume"})
            refuse_settings_without_effect(config, names)
            check_feasible(config)
        else:
            with pytest.raises(ValueError, match="--weights /w.safetensors would do nothing: .* began from /"):
                settings_on_resume(saved, now, names - {"resume"})
    with pytest.raises(ValueError, match="began without: remove one of the two"):
        settings_on_resume(config_of(flags), now, names - {"resume"})


def test_another_preset_is_refused_in_a_run_that_goes_on_and_its_flags_are_judged_by_the_run(tmp_path):
    def order(line: str):
        return run_request.read_request([*line.split(), "--out", str(tmp_path)], Launcher("alone"))

    began = order("--preset paper --depth 12 --batch 2")
    write_json(tmp_path / "config.json", describe_run(began.config, began.preset, {}, {"data": 1}))
    assert order("--preset paper --depth 12 --resume").config.depth == 12
    with pytest.raises(ValueError, match="--preset debug: the run in .* continues as it began, paper"):
        order("--preset debug --resume")
    with pytest.raises(ValueError, match="--skips would do nothing: --decoder plain"):
        order("--skips monai --resume")  # the default preset here has another decoder


def test_make_train_again_continues_what_was_interrupted_and_else_takes_the_next_folder(tmp_path, monkeypatch):
    (line,) = re.findall(r"launch/train\.py (.*)", (ROOT / "Makefile").read_text())
    monkeypatch.chdir(tmp_path)

    def order(*more: str) -> tuple[str, bool, str]:
        asked = run_request.read_request([*line.split(), "--preset", "debug", *more], Launcher("alone"))
        assert not asked.config.again, "a saved run would take another folder again"
        run_request.refuse_other_run(asked.config)
        return asked.config.out, asked.config.resume, first_lines(asked, Launcher("alone")).splitlines()[0]

    def leave(out: str, state: str, code: int = 0) -> None:
        config = replace(PRESETS["debug"](), batch=2, out=out)
        write_json(tmp_path / out / "config.json", describe_run(config, "debug", {}, {"data": 1}))
        write_json(tmp_path / out / "status.json", {"state": state, "code": code})

    assert order()[:2] == ("runs/phantom", False)
    for state, code in (("running", 0), ("preempted", 75), ("failed", 1)):
        leave("runs/phantom", state, code)
        assert order()[:2] == ("runs/phantom", True)
    leave("runs/phantom", "finished")
    out, resumes, first = order()
    assert (out, resumes) == ("runs/phantom-2", False)
    assert first == "--again: runs/phantom holds a run that has ended, so this one goes into runs/phantom-2"
    leave("runs/phantom-2", "failed", 5)
    assert order()[:2] == ("runs/phantom-3", False)
    leave("runs/phantom-2", "preempted", 75)
    assert order()[:2] == ("runs/phantom-2", True)
    with pytest.raises(ValueError, match="--again needs no --resume"):
        order("--resume")
    with pytest.raises(ValueError, match="--again needs --out"):
        run_request.read_request(["--again"], Launcher("alone"))


def test_a_presets_warm_up_is_shortened_where_it_leaves_no_epoch_and_ones_own_is_refused(tmp_path):
    def order(*flags: str):
        return run_request.read_request(["--preset", "laptop", "--dry-run", *flags], Launcher("alone"))

    assert PRESETS["laptop"]().warmup == 1 == order("--epochs", "2").config.warmup
    short = order("--epochs", "1")
    assert short.config.warmup == 0 and short.config.epochs == 1
    cubes = first_lines(order("--network", "nnunet-plain"), Launcher("alone"))
    assert " cubes of " in cubes and "cube: the smallest block that a rank can have" in " ".join(cubes.split())
    assert first_lines(short, Launcher("alone")).splitlines()[0] == (
        "--warmup 0 instead of the preset's 1: the run has 1 epoch"
    )
    assert "warmup" not in order("--epochs", "2").choices
    with pytest.raises(ValueError, match="--warmup 1 leaves no epoch of 1: use --warmup 0"):
        order("--epochs", "1", "--warmup", "1")
    with pytest.raises(ValueError, match="--epochs 0: it must be at least 1"):
        order("--epochs", "0")


def test_what_a_resumed_run_changes_is_announced_and_kept(tmp_path):
    config = replace(PRESETS["debug"](), batch=2, out=str(tmp_path))
    started = append_start([], 0, 1, {})
    write_json(tmp_path / "config.json", describe_run(config, "debug", {}, {"data": 1}, started))
    line = ["--resume", "--take-over", "--out", f"{tmp_path}/.", "--lr", "0.01", "--betas", "0.8", "0.9", "--compile"]
    order = run_request.read_request(line, Launcher("alone"))
    assert order.changes == {"lr": [2e-3, 0.01], "betas": [(), (0.8, 0.9)], "compile": [False, True]}
    announced = first_lines(order, Launcher("alone")).splitlines()[-1]
    assert announced == (
        "changed since this run was last started: --lr 0.002 -> 0.01, --betas unset -> 0.8 0.9, --compile no -> yes"
    )
    history = append_start(read_config(tmp_path)["history"], 30, 4, order.changes)
    assert [(start["step"], start["ranks"]) for start in history] == [(0, 1), (30, 4)]
    same = run_request.read_request(["--resume", "--out", str(tmp_path), "--lr", "0.002"], Launcher("alone"))
    assert same.changes == {} and "changed" not in first_lines(same, Launcher("alone"))


def test_a_damaged_value_of_a_resumed_run_can_be_replaced_by_a_flag_and_is_else_blamed_on_the_file(tmp_path):
    config = replace(PRESETS["debug"](), batch=2, out=str(tmp_path))
    content = describe_run(config, "debug", {}, {"data": 1})
    content["config"]["val_overlap"] = 2.0
    write_json(tmp_path / "config.json", content)

    def order(*more: str) -> Config:
        return run_request.read_request(["--resume", "--out", str(tmp_path), *more], Launcher("alone")).config

    with pytest.raises(DataError, match=r"config.json: cannot be used \(val_overlap 2.0: it must be in \[0, 1\)\)"):
        order()
    assert order("--val-overlap", "0.25").val_overlap == 0.25
    with pytest.raises(ValueError, match=r"^--val-overlap 3.0: it must be in \[0, 1\)$"):
        order("--val-overlap", "3")


def test_a_run_goes_on_from_another_folder_with_the_data_that_it_began_with(tmp_path, monkeypatch):
    for folder in ("here", "elsewhere"):  # both have a D
        nnunet(tmp_path / folder / "D", 2)
    nnunet(tmp_path / "raw" / "Dataset007_Liver", 2)
    (tmp_path / "here" / "link").symlink_to("../raw")
    monkeypatch.setenv("nnUNet_raw", str(tmp_path / "raw"))
    monkeypatch.chdir(tmp_path / "here")
    began = replace(PRESETS["debug"](), batch=2, data="D", cache="cache")
    content = describe_run(began, "debug", {}, {"data": 1})
    older = {**content, "config": {**content["config"], "data": "D", "cache": "cache"}}

    def order(*more: str):
        return run_request.read_request(["--resume", "--out", str(tmp_path / "run"), *more], Launcher("alone"))

    for kept, folder in ((older, "here"), (content, "here"), (content, "elsewhere")):
        write_json(tmp_path / "run" / "config.json", kept)
        monkeypatch.chdir(tmp_path / folder)
        resumed = order()
        assert resumed.changes == {} and os.path.samefile(resumed.config.data, tmp_path / "here" / "D")
        assert describe_run(resumed.config, "debug", {}, {})["config"] == {
            **content["config"], "resume": True, "out": str(tmp_path / "run")
        }  # fmt: skip
    assert list(order("--data", "D").changes) == ["data"]
    monkeypatch.chdir(tmp_path / "here")
    assert order("--data", "D", "--cache", "cache").changes == {}
    monkeypatch.chdir(tmp_path / "elsewhere")
    named = {"7": "Dataset007_Liver", "Dataset007_Liver": "Dataset007_Liver", "../here/link/../here/D": "../here/D"}
    for typed, place in named.items():
        data = describe_run(replace(began, data=typed), "", {}, {})["config"]["data"]
        assert os.path.isabs(data) and os.path.samefile(data, tmp_path / "raw" / place), typed


def test_a_run_that_is_over_is_left_alone_and_goes_on_with_more_epochs_or_patience(tmp_path):
    config = replace(PRESETS["debug"](), batch=2, epochs=3, iterations=2, patience=1, out=str(tmp_path))
    write_json(tmp_path / "config.json", describe_run(config, "debug", {}, {"data": 1}))
    (tmp_path / "model.safetensors").touch()

    def said(step: int, *more: str, state: str = "finished", why: str = "") -> str:
        write_json(tmp_path / "status.json", {"state": state, "step": step, "steps": 6, "why": why})
        line = ["--resume", "--out", str(tmp_path), *more]
        return describe_finished(run_request.read_request(line, Launcher("alone")))

    assert said(6).startswith(f"{tmp_path} has finished at step 6 of 6: nothing is left to do")
    assert "step 4 of 6 (no better Dice in 1 validations): nothing" in said(4, why="no better Dice in 1 validations")
    for more in ("--patience 2", "--epochs 4", "--data elsewhere"):
        assert not said(4, *more.split()), "it may go on, or be refused"
    assert said(6, "--epochs", "3"), "as a scheduler repeats the line"
    assert not said(6, state="preempted") and not said(4, state="running")
    (tmp_path / "model.safetensors").unlink()
    assert not said(6), "what is lacking is written"


@pytest.mark.parametrize(("groups", "expected"), [(1, (2, 4)), (2, (2, 2)), (4, (2, 1)), (8, (1, 1))])
def test_the_global_batch_is_kept_on_other_ranks(groups, expected):
    config = keep_global_batch(replace(PRESETS["debug"](), batch=2, accumulate=1), 8, groups)
    assert (config.batch, config.accumulate) == expected


WISHES = {"--batch 1": (1, 8), "--batch 8": (8, 1), "--accumulate 4": (2, 4), "--batch 0": (2, 4)}


@pytest.mark.parametrize("wish", WISHES)
def test_a_run_goes_on_with_another_batch_or_accumulation_that_makes_its_tiles_a_step(tmp_path, wish):
    config = replace(PRESETS["debug"](), batch=2, out=str(tmp_path))
    write_json(tmp_path / "config.json", describe_run(config, "debug", {}, {"data": 4}))
    order = run_request.read_request(["--resume", "--out", str(tmp_path), *wish.split()], Launcher("alone"))
    assert (order.config.batch, order.config.accumulate) == WISHES[wish]
    line = first_lines(order, Launcher("alone"))
    assert f"{WISHES[wish][0]} tile" in line and (f"{WISHES[wish][1]} times a step" in line) == (WISHES[wish][1] > 1)


def test_one_that_does_not_is_refused_with_those_that_do():
    config = replace(PRESETS["debug"](), batch=2)
    with pytest.raises(ValueError, match=r"--batch 3: the run has 4 .*: use --batch 1 --accumulate 4, --batch 2 --acc"):
        keep_global_batch(config, 8, 2, {"batch": 3})
    with pytest.raises(ValueError, match="--batch 2 --accumulate 4: the run has 4 tiles"):
        keep_global_batch(config, 8, 2, {"batch": 2, "accumulate": 4})


TIED = {"--batch-dice": {"batch_dice": True}, "batch norm": {"network": "unet-hou", "batch_dice": False}}


@pytest.mark.parametrize("what", TIED)
def test_tiles_that_are_computed_together_stay_together_on_other_ranks(what):
    config = replace(PRESETS["debug"](), batch=2, accumulate=3, **TIED[what])
    for groups, batch in ((1, 4), (2, 2), (4, 1)):
        kept = keep_global_batch(config, 12, groups)
        assert (kept.batch, kept.accumulate) == (batch, 3)
        assert keep_global_batch(config, 12, groups, {"batch": batch, "accumulate": 3}) == kept
    begun = f"with {what} results depend on which tiles are computed together, 4 tiles in this run: "
    with pytest.raises(ValueError, match=f"^--batch 1: {begun}keep --accumulate 3 .here with --batch 2., or remove"):
        keep_global_batch(config, 12, 2, {"batch": 1})
    with pytest.raises(ValueError, match=f"^{begun}3 sequence groups cannot .*: resume with .* groups: 1, 2, 4$"):
        keep_global_batch(config, 12, 3)
    with pytest.raises(ValueError, match="2 sequence groups, each of 4 ranks with --mode swap, .* of groups: 1$"):
        keep_global_batch(replace(config, mode="swap", seqpar=4), 12, 2)
    with pytest.raises(ValueError, match="resume with --mode halo$"):
        keep_global_batch(replace(config, mode="swap", seqpar=8), 12, 2)
    free = replace(config, batch_dice=False, network="vit")
    assert keep_global_batch(free, 12, 1).accumulate == 6, "the control: other networks are split otherwise"


def test_a_global_batch_that_cannot_be_kept_is_refused():
    with pytest.raises(ValueError, match="one of these numbers of groups: 1, 2, 4"):
        keep_global_batch(PRESETS["debug"](), 4, 3)


@pytest.mark.parametrize("name", ["metrics.jsonl", "validation", "checkpoints/step-00000004"])
def test_what_is_left_of_a_run_without_its_settings_is_not_overwritten(name: str, tmp_path: Path) -> None:
    for path in ("train.log", "status.json"):  # of a start that failed
        (tmp_path / path).touch()
    (tmp_path / "checkpoints").mkdir()
    run_request.refuse_other_run(Config(out=str(tmp_path)))
    (tmp_path / name).mkdir()
    (tmp_path / name / ".left.tmp").touch()
    run_request.refuse_other_run(Config(out=str(tmp_path)))  # nothing that a run has finished
    (tmp_path / name / "written").touch()
    with pytest.raises(ValueError, match="which would be lost, and no config.json: restore that of the run"):
        run_request.refuse_other_run(Config(out=str(tmp_path)))
