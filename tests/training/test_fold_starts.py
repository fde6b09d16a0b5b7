"""How five folds begin, go on and are told apart from single runs; signals that come to one of them."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seqpar.cli import train
from seqpar.cluster import stop_request
from seqpar.cluster.exit_codes import FINAL
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group, Mesh
from seqpar.runs.run_folder import describe_run, read_config
from seqpar.runs.run_status import describe_kill
from seqpar.settings.command_line import parse
from seqpar.training import folds
from seqpar.training.run_request import read_request
from tests.support.folders import write_json
from tests.support.training_runs import status, trained


@pytest.fixture
def lines_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[list[str]]]]:
    """Returns a function that starts five folds whose trainings end with ``codes``: exit code, and the flags of each.

    A training that ends with 0 leaves a finished run, one that would fail again a failed one, any other one that still
    says that it is running.
    """

    def begin(*flags: str, codes: Sequence[int] = (0,) * 5) -> tuple[int, list[list[str]]]:
        lines, left = list[list[str]](), list(codes)

        class Ended:
            def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
                lines.append(list(command[2:]))
                self.code, run = left.pop(0), Path(command[command.index("--out") + 1])
                write_json(run / "config.json", {})
                failed = self.code in FINAL
                state = "failed" if failed else "running" if self.code else "finished"
                write_json(run / "status.json", {"state": state, "code": self.code})

            def wait(self) -> int:
                return self.code

        monkeypatch.setattr(folds, "start_python", Ended)
        five = folds.find_folds([*flags, "--fold", "all5"])
        assert five is not None
        return five.train(folds.Launcher("test")), lines

    return begin


def test_folds_that_have_not_begun_take_the_flags_of_the_first_start(lines_of, tmp_path) -> None:
    """As a run's own settings are kept by --resume, and as what is printed says: else they would train on phantoms."""
    out = str(tmp_path / "five")
    begun = ["--preset", "debug", "--lr", "0.1"]
    assert lines_of(*begun, "--out", out, codes=(0, 75))[0] == 75
    code, lines = lines_of("--resume", "--out", out, "--lr", "0.2", codes=(0, 0, 75))
    assert code == 75 and lines[0] == ["--lr", "0.2", "--fold", "1", "--out", f"{out}/fold1", "--resume"]
    assert lines[1] == [*begun, "--lr", "0.2", "--fold", "2", "--out", f"{out}/fold2"]
    code, lines = lines_of("--resume", "--out", out, codes=(0, 0))
    assert code == 0 and lines[0] == ["--fold", "3", "--out", f"{out}/fold3", "--resume"]
    assert lines[1] == [*begun, "--lr", "0.2", "--fold", "4", "--out", f"{out}/fold4"]


def test_folds_that_would_be_unlike_those_that_have_begun_are_refused(lines_of, tmp_path) -> None:
    """What a single run may change when it resumes stays allowed; nothing is written for what is refused."""
    out = str(tmp_path / "five")
    begun = ["--preset", "debug", "--patch", "8", "--batch", "2", "--lr", "0.1", "--device", "cpu"]
    assert lines_of(*begun, "--out", out, codes=(0, 0, 75))[0] == 75
    for fold in range(3):
        config = replace(parse(begun, "debug")[1], out=f"{out}/fold{fold}", fold=str(fold))
        write_json(tmp_path / "five" / f"fold{fold}" / "config.json", describe_run(config, "debug", {}, {"data": 1}))
    flags = (tmp_path / "five" / "folds.json").read_text()
    for more, told in (
        ("--patch 4", r"--patch 4 4 4: .*five/fold0 began with --patch 8 8 8, and all five folds need the same: the "),
        ("--optimizer sgd", "--optimizer sgd: .*fold0 began with --optimizer adam, and all five"),
        ("--no-qkv-bias", "--no-qkv-bias: .*fold0 began with --qkv-bias, and all five"),
        ("--weights other.safetensors", "--weights .*other.safetensors: .*fold0 began with --weights unset, and all"),
        ("--preset laptop", "--preset laptop: the run in .*fold0 continues as it began, debug: remove it"),
        ("--batch 4", "--batch 4: folds that begin now would have 4 tiles a step, and .*fold0 has 2: all five folds"),
        ("--global-batch 8", "--global-batch 8: folds that begin now would have 8 tiles a step"),
    ):
        for start in ("--resume", "--again", "--resume --dry-run"):
            with pytest.raises(ValueError, match=told):
                lines_of(*start.split(), *more.split(), "--out", out)
    assert (tmp_path / "five" / "folds.json").read_text() == flags
    path = tmp_path / "five" / "fold2" / "config.json"  # of another patch: the message names the fold that differs
    write_json(path, {**read_config(path.parent), "config": {**read_config(path.parent)["config"], "patch": [4, 4, 4]}})
    with pytest.raises(ValueError, match="--patch 8 8 8: .*fold2 began with --patch 4 4 4"):
        lines_of("--resume", "--patch", "8", "--out", out)
    more = ["--epochs", "9", "--lr", "0.2", "--patience", "3", "--batch", "1", "--accumulate", "2", "--patch", "8"]
    path.unlink()
    code, lines = lines_of("--resume", *more, "--out", out)
    assert code == 0 and lines[-1] == [*begun, *more, "--fold", "4", "--out", f"{out}/fold4"]


def test_a_signal_before_a_fold_began_leaves_early_and_a_second_ctrl_c_does_not(monkeypatch, tmp_path) -> None:
    five, run = folds.find_folds(["--fold", "all5"]), tmp_path / "fold0"
    monkeypatch.setattr(five, "_start", lambda *_: 130)
    five._signals.append(signal.SIGINT)
    assert five._train_fold(0, str(run), False, folds.Launcher("test")) == 75
    write_json(run / "config.json", {})
    assert five._train_fold(0, str(run), False, folds.Launcher("test")) == 130


def test_a_time_limit_is_that_of_all_five_in_each_start(lines_of, flags, tmp_path) -> None:
    """A fold's own run keeps what was left of it in its config, which would end the next start at once."""
    out = ["--out", str(tmp_path / "five")]
    asked = ["--resume", *out]
    for line, minutes in (
        ([*flags, "--time-limit", "1:00:00", *out], 60),
        (asked, 60),
        ([*asked, "--time-limit=30"], 30),
    ):
        _, lines = lines_of(*line, codes=(0, 75))
        for own in lines:
            limit = parse(own, "debug")[1].time_limit
            assert float(limit) == pytest.approx(minutes, abs=0.5)
    code, lines = lines_of(*asked, "--time-limit", "none", codes=(0,) * 2)
    assert code == 0 and [parse(own, "debug")[1].time_limit for own in lines] == ["none", "none"]


def test_each_fold_has_the_lessons_of_a_curriculum(lines_of, flags, tmp_path) -> None:
    own = {"--batch", "--tile", "--epochs"}
    kept = [text for n, text in enumerate(flags) if not ({text, flags[n - 1]} & own)]
    line = [*kept, "--patch", "4", "--iterations", "1", "--curriculum", "8:1:1,12:1:1"]
    code, lines = lines_of(*line, "--out", str(tmp_path / "five"))
    requests = [read_request(of_fold, Launcher("alone")) for of_fold in lines]
    assert code == 0 and [request.config.fold for request in requests] == list("01234")
    assert all([lesson.config.tile[0] for lesson in request.lessons] == [8, 12] for request in requests)
    trained(1, lines[3], tmp_path / "alone")
    assert status(tmp_path / "alone")["steps"] == 2 and status(tmp_path / "alone")["state"] == "finished"
    assert read_config(tmp_path / "alone")["config"]["fold"] == "3"


def test_a_line_that_is_given_again_whole_adds_nothing_and_a_new_start_begins_anew(lines_of, tmp_path) -> None:
    out = str(tmp_path / "five")
    line = ["--preset", "debug", "--out", out]
    assert lines_of(*line, codes=(75,))[0] == 75
    code, lines = lines_of(*line, "--resume")
    assert code == 0 and lines[1][:3] == ["--preset", "debug", "--fold"]
    for n in range(5):
        shutil.rmtree(f"{out}/fold{n}")
    assert lines_of("--lr", "1", "--out", out)[1][0][:3] == ["--lr", "1", "--fold"]


def test_resume_needs_five_folds_and_another_run_s_folder_is_left_alone(lines_of, tmp_path) -> None:
    missing, single = tmp_path / "mistyped", tmp_path / "single"
    with pytest.raises(ValueError, match="--resume --out .*mistyped: .* no five folds"):
        lines_of("--resume", "--out", str(missing))
    assert not missing.exists()
    write_json(single / "config.json", {})
    write_json(single / "status.json", {"state": "finished"})
    for more in ([], ["--resume"], ["--again"]):
        with pytest.raises(ValueError, match="--out .*single holds a run .* name another"):
            lines_of("--out", str(single), *more)
    assert status(single) == {"state": "finished"}
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--out .*file: cannot be written"):
        lines_of("--out", str(tmp_path / "file"))


def test_again_takes_the_next_folder_after_a_failure_that_would_come_again(lines_of, tmp_path) -> None:
    """As a single run does; after others it goes on, and without a fold that has begun it begins anew."""
    out, again = str(tmp_path / "five"), ["--again", "--out", str(tmp_path / "five")]
    assert lines_of("--lr", "0.1", "--out", out, codes=(0, 75))[0] == 75
    code, lines = lines_of(*again, codes=(3,))
    assert code == 3 and lines[0][-1] == "--resume" and f"{out}/fold1" in lines[0]
    code, lines = lines_of("--lr", "0.2", *again, codes=(75,))
    assert code == 75 and lines[0] == ["--lr", "0.2", "--fold", "0", "--out", f"{out}-2/fold0"]
    assert lines_of(*again)[1][0] == ["--fold", "0", "--out", f"{out}-2/fold0", "--resume"]
    assert lines_of(*again)[1][0][-1] == f"{out}-3/fold0", "both have ended"
    write_json(tmp_path / "mistyped" / "status.json", {"state": "failed", "step": 0, "code": 2})
    write_json(tmp_path / "mistyped" / "folds.json", {"flags": ["--heads", "5"]})
    assert lines_of("--again", "--out", str(tmp_path / "mistyped"))[1][0][0] == "--fold", "not by those flags"
    with pytest.raises(ValueError, match="--again needs no --resume: leave one of both out"):
        lines_of(*again, "--resume")


def test_a_single_run_does_not_go_among_five_folds(flags, lines_of, tmp_path) -> None:
    out = str(tmp_path / "five")
    lines_of("--out", out)
    for more in ([], ["--fold", "0"], ["--again"], ["--resume"]):
        with pytest.raises(ValueError, match="--out .*five holds five folds: resume them with --fold all5 --resume"):
            train.act([*flags, "--out", out, *more])
    assert status(tmp_path / "five")["state"] == "finished"


def test_one_ctrl_c_that_comes_twice_to_a_fold_is_one(monkeypatch, tmp_path) -> None:
    """From srun to all processes, and passed on by the one that trains fold after fold."""
    numbers, clock = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), [100.0]
    before = [signal.getsignal(number) for number in numbers]
    monkeypatch.setattr(stop_request.time, "monotonic", lambda: clock[0])
    try:
        for parents, passes in (({folds.PARENT_OF_FOLD: "1"}, True), ({}, False)):
            monkeypatch.delenv(folds.PARENT_OF_FOLD, raising=False)
            for name, value in parents.items():
                monkeypatch.setenv(name, value)
            stopper = stop_request.StopRequest(3600.0)
            stopper.begin(
                Mesh(Launcher("alone"), torch.device("cpu"), *[Group("world")] * 7, ("here",)), print, tmp_path
            )
            for moment in (100.0, 100.3):
                clock[0] = moment
                with nullcontext() if passes or moment == 100.0 else pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGINT)
            assert stopper.own_reason() == "SIGINT"
            clock[0] = 102.0
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            clock[0] = 100.0
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def test_a_signal_before_the_start_counts_though_python_dropped_what_it_raised(tmp_path) -> None:
    """As it does within a finaliser, which may run at any time."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    try:
        stopper = stop_request.StopRequest(3600.0)
        with suppress(stop_request.LeftBeforeStart):
            os.kill(os.getpid(), signal.SIGTERM)
        mesh = Mesh(Launcher("alone"), torch.device("cpu"), *[Group("world")] * 7, ("here",))
        with pytest.raises(stop_request.LeftBeforeStart) as left:
            stopper.begin(mesh, print, tmp_path)
        assert left.value.code == 128 + signal.SIGTERM
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def test_a_fold_that_was_killed_is_no_running_one(lines_of, tmp_path) -> None:
    """One that is refused because another training holds its folder is: that one goes on, and will write the end."""
    out = tmp_path / "five"
    assert lines_of("--out", str(out), codes=(0, -9))[0] == 1
    assert (status(out)["state"], status(out)["code"]) == ("failed", 1)
    assert status(out)["why"] == "fold 1: ended with exit code 1"
    assert lines_of("--out", str(out), "--resume", codes=(6,))[0] == 6
    assert status(out)["state"] == "running" and describe_kill(out) == "", "the lock is in the fold's own folder"


def test_flags_that_no_fold_would_take_are_refused(lines_of, tmp_path, monkeypatch) -> None:
    """Else a resume with more epochs would say that it finished, and train nothing."""
    out = tmp_path / "five"
    assert lines_of("--epochs", "1", "--out", str(out))[0] == 0
    code, lines = lines_of("--resume", "--out", str(out))
    assert code == 0 and lines == [], "nothing is left to do, and nothing is asked for"
    for fold in range(5):
        write_json(out / f"fold{fold}" / "config.json", {"config": {"epochs": 1, "iterations": 5}})
    one = re.escape(f"train.py --resume --out {out}/fold0 --epochs 2")
    with pytest.raises(ValueError, match=rf"all five have finished, and --epochs 2 would change none: continue.*{one}"):
        lines_of("--resume", "--epochs", "2", "--out", str(out))
    for flags in (["--time-limit", "300"], ["--iterations", "5", "--epochs", "1"]):
        assert lines_of("--resume", *flags, "--out", str(out)) == (0, []), "they ask for nothing that is not done"
    write_json(out / "fold0" / "config.json", {"config": {"epochs": 2, "iterations": 5}})
    with pytest.raises(ValueError, match=re.escape(f"train.py --resume --out {out}/fold1 --epochs 2")):
        lines_of("--resume", "--epochs", "2", "--out", str(out))
    assert folds.read_flags(out) == ["--epochs", "1"], "kept as they were"
    write_json(out / "fold4" / "status.json", {"state": "preempted"})
    assert len(lines_of("--resume", "--epochs", "2", "--out", str(out))[1]) == 1, "one takes them"
