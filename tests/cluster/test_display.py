"""What people watch: the time left is never cut, a log gets a line at least every minute, colours only on terminals."""

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from seqpar import terminal
from seqpar import terminal as display_module
from seqpar.cli import prepare
from seqpar.cluster.exit_codes import DATA
from seqpar.cluster.start_ranks import run_local
from seqpar.parallel.launcher import Launcher
from seqpar.runs import run_log
from seqpar.runs.run_log import logging_output
from seqpar.terminal import TYPED, Display, ProgressBar, coloured, fit, next_command, python_module, typed_variable
from seqpar.training import folds
from tests.support.folders import nnunet

FIELDS = ["epoch 12/200 ███·····", "1:02:03 left", "loss 0.5", "dice 0.81", "9,123 tokens/s"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns a list of one: the time that display and bar see from now on, in place of the machine's."""
    clock = [100.0]
    for module in (display_module, terminal):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


@pytest.mark.parametrize("width", range(12, 90))
def test_the_time_that_is_left_is_never_cut(width: int) -> None:
    line = fit(FIELDS, width)
    assert len(line) <= width and "1:02:03 left" in line
    shown = line.split("  ")
    assert shown[1:] in ([], *(FIELDS[1:n] for n in range(2, 6))), "whole fields, the last ones go first"
    assert width < 36 or shown[0] == FIELDS[0]


def test_a_log_gets_milestones_and_a_line_at_least_as_often_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", log := io.StringIO())
    clock = stopped_clock(monkeypatch)
    display = Display("stdout", every_s=0.02)  # the thread looks every 0.05 s of the true time
    for step in range(50):
        display.show([f"step {step}", "? left"], milestone=step == 49)
    assert log.getvalue().splitlines() == ["step 49  ? left"]
    for lines in (2, 3):
        clock[0] += 59 if lines == 2 else 7  # nothing happens: a long step, say
        until = time.monotonic() + 60
        while len(log.getvalue().splitlines()) < lines and time.monotonic() < until:
            time.sleep(0.01)
    display.show(["step 50", "? left"])
    display.close()
    wanted = ["step 49  ? left", "step 49  ? left", "step 49  ? left  (no news for 1:06)"]
    assert log.getvalue().splitlines() == wanted, "the thread speaks"
    clock[0] += 7
    time.sleep(0.15)
    assert log.getvalue().splitlines() == wanted, "a closed one is silent"


def test_a_line_that_is_repeated_within_a_minute_does_not_complain_of_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", log := io.StringIO())
    clock = stopped_clock(monkeypatch)
    display = Display("stdout", every_s=100.0)
    display.show(["step 1"], milestone=True)
    clock[0] += 41
    display.show(["step 2"])
    clock[0] += 59
    display._repeat()
    display.close()
    assert log.getvalue().splitlines() == ["step 1", "step 2"]


def test_a_message_has_lines_of_its_own_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setattr(sys, "stderr", errors := Terminal())
    display = Display("stdout")
    display.show(["case 1/2", "0:01 left"])
    display.say("error: broken", "stderr")
    display.show(["case 2/2", "0:00 left"], milestone=True)
    display.say("done")
    display.close()
    assert terminal.getvalue() == "\r\x1b[Kcase 1/2  0:01 left\n\r\x1b[Kcase 2/2  0:00 left\ndone\n"
    assert errors.getvalue() == "\x1b[31merror:\x1b[0m broken\n"


def test_colours_are_for_terminals_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = "warning: slow\nnext: python x\n██··\nno warning: here"
    painted = coloured(text, Terminal())
    assert (
        painted == "\x1b[33mwarning:\x1b[0m slow\n\x1b[36mnext:\x1b[0m python x\n\x1b[32m██\x1b[0m··\nno warning: here"
    )
    assert coloured(text, io.StringIO()) == text
    for name, value in (("TERM", "dumb"), ("NO_COLOR", "1")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert coloured(text, Terminal()) == text


def test_a_bar_over_cases_shows_parts_of_cases_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    clock = stopped_clock(monkeypatch)
    show = ProgressBar("preparing")
    for seconds, done in ((30, 0), (0, 0.31), (0, 0.35), (23, 1.5), (10, 2), (0, 2)):
        clock[0] += seconds
        show(done, 2)
    lines = log.getvalue().splitlines()
    assert [line.split("  ")[:2] for line in lines[1:]] == [
        ["preparing 2 cases ██·········· 16%", "? left"],
        ["preparing 2 cases █████████··· 75%", "0:09 left"],
        ["preparing 2 cases ████████████ 100%", "in 63 s"],
    ]
    assert lines[0] == "preparing 2 cases ············ 0%  ? left  0:30 so far"


def test_a_log_file_has_what_was_printed_without_what_was_written_over(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", "a b"])
    path, display = tmp_path / "train.log", Display("stdout")
    path.write_text("of an earlier start\n")
    with logging_output(True) as log:
        print("early")
        log.open(path)
        for step in range(3):
            display.show([f"step {step} ██", "1:00 left"], milestone=step == 2)
        print("warning: x", file=sys.stderr)
        monkeypatch.setattr(run_log, "EVERY_S", 0.0)
        display.show(["step 3", "0:01 left"])
    print("late")
    text = path.read_text()
    assert "late" not in text and "\x1b" not in text and "\r" not in text
    first, *lines = text.splitlines()
    assert first == "of an earlier start"
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    wanted = ["$ train.py --out 'a b'", "early", "step 2 ██  1:00 left", "warning: x", "step 3  0:01 left"]
    assert [line[20:] for line in lines] == wanted
    assert "early" in terminal.getvalue() and terminal.getvalue().count("\r") == 4
    with logging_output(False) as none:
        none.open(tmp_path / "other.log")
    assert not (tmp_path / "other.log").exists(), "only the first rank writes one"


def test_what_the_fold_before_said_of_its_start_is_in_the_log_alone(tmp_path, monkeypatch) -> None:
    before, path, out = tmp_path / "before.log", tmp_path / "train.log", io.StringIO()
    said = ["$ train.py", "seqpar: debug", "(words)", "", "data: fold 0", "epoch 1/1  0:00 left", "class  Dice"]
    before.write_text("".join(f"2026-01-01 00:00:00 {line}\n" for line in said))
    monkeypatch.setenv(run_log.FOLD_BEFORE, str(before))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", errors := io.StringIO())
    with logging_output(True) as log:
        print("seqpar: debug\ndata: fold 1")
        log.open(path)
        print("\x1b[2m(words)\x1b[0m\n")
        print("(words)", end="")
        print(" of another line, and", end=" ")
        print("(words)\nclass  Dice")
        print("(words)", file=sys.stderr)
    news = ["data: fold 1", "", "(words) of another line, and (words)", "class  Dice"]
    assert out.getvalue().splitlines() == news and errors.getvalue() == "(words)\n"
    logged = [line[20:] for line in path.read_text().splitlines()[1:]]
    assert logged == ["seqpar: debug", "data: fold 1", "(words)", *news[1:], "(words)"]


def test_a_log_of_the_fold_before_that_is_a_pipe_is_not_read(tmp_path, monkeypatch) -> None:
    os.mkfifo(tmp_path / "before.log")  # to open it would never end
    monkeypatch.setenv(run_log.FOLD_BEFORE, str(tmp_path / "before.log"))
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    with logging_output(True):
        print("on")
    assert out.getvalue() == "on\n"


def test_a_display_that_nobody_holds_repeats_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(every_s=0.05)
    display.show(["step 1"])
    thread = display._thread
    assert thread is not None and thread.is_alive()
    del display
    thread.join(10)
    assert not thread.is_alive()


def test_a_log_file_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    with logging_output(True) as log:
        log.open(tmp_path)  # a folder
        print("on")
    first, second = out.getvalue().splitlines()
    assert first.startswith("warning: ") and "this run has no log file" in first and second == "on"


def test_the_next_command_is_typed_as_this_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for started, line, of_two in (
        ("/usr/bin/seqpar-train", "seqpar-report 'runs/a b'", "-m seqpar.cli.train --lr 1"),
        ("launch/train.py", "python launch/report.py 'runs/a b'", "launch/train.py --lr 1"),
        (prepare.__file__, "python -m seqpar.cli.report 'runs/a b'", "-m seqpar.cli.train --lr 1"),
        ("/usr/lib/pytest/__main__.py", "python launch/report.py 'runs/a b'", "launch/train.py --lr 1"),
    ):
        monkeypatch.setattr(sys, "argv", [started])
        assert next_command("report", "runs/a b") == line
        assert next_command("train", "--lr", 1, ranks=2) == f"torchrun --nproc-per-node 2 {of_two}"


def test_ranks_and_folds_that_an_act_starts_spell_it_as_that_act_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        returncode = 0

        def __init__(self, command: Sequence[str], env: dict[str, str], **options: object) -> None:
            with monkeypatch.context() as inside:
                inside.setattr(os, "environ", env)
                inside.setattr(sys, "argv", list(command[1:]))
                lines.append(next_command("predict", "run"))

        def poll(self) -> int:
            return 0

        wait = poll

    lines = list[str]()
    five = folds.find_folds(["--fold", "all5", "--out", "five"])
    assert five is not None
    for typed, script in (("/usr/bin/seqpar-train", "seqpar-predict"), ("launch/train.py", "python launch/predict.py")):
        monkeypatch.setattr(sys, "argv", [typed, "--seqpar", "2"])
        monkeypatch.setattr(subprocess, "Popen", Ended)
        assert run_local(2, ["-m", "seqpar.cli.train"]) == 0
        assert five._train_fold(0, "five/fold0", False, Launcher("test")) == 0
        assert lines == [f"{script} run"] * 3
        lines.clear()


def test_trainings_of_a_sweep_spell_commands_as_a_person_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    for typed, script in (("/usr/bin/seqpar-tune", "/usr/bin/seqpar-train"), ("launch/tune.py", "launch/train.py")):
        monkeypatch.setattr(sys, "argv", [typed, "--space", "lr=1"])
        assert typed_variable(python_module("train")) == {TYPED: script}
        assert typed_variable(["-m", "seqpar.cluster.acceptance.two_ranks"]) == {TYPED: typed}


def test_a_preparation_says_how_to_train_on_it(tmp_path, capsys) -> None:
    data, cache = nnunet(tmp_path / "D", 2), tmp_path / "c"
    assert prepare.act([str(data), "--out", str(cache), "--spacing", "2,2,2", "--workers", "0"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(rf"next: python \S*train.py --data {data} --cache {cache} --spacing 2,2,2", line)
    (data / "labelsTr" / "c_001.nii.gz").write_bytes(b"")
    assert prepare.act([str(data), "--out", str(cache), "--workers", "0"]) == DATA
    assert "next:" not in capsys.readouterr().out


def test_a_pipe_in_the_place_of_the_log_is_one_warning(tmp_path) -> None:
    """To open it would wait until somebody reads it."""
    said, log = [], run_log.RunLog()
    os.mkfifo(tmp_path / "train.log")
    log.open(tmp_path / "train.log", said.append)
    log.line("epoch 1")
    assert said == [
        f"warning: {tmp_path}/train.log is no file (but a pipe, socket or device): this run has no log file"
    ]
