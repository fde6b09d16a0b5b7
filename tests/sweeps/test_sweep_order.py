"""What a sweep is asked for, checked and changed before and between its runs, without Ray."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from seqpar.cli import report, tune
from seqpar.cluster.exit_codes import run
from seqpar.data.errors import DataError
from seqpar.runs.sweep_folder import Point, Sweep, describe_mixed, how_mixed, read_sweep, refresh_points, write_sweep
from seqpar.sweeps import results, sweep_request
from seqpar.sweeps.ray_cluster import rank_bundle
from seqpar.sweeps.results import draw_sweep, write_results
from seqpar.sweeps.space import parse_space
from seqpar.sweeps.sweep_request import SweepRequest
from tests.support.report_page import Page
from tests.support.sweep_folder import SPACE, TINY, asked, begin, make_sweep_folder


def test_a_sweep_of_which_no_point_has_begun_takes_other_flags(tmp_path: Path) -> None:
    """As where the data could not be prepared with the first ones."""
    out = tmp_path / "s"
    _, sweep, _ = asked(out, "--tile", "16", "24", "32")
    write_sweep(out, sweep)
    for more in ([], ["--resume"]):
        order, now, _ = asked(out, "--depth", "3", *more)
        assert order.settings["depth"] == 3 and "tile" not in order.settings and now == order.sweep()
    options, rest = tune._parse(["--resume", "--out", str(out)])
    assert tune._order(options, rest)[0].settings["tile"] == (16, 24, 32), "by itself it goes on as it was"
    begin(out, sweep)
    with pytest.raises(ValueError, match="holds a sweep already"):
        asked(out, "--depth", "3")


def test_a_sweep_goes_on_with_its_way_to_stop_and_to_fail_unless_others_are_typed(tmp_path: Path) -> None:
    out = tmp_path / "s"
    order, sweep, _ = asked(out, "--stop-early", "asha", "--max-failures", "5")
    assert (order.stop_early, order.max_failures) == ("asha", 5)
    write_sweep(out, sweep)
    begin(out, sweep)

    def resumed(*line: str) -> tuple[str, int]:
        options, rest = tune._parse(["--resume", "--out", str(out), *line])
        order, sweep = tune._order(options, rest)
        assert order.began() == sweep.began, "written down for the next time"
        return order.stop_early, order.max_failures

    assert resumed() == resumed(*SPACE, *TINY) == ("asha", 5)
    assert resumed("--max-failures", "0") == ("asha", 0) and resumed("--stop-early", "none") == ("none", 5)
    content = json.loads((out / "sweep.json").read_text())
    for name in ("stop_early", "max_failures"):  # as earlier versions wrote it
        del content["began"][name]
    (out / "sweep.json").write_text(json.dumps(content))
    assert resumed() == ("none", 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content["points"].clear(), "has 0 points, and its space has 4: restore it, or begin in"),
        (lambda content: content["points"].pop(), "has 3 points, and its space has 4: restore it"),
        (lambda content: content["points"][0].update(settings={"lr": 5.0}), "has 4 points, and its space has others"),
        (lambda content: content.update(version=7), r"is no sweep of this version \(but of version 7\); restore it"),
    ],
)
def test_a_sweep_whose_points_were_edited_does_not_end_as_finished(change, words: str, tmp_path: Path) -> None:
    out = tmp_path / "s"
    _, sweep, _ = asked(out)
    write_sweep(out, sweep)
    options, rest = tune._parse(["--resume", "--out", str(out)])
    assert tune._order(options, rest)[1] == sweep
    content = json.loads((out / "sweep.json").read_text())
    change(content)
    (out / "sweep.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=words):
        tune._order(options, rest)


def test_a_sweep_of_pretrainings_begins_with_trains_usual_preset(tmp_path: Path) -> None:
    line = ["--space", "mask-ratio=0.5,0.75", "--task", "pretrain", "--device", "cpu", "--out", str(tmp_path / "s")]
    options, rest = tune._parse(line)
    order, sweep = tune._order(options, rest)
    assert order.preset == "mae-laptop" and {one.batch for one in order.configs(sweep).values()} == {4}


def test_points_whose_batch_is_open_are_checked_before_anything_begins(tmp_path: Path) -> None:
    for space, error in (("lr=0,1e-4", "point lr-0: --lr"), ("heads=5,12", "point heads-5: --heads 5")):
        options, rest = tune._parse(["--space", space, "--preset", "paper", "--out", str(tmp_path / "s")])
        order, sweep = tune._order(options, rest)
        with pytest.raises(ValueError, match=error):
            order.configs(sweep)


def steps_of(out: Path, line: str) -> tuple[int, int]:
    """Returns the earliest first and the latest last validation of a sweep's runs on 4 devices."""
    options, rest = tune._parse([*line.split(), "--device", "cpu", "--out", str(out)])
    order, sweep = tune._order(options, rest)
    return order.validated_steps(order.configs(order.known(sweep)), order.ranks(4))


def test_runs_are_compared_from_the_first_validation_to_the_end_of_the_longest(tmp_path: Path) -> None:
    short = "--space lr=1e-4,1e-3 --preset debug --iterations 8"
    assert steps_of(tmp_path, f"{short} --epochs 6 --val-every 2") == (16, 48)
    assert steps_of(tmp_path, f"{short} --epochs 5 --val-every 50") == (40, 40), "its end is its first"
    assert steps_of(tmp_path, f"{short} --epochs 5 --val-every 0") == (40, 40)
    assert steps_of(tmp_path, "--space epochs=2,9 --preset debug --iterations 8 --val-every 1") == (8, 72)
    scaled = f"{short} --epochs 6 --val-every 2 --scale-lr --devices-per-run"
    assert steps_of(tmp_path, f"{scaled} 1") == (16, 48) and steps_of(tmp_path, f"{scaled} all") == (4, 12)
    assert steps_of(tmp_path, "--space lr=1e-4,1e-3 --preset distmis --epochs 5 --stop-early asha") == (845, 845)


def test_optuna_may_suggest_the_longest_run_of_its_space(tmp_path: Path) -> None:
    order, _, _ = asked(tmp_path / "s", "--val-every", "1")
    space = parse_space(["epochs=2,9", "batch=1,2"])
    order = replace(order, space=space, settings={"iterations": 8, "val_every": 1}, samples=3, search="optuna")
    known = Sweep(order.began(), (Point("a", {"epochs": 2, "batch": 1}),))
    assert order.validated_steps(order.configs(known), 1) == (8, 72)


def test_a_setting_of_many_values_that_are_no_numbers_is_drawn(tmp_path: Path) -> None:
    spaces = (["tile=16,24,32,40,48,56,64,72,80"], [f"betas={','.join(f'0.9:0.9{n}' for n in range(1, 10))}"],
              [f"lr={','.join(f'{n}e-4' for n in range(10))}"])  # fmt: skip
    for number, words in enumerate(spaces):
        points = [
            Point(f"p{at}", settings, "finished", score=at / 10)
            for at, settings in enumerate(parse_space(words).points())
        ]
        draw_sweep(tmp_path, Sweep({}, tuple(points)), tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").read_bytes()[:4] == b"\x89PNG"


GPU, HEAD = {"GPU": 4.0, "CPU": 32.0}, {"CPU": 64.0}


def of_ray(*resources: dict[str, float]) -> list[dict]:
    return [{"Alive": True, "Resources": one} for one in resources] + [{"Alive": False, "Resources": GPU}]


def test_a_running_cluster_decides_on_the_devices_of_runs() -> None:
    """The machine that asks may have no GPUs, nor the head: a rank takes its share of the cores of a node with GPUs."""
    for here in (False, True):
        assert rank_bundle(of_ray(HEAD, GPU, GPU), "auto", here) == (True, 8, {"GPU": 1.0, "CPU": 8.0})
        assert rank_bundle(of_ray(HEAD, GPU), "cpu", here) == (False, 96, {"CPU": 1.0})
        with pytest.raises(ValueError, match="Ray sees none: add --device cpu"):
            rank_bundle(of_ray(HEAD), "cuda", here)
    assert rank_bundle(of_ray(GPU, {"GPU": 2.0, "CPU": 6.0}), "cuda", False) == (True, 6, {"GPU": 1.0, "CPU": 3.0})
    assert rank_bundle(of_ray(HEAD), "auto", False) == (False, 64, {"CPU": 1.0})
    with pytest.raises(ValueError, match="or start Ray with its GPUs"):
        rank_bundle(of_ray(HEAD), "auto", True)


def test_numbers_that_make_a_point_a_second_time_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_request, "draw", lambda one, source: source.uniform(one.low, one.high))
    space = parse_space(["lr=uniform:0.1:0.1012", "batch=1,2"])  # 13 numbers of four digits

    def drawn(seed: int, samples: int = 12) -> list[float]:
        return [point.settings["lr"] for point in SweepRequest(space, "debug", {"seed": seed}, samples=samples)
                .sweep().points]  # fmt: skip

    assert len(set(drawn(0)[:12])) == 12 == len(set(drawn(0)[12:])) and drawn(0) == drawn(0) != drawn(1)
    with pytest.raises(ValueError, match="take other ends, or fewer --samples"):
        drawn(0, 14)


def told_of(out: Path, *kinds: tuple[str, dict]) -> tuple[str, list[str], str]:
    """Returns caution, column of sweep.csv and page of a sweep whose first points recorded what they were scored on,
    and of their data.
    """
    for point, (measured_on, described) in zip(read_sweep(out).points, kinds):
        rows = [json.loads(line) for line in (out / point.name / "metrics.jsonl").read_text().splitlines()]
        rows = [row | {"measured_on": measured_on} if row["kind"] == "val" and measured_on else row for row in rows]
        (out / point.name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
        content = json.loads((out / point.name / "config.json").read_text())
        content["dataset"] |= described
        (out / point.name / "config.json").write_text(json.dumps(content))
        summary = out / point.name / "validation" / "summary.json"
        content = json.loads(summary.read_text())
        (entry,) = content["metric_per_case"][:1]
        content["metric_per_case"] = [json.loads(json.dumps(entry).replace("case_a", f"case_{n}")) for n in range(6)]
        summary.write_text(json.dumps(content))
    sweep = refresh_points(out, read_sweep(out))
    lines = [line for line in write_results(out, sweep) if line.startswith("caution: ")]
    column = [row["validated_on"] for row in csv.DictReader((out / "sweep.csv").open())]
    assert run(report.act, [str(out)]) == 0
    return "".join(lines), column, Page((out / "report.html").read_text()).text


CUT = {"crop_to": [2, 2, 2], "cut_labels": True}
OTHERWISE = {"recipe": {"spacing": [2, 2, 2]}, "files": {"case_a": "f"}, "digests": {"case_a": "2"}}
HERE, THERE = ({"prepared": f"/{n}/B", "voxels": {"case_a": n}, "files": {"case_a": n}} for n in "xy")


@pytest.mark.parametrize(
    ("kinds", "column"),
    [
        ((("a mirror=no", {}), ("b mirror=no", {})), ["1", "2"]),
        ((("a", {"recipe": {"joined": []}}), ("a", {"recipe": {"joined": [[2, 1]]}})), ["1", "2"]),
        ((("a", HERE), ("b", THERE)), ["1", "2"]),
        ((("", HERE), ("", THERE)), ["", ""]),
        ((("a", OTHERWISE | {"recipe": CUT}), ("b", OTHERWISE)), ["1", "2"]),
        ((("a", OTHERWISE | {"recipe": {}}), ("b", OTHERWISE | {"files": {"case_a": "g"}})), ["1", "2"]),
    ],
    ids=[
        "other cases",
        "joined labels",
        "two data sets",
        "two data sets in an earlier version",
        "labels cut off",
        "other labels, prepared otherwise",
    ],
)
def test_points_that_were_scored_on_different_cases_are_told_and_not_compared_case_by_case(
    kinds: tuple, column: list[str], tmp_path: Path
) -> None:
    out = make_sweep_folder(tmp_path)
    line, numbers, page = told_of(out, *kinds)
    assert numbers == [*column, "", ""]
    how = "on different cases or labels"
    told = f"oints were validated {how}, so their order says little about which setting is best: "
    told += "(1) lr-0.001_batch-1; (2) lr-0.001_batch-2"
    assert line == f"caution: p{told}" * bool(column[0]) and (f"P{told}." in page) == bool(column[0])
    assert f"the first two points, were validated {how}: their scores are not compared" in page
    assert "confidence interval" not in page and "exactly the same mean Dice" not in page
    above, below = results._figure_of_sweep(out, refresh_points(out, read_sweep(out))).subfigs
    assert (f"points were validated {how}" in above.get_suptitle()) == bool(column[0]), "and its best has no star"
    assert (results.STAR in below._supxlabel.get_text().replace("\n", " ")) != bool(column[0])
    if HERE in (own for _, own in kinds):
        told = "These runs were trained on several data sets: balls (prepared in /y/B), balls (prepared in /x/B): "
        assert told in page and "changed between these trainings" not in page


@pytest.mark.parametrize(
    "kinds",
    [
        (("", {}), ("", {})),
        (("", {}), ("b", {})),
        (("a overlap=0.25", {}), ("a overlap=0.5", {})),
        (("a", OTHERWISE | {"recipe": {}}), ("b", OTHERWISE)),
        (("a", OTHERWISE | {"recipe": CUT | {"cut_labels": False}}), ("b", OTHERWISE)),
        (("a", {"recipe": {}}), ("b", {"recipe": {"spacing": [2, 2, 2]}})),
        (("a", {"files": {"x": "before"}}), ("a", {"files": {"x": "after"}, "recipe": {"mean": 2}})),
    ],
    ids=[
        "not known",
        "known of one",
        "scored otherwise",
        "prepared otherwise",
        "cut, and no label",
        "no files known",
        "other training data",
    ],
)
def test_points_that_were_scored_on_the_same_cases_are_compared(kinds: tuple, tmp_path: Path) -> None:
    out = make_sweep_folder(tmp_path)
    line, numbers, page = told_of(out, *kinds)
    assert line == "" and len({*numbers[:2]} - {""}) < 2 and "validated on different cases" not in page
    assert "lr-0.001_batch-1 and lr-0.001_batch-2 have exactly the same mean Dice over" in page


def test_of_many_points_on_different_cases_some_are_named() -> None:
    numbers = {f"p{n}": n // 6 + 1 for n in range(36)}
    sweep = Sweep({}, tuple(Point(name, {}, measured_on=f"case{n}") for name, n in numbers.items()))
    told = describe_mixed(sweep, numbers)
    assert told.endswith("is best: (1) p0, p1, p2, p3, and 2 more; (2) p6, p7, p8, p9, and 2 more; (3) p12, p13, p14, "
                         "p15, and 2 more; (4) p18, p19, p20, p21, and 2 more; and 2 more")  # fmt: skip
    assert describe_mixed(sweep, dict.fromkeys(numbers, 1)) == describe_mixed(sweep, {}) == ""


def test_it_is_told_on_what_scores_that_cannot_be_compared_depend() -> None:
    def told(*measured_on: str, task: str = "pretrain") -> str:
        return how_mixed(task, [Point(str(n), {}, measured_on=own) for n, own in enumerate(measured_on)])

    assert told("a", "b", "", task="segment") == "were validated on different cases or labels"
    assert told("a", "b") == told("a mask_ratio=0.5", "b") == "were validated on different cases"
    assert told("a mask_ratio=0.5", "a mask_ratio=0.7", "") == "were validated with different --mask-ratio"
    assert told("a mask_ratio=0.5 normalised_targets=True", "b mask_ratio=0.7 normalised_targets=False") == (
        "were validated with different --mask-ratio and --normalised-targets"
    )


def test_points_that_were_validated_on_several_grids_say_so(tmp_path: Path) -> None:
    out = make_sweep_folder(tmp_path)
    usual, coarse = "voxels of the files (lr-0.001_batch-1)", "voxels of 2 × 2 × 2 mm (lr-0.001_batch-2)"
    for kinds, told in (
        ([None, None], ""),
        ([None, [2.0, 2.0, 2.0]], f"validated on different grids: {coarse}; the {usual}. Their curves in validation"),
        ([[2.0, 2.0, 2.0]] * 2, "These runs were validated on their own grid (voxels of 2 × 2 × 2 mm): their curves"),
    ):
        for number, (point, spacing) in enumerate(zip(read_sweep(out).points, kinds)):
            path = out / point.name / "config.json"
            content = json.loads(path.read_text())
            recipe = {**(content["dataset"].get("recipe") or {}), "spacing": spacing}
            content["dataset"] |= {"recipe": recipe, "digests": {"case_a": str(number)}}
            path.write_text(json.dumps(content))
        assert run(report.act, [str(out)]) == 0
        page = Page((out / "report.html").read_text()).text
        assert told in page and ("own grid" in page or "different grids" in page) == bool(told)
        assert ("The scores that order the points were measured there too." in page) == bool(told)
