"""Figures: their runs are made once, go on where they were cut, and become pictures, points and verdicts."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

import figures
from lab.figures.figure import FigureRequest, runs_of
from lab.figures.paper_figures import SCALES
from seqpar.cluster.exit_codes import PREEMPTED, USAGE, run
from seqpar.report.curves import DICE, QUANTITIES, TRAIN_LOSS, VAL_LOSS, read_curve
from seqpar.sweeps import one_by_one
from seqpar.sweeps.planned_run import config_of
from tests.support.figure_runs import FLAGS, forked
from tests.support.folders import write_json
from tests.support.marks import long_case
from tests.support.pages import ROOT
from tests.support.training_runs import tiny_data


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """Figures 5 and 6 of tiny runs, and what was printed."""
    root = tmp_path_factory.mktemp("figures")
    data = tiny_data(root)[-4:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_by_one, "start_ranks", forked)
        line, said = ["5", "6", *FLAGS.split(), *data, "--out", str(root / "out")], io.StringIO()
        with redirect_stdout(said):
            assert figures.act(line) == 0
        (root / "line.json").write_text(json.dumps(line))
        yield root / "out", said.getvalue().splitlines()


@pytest.mark.started
def test_gather_coincides_and_no_gather_does_not(drawn: tuple[Path, list[str]]) -> None:
    out, said = drawn
    (line,) = [line for line in said if line.startswith("Gather: ") and "training loss" in line]
    words, figure = line.rsplit(" ", 1)
    assert words == "Gather: SeqPar 1, 2, 4 coincide: largest difference of the training loss"
    assert 0 <= float(figure) <= 1e-9
    for size in (2, 4):
        (line,) = [line for line in said if f"No-Gather: SeqPar {size} " in line and "training loss" in line]
        assert "differs from SeqPar 1: largest difference of the training loss" in line
    assert "coincide" in (out / "figure-5.txt").read_text() and "--scale debug, 1 seed:" in said_note(out)


def said_note(out: Path) -> str:
    return next(line for line in (out / "figure-5.txt").read_text().splitlines() if line.startswith("--scale"))


@pytest.mark.started
def test_a_run_of_both_figures_is_made_once_and_all_are_run_folders(drawn: tuple[Path, list[str]]) -> None:
    out, said = drawn
    runs = sorted(path.name for path in (out / "runs").iterdir() if not path.name.endswith("-logs"))
    assert len(runs) == 5
    for name in runs:
        assert json.loads((out / "runs" / name / "status.json").read_text())["state"] == "finished"
    assert sum("begins" in line for line in said) == 5 and sum("has finished" in line for line in said) == 1
    starts = [line for line in said if line.startswith("figure 5: ")]
    assert len(starts) == 1 and re.search(r"; about \d+:\d\d of steps by the planner$", starts[0])


@pytest.mark.started
def test_points_and_pictures_are_those_of_the_journals(drawn: tuple[Path, list[str]]) -> None:
    out, _ = drawn
    with open(out / "figure-6.csv") as file:
        rows = list(csv.DictReader(file))
    assert {row["curve"] for row in rows} == {"SeqPar 1", "SeqPar 2", "SeqPar 4"}
    assert {row["quantity"] for row in rows} == set(QUANTITIES)
    name = "mode-nogather_precision-fp64_seqpar-4_seed-0"  # what all figures have is left out
    losses = [float(row["value"]) for row in rows if row["quantity"] == TRAIN_LOSS and row["curve"] == "SeqPar 4"]
    journal = (out / "runs" / name / "metrics.jsonl").read_text().splitlines()
    assert losses == [row["loss"] for row in map(json.loads, journal) if row["kind"] == "train"] and len(losses) == 3
    for number in (5, 6):
        assert (out / f"figure-{number}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"figure-{number}.svg").read_text()


@pytest.mark.started
def test_the_same_command_repeats_nothing_and_another_is_refused(drawn: tuple[Path, list[str]]) -> None:
    """The program itself makes the one run that is gone, and draws both figures again."""
    out, _ = drawn
    line = json.loads((out.parent / "line.json").read_text())
    shutil.rmtree(next(path for path in (out / "runs").iterdir() if "seqpar" not in path.name))
    for runs, begun in ((1, 1), (2, 0)):
        done = subprocess.run([sys.executable, ROOT / "launch" / "figures.py", *line], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("; its runs have finished") == runs
        assert len(re.findall(" (?:begins|resumes) on ", done.stdout)) == begun
    with pytest.raises(ValueError, match=r"was made with --lr 0\.01, and now --lr 0\.02: name another --out"):
        figures.act([*line, "--lr", "0.02"])


def fake(codes: list[int], lines: list[list[str]]) -> one_by_one.OneByOne:
    """Returns an engine whose trainings end with these codes and leave a run folder."""

    def start(ranks: int, flags: Sequence[str], signals: list[int]) -> int:
        code, out = codes.pop(0), Path(flags[flags.index("--out") + 1])
        lines.append(list(flags))
        write_json(out / "status.json", {"state": "running" if code else "finished", "why": "a reason"})
        if "--resume" not in flags:
            command = {"command": ["train.py", *flags]}
            write_json(out / "config.json", {"history": [command], "layout": {"ranks": ranks}})
        if code == -signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)
        return code

    return one_by_one.OneByOne(start)


@pytest.mark.parametrize("code", [PREEMPTED, -signal.SIGTERM])
def test_runs_that_were_cut_go_on_and_finished_ones_stay(code: int, tmp_path: Path) -> None:
    """By themselves, or as this process was asked to leave; afterwards a signal acts as before."""
    runs = [one for of_arm in runs_of(figures.FIGURES[5], FigureRequest("debug"), SCALES).values() for one in of_arm]
    lines, usual = list[list[str]](), signal.getsignal(signal.SIGTERM)
    assert fake([0, code], lines).make(runs, tmp_path) == PREEMPTED
    assert len(lines) == 2 and signal.getsignal(signal.SIGTERM) == usual
    assert fake([0, 0], lines).make(runs, tmp_path) == 0
    no_limit = ["--time-limit", "none"]  # though the run was begun with what was left of one
    assert lines[2] == ["--resume", "--out", str(tmp_path / runs[1].name), *no_limit]
    assert lines[3] == [*runs[2].flags, "--out", str(tmp_path / runs[2].name)]
    assert fake([], lines).make(runs, tmp_path) == 0


def test_a_run_that_fails_ends_its_figure_with_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [one for of_arm in runs_of(figures.FIGURES[5], FigureRequest("debug"), SCALES).values() for one in of_arm]
    assert fake([0, 4], []).make(runs, tmp_path) == 4
    assert f"run 2 of 3 ended with exit code 4: {tmp_path / runs[1].name}: a reason" in capsys.readouterr().err


def test_no_run_begins_after_the_time_limit(tmp_path: Path) -> None:
    late = fake([], [])
    late.until = 0.0
    assert (
        late.make(next(iter(runs_of(figures.FIGURES[5], FigureRequest("debug"), SCALES).values())), tmp_path)
        == PREEMPTED
    )


@pytest.mark.parametrize("scale", [long_case(scale) if scale == "paper" else scale for scale in SCALES])
def test_every_run_of_every_figure_can_be(scale: str) -> None:
    """As the command line and the layout of its ranks are concerned; ranks a tile vary, groups do not."""
    for figure in figures.FIGURES.values():
        runs = [one for of_arm in runs_of(figure, FigureRequest(scale), SCALES).values() for one in of_arm]
        arms = [arm for arm in figure.arms if scale in (arm.scales or SCALES)]
        assert len(runs) == len(arms) and len({one.groups for one in runs}) == 1
        configs = [config_of(one) for one in runs]
        assert all(config_of(one.before).task == "pretrain" for one in runs if one.before)
        assert len({(config.epochs, config.iterations, config.lr, config.precision) for config in configs}) == 1
        if figure.number in (5, 6, 9):
            assert configs[0].precision == ("fp32" if scale == "paper" else "fp64")


def test_seeds_are_runs_of_their_own_and_form_a_band(tmp_path: Path) -> None:
    runs = runs_of(figures.FIGURES[5], FigureRequest("debug", {"seed": 3}, seeds=2), SCALES)
    assert [one.settings["seed"] for one in runs["SeqPar 2"]] == [3, 4]
    for number, level in enumerate((1.0, 2.0)):
        rows = [{"kind": "train", "step": n, "loss": level - n / 10, "seconds": 2.0} for n in range(4)]
        rows += [{"kind": "val", "step": 2, "loss": 0.5, "dice": {"a": 0.2 * level, "b": 0.4, "c": None}}]
        (tmp_path / str(number)).mkdir()
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / str(number) / "metrics.jsonl").write_text(text)
    folders = [tmp_path / "0", tmp_path / "1"]
    loss = read_curve("SeqPar 2", folders, TRAIN_LOSS)
    assert loss.steps == (1, 2, 3, 4) and loss.seconds == (2, 4, 6, 8)
    assert np.allclose(loss.mean, [1.5, 1.4, 1.3, 1.2])
    dice = read_curve("SeqPar 2", folders, DICE)
    assert np.allclose(dice.values, [[0.3], [0.4]]) and dice.seconds == (4.0,)
    assert read_curve("SeqPar 2", folders[:1], VAL_LOSS).rows == ((0.5,),)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("3", "there is no figure 3 here: choose from 5, 6"),
        ("5 --mode halo", "--mode is what figure 5 compares"),
        ("5 --resume", "--resume belongs to a single run"),
        ("5 --preset laptop", "--scale says what the figures' runs begin with"),
        ("5 --fold all5", "--fold all5 is five runs"),
        ("5 --sedes 3", "nearest to --sedes is --seeds"),
        ("5 --seeds 0", "--seeds 0: it must be in [1, 1000]"),
        ("5 --heads 5", "--heads"),
    ],
)
def test_what_cannot_be_is_refused_before_any_run(
    line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(figures.act, [*line.split(), "--out", str(tmp_path / "out")]) == USAGE
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_list_says_what_each_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.act(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(figures.FIGURES)


def test_a_laptop_learns_whole_tumours_unless_it_has_data_of_its_own() -> None:
    """The parts of the built-in tumours would take more steps than there is time for."""
    for typed, joined in (({}, {"tumour=1,2,3"}), ({"data": "/DATA"}, {""})):
        every = [runs_of(figures.FIGURES[number], FigureRequest("laptop", typed), SCALES) for number in (5, 6, 7, 8)]
        configs = [config_of(one) for runs in every for of_arm in runs.values() for one in of_arm]
        assert {config.join_labels for config in configs} == joined and len(configs) == 14
