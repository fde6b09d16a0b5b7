"""Files are there whole or not at all, and on disk before their names are."""

import errno
import os
from pathlib import Path

import pytest

from seqpar.data.errors import DataError, remedy, unwritable
from seqpar.data.files import whole_file, write_bytes, write_json, write_text


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names what is synced and renamed, in order."""
    done: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: done.append("synced " + os.readlink(f"/proc/self/fd/{handle}")))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(f"{a} became {b}"), replace(a, b)))
    return done


def test_a_file_is_on_disk_before_its_name_and_the_name_before_it_counts_as_written(tmp_path, calls):
    with whole_file(tmp_path / "a") as temporary:
        temporary.write_text("new")
        assert not (tmp_path / "a").exists()
    assert calls == [f"synced {temporary}", f"{temporary} became {tmp_path / 'a'}", f"synced {tmp_path}"]
    assert str(os.getpid()) in temporary.name and temporary.name.startswith(".a.") and temporary.suffix == ".tmp"


def test_what_is_worthless_after_a_crash_is_renamed_without_waiting_for_the_disk(tmp_path, calls):
    write_text(tmp_path / "a", "new", durable=False)
    assert len(calls) == 1 and calls[0].endswith(f"became {tmp_path / 'a'}")


def test_text_is_utf_8_and_json_ends_with_a_line(tmp_path):
    write_text(tmp_path / "a", "ü")
    write_json(tmp_path / "b", {"x": [1]})
    assert (tmp_path / "a").read_bytes() == b"\xc3\xbc"
    assert (tmp_path / "b").read_text() == '{\n  "x": [\n    1\n  ]\n}\n'


@pytest.mark.parametrize("place", ["os.fsync", "os.replace"])
def test_a_full_disk_is_named_by_the_file_and_leaves_the_old_one_alone(place, tmp_path, monkeypatch):
    write_bytes(tmp_path / "a", b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "another name")

    monkeypatch.setattr(place, full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/a'"):
        write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old" and [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_whatever_ends_the_block_no_temporary_file_stays(error, tmp_path):
    with pytest.raises(error), whole_file(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="none/a'"):
        write_bytes(Path(tmp_path / "none/a"), b"")
    with pytest.raises(NotADirectoryError, match="file/a'"):
        write_bytes(Path(tmp_path / "file/a"), b"")


def test_a_folder_that_can_be_written_but_not_opened_keeps_the_file(tmp_path, monkeypatch):
    """The new file is in place by then: nothing is reported as failed."""
    opened = os.open

    def refuse(path, *flags, **more):
        if Path(path) == tmp_path:
            raise PermissionError(13, "Permission denied")
        return opened(path, *flags, **more)

    monkeypatch.setattr(os, "open", refuse)
    write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "new" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_came_in_the_meantime_stays(links, tmp_path, monkeypatch):
    if not links:
        monkeypatch.setattr(os, "link", lambda *of: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no links")))
    path = tmp_path / "a"
    with whole_file(path, replaces=False) as temporary:
        temporary.write_text("first")
    with pytest.raises(DataError, match="a: is there already"), whole_file(path, replaces=False) as temporary:
        temporary.write_text("second")
    assert path.read_text() == "first" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("number", "act"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EROFS, "make the disk writable"),
        (errno.EACCES, "correct the permissions"),
        (errno.EIO, "check the path and its disk"),
    ],
)
def test_what_to_do_about_a_file_that_cannot_be_written_depends_on_why(number: int, act: str) -> None:
    error = OSError(number, os.strerror(number))
    assert remedy(error) == remedy(f"rank 1: {error}") == act, "also in the words of another rank"
    assert unwritable("x", error).problem.endswith(f"; {act} or choose another folder")
