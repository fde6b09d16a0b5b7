"""``--patch W D H`` in a run: the same on one rank and on two, resumed, predicted; earlier configs have a number."""

import json
from dataclasses import asdict

import pytest

from seqpar.cli import plan, predict
from seqpar.data.volumes import read_volume
from seqpar.models.build import family_of
from seqpar.planner.feasibility import check_feasible
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from tests.support.training_runs import farthest, losses, trained

PATCHES = ["--patch", "8", "4", "2", "--decoder", "unetr", "--mode", "halo", "--precision", "fp64", "--lr", "1e-3"]


@pytest.mark.started
def test_a_run_is_the_same_on_one_rank_and_on_two_and_predicts(flags, tmp_path) -> None:
    line = [*flags, *PATCHES, "--epochs", "1", "--iterations", "4"]
    trained(1, line, tmp_path / "one")
    trained(2, [*line, "--seqpar", "2"], tmp_path / "two")
    assert farthest(losses(tmp_path / "one"), losses(tmp_path / "two")) < 1e-9
    assert json.loads((tmp_path / "two" / "config.json").read_text())["config"]["patch"] == [8, 4, 2]
    trained(2, ["--resume", "--epochs", "2"], tmp_path / "two")
    assert len(losses(tmp_path / "two")) == 8
    images = flags[flags.index("--data") + 1] + "/imagesTr"
    for name in ("one", "two"):
        for window in ("sliding", "whole"):
            out = tmp_path / f"{name}-{window}"
            line = [str(tmp_path / name), "-i", images, "-o", str(out), "--window", window, "--device", "cpu"]
            assert predict.act(line) == 0
            assert read_volume(out / "c_000.nii.gz").array.shape == (1, 14, 12, 10)


def test_one_number_is_a_cube_in_flags_scripts_and_configs_of_before() -> None:
    _, config, _ = parse(["--patch", "8"], "debug")
    assert config.patch == (8, 8, 8) == Config(patch=8).patch
    before = asdict(config) | {"patch": 8}
    assert Config.from_dict(before) == config == Config.from_dict(json.loads(config.to_json()))
    with pytest.raises(ValueError, match="patch is 'large', and a value such as"):
        Config.from_dict(before | {"patch": "large"})


def test_patches_that_cannot_be_are_refused_with_the_nearest() -> None:
    for text, why in (
        ("8 8", "--patch 8 8: give one number, or three"),
        ("8 8 3", "--patch 8 8 3: the decoders double the grid; use --patch 8 8 4"),
        ("7 7 7", "--patch 7: the decoders double the grid; use --patch 8"),
        ("1", "--patch 1: the decoders double the grid; use --patch 2"),
        ("8 0 8", "it must be at least 1"),
        ("8 8 1 --tile 32 32 32 --decoder unetr", ""),
        ("8 4 4 --tile 32 32 30", r"use tile=\(32, 32, 32\)"),
    ):
        _, config, _ = parse(f"--preset debug --patch {text}".split(), "debug")
        if not why:
            check_feasible(config)
            continue
        with pytest.raises(ValueError, match=why):
            check_feasible(config)


def test_the_plan_counts_it_and_prints_it_as_typed(capsys) -> None:
    sizes = ["--tile", "64", "64", "32", "--depth", "1", "--embed-dim", "96", "--heads", "4", "--decoder", "unetr"]
    assert plan.act([*sizes, "--patch", "16", "16", "4", "--seqpar", "2", "--device", "a100"]) == 0
    said = capsys.readouterr().out
    assert "patch 16x16x4: 128 tokens" in said and "--patch 16 16 4" in said.splitlines()[-1]
    assert plan.act([*sizes, "--patch", "8", "--seqpar", "1", "--device", "a100"]) == 0
    said = capsys.readouterr().out
    assert "patch 8: 256 tokens" in said and "--patch 8 " in said.splitlines()[-1]
    assert family_of(Config()).unit(Config(patch=(8, 8, 4))) == (8, 8, 4)  # type: ignore[arg-type]
