"""Writes the cache: each case whole or not at all, whenever the process ends."""

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.data.errors import DataError, reason, remedy
from seqpar.data.files import STATE, fsync_folder, is_state, write_json
from seqpar.data.preparation.cache import VERSION
from seqpar.data.preparation.prepared_case import Prepared
from seqpar.data.preparation.recipe import Recipe

_STALE = 3600.0  # seconds after which nobody reads such a file
ELSEWHERE = "give another folder (prepare: --out, train: --cache, built-in phantoms: SEQPAR_CACHE)"
_WRITING, _OLD, _READERS = ".writing-", ".old-", ".readers"
_OF_A_CASE = ("image.npy", "label.npy", "locations.npy", "truth.npy", "case.json")
_PARTS = (".cache.json*.tmp", "cases/*/.case.json*.tmp", f".{STATE}*.tmp", f"{STATE}*.json")  # if a writer was killed


class CacheError(DataError):
    """The cache's folder cannot be written. Preparation ends, since the next case would fail too."""


def write_case(path: Path, name: str, case: Prepared, recipe: Recipe, sources: list[list[Any]]) -> None:
    """Writes a case's folder under a temporary name and renames it once it is safe on disk."""
    writing, final, old = (path / "cases" / f"{before}{name}" for before in (_WRITING, "", _OLD))
    rows = [np.zeros((0, 3), np.int32), *case.locations.values()]
    arrays = {"image.npy": case.image, "label.npy": case.label, "locations.npy": np.concatenate(rows)}
    arrays |= {"truth.npy": case.truth}
    with as_cache_error(path):
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        files = {file: _save(writing / file, array) for file, array in arrays.items() if array is not None}
        record = {
            "version": VERSION,
            "recipe": recipe.to_json(),
            "sources": sources,
            "digests": list(case.digests),
            "voxels": list(case.voxels),
            "files": files,
            "locations": {str(n): len(rows) for n, rows in case.locations.items()},
            "properties": case.properties.to_json(),
        }
        write_json(writing / "case.json", record)
        fsync_folder(writing)
        if final.exists():
            refuse_while_read(path)
        invalidate_cache(path)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        writing.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        fsync_folder(final.parent)


def invalidate_cache(path: Path) -> None:
    """Removes the index, so that the cache counts as unfinished while it changes."""
    (path / "cache.json").unlink(missing_ok=True)


def remove_partial_files(path: Path, names: set[str]) -> None:
    """Removes what killed runs left half written, and all cases except ``names``; other hidden files are not ours."""
    for folder in (path / "cases").iterdir():
        is_partial = folder.name.startswith((_WRITING, _OLD))
        if folder.name not in names and (is_partial or not folder.name.startswith(".")):
            if not is_partial:
                refuse_while_read(path)
                invalidate_cache(path)
            if folder.is_symlink():
                folder.unlink()
            else:
                shutil.rmtree(folder)
    for file in [found for pattern in _PARTS for found in path.glob(pattern)]:
        if not is_state(file) or _age(file) > _STALE:
            file.unlink(missing_ok=True)


def discard(path: Path, name: str) -> None:
    """Removes a case whose files can no longer be prepared."""
    with as_cache_error(path):
        if (path / "cases" / name).exists():
            refuse_while_read(path)
            invalidate_cache(path)
            shutil.rmtree(path / "cases" / name, ignore_errors=True)


@contextmanager
def cache_lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of a cache folder; waits while another process prepares into it.

    waiting: called repeatedly while this process waits.
    """
    with as_cache_error(path):
        path.mkdir(parents=True, exist_ok=True)
        refuse_foreign(path)
        handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)  # first: it marks the folder as ours
    try:
        while not _lock(handle):
            waiting()
            time.sleep(0.2)
        with as_cache_error(path):
            (path / "cases").mkdir(exist_ok=True)
            _refuse_foreign_cases(path)
            os.close(_readers_of(path))  # those who may only read can mark it then
        yield
    finally:
        os.close(handle)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Marks a cache as read until the block ends, so that no preparation replaces or removes its cases meanwhile.

    Where nothing may be written, and on file systems without locks, it is not marked.
    """
    handle = None
    with suppress(OSError):
        try:
            handle = _readers_of(path)
        except OSError:  # another user's cache
            handle = os.open(path / _READERS, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _readers_of(path: Path) -> int:
    """Returns a handle of the file that readers of a cache lock together, and makes it if need be."""
    return os.open(path / _READERS, os.O_RDWR | os.O_CREAT, 0o644)


def refuse_while_read(path: Path) -> None:
    """Raises CacheError if a training reads the cache: it would go on with other images and labels."""
    handle = _readers_of(path)
    try:
        if not _lock(handle):
            raise CacheError(
                path,
                "is being read by a training, and cases that it reads would be prepared anew or removed: wait for its "
                f"end, or {ELSEWHERE}",
            )
    finally:
        os.close(handle)


def refuse_foreign(path: Path) -> None:
    """Raises CacheError if a folder holds something, but nothing that a preparation has made."""
    with as_cache_error(path):
        if not path.is_dir():
            return
        foreign = sorted(filter(_is_foreign, path.iterdir()))
        is_copy = (path / "cache.json").is_file() and (path / "cases").is_dir()  # without hidden files
        is_ours = is_copy or (path / ".lock").exists()  # looked for last: another process may have begun meanwhile
        if foreign and not is_ours:
            raise CacheError(path, f"has {foreign[0].name} but no cache; {ELSEWHERE}, so that nothing is lost")


def _refuse_foreign_cases(path: Path) -> None:
    """Raises CacheError if a file is among the cases that no preparation has made, as cases are removed whole."""
    for folder in sorted((path / "cases").glob("[!.]*")):
        files = sorted(folder.glob("[!.]*")) if folder.is_dir() else [folder]
        if foreign := next((file for file in files if file.name not in _OF_A_CASE), None):
            raise CacheError(
                path,
                f"has {foreign.relative_to(path)}, which prepare did not write; {ELSEWHERE}, so that nothing is lost",
            )


@contextmanager
def as_cache_error(path: Path) -> Iterator[None]:
    """Turns an OSError in the block into a CacheError that says what to do."""
    try:
        yield
    except OSError as error:
        free = f", {shutil.disk_usage(path).free >> 20} MB are free" if error.errno == errno.ENOSPC else ""
        raise CacheError(
            path,
            f"cannot be written ({reason(error)}{free}); finished cases are kept: {remedy(error)}, "
            f"or {ELSEWHERE}, and run again",
        ) from error


def _is_foreign(file: Path) -> bool:
    """Returns whether a file in a folder without a lock is not from a preparation that was killed early."""
    if file.name == "cases" and file.is_dir():
        return any(file.iterdir())
    return not is_state(file) and not file.match(_PARTS[0])


def _age(file: Path) -> float:
    """Returns the seconds since a file was written; 0 if its run has just replaced or removed it."""
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _lock(handle: int) -> bool:
    """Tries to take the lock; returns whether it is ours, which on a file system without locks it always is."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
    return True


class _Hashing:
    """A file being written, with the digest of its bytes so far."""

    def __init__(self, file: Any) -> None:
        self.file, self.digest = file, hashlib.blake2b(digest_size=16)

    def write(self, block: bytes) -> int:
        self.digest.update(block)
        return int(self.file.write(block))


def _save(path: Path, array: np.ndarray) -> tuple[int, str]:
    """Writes an array to disk; returns its file's size and digest."""
    with open(path, "wb") as file:
        hashing = _Hashing(file)
        np.lib.format.write_array(hashing, array, allow_pickle=False)  # type: ignore[arg-type]
    fsync_folder(path)  # not `whole_file`: it is the folder that gets its final name at the end
    return path.stat().st_size, hashing.digest.hexdigest()
