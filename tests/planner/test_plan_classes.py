"""Classifiers are planned as large as their volumes are, and the planner's command is one that train takes."""

import shlex
from pathlib import Path

import pytest

from seqpar.cli import plan
from seqpar.settings.command_line import parse
from seqpar.settings.rules import refuse_settings_without_effect
from tests.support.class_folders import class_folder

LINE = "--task classify --preset debug --network resattnet18 --features 8 --device h200 --seqpar 1"


def test_the_tile_channels_and_classes_are_the_datas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = class_folder(tmp_path / "data", 4)
    assert plan.act([*LINE.split(), "--data", str(data)]) == 0
    said = capsys.readouterr().out
    assert "tile 40x24x16" in said and "1 channel, 2 classes" in said
    _, config, names = parse(shlex.split(said.strip().splitlines()[-1])[4:], "laptop")
    refuse_settings_without_effect(config, names)
    refuse_settings_without_effect(config, names)
    assert (config.task, config.network, config.tile, config.features) == ("classify", "resattnet18", (40, 24, 16), 8)


def test_without_data_a_tile_is_asked_for() -> None:
    with pytest.raises(ValueError, match="--task classify needs --data, .*; or give --tile"):
        plan.act(LINE.split())
    with pytest.raises(ValueError, match="--predict with --task classify: a case passes whole"):
        plan.act([*LINE.split(), "--tile", "32", "--predict", "--volume", "32", "32", "32"])


@pytest.mark.parametrize("network", ["vit", "resattnet34"])
def test_stages_of_classifiers_are_planned(network: str, capsys: pytest.CaptureFixture[str]) -> None:
    own = "--features 8" if network != "vit" else "--pooling token --positions learned"
    line = ["--task", "classify", "--preset", "debug", "--network", network, *own.split(), "--tile", "32"]
    assert plan.act([*line, "--device", "h200", "--pipe", "2", "--batch", "2", "--accumulate", "4"]) == 0
    assert "--pipe 2" in capsys.readouterr().out
