"""Figure 15: a pretraining is made before what starts from it, and what it brings and costs is said."""

import json
from pathlib import Path

import pytest

import figures
from lab.figures import pretraining_figure
from lab.figures.figure import FigureRequest, Results, every_run, runs_of
from lab.figures.paper_figures import SCALES
from lab.figures.pretraining_figure import FRESH, PRETRAINED, PRETRAINING_FIGURE
from seqpar.sweeps import one_by_one
from seqpar.sweeps.planned_run import PlannedRun
from tests.support.figure_runs import FLAGS, forked
from tests.support.folders import write_json
from tests.support.training_runs import losses, tiny_data


def made_up(root: Path, planned: PlannedRun, dice: float, seconds: float) -> Path:
    """Returns a run folder of four steps whose Dice ends with ``dice``."""
    out, count = root / planned.name, 19 if planned.before is None and "task" in planned.settings else 4
    write_json(out / "config.json", {"dataset": {"train": [f"c{n}" for n in range(count)]}})
    rows: list[dict] = [{"kind": "train", "step": s, "loss": 1 - s / 9, "seconds": seconds} for s in range(4)]
    rows += [{"kind": "val", "step": s, "loss": 1.0, "dice": {"a": dice * s / 4}} for s in (2, 4)]
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def test_verdicts_say_who_is_ahead_how_soon_and_at_what_cost(tmp_path: Path) -> None:
    runs = runs_of(PRETRAINING_FIGURE, FigureRequest("laptop", seeds=3), SCALES)
    dice = {FRESH: (0.3, 0.4, 0.5), PRETRAINED: (0.8, 0.8, 0.8)}
    folders = {
        label: [made_up(tmp_path, one, dice[label][n], 2.0) for n, one in enumerate(of_arm)]
        for label, of_arm in runs.items()
    }
    before = {PRETRAINED: [made_up(tmp_path, one.before, 0.0, 5.0) for one in runs[PRETRAINED] if one.before]}
    results = Results(folders, before=before)
    first, level, _, soon, cost = pretraining_figure.judge(results)
    assert "not pretrained 0.400, pretrained 0.800; pretrained is highest, by 0.4, beyond the seeds' spread" in first
    assert level.startswith("Pretraining: pretrained differs from not pretrained: largest difference of the Dice 0.5")
    assert soon.endswith("; pretrained is quickest") and "with the time of that 24 s (step 2)" in soon
    assert cost == (
        "Pretraining: 4 steps on 19 cases without labels took 20 s, 2.50 times the 8 s of 4 steps on 4 labelled ones"
    )
    assert pretraining_figure.draw(results)[-1].lines[0].rows[0] == pytest.approx([1 - s / 9 for s in range(4)])


def test_a_pretraining_comes_before_what_starts_from_it_and_both_keep_their_own_settings(tmp_path: Path) -> None:
    runs = runs_of(PRETRAINING_FIGURE, FigureRequest("laptop", {"epochs": 2, "decoder_width": 9}, seeds=2), SCALES)
    every = every_run(runs)
    assert [("task" in one.settings, one.settings["seed"]) for one in every] == [
        (False, 0), (True, 0), (False, 0), (False, 1), (True, 1), (False, 1),
    ]  # fmt: skip
    plain, masked, tuned = every[:3]
    assert plain.settings == tuned.settings and plain.name != tuned.name and tuned.before == masked
    assert (tuned.settings["epochs"], masked.settings["epochs"]) == (2, 10)
    assert tuned.settings["decoder_width"] == 9 and "decoder_width" not in masked.settings
    assert tuned.line(tmp_path / tuned.name)[-2:] == ["--weights", str(tmp_path / masked.name)]


def test_a_seed_alone_is_the_run_that_it_is_among_others() -> None:
    three, alone = (
        runs_of(PRETRAINING_FIGURE, order, SCALES)
        for order in (FigureRequest("laptop", seeds=3), FigureRequest("laptop", {"seed": 2}))
    )
    for label in three:
        assert three[label][2] == alone[label][0] and three[label][2].flags == alone[label][0].flags
    last, one = three[PRETRAINED][2].before, alone[PRETRAINED][0].before
    assert last is not None and one is not None and last.flags == one.flags


@pytest.mark.started
def test_the_figure_is_made_of_a_pretraining_and_two_trainings_on_the_same_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_by_one, "start_ranks", forked)
    line = ["15", *FLAGS.split(), *tiny_data(tmp_path)[-4:], "--train-cases", "3", "--out", str(tmp_path / "out")]
    assert figures.act(line) == 0
    said, root = capsys.readouterr().out, tmp_path / "out" / "runs"
    assert said.count("begins on 1 rank") == 3 and "32 steps on 4 cases without labels took" in said
    configs = {p.parent: json.loads(p.read_text()) for p in root.glob("*/config.json")}
    (tuned,) = [run for run in configs if "_after_" in run.name]
    start, _, masked = tuned.name.partition("_after_")
    fresh = root / f"{start}_seed-0"
    assert set(configs) == {tuned, fresh, root / masked}
    assert (configs[tuned]["config"]["weights"], configs[fresh]["config"]["weights"]) == (str(root / masked), "")
    assert [len(configs[run]["dataset"]["train"]) for run in (tuned, fresh, root / masked)] == [3, 3, 4]
    assert losses(tuned)[0] != losses(fresh)[0]
    assert (tmp_path / "out" / "figure-15.png").stat().st_size > 1000
    monkeypatch.setattr(one_by_one, "start_ranks", lambda *of: pytest.fail("a run was repeated"))
    assert figures.act(line) == 0
