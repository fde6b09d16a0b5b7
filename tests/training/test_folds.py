"""Five folds one after the other: each as if trained by itself; left in the middle, the whole goes on."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from seqpar.cli import train
from seqpar.cluster import exit_codes
from seqpar.data.errors import DataError
from seqpar.runs.fold_folder import refuse_other_folds, write_flags
from seqpar.runs.run_folder import read_config
from seqpar.tasks.case_evaluation import _about_folds
from seqpar.training import folds, gradients
from seqpar.training.folds import find_folds
from tests.support.folders import nnunet, write_json
from tests.support.training_runs import Hook, at, signalled, status, trained, weights

SHORT = ("--epochs", "1", "--iterations", "6", "--seqpar", "2")
FIVE = ("--fold", "all5")


def test_another_run_in_the_place_of_a_fold_is_refused(tmp_path: Path) -> None:
    for number, fold in enumerate("0122"):
        write_json(tmp_path / f"fold{number}" / "config.json", {"config": {"fold": fold}})
    with pytest.raises(DataError, match="fold3: holds a run of fold 2: put that of fold 3 back, or remove it"):
        refuse_other_folds(tmp_path)
    shutil.rmtree(tmp_path / "fold3")
    refuse_other_folds(tmp_path)
    write_json(tmp_path / "fold3" / "config.json", {"config": {}})  # of an earlier version
    refuse_other_folds(tmp_path)


class Forked:
    """A training in a forked process, where the act starts a new one."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                os.environ |= dict(env)
                code = exit_codes.run(train.act, list(command[2:]))
                sys.stdout.flush()
            except SystemExit as error:
                code = int(error.code or 0)
            finally:
                os._exit(code)

    def wait(self) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def forking(rank: int) -> None:
    folds.start_python = Forked  # type: ignore[assignment]


def amid_fold(number: int, act: Callable[[], object]) -> Hook:
    """Returns a hook by which the process of rank 1 that trains one of the folds does something amid a step."""

    def act_in_fold() -> None:
        if os.environ[folds.MEETING] == f"fold{number}":
            act()

    def hook(rank: int) -> None:
        forking(rank)
        at(gradients.Gradients, "_backward", 1, act_in_fold, call=3)(rank)

    return hook


def tell_to_leave() -> None:
    """Tells the process that trains fold after fold to leave."""
    arrived, usual = list[int](), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: (arrived.append(number), usual(number, frame)))
    os.kill(int(os.environ[folds.PARENT_OF_FOLD]), signal.SIGTERM)
    until = time.monotonic() + 30
    while not arrived and time.monotonic() < until:  # it is passed on to this process
        time.sleep(0.01)


@pytest.mark.started
def test_five_folds_left_in_the_middle_go_on_and_each_is_a_run_of_its_own(flags, tmp_path) -> None:
    """The first start meets at torchrun's store; the second at one that the first rank holds beside its folds."""
    out = tmp_path / "five"
    line = [*flags, *SHORT, *FIVE]
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    left = trained(2, line, out, expect=75, hook=amid_fold(1, tell_to_leave), **agent)
    assert [status(out / f"fold{n}")["state"] for n in (0, 1)] == ["finished", "preempted"]
    assert status(out / "fold1")["step"] < 6 and not (out / "fold2").exists()
    state = status(out)
    assert (state["state"], state["code"], state["step"], state["steps"]) == ("preempted", 75, 1, 5)
    assert "fold 1: SIGTERM" in state["why"]
    assert (
        f"to continue: torchrun --nproc-per-node 2 launch/train.py --resume --fold all5 --out {out}" in left.said(0)
        and "go on" not in left.said(1).split("fold 1 ")[-1]
    )
    said_by_first = (out / "fold0" / "train.log").read_text()
    first, parts = weights(out / "fold0"), [read_config(out / "fold0")["dataset"]["held_out"]]
    ended = trained(2, [*line, "--resume"], out, hook=forking)
    said = ended.said(0).splitlines()
    for words in ("  (rank: a process", "  modalities: ", "  label tumour", "(dice: soft Dice"):
        assert sum(line.startswith(words) for line in said) == 1, "said once, not by each fold"
        assert words in (out / "fold4" / "train.log").read_text() and words in said_by_first
    assert [line[-8:] for line in said if line.startswith("data: ")] == [f"(fold {fold})" for fold in range(1, 5)]
    assert weights(out / "fold0") == first and "fold 0 of 5 has finished" in ended.said(0)
    for fold in range(1, 5):
        assert status(out / f"fold{fold}")["state"] == "finished"
        config = read_config(out / f"fold{fold}")
        assert config["config"]["fold"] == str(fold)
        parts.append(config["dataset"]["held_out"])
    assert sorted(sum(parts, [])) == [f"c_{n:03d}" for n in range(5)]
    assert status(out)["state"] == "finished" and status(out)["step"] == 5
    assert f"predict.py {out} -i IMAGES" in ended.said(0).splitlines()[-1] and "folds should" not in ended.said(0)
    assert _about_folds([out / f"fold{fold}" for fold in range(5)]) == []
    trained(2, [*flags, *SHORT, "--fold", "1"], tmp_path / "alone")
    assert weights(out / "fold1") == weights(tmp_path / "alone")


@pytest.mark.started
def test_a_file_stop_next_to_five_folds_ends_them_after_a_step_or_before_a_fold(flags, tmp_path) -> None:
    out, line = tmp_path / "five", [*flags, *SHORT, *FIVE]
    left = trained(2, line, out, expect=75, hook=amid_fold(0, (out / "stop").touch))
    assert status(out / "fold0")["state"] == status(out)["state"] == "preempted" and status(out / "fold0")["step"] < 6
    assert f"file {out}/stop" in status(out)["why"] and "fold 0 left early; to continue:" in left.said(0)
    assert not (out / "stop").exists() and not (out / "fold1").exists()
    (out / "stop").touch()
    trained(2, [*line, "--resume"], out, expect=75, hook=forking)
    assert status(out / "fold0")["step"] < 6 and not (out / "stop").exists()


def test_folds_of_several_splits_or_classes_are_named(tmp_path, capsys) -> None:
    write_flags(tmp_path, [])
    cases = [f"c_{n}" for n in range(5)]
    contents = [
        {"dataset": {"train": [own for own in cases if own != held], "held_out": [held], "labels": {"tumour": 1}}}
        for held in cases
    ]
    for n, own in enumerate(contents):
        (tmp_path / f"fold{n}").mkdir()
        write_json(tmp_path / f"fold{n}/config.json", own)
    runs = [tmp_path / f"fold{n}" for n in range(5)]
    five = find_folds(["--fold", "all5"])
    assert five is not None
    five._warn_of_other_data(contents)
    assert _about_folds(runs) == [] and capsys.readouterr().out == ""
    contents[4]["dataset"] |= {"held_out": ["c_0"], "train": cases[1:]}
    write_json(tmp_path / "fold4/config.json", contents[4])
    told = "several of these folds hold out 1 case, such as c_0: together these folds are no cross-validation"
    assert _about_folds(runs) == _about_folds([run / "validation" for run in runs]) == [f"Caution: {told}."]
    assert _about_folds(runs[:4]) == [] and _about_folds([*runs, tmp_path / "more"]) == [f"Caution: {told}."]
    five._warn_of_other_data(contents)
    assert capsys.readouterr().out == f"warning: {told}\n"
    contents[3]["dataset"] |= {"labels": {"liver": 2, "tumour": 1}}
    contents[4]["dataset"] |= {"labels": {"tumour": 1, "liver": 2}}
    five._warn_of_other_data(contents[3:])
    assert capsys.readouterr().out == "", "names in another order are the same classes"
    five._warn_of_other_data(contents)
    classes = "the classes of the data changed between these folds: predict refuses their mean"
    assert capsys.readouterr().out == f"warning: {classes}\n", "the other was said before"
    five._warn_of_other_data(contents)
    assert capsys.readouterr().out == ""


def ending(*codes: Sequence[int]) -> Hook:
    """Returns a hook by which a fold's training ends at once: on each rank with its code, in order."""

    def hook(rank: int) -> None:
        left = list(codes[rank])

        class Ended:
            def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
                self.code, run = left.pop(0), Path(command[command.index("--out") + 1])
                if rank == 0:
                    write_json(run / "config.json", {})
                    write_json(run / "status.json", {"state": "running" if self.code else "finished"})

            def wait(self) -> int:
                return self.code

            def poll(self) -> int:
                return self.code

        folds.start_python = Ended  # type: ignore[assignment, misc]

    return hook


def test_ranks_agree_whether_a_fold_begins_and_how_it_ended(flags, tmp_path) -> None:
    """A signal that one rank alone gets between two folds ends all; the exit code that says most is everyone's."""

    def one_is_told(rank: int) -> None:
        ending([0], [0])(rank)
        at(folds.Folds, "_agree", 1, signalled(signal.SIGTERM), call=2)(rank)

    left = trained(2, [*flags, *FIVE], tmp_path / "told", expect=75, hook=one_is_told)
    assert status(tmp_path / "told")["why"] == "fold 1: it had not begun" and "fold 1 left early" in left.said(0)
    trained(2, [*flags, *FIVE], tmp_path / "lost", expect=75, hook=ending([0, 75], [0, 1]))
    assert status(tmp_path / "lost")["step"] == 1
    trained(2, [*flags, *FIVE], tmp_path / "failed", expect=3, hook=ending([0], [3]))
    stale = tmp_path / "stale"  # the second rank's disk is late: it sees no run that has ended
    assert trained(2, [*flags, *FIVE], stale, expect=75, hook=ending([0, 0, 75], [0, 0, 75]))

    def blind(rank: int) -> None:
        ending([0, 0, 0], [0, 0, 0])(rank)
        if rank:
            folds.read_status = folds.read_flags = None  # type: ignore[assignment]

    trained(2, [*FIVE, "--resume"], stale, hook=blind)
    assert status(stale)["state"] == "finished"


def test_five_folds_that_ended_are_left_alone_and_an_error_ends_all(flags, tmp_path) -> None:
    out = tmp_path / "five"
    for n in range(2):
        write_json(out / f"fold{n}" / "config.json", {})
    with pytest.raises(ValueError, match=f"--out {out} holds a run already, {out}/fold0"):
        train.act([*flags, *FIVE, "--out", str(out)])
    shutil.rmtree(out)
    failed = trained(1, [*flags, *FIVE, "--heads", "5"], out, expect=2, hook=forking)
    assert "fold 0 ended with exit code 2" in failed.said() and not (out / "fold1").exists()
    assert status(out)["state"] == "failed" and status(out)["code"] == 2
    assert trained(1, [*flags, *FIVE, "--heads", "5", "--dry-run"], out, expect=2, hook=forking)


def test_what_five_folds_need_is_said_before_anything(flags, tmp_path) -> None:
    with pytest.raises(ValueError, match="--fold all5 needs --out"):
        train.act([*flags, *FIVE])
    data = nnunet(tmp_path / "own", cases=4)
    write_json(data / "splits_final.json", [{"train": ["c_000", "c_001"], "val": ["c_002"]}])
    with pytest.raises(ValueError, match="has the folds 0, not 0 to 4"):
        train.act([*flags, *FIVE, "--data", str(data), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_a_signal_before_a_fold_could_act_is_no_failure(tmp_path, monkeypatch) -> None:
    """Its process is still importing then, and a signal kills it: nothing is lost."""
    five = folds.find_folds(["--fold", "all5", "--out", str(tmp_path / "five")])
    assert five is not None

    class Young:
        def __init__(self, *of: object) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            self.got: list[int] = []

        def wait(self) -> int:
            return -self.got[-1]

        def poll(self) -> None:
            return None

        def send_signal(self, number: int) -> None:
            self.got.append(number)

    monkeypatch.setattr(folds, "start_python", Young)
    before = signal.getsignal(signal.SIGTERM)
    launcher = folds.Launcher("test")
    assert five.train(launcher) == 75
    assert five.train(launcher) == 75, "no further fold begins"
    assert signal.getsignal(signal.SIGTERM) == before
    assert status(tmp_path / "five")["why"] == "fold 0: it had not begun"
