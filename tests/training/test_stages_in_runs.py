"""``--encoder hierarchical`` in a run: the same on one rank and on two, resumed, predicted, planned."""

import json
import re

import pytest

from seqpar.cli import plan, predict, train
from seqpar.data.volumes import read_volume
from tests.support.pages import PAGES
from tests.support.training_runs import farthest, losses, trained

STAGES = "--encoder hierarchical --stage-depths 1 1 --patch 4 --decoder unetr --mode auto --precision fp64 --lr 1e-3"


@pytest.fixture
def line(flags: list[str]) -> list[str]:
    """Returns the flags of a tiny run, without the depth of a plain encoder."""
    at = flags.index("--depth")
    return [*flags[:at], *flags[at + 2 :], *STAGES.split()]


def test_the_planner_may_choose_the_group(line, tmp_path, capsys) -> None:
    assert train.act([*line, "--seqpar", "auto", "--dry-run"]) == 0
    assert "64 tokens, merged to 8" in capsys.readouterr().out


def test_a_run_is_the_same_on_one_rank_and_on_two_resumes_and_predicts(line, flags, tmp_path) -> None:
    trained(1, [*line, "--epochs", "1"], tmp_path / "one")
    trained(2, [*line, "--epochs", "1", "--seqpar", "2"], tmp_path / "two")
    assert farthest(losses(tmp_path / "one"), losses(tmp_path / "two")) < 1e-9
    trained(2, ["--resume", "--epochs", "2"], tmp_path / "two")
    assert len(losses(tmp_path / "two")) == 4
    config = json.loads((tmp_path / "two" / "config.json").read_text())["config"]
    assert (config["encoder"], config["stage_depths"], config["decoder"]) == ("hierarchical", [1, 1], "unetr")
    images = flags[flags.index("--data") + 1] + "/imagesTr"
    for window in ("sliding", "whole"):
        out = tmp_path / window
        arguments = [str(tmp_path / "two"), "-i", images, "-o", str(out), "--window", window, "--device", "cpu"]
        assert predict.act(arguments) == 0
        assert read_volume(out / "c_000.nii.gz").array.shape == (1, 14, 12, 10)
    more = ["--epochs", "1", "--iterations", "1", "--tile", "24", "--weights", str(tmp_path / "one")]
    said = trained(1, [*line, *more], tmp_path / "from").said()
    assert "positions resized from 64 tokens to 6x6x6" in said and "; new: " not in said
    wrong = trained(1, [*flags, "--weights", str(tmp_path / "one")], tmp_path / "plain", expect=2).said()
    assert "--encoder hierarchical --stage-depths 1 1" in wrong


@pytest.mark.started
def test_the_plan_counts_stages_pads_to_cubes_and_prints_what_runs_it(capsys) -> None:
    sizes = "--preset modern --encoder hierarchical --patch 4 --stage-depths 1 1 1 --embed-dim 24 --heads 2"
    volume = ["--volume", "48", "48", "39", "--device", "mi250x"]
    assert plan.act([*sizes.split(), *volume, "--seqpar", "2"]) == 0
    said = capsys.readouterr().out
    assert "padded to 48x48x48" in said and "1728 tokens, merged to 216, then 27" in said
    assert "--encoder hierarchical --stage-depths 1 1 1" in " ".join(said.split())
    assert plan.act([*sizes.split(), *volume, "--pipe", "2", "--seqpar", "1"]) == 0


@pytest.mark.started  # 30 s of counting
def test_the_manual_shows_rows_as_they_are_planned_now(capsys, monkeypatch) -> None:
    monkeypatch.setattr("seqpar.planner.printer.most_tiles", lambda *of: 1)  # counts as much again
    manual = "\n".join(page.read_text() for page in PAGES)
    (line,) = re.findall(r"python launch/plan.py (--preset modern --encoder hierarchical .*)", manual)
    (more,) = re.findall(r"`(--window 8 .*? --seqpar 64)`", manual)
    (fewer,) = re.findall(r"`(--volume 512 .*? --seqpar 8)`", manual)
    (pretraining,) = re.findall(r"`plan.py (--preset mae .*? mi250x)`", manual)
    for flags in (f"{line} --seqpar 8", f"{line} {more}", f"{line} {more} {fewer}", pretraining):
        assert plan.act(flags.split()) == 0
        said = capsys.readouterr().out
        (row,) = (text for text in said.splitlines() if re.match(" +(8|64) [a-z]", text))
        assert f"\n{row.rstrip()}\n" in manual
