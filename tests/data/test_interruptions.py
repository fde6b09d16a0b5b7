"""Kills, full disks and several processes: the cache ends as if nothing had happened, and nothing is lost."""

import os
import resource
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqpar.cli.prepare import act
from seqpar.cluster.exit_codes import run
from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.preparation import cache_writer
from seqpar.data.preparation.cache import check_cache, open_cache
from seqpar.data.preparation.cache_writer import CacheError, reading
from seqpar.data.preparation.prepare_dataset import prepare, prepared
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.data.workers import map_in_processes
from tests.support.folders import child, exit_code, image_array, nnunet, save, tree, write_json


@pytest.mark.started
def test_prepare_killed_at_random_moments_ends_with_the_undisturbed_cache(tmp_path):
    data = read_dataset(nnunet(tmp_path / "D", 6, ("CT",)))
    began = time.monotonic()
    prepare(data, tmp_path / "whole", workers=2)
    took = time.monotonic() - began
    rng, killed = np.random.default_rng(0), 0
    for _ in range(100):
        if killed == 6:
            break
        pid = child(lambda: prepare(data, tmp_path / "c", workers=2))
        time.sleep(rng.uniform(0.05, 0.9) * took)
        ended, status = os.waitpid(pid, os.WNOHANG)
        assert status == 0
        if not ended:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            killed += 1
        if (tmp_path / "c/cache.json").exists():  # finished: some of it is lost, so that there is work to kill
            for path in (tmp_path / "c/cases").glob("c_00[024]/label.npy"):
                path.unlink()
    assert killed == 6
    assert not prepare(data, tmp_path / "c", workers=2).faults
    assert tree(tmp_path / "c") == tree(tmp_path / "whole")


def test_ctrl_c_ends_workers_and_says_how_to_go_on(tmp_path, monkeypatch, capfd):
    root = nnunet(tmp_path / "D", 3)

    def slow(*_: object) -> None:
        (tmp_path / f"worker-{os.getpid()}").touch()
        time.sleep(60)

    def work() -> None:
        code = run(act, [str(root), "--out", str(tmp_path / "c"), "--workers", "2"])
        (tmp_path / "code").write_text(str(code))

    monkeypatch.setitem(prepare.__globals__, "write_case", slow)
    pid, until = child(work), time.monotonic() + 20
    while len(list(tmp_path.glob("worker-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(pid, signal.SIGINT)
    assert exit_code(pid) == 0
    assert (tmp_path / "code").read_text() == "130" and time.monotonic() < until
    said = capfd.readouterr().err
    assert "the same command continues" in said and "Traceback" not in said
    assert not any(_runs(int(path.name[7:])) for path in tmp_path.glob("worker-*"))


def test_a_damaged_index_is_written_again(tmp_path):
    data = read_dataset(nnunet(tmp_path / "D", 2))
    prepare(data, tmp_path / "c", workers=0)
    before = tree(tmp_path / "c")
    (tmp_path / "c/cache.json").write_text("{")
    assert "run prepare" in check_cache(tmp_path / "c")[0].problem
    assert prepare(data, tmp_path / "c", workers=0).prepared == () and tree(tmp_path / "c") == before


def test_no_worker_outlives_its_parent(tmp_path):
    def work(item: int, tell: object) -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    pid = child(lambda: list(map_in_processes(work, [1, 2], 2)))
    until = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(workers) == 2 and all(Path(f"/proc/{worker}").exists() for worker in workers)
    os.kill(pid, signal.SIGKILL)  # the parent alone, not its group
    os.waitpid(pid, 0)
    while any(_runs(worker) for worker in workers) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(_runs(worker) for worker in workers)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_worker_costs_its_case_alone_and_a_mistake_of_ours_is_raised(tmp_path, monkeypatch):
    data = read_dataset(nnunet(tmp_path / "D", 3))
    write = prepare.__globals__["write_case"]

    def fatal(path: Path, name: str, *more: object) -> None:
        if name == "c_001":
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, name, *more)

    monkeypatch.setitem(prepare.__globals__, "write_case", fatal)
    report = prepare(data, tmp_path / "c", workers=2)
    assert len(report.prepared) == 2 and "exit code -9" in report.faults[0].problem
    assert "c_001" in report.faults[0].path and "--workers" in report.faults[0].problem

    def wrong(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setitem(prepare.__globals__, "write_case", wrong)
    with pytest.raises(RuntimeError, match=r"(?s)a worker failed.*KeyError: 'ours'"):
        prepare(data, tmp_path / "d", workers=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_disk_is_one_clear_error_and_nothing_finished_is_lost(workers, tmp_path, monkeypatch):
    root = nnunet(tmp_path / "D", 4)
    data = read_dataset(root)
    prepare(replace(data, cases=data.cases[:2]), tmp_path / "c", workers=0)
    before = tree(tmp_path / "c/cases")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("numpy.lib.format.write_array", full)
        with pytest.raises(CacheError, match=r"c: cannot be written \(No space left on device, \d+ MB are free\)"):
            prepare(data, tmp_path / "c", workers=workers)
    assert tree(tmp_path / "c/cases") == before, "lost or left half written"
    assert prepare(data, tmp_path / "c", workers=0).prepared == ("c_002", "c_003")


def test_a_file_that_the_system_cuts_off_is_not_taken_for_whole(tmp_path):
    data = read_dataset(nnunet(tmp_path / "D", 2))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))  # a real write that fails half way
        try:
            prepare(data, tmp_path / "c", workers=2)
        except CacheError as error:
            (tmp_path / "error").write_text(str(error))

    assert exit_code(child(limited)) == 0
    error = (tmp_path / "error").read_text()
    assert "c: cannot be written (File too large: 1500 bytes" in error and "finished cases are kept" in error
    assert list((tmp_path / "c/cases").iterdir()) == [] and not (tmp_path / "c/cache.json").exists()
    with pytest.raises(DataError, match="no finished cache"):
        open_cache(tmp_path / "c")


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path):
    data = read_dataset(nnunet(tmp_path / "D", 1))
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match=r"file/c: cannot be written \(Not a directory"):
        prepare(data, tmp_path / "file/c", workers=0)


def test_a_current_cache_on_a_read_only_disk_is_used_as_it_is(tmp_path, monkeypatch):
    root = nnunet(tmp_path / "D", 1)
    prepare(read_dataset(root), tmp_path / "c", workers=0)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("os.replace", "os.fsync", "pathlib.Path.mkdir", "pathlib.Path.unlink"):
        monkeypatch.setattr(name, read_only)
    assert prepare(read_dataset(root), tmp_path / "c", workers=0).kept == ("c_000",)
    assert prepared(root, tmp_path / "c", is_first=True).ids == ("c_000",)
    with pytest.raises(CacheError, match="Read-only"):
        prepare(read_dataset(root), tmp_path / "c", PrepareSettings(locations=3), workers=0)


def test_somebody_elses_folder_is_left_alone(tmp_path):
    data = read_dataset(nnunet(tmp_path / "D", 1))
    save(tmp_path / "mine/cases/c_000/notes.nii.gz", image_array(0))
    before = tree(tmp_path / "mine")
    with pytest.raises(DataError, match="has cases but no cache; give another folder"):
        prepare(data, tmp_path / "mine", workers=0)
    assert tree(tmp_path / "mine") == before
    prepare(data, tmp_path / "c", workers=0)
    other = read_dataset(nnunet(tmp_path / "E", 1))
    with pytest.raises(DataError, match="has the cache of D, not of E"):
        prepare(other, tmp_path / "c", workers=0)
    assert open_cache(tmp_path / "c").name == "D"


@pytest.mark.parametrize("name", ["cases/p1/notes.txt", "cases/c_000/notes.txt", "cases/notes.txt"])
def test_somebody_elses_cases_are_left_alone_next_to_a_lock(name, tmp_path):
    """Many programs call a lock ``.lock``."""
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    for own in (file, tmp_path / "mine/.lock", tmp_path / "mine/.mine.tmp"):
        own.write_text("mine")
    before = tree(tmp_path / "mine")
    with pytest.raises(CacheError, match=f"has {name}, which prepare did not write; give another folder"):
        prepare(read_dataset(nnunet(tmp_path / "D", 1)), tmp_path / "mine", workers=0)
    assert tree(tmp_path / "mine") == before
    file.unlink()
    prepare(read_dataset(tmp_path / "D"), tmp_path / "mine", workers=0)
    assert (tmp_path / "mine/.mine.tmp").exists()


@pytest.mark.parametrize("left", ["cases/", "state-0a.json", ".state-0a.json.node1.77.tmp"])
def test_what_a_preparation_leaves_that_ended_at_once_is_no_obstacle(left, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / left).mkdir() if left.endswith("/") else (tmp_path / "c" / left).write_text("{")
    assert prepare(read_dataset(nnunet(tmp_path / "D", 1)), tmp_path / "c", workers=0).prepared == ("c_000",)


def test_two_runs_into_one_folder_do_not_meet(tmp_path):
    data = read_dataset(nnunet(tmp_path / "D", 4))
    pids = [child(lambda: prepare(data, tmp_path / "c", workers=2)) for _ in range(2)]
    assert [exit_code(pid) for pid in pids] == [0, 0]
    assert exit_code(child(lambda: prepare(data, tmp_path / "d", workers=-1))) == 1, "no control"
    prepare(data, tmp_path / "d", workers=0)
    assert tree(tmp_path / "c") == tree(tmp_path / "d") and check_cache(tmp_path / "c") == []


def test_a_cache_stays_finished_until_a_case_has_to_be_made_again(tmp_path):
    root, out = nnunet(tmp_path / "D", 3), tmp_path / "c"
    prepare(read_dataset(root), out, workers=0)
    (root / "labelsTr/c_001.nii.gz").write_text("x")
    os.utime(root / "labelsTr/c_001.nii.gz", (1, 1))
    finished: dict[int, bool] = {}

    def look(done: int, total: int) -> None:
        finished[done] = (out / "cache.json").exists()

    assert len(prepare(read_dataset(root), out, None, 0, look).faults) == 1
    assert finished.pop(0), "headers come first, and the bad case with them"
    assert {2, 3} <= set(finished) and not any(finished.values())
    finished.clear()
    prepare(read_dataset(root), out, None, 0, look)
    assert all(finished.values()), "the bad case has gone already"
    assert open_cache(out).ids == ("c_000", "c_002")


def test_who_may_only_read_a_cache_marks_it_too(tmp_path, monkeypatch):
    """Another user's training would go on with other labels."""
    root, out = nnunet(tmp_path / "D", 3), tmp_path / "c"
    prepare(read_dataset(root), out, workers=0)
    save(root / "imagesTr/c_001_0000.nii.gz", image_array(9))
    with monkeypatch.context() as denied:
        denied.setattr(cache_writer, "_readers_of", at_once(PermissionError(13, "Permission denied")))
        reader = reading(out)
        reader.__enter__()
    with pytest.raises(CacheError, match="is being read by a training"):
        prepare(read_dataset(root), out, workers=0)
    reader.__exit__(None, None, None)
    assert prepare(read_dataset(root), out, workers=0).prepared == ("c_001",)


def test_hidden_files_among_the_cases_stay_and_a_link_is_removed_alone(tmp_path):
    root, out, elsewhere = nnunet(tmp_path / "D", 3), tmp_path / "c", tmp_path / "elsewhere"
    prepare(read_dataset(root), out, workers=0)
    write_json(out / "cases" / ".mine" / "notes.json", {})
    (out / "cases" / ".DS_Store").touch()
    write_json(elsewhere / "kept.json", {})
    (out / "cases" / "old_case").symlink_to(elsewhere)
    (elsewhere / "kept.json").rename(elsewhere / "image.npy")  # as a case's
    for path in root.glob("*/c_002*"):
        path.unlink()
    prepare(read_dataset(root), out, workers=0)
    assert open_cache(out).ids == ("c_000", "c_001")
    assert {path.name for path in (out / "cases").iterdir()} == {"c_000", "c_001", ".mine", ".DS_Store"}
    assert (elsewhere / "image.npy").exists()


def test_a_refused_preparation_changes_nothing(tmp_path):
    """A new case sorts before the changed one, and would be written before the refusal."""
    root, out = nnunet(tmp_path / "D", 3), tmp_path / "c"
    prepare(read_dataset(root), out, workers=0)
    for path in [*root.glob("*/c_000*")]:
        shutil.copy(path, path.with_name(path.name.replace("c_000", "a_new")))
    save(root / "imagesTr/c_001_0000.nii.gz", image_array(9))
    before = tree(out / "cases") | {"index": (out / "cache.json").read_bytes()}
    with reading(out), pytest.raises(CacheError, match="is being read by a training"):
        prepare(read_dataset(root), out, workers=0)
    assert tree(out / "cases") | {"index": (out / "cache.json").read_bytes()} == before
    os.utime(root / "labelsTr/c_001.nii.gz", (1, 1))
    assert prepare(read_dataset(root), out, workers=0).prepared == ("a_new", "c_001")


def at_once(error):
    def fail(*arguments):
        raise error

    return fail


def test_cases_that_a_training_reads_are_neither_replaced_nor_removed(tmp_path):
    root, out = nnunet(tmp_path / "D", 3), tmp_path / "c"
    prepare(read_dataset(root), out, workers=0)
    before, image = tree(out / "cases"), (root / "imagesTr/c_001_0000.nii.gz").read_bytes()
    with reading(out):
        nnunet(root, 4)  # the same three, and another case
        assert prepare(read_dataset(root), out, workers=0).prepared == ("c_003",)
        save(root / "imagesTr/c_001_0000.nii.gz", image_array(9))
        with pytest.raises(CacheError, match="is being read by a training, and cases that it reads would be prepared"):
            prepare(read_dataset(root), out, workers=0)
        (root / "imagesTr/c_001_0000.nii.gz").write_bytes(image)
        for path in root.glob("*/c_002*"):
            path.unlink()
        with pytest.raises(CacheError, match="is being read by a training"):
            prepare(read_dataset(root), out, workers=0)
        kept = tree(out / "cases")
        assert all(kept[name] == content for name, content in before.items() if not name.endswith("case.json"))
    prepare(read_dataset(root), out, workers=0)
    assert sorted(path.name for path in (out / "cases").iterdir()) == ["c_000", "c_001", "c_003"]
