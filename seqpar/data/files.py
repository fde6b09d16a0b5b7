"""Writes files whole or not at all, reads and writes JSON, finds copies, and splits the suffix off a volume's name."""

import errno
import filecmp
import json
import os
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError, unreadable, unwritable

SPECIAL = "is no file (but a pipe, socket or device)"
SUFFIXES = (".nii.gz", ".nii", ".nrrd", ".mha")  # of volumes
STATE = "state-"  # prefix of the files in which runs report their progress; each run writes its own, without a lock


def user_cache() -> Path:
    """Returns the folder of what is kept for later runs: $SEQPAR_CACHE, else seqpar in $XDG_CACHE_HOME or ~/.cache."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "seqpar"
    return expand_home(os.environ.get("SEQPAR_CACHE") or usual, "the cache folder ").absolute()


def expand_home(path: str | Path, name: str = "") -> Path:
    """Returns a path with ~ replaced by a home folder; raises DataError if nothing says where that is.

    - ``name``: what the message calls the path
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        more = ", or set SEQPAR_CACHE to one" if name else ""
        raise DataError(f"{name}{path}", f"there is no such home folder; name a folder without ~{more}") from None


def is_state(file: Path) -> bool:
    """Returns whether a file reports a run's progress, or is half of such a file."""
    return file.name.removeprefix(".").startswith(STATE) and file.suffix in (".json", ".tmp")


@contextmanager
def whole_file(path: Path, durable: bool = True, replaces: bool = True) -> Iterator[Path]:
    """Yields a temporary path next to ``path`` to write to, and renames it to ``path`` when the block ends.

    Whenever the process ends, and whoever else writes the same file, ``path`` is either the old file or the new one.
    If anything fails, the temporary file is removed; an OSError (such as a full disk) names ``path``.

    durable: whether file and name are on disk, safe from a power cut, before this returns. False is for frequent
        writes whose latest content is worthless after a crash.
    replaces: whether a file that is there is replaced. False raises DataError, also if it came in the meantime (where
        the file system has links).
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    if is_special(path):  # root would rename the file over /dev/null
        raise OSError(errno.EINVAL, SPECIAL, str(path))
    try:
        with umask_mode(temporary):
            yield temporary
        if durable:
            fsync_folder(temporary)
        if replaces:
            os.replace(temporary, path)
        else:
            _place(temporary, path)
        if durable:
            with suppress(OSError):  # the file exists; some folders can be written but not opened
                fsync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _place(temporary: Path, path: Path) -> None:
    """Gives a file its name, unless another file has it."""
    try:
        os.link(temporary, path)
    except OSError:  # it is there, or this file system has no links
        refuse_existing(path)
        os.replace(temporary, path)
    temporary.unlink(missing_ok=True)


def refuse_existing(path: Path) -> None:
    """Raises DataError if a file is there."""
    if path.exists():
        raise DataError(path, "is there already; name another file, or remove it")


def refuse_unwritable(folder: Path, name: str = "") -> None:
    """Raises DataError if no file can be made in a folder or, where it is missing, in the one that it will be made in.

    Leaves nothing there.

    - ``name``: what the message calls the folder
    """
    place = folder.absolute()
    try:
        while not _is_there(place):
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise unwritable(name or folder, error) from None


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


@contextmanager
def umask_mode(path: Path) -> Iterator[None]:
    """Gives the file written in the block a new file's permissions, whatever its writer sets (safetensors: 0600)."""
    path.touch()
    mode = path.stat().st_mode
    yield
    if path.stat().st_mode != mode:
        path.chmod(mode)


def remove_leftovers(folder: Path, idle_s: float = 3600.0) -> None:
    """Removes the temporary files that killed writers of ``whole_file`` left in a folder.

    - ``idle_s``: the age in seconds from which one of another host is removed; on this host its process must be gone
    """
    for path in folder.glob(".*.tmp"):
        owner, _, pid = path.name.removesuffix(".tmp").rpartition(".")
        with suppress(OSError):  # another process may remove it too
            if not pid.isdigit():
                continue
            if owner.endswith(f".{socket.gethostname()}"):
                is_left = not _runs(int(pid))
            else:
                is_left = time.time() - path.stat().st_mtime > idle_s
            if is_left:
                path.unlink()


def _runs(pid: int) -> bool:
    """Returns whether a process is running on this host."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def write_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    """Writes a file whole or not at all; ``durable`` as in `whole_file`."""
    with whole_file(path, durable) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str, durable: bool = True) -> None:
    """Writes a file in UTF-8 whole or not at all; ``durable`` as in `whole_file`.

    Bytes of a file's name that are not UTF-8 are written as escapes.
    """
    write_bytes(path, content.encode(errors="backslashreplace"), durable)


def write_json(path: Path, content: Any, durable: bool = True) -> None:
    """Writes a JSON file whole or not at all; ``durable`` as in `whole_file`."""
    write_text(path, json.dumps(content, indent=2) + "\n", durable)


def fsync_folder(path: Path) -> None:
    """Waits until a file's bytes, or the entries of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refuse_special(path: str | Path) -> None:
    """Raises DataError for what is there and is neither a file nor a folder: to open a pipe may never end."""
    if is_special(path):
        raise DataError(path, f"{SPECIAL}; put a file in its place")


def is_special(path: str | Path) -> bool:
    """Returns whether there is something that is neither a file nor a folder, such as a device."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def read_whole(path: Path) -> bytes:
    """Returns the bytes of a file; raises DataError for what is there and is none, and OSError as usual."""
    refuse_special(path)
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """Returns a JSON file's content; raises DataError if it cannot be read or repeats a key."""

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            keys = [key for key, _ in pairs]
            duplicate = min(key for key in keys if keys.count(key) > 1)
            raise DataError(path, f"has the key {duplicate!r} twice; keep one of them")
        return content

    refuse_special(path)
    try:
        text = path.read_text(encoding="utf-8").removeprefix("\ufeff")  # which Windows' editors begin with
        return json.loads(text, object_pairs_hook=refuse_duplicates)
    except json.JSONDecodeError as error:
        raise DataError(path, f"is not valid JSON: {error.msg} in line {error.lineno}; repair it") from error
    except RecursionError as error:
        raise DataError(path, "is nested too deeply; write it again") from error
    except UnicodeDecodeError as error:
        raise DataError(path, f"is not UTF-8 text ({error.reason}); write it again") from error
    except OSError as error:
        raise unreadable(path, error) from error


SAMPLE = 1 << 16  # bytes from the middle of a file, which tell most files of one size apart


def find_copies(files: Mapping[str, Path], known: Mapping[str, Path]) -> dict[str, str]:
    """Returns, for each file that is a copy of a known one, the name of that one.

    A file that equals several known files is left out, since it does not tell patients apart: the label map of a
    template, for instance.
    Only files of equal size are read, and only those whose middle is equal are read whole.
    """
    sizes = [{name: path.stat().st_size for name, path in own.items() if path.is_file()} for own in (files, known)]
    shared = set(sizes[0].values()) & set(sizes[1].values())
    alike = defaultdict[tuple[int, bytes], list[str]](list)
    for name, size in sizes[1].items():
        if size in shared:
            alike[size, _middle(known[name], size)].append(name)
    copies = dict[str, str]()
    for name, size in sizes[0].items():
        candidates = alike.get((size, _middle(files[name], size)), []) if size in shared else []
        same = [one for one in candidates if filecmp.cmp(files[name], known[one], shallow=False)]
        if len(same) == 1:
            copies[name] = same[0]
    return copies


def _middle(path: Path, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, size - SAMPLE) // 2)
        return file.read(SAMPLE)


def is_single_volume(path: Path) -> bool:
    """Returns whether a path is one file, and not a list of cases."""
    return path.is_file() and path.suffix != ".json"


def strip_suffix(name: str) -> str:
    """Returns a volume's name without its suffix, such as .nii.gz."""
    return name.removesuffix(suffix_of(name))


def suffix_of(name: str) -> str:
    """Returns the suffix that tells a volume's format; "" if the name has none."""
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
