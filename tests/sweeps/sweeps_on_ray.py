"""Sweeps on Ray: every point once, with the bits of a run alone, whoever is killed in the middle. Run by .ci/tune."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from seqpar.cli.tune import act as tune_act
from seqpar.data.files import read_json
from seqpar.runs.sweep_folder import Point, Sweep, read_sweep, refresh_points
from seqpar.sweeps.ray_cluster import Cluster
from seqpar.sweeps.ray_engine import SideBySide
from seqpar.sweeps.space import parse_space
from seqpar.sweeps.sweep_request import SweepRequest
from tests.support.pages import ROOT, page, shown_commands
from tests.support.started_sweeps import Tune, below, parents, processes
from tests.support.training_runs import farthest, losses, status, tiny_data, trained, weights

RATES, BATCHES = ("0.01", "0.02", "0.005"), ("1", "2")
SPACE = ["--space", f"lr={','.join(RATES)}", f"batch={','.join(BATCHES)}"]
TRAINING = "seqpar.cli.train"  # in the command line of every rank
NAMES = [f"lr-{rate}_batch-{batch}" for rate in RATES for batch in BATCHES]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    line = tiny_data(tmp_path_factory.mktemp("data"))
    own = {"--lr": 1, "--batch": 1, "--iterations": 1, "--epochs": 1}
    kept = list[str]()
    skip = 0
    for word in line:
        skip = own[word] + 1 if word in own else skip
        kept += [] if skip else [word]
        skip = max(skip - 1, 0)
    return [*kept, *["--iterations", "40", "--epochs", "1", "--no-output-bias", "--foreground", "1"]]


@pytest.fixture(scope="module")
def of_killed() -> set[tuple[int, str]]:
    """Processes of sweeps of which one was killed, by number and begin."""
    return set()


def steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count('"kind": "train"') if path.exists() else 0


def state(out: Path, name: str) -> str:
    return str(status(out / name)["state"]) if (out / name / "status.json").exists() else "open"


def finished(out: Path) -> list[str]:
    return [name for name in NAMES if state(out, name) == "finished"]


def training(out: Path, at_least: int = 3) -> list[str]:
    """Returns the points that train and have done some steps; what a killed training left behind says so too."""
    alive = {line.split()[-1] for line in processes(str(out)).values() if TRAINING in line}
    running = [name for name in NAMES if str(out / name) in alive and state(out, name) == "running"]
    return [name for name in running if at_least <= steps(out / name) < 30]


def test_the_command_of_the_page_runs_and_so_do_those_that_it_prints_as_next(tmp_path: Path) -> None:
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "SEQPAR_CACHE": "cache", "OMP_NUM_THREADS": "1"}

    def typed(line: str) -> list[str]:
        """Types a line into a shell; returns the commands that it prints as next."""
        done = subprocess.run(["bash", "-c", line], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(r"^next: (.*?)(?:  \(.*)?$", done.stdout, re.M)

    (line,) = shown_commands(page("how-to/sweeps"), "--preset debug --out sweeps/small")
    of_report, of_predict = typed(line)
    typed(of_report)
    assert (tmp_path / "sweeps/small/report.html").is_file()
    (images,) = (tmp_path / "cache/data").glob("phantom-*")
    of_evaluate, _ = typed(of_predict.replace("IMAGES", str(images)).replace("PREDICTIONS", "found"))
    typed(of_evaluate.replace("TRUTH", str(images)))


def starts(out: Path, name: str) -> int:
    return len(read_json(out / name / "config.json")["history"])


@pytest.fixture(scope="module")
def undisturbed(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All points by one sweep, two at a time."""
    out = tmp_path_factory.mktemp("sweep") / "undisturbed"
    with Tune(out, *SPACE, "--devices", "2", *flags) as tune:
        assert tune.ends() == 0, tune.said()
        (out / "said.txt").write_text(tune.log.read_text())
    assert not processes(str(out))
    yield out


def test_every_point_is_run_once_two_at_a_time(undisturbed: Path) -> None:
    assert finished(undisturbed) == NAMES and {starts(undisturbed, name) for name in NAMES} == {1}
    times = {name: (undisturbed / name).stat().st_ctime for name in NAMES}
    begins = {name: min(p.stat().st_mtime for p in (undisturbed / name).rglob("*")) for name in NAMES}
    ends = {name: status(undisturbed / name)["time"] for name in NAMES}
    together = max(sum(begins[other] <= begins[name] < ends[other] for other in NAMES) for name in NAMES)
    assert together == 2, f"{together} at a time: {begins} {ends} {times}"
    said = (undisturbed / "said.txt").read_text()
    assert "starting Ray\neach on 1 core, 2 at a time on 2 cores\n" in said
    assert "6 points to train\n" in said and "6 of 6 points have ended" in said
    assert {path.name for path in undisturbed.glob("sweep.*")} == {"sweep.json", "sweep.csv", "sweep.png"}
    assert status(undisturbed)["state"] == "finished" and status(undisturbed)["step"] == 6
    typed = {read_json(undisturbed / name / "config.json")["command"][0] for name in NAMES}
    assert typed == {str(ROOT / "launch" / "train.py")}, "as a person would start one of them again"
    assert not (undisturbed / ".ray").exists() and not (undisturbed / "leaving").exists()


def test_points_have_the_bits_of_runs_alone_so_that_the_best_is_the_same(
    undisturbed: Path, flags: list[str], tmp_path: Path
) -> None:
    """The best one and two others are trained alone; of these it is the best by their own records too."""
    sweep, alone = read_sweep(undisturbed), list[Point]()
    assert sweep.best is not None and [point.name for point in sweep.points] == NAMES
    for name, (rate, batch) in zip(NAMES, ((rate, batch) for rate in RATES for batch in BATCHES)):
        if name in (NAMES[0], NAMES[-1], sweep.best.name):
            trained(1, [*flags, "--lr", rate, "--batch", batch], tmp_path / name)
            assert losses(undisturbed / name) == losses(tmp_path / name)
            assert weights(undisturbed / name) == weights(tmp_path / name)
            alone.append(Point(name, {}))
    by_themselves = refresh_points(tmp_path, Sweep(sweep.began, tuple(alone)))
    assert by_themselves.best is not None and by_themselves.best.name == sweep.best.name
    assert (by_themselves.best.score, by_themselves.best.loss) == (sweep.best.score, sweep.best.loss)
    assert (sweep.best.score, -sweep.best.loss) == max((point.score, -point.loss) for point in sweep.points)


def test_a_sweep_whose_trial_driver_and_raylet_are_killed_and_that_is_told_to_leave_ends_with_the_same_bits(
    undisturbed: Path,
    flags: list[str],
    of_killed: set[tuple[int, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "disturbed"
    line = [*SPACE, "--devices", "2", *flags, "--checkpoint-minutes", "0.002"]
    with Tune(out, *line) as tune:
        tune.until(lambda: training(out), "a point trains")
        name = training(out)[0]
        (rank,) = [pid for pid, line in processes(str(out / name)).items() if TRAINING in line]
        os.kill(rank, signal.SIGKILL)
        tune.until(lambda: finished(out), "others go on")
        tune.until(lambda: training(out), "another trains")
        of_killed |= below(tune.process.pid)
        os.kill(tune.process.pid, signal.SIGKILL)
        tune.ends()
    assert len(of_killed) > 4
    gone(out)
    before = {name: starts(out, name) for name in finished(out)}
    assert before

    with Tune(out, "--resume") as tune:
        tune.until(lambda: training(out) and len(finished(out)) > len(before), "points go on")
        own = {pid for pid, _ in below(tune.process.pid)}
        of_killed |= below(tune.process.pid)
        (raylet,) = [pid for pid, line in processes("raylet/raylet ").items() if pid in own]
        os.kill(raylet, signal.SIGKILL)
        assert tune.ends() == 1, tune.said()
        assert "of Ray's on this machine has ended: the same command with --resume continues" in tune.log.read_text()
    gone(out)
    assert status(out)["state"] == "failed"

    stopped = next(name for name in NAMES if name not in finished(out))
    (out / stopped).mkdir(exist_ok=True)
    (out / stopped / "stop").touch()
    with Tune(out, "--resume") as tune:
        tune.until(lambda: f"{stopped} left early" in tune.log.read_text(), "a point is left by its file stop")
        assert state(out, stopped) == "preempted"
        (out / "stop").touch()
        assert tune.ends() == 75, tune.said()
        said = tune.log.read_text()
        assert f"{stopped} resumes" not in said and not ("leaving: runs save" in said and (out / "stop").exists())
        (out / "stop").unlink(missing_ok=True)  # of a sweep that ended before it was told
    gone(out)
    left = [name for name in NAMES if state(out, name) in ("preempted", "finished")]
    assert len(left) > len(before) and status(out)["state"] == "preempted", "runs that trained have saved"
    assert not [point.name for point in read_sweep(out).points if point.state in ("running", "killed")]

    with Tune(out, "--resume") as tune:
        assert tune.ends() == 0, tune.said()
    gone(out)
    assert finished(out) == NAMES
    assert starts(out, name) > 1, "the killed training has gone on"
    for done, count in before.items():
        assert starts(out, done) == count, "a finished point is not run again"
    for name in NAMES:
        assert losses(out / name) == losses(undisturbed / name), name
        assert weights(out / name) == weights(undisturbed / name), name
    assert (
        tune_act([*line, "--resume", "--out", str(out)]) == 0 and "6 of 6 points have ended" in capsys.readouterr().out
    )


def test_a_sweep_that_is_taken_over_ends_and_its_points_go_on_in_the_other(flags: list[str], tmp_path: Path) -> None:
    out, rates = tmp_path / "taken", ("0.01", "0.02", "0.005")
    with Tune(out, "--space", f"lr={','.join(rates)}", "--batch", "1", "--devices", "2", *flags) as first:
        first.until(lambda: steps(out / "lr-0.01") > 3, "the first point trains")
        with Tune(out, "--resume", "--take-over") as second:
            assert first.ends() == 6, first.said()
            assert second.ends() == 0, second.said()
    assert f"--out {out.name} was taken over by process {second.process.pid} " in (said := first.log.read_text())
    assert ": this sweep ends" in said and "3 of 3 points have ended" in second.log.read_text()
    assert {state(out, f"lr-{rate}") for rate in rates} == {"finished"} and status(out)["state"] == "finished"
    gone(out)


def gone(out: Path) -> None:
    """Asserts that no training of a sweep is left, soon."""
    until = time.monotonic() + 30
    while left := processes(str(out)):
        assert time.monotonic() < until, f"orphans: {left}"
        time.sleep(0.2)


def test_a_run_of_two_ranks_goes_on_when_one_is_killed_and_one_that_cannot_work_ends_with_its_code(
    flags: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    """Both ranks are in the placement group of their trial; what would come again is not tried again."""
    out = tmp_path / "pairs"
    line = ["--space", "lr=0.01,1e30", "--batch", "2", "--devices-per-run", "2", "--devices", "2", *flags]
    with Tune(out, *line, "--seqpar", "2", "--checkpoint-minutes", "0.002") as tune:
        tune.until(lambda: steps(out / "lr-0.01") > 3, "the first point trains")
        ranks = [pid for pid, command in processes(str(out / "lr-0.01")).items() if TRAINING in command]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert tune.ends() == 5, tune.said()
    layouts = [read_json(out / name / "config.json")["layout"] for name in ("lr-0.01", "lr-1e+30")]
    assert [(layout["ranks"], layout["seqpar"]) for layout in layouts] == [(2, 2)] * 2
    said = tune.log.read_text()
    assert "starting Ray\neach on 2 cores, 1 at a time on 2 cores\n" in said
    assert "lr-0.01 resumes: its training was killed" in said
    assert state(out, "lr-0.01") == "finished" and starts(out, "lr-0.01") == 2
    assert farthest(losses(out / "lr-0.01"), losses(undisturbed / "lr-0.01_batch-2")) < 1e-3
    assert status(out / "lr-1e+30")["code"] == 5 and starts(out, "lr-1e+30") == 1
    assert "lr-1e+30 failed, code 5" in said


def test_ctrl_c_before_runs_begin_leaves_a_sweep_that_goes_on(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from seqpar.sweeps import sweep_runs

    def pressed(configs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_runs, "_prepare", pressed)
    out = tmp_path / "early"
    assert tune_act([*SPACE, *flags, "--device", "cpu", "--out", str(out)]) == 75
    assert "left early; to continue: python launch/tune.py --resume --out " in capsys.readouterr().out
    assert status(out)["state"] == "preempted" and {point.state for point in read_sweep(out).points} == {"open"}


def test_asha_ends_what_falls_behind_and_nothing_at_its_own_end() -> None:
    from ray.tune.schedulers import TrialScheduler

    engine = SideBySide(Cluster(2, {"CPU": 1.0}), 1, stop_early="asha", first_step=30, last_step=90)
    scheduler, decisions = engine._scheduler(), dict[tuple[str, int], str]()
    assert scheduler.set_search_properties("score", "max")
    for name, scores in {"good": (0.5, 0.6, 0.7), "bad": (0.1, 0.1, 0.1)}.items():
        trial = SimpleNamespace(trial_id=name)
        scheduler.on_trial_add(None, trial)
        for step, score in zip((30, 60, 90), scores):
            decisions[name, step] = scheduler.on_trial_result(None, trial, {"step": step, "score": score})
    assert {decisions["good", step] for step in (30, 60, 90)} == {TrialScheduler.CONTINUE}
    assert decisions["bad", 30] == TrialScheduler.STOP
    at_its_end = SideBySide(Cluster(2, {"CPU": 1.0}), 1, stop_early="asha", first_step=90, last_step=90)._scheduler()
    assert at_its_end.set_search_properties("score", "max")
    at_its_end.on_trial_add(None, trial)
    assert at_its_end.on_trial_result(None, trial, {"step": 90, "score": 0.5}) == TrialScheduler.CONTINUE


def test_a_search_algorithm_that_cannot_be_made_ends_the_sweep_with_its_error(tmp_path: Path) -> None:
    def suggest(*of: object) -> None:
        raise ModuleNotFoundError("No module named 'colorlog'")

    with pytest.raises(ModuleNotFoundError, match="colorlog"):
        SideBySide(Cluster(2, {"CPU": 1.0}), 1, suggest=suggest, total=3).make([], tmp_path)


def test_optuna_suggests_every_point_of_a_grid_and_no_point_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it asks for the same points again and again: those that are left come in their order."""
    pytest.importorskip("optuna")
    from seqpar.sweeps import suggested_points
    from seqpar.sweeps.suggested_points import SuggestedPoints

    monkeypatch.setattr(suggested_points, "TRIES", 1)
    space, names = parse_space(["batch=1,2,3,4", "lr=1,2,3,4", "amsgrad=no,yes"]), list[str]()

    def task(name: str, settings: object) -> dict:
        names.append(name)
        return {}

    points = SuggestedPoints(space, 32, [], task, lambda: False)
    trials = [f"trial-{number}" for number in range(33)]
    for number, trial in enumerate(trials):
        if points.suggest(trial) != SuggestedPoints.FINISHED:
            points.on_trial_complete(trial, {"score": number / 32})
    assert len(names) == 32 == len(set(names)) and points.suggest("more") == SuggestedPoints.FINISHED


def test_optuna_suggests_points_by_those_before_and_goes_on_after_the_driver_was_killed(
    flags: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("optuna")
    out = tmp_path / "optuna"
    line = ["--space", "lr=log:1e-4:0.1", "batch=1,2", "--samples", "5", "--search", "optuna", "--devices", "2"]
    with Tune(out, *line, *flags, "--iterations", "5") as tune:
        tune.until(lambda: len(read_sweep(out).points) >= 3 if (out / "sweep.json").exists() else False, "three points")
        os.kill(tune.process.pid, signal.SIGKILL)
    gone(out)
    before = [point.name for point in read_sweep(out).points]
    with Tune(out, "--resume") as tune:
        assert tune.ends() == 0, tune.said()
    points = read_sweep(out).points
    assert [point.name for point in points][: len(before)] == before and len(points) == 5
    assert {point.state for point in points} == {"finished"} and len({point.name for point in points}) == 5
    assert all(1e-4 <= point.settings["lr"] <= 0.1 for point in points)


def test_points_are_drawn_at_random_by_the_seed() -> None:
    def drawn(seed: int) -> list[float]:
        order = SweepRequest(parse_space(["lr=log:1e-4:1e-2"]), "debug", {"seed": seed}, samples=24)
        return [point.settings["lr"] for point in order.sweep().points]

    assert drawn(1) == drawn(1) != drawn(2) and len(set(drawn(1))) == 24
    assert all(1e-4 <= rate <= 1e-2 for rate in drawn(1)) and sum(rate < 1e-3 for rate in drawn(1)) in range(6, 19)


def test_no_process_of_a_ray_whose_driver_or_raylet_was_killed_is_left(of_killed: set[tuple[int, str]]) -> None:
    """Two agents of Ray's take a minute or two to notice, so that other tests come between."""
    if not of_killed:
        pytest.skip("no sweep was killed before")
    until = time.monotonic() + 150
    while left := of_killed & {(pid, began) for pid, (_, began) in parents().items()}:
        assert time.monotonic() < until, f"orphans: {left}"
        time.sleep(0.2)
