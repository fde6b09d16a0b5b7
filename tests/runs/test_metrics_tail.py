"""A journal is written whole, followed meanwhile, and read anew where a resumed training has rewritten it."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from seqpar.runs.journal import Journal, read_metrics
from seqpar.runs.metrics_tail import MetricsTail, best_validation, what_is_not_found
from seqpar.runs.run_lock import RunLock
from tests.support.folders import child, exit_code


def test_new_rows_come_once_whole_and_anew_after_the_file_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_text('{"step": 0}\nbroken\n{"step": 1}\n{"st')
    assert [row["step"] for row in tail.read()] == [0, 1]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert [row["step"] for row in tail.read()] == [2] and tail.read() == []
    other = tmp_path / "other"
    other.write_text('{"step": 0}\n{"step": 5}\n{"step": 6}\n{"step": 7}\n{"step": 8}\n')
    other.replace(path)
    assert [row["step"] for row in tail.read()] == [0, 5, 6, 7, 8]


def _record_beyond(out: Path, room: int, comes: bool) -> None:
    """Records 100 rows while there is room for some of them, until more ``comes``."""
    journal = Journal(out, True, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    for step in range(100):
        journal.record("train", step, loss=0.5)
    if comes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.close()


def test_rows_for_which_there_is_no_room_wait_until_there_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code(child(lambda: _record_beyond(tmp_path, 1000, True))) == 0
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(100))
    said = capfd.readouterr().out
    assert said.count("warning: ") == 1 and f"{tmp_path} cannot be written (File too large); training continues" in said


def test_rows_for_which_there_never_was_room_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code(child(lambda: _record_beyond(tmp_path, 1000, False))) == 0
    there = len(read_metrics(tmp_path / "metrics.jsonl"))
    assert 0 < there < 50
    assert f"metrics.jsonl lacks the last {100 - there} rows: there was no room for them" in capfd.readouterr().out


def test_of_equally_good_validations_that_with_the_lowest_loss_is_best() -> None:
    rows: list[dict] = [
        {"step": step, "dice": {"a": dice}, "loss": loss}
        for step, dice, loss in ((1, 0.5, 0.9), (2, 0.4, 0.1), (3, 0.5, 0.7), (4, 0.5, 0.7), (5, None, 0.0))
    ]
    assert best_validation(rows) is rows[2]
    del rows[2]["loss"], rows[3]["loss"]
    assert best_validation(rows) is rows[0], "a loss that is not known is not the lowest"
    assert best_validation(rows[4:]) is None and best_validation([]) is None


def test_classes_that_the_best_validation_does_not_find_are_named() -> None:
    def said(**dice: float | None) -> str:
        return what_is_not_found([{"step": 1, "loss": 1.0, "dice": dice}])

    assert said(a=0.0, b=0.5, c=0.0004, d=None, e=0.0) == (
        "At the best validation, the mean Dice of a, c and e is 0.000: where held-out cases have them, what is "
        "predicted of them hardly overlaps them. Nothing shows that the network has learned to find them. In no "
        "held-out case could d be scored: nothing shows whether the network finds it."
    )
    assert "Dice of a is 0.000" in said(a=0.0, b=0.5) and said(a=0.0).endswith("learned to find it.")
    assert said(a=0.0005) == "" and what_is_not_found([]) == ""
    assert what_is_not_found([{"step": 1, "loss": 1.0, "scores": {"balanced accuracy": 0.0}}]) == ""
    better = {"step": 2, "loss": 1.0, "dice": {"a": 0.1}}
    assert what_is_not_found([{"step": 1, "loss": 1.0, "dice": {"a": 0.0}}, better]) == ""
    rows = [{"step": 1, "loss": 1.0, "dice": {"a": 0.0, "b": 0.0}}]
    assert "of a and b is 0.000: in the held-out cases that have them, no voxel" in what_is_not_found(
        rows, {"a": 1, "b": 2}
    )
    assert "of a and b is 0.000: where held-out cases have them, no voxel" in what_is_not_found(rows, {"a": 1})
    told = what_is_not_found(rows, {"a": 1, "b": 0})
    assert "is 0.000: in the held-out cases that have it, no voxel of it was found. Nothing shows" in told
    assert "Dice of b is 0.000: no held-out case is known to have it, and what is predicted of it counts" in told
    told = what_is_not_found(rows, {"a": 1, "b": 1}, untaught=["b"])
    assert (
        "Dice of b is 0.000: no case that the run trains on has it, so the network could not learn to find it." in told
    )
    assert "of a is 0.000: in the held-out cases that have it, no voxel" in told and told.count("Nothing shows") == 1
    open_rows = [{"step": 1, "loss": 1.0, "dice": {"a": 0.5, "b": None}}]
    told = what_is_not_found(open_rows, untaught=["b"])
    assert told.endswith("whether the network finds it. No case that the run trains on has b either.")
    assert "either" not in what_is_not_found(open_rows)
    told = what_is_not_found(rows, {"a": 0, "b": 0}, untaught=["b"])
    assert "b is 0.000: no case that the run trains on" in told and "a is 0.000: no held-out case is known" in told
    assert "find it. No held-out case is known to have b either." in told


def _lose(path: Path, how: str) -> None:
    if how == "was cut off":
        os.truncate(path, 30)
        return
    path.unlink()
    if how == "was replaced":
        path.touch()


@pytest.mark.parametrize(
    "how, kept", [("was removed", [0, 1, 2, 3]), ("was replaced", [2, 3]), ("was cut off", [2, 3])]
)
def test_rows_after_the_file_was_lost_are_kept(how: str, kept: list[int], tmp_path: Path, capsys: Any) -> None:
    journal = Journal(tmp_path, True, 0)
    for step in range(4):
        if step == 2:
            _lose(journal.path, how)
        journal.record("train", step, loss=0.5)
    journal.close()
    assert [row["step"] for row in read_metrics(journal.path)] == kept
    assert (said := capsys.readouterr().err).count("warning: ") == 1 and f"metrics.jsonl {how} while" in said


def test_rows_of_a_run_that_was_taken_over_do_not_reach_the_others_file(tmp_path: Path, capsys: Any) -> None:
    old, new = RunLock(tmp_path), RunLock(tmp_path)
    old.take()
    journal = Journal(tmp_path, True, 0, lock=old)
    journal.record("train", 0, loss=0.5)
    new.take(take_over=True)
    Journal(tmp_path, True, 0, lock=new).record("train", 0, loss=0.25)
    journal.record("train", 1, loss=0.5)
    journal.close()
    assert [row["loss"] for row in read_metrics(journal.path)] == [0.25]
