"""One process prepares and the others wait for it: they see how far it is, what failed, and no other run's news."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seqpar.data.errors import DataError
from seqpar.data.preparation import waiting
from seqpar.data.preparation.cache_writer import refuse_foreign, remove_partial_files
from seqpar.data.preparation.prepare_dataset import prepare, prepared
from seqpar.data.preparation.waiting import ProgressFile
from tests.support.folders import child, exit_code, nnunet


def test_the_others_wait_until_the_first_has_prepared(tmp_path):
    root = nnunet(tmp_path / "D", 3)
    pid = child(lambda: (time.sleep(0.5), prepared(root, tmp_path / "c", is_first=True, workers=0)))
    start = time.monotonic()
    cache = prepared(root, tmp_path / "c", is_first=False, deadline=30)
    assert cache.ids == ("c_000", "c_001", "c_002") and time.monotonic() - start > 0.4
    assert exit_code(pid) == 0
    assert not list((tmp_path / "c").glob("state*"))


def test_the_others_see_the_firsts_error(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "_GRACE", 0.2)
    root = nnunet(tmp_path / "D", 3)
    (root / "imagesTr/c_001_0000.nii.gz").write_text("x")
    errors: dict[bool, str] = {}

    def go(is_first: bool) -> None:
        try:
            prepared(root, tmp_path / "c", is_first=is_first, workers=0, token="run", deadline=30)
        except DataError as error:
            errors[is_first] = str(error)

    threads = [threading.Thread(target=go, args=(is_first,)) for is_first in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors[True] == errors[False] and "c_001_0000.nii.gz" in errors[True]


def test_an_earlier_runs_failure_is_not_taken_for_this_ones(tmp_path):
    root = nnunet(tmp_path / "D", 2)
    ProgressFile(tmp_path / "c", "old").write(state="failed", path="x", problem="old")
    pid = child(lambda: (time.sleep(1), prepared(root, tmp_path / "c", is_first=True, workers=0, token="new")))
    assert len(prepared(root, tmp_path / "c", is_first=False, token="new", deadline=30).ids) == 2
    assert exit_code(pid) == 0


def test_a_cache_that_another_process_begins_just_now_is_not_taken_for_foreign(tmp_path, monkeypatch):
    folder, listed = tmp_path / "c", Path.iterdir
    folder.mkdir()

    def begun_meanwhile(path: Path) -> Iterator[Path]:
        (folder / ".lock").touch()
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", begun_meanwhile)
    refuse_foreign(folder)


def test_waiting_for_nobody_ends_at_the_deadline(tmp_path):
    root = nnunet(tmp_path / "D", 1)
    with pytest.raises(DataError, match="silent for 1 s"):
        prepared(root, tmp_path / "c", is_first=False, deadline=1)


def test_two_jobs_that_start_on_the_same_data_prepare_it_once(tmp_path, monkeypatch):
    root, out = nnunet(tmp_path / "D", 3), tmp_path / "c"
    write, walked = prepare.__globals__["write_case"], tmp_path / "walked"

    def slow(*arguments: object) -> None:
        (tmp_path / "holds").touch()
        _until((tmp_path / "waits").exists)
        write(*arguments)

    def first() -> None:
        monkeypatch.setitem(prepare.__globals__, "write_case", slow)
        prepared(root, out, is_first=True, workers=0, token="a")

    def second() -> None:
        def progress(done: int, total: int) -> None:
            ((tmp_path / "waits") if done == 0 else walked).touch()

        _until((tmp_path / "holds").exists)
        prepared(root, out, is_first=True, workers=0, token="b", progress=progress)

    others = [lambda token=token: prepared(root, out, is_first=False, token=token, deadline=30) for token in "aabb"]
    started = [child(work) for work in (first, second, *others)]
    assert [exit_code(pid) for pid in started] == [0] * 6
    assert (tmp_path / "waits").exists() and not walked.exists()


def test_runs_that_wait_for_one_folder_do_not_take_each_others_files(tmp_path):
    def beat(token: str) -> None:
        announcement = ProgressFile(tmp_path / "c", token)
        for n in range(300):
            announcement.write(state="preparing", done=n, total=300)

    (tmp_path / "c/cases").mkdir(parents=True)
    started = [child(lambda token=token: beat(token)) for token in "ab"]
    started.append(child(lambda: [remove_partial_files(tmp_path / "c", set()) for _ in range(3000)]))
    assert [exit_code(pid) for pid in started] == [0, 0, 0]
    left = [path for path in (tmp_path / "c").iterdir() if path.is_file()]
    assert len(left) == 2 and all(path.suffix == ".json" for path in left)
    for path in left:
        os.utime(path, (1, 1))
    remove_partial_files(tmp_path / "c", set())
    assert not any(path.exists() for path in left), "what old runs left is removed"


def test_a_failure_is_not_lost_where_another_run_goes_on_in_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "_GRACE", 0.6)
    root = nnunet(tmp_path / "D", 1)

    def go_on() -> None:
        other, end = ProgressFile(tmp_path / "c", "b"), time.monotonic() + 20
        ProgressFile(tmp_path / "c", "a").write(state="failed", path="c_001.nii.gz", problem="is truncated")
        while time.monotonic() < end:
            other.write(state="preparing", done=0, total=1)
            time.sleep(0.05)

    pid = child(go_on)
    with pytest.raises(DataError, match="c_001.nii.gz: is truncated"):
        prepared(root, tmp_path / "c", is_first=False, token="a", deadline=9)
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL, "the other run had ended"


def _until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)
