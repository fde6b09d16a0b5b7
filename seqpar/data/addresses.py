"""Files by address: ``https://`` with a checksum, or ``hf://`` of the Hugging Face hub. Each is downloaded once.

They are kept in the user's cache folder: ``weights/SHA256/NAME``, and ``hub`` as huggingface_hub lays it out. A file is
checked when it is used, once per process and state of the file.
"""

import fcntl
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from seqpar.data.errors import DataError, unwritable
from seqpar.data.files import remove_leftovers, user_cache, whole_file
from seqpar.parallel.meeting import START_S
from seqpar.text import install_hint

SILENT_S = 60.0  # seconds in which a server has to send a piece of the file
ANSWER_S = 300.0  # in which it has to answer, on one of several addresses
_PIECE = 1 << 16
_BLOCK = 1 << 20
_POLL_S = 0.2
_ADDRESS = re.compile(r"(https?|hf|ftp|s3|gs):/|[A-Za-z][A-Za-z0-9+.-]+://")  # a Path has one slash of two
_HTTPS = re.compile(r"https://[^#]+#sha256=([0-9A-Fa-f]{64})")
_HUB = re.compile(r"hf://([^/@#]+/[^/@#]+)(?:@([^/#]+))?/([^@#]*[^/@#])(?:#sha256=([0-9A-Fa-f]{64}))?")


def is_address(source: str | Path) -> bool:
    """Returns whether a text is an address, and not the path of a file or folder."""
    return bool(_ADDRESS.match(str(source)))


def absolute(source: str) -> str:
    """Returns an address unchanged, and makes a path absolute."""
    return source if is_address(source) else os.path.abspath(source)


def local_file(source: str | Path) -> Path:
    """Returns the path itself or, of an address, that of the file in the cache, downloaded if it is missing.

    Of several processes on a disk one downloads, and the others wait. Raises ``ValueError`` for an address that cannot
    be taken, and ``DataError`` for a file that cannot be had or has other bytes than its checksum says.
    """
    if not is_address(source):
        return Path(source)
    address = _parse(source)
    path = address.find()
    if path is None:
        with _one_at_a_time(address.folder, address.text):
            path = address.find() or address.download()
    address.check(path)
    return path


def is_missing(source: str | Path) -> bool:
    """Returns whether a source is an address whose file has not been downloaded; asks nobody."""
    return is_address(source) and _parse(source).find() is None


def describe_download(source: str | Path) -> str:
    """Returns the sentence of a dry run on an address whose file is missing."""
    address = _parse(source)
    return (
        f"weights: {address.text} would be downloaded to {address.folder}. Nothing is downloaded now, so whether they "
        "fit is open, and so are the settings that nnU-Net's and nnssl's files bring with them, such as the network"
    )


@dataclass(frozen=True)
class _Https:
    """A file on a server, and its checksum."""

    text: str
    sha256: str

    @property
    def url(self) -> str:
        return self.text.partition("#")[0]

    @property
    def folder(self) -> Path:
        return user_cache() / "weights" / self.sha256

    @property
    def path(self) -> Path:
        name = unquote(urlsplit(self.url).path.rpartition("/")[2])
        return self.folder / (re.sub(r"[^\w.+-]", "_", name).lstrip(".")[-100:] or "weights")

    def find(self) -> Path | None:
        return self.path if self.path.is_file() else None

    def download(self) -> Path:
        remove_leftovers(self.folder)
        try:
            with whole_file(self.path) as temporary, temporary.open("wb") as file:
                self._receive(file)
        except OSError as error:
            raise unwritable(self.path, error) from error
        return self.path

    def check(self, path: Path) -> None:
        if (found := digest_once("sha256", path)) != self.sha256:
            raise DataError(
                path, f"is damaged: it has sha256 {found}, and its address says {self.sha256}; remove it, and it is "
                "downloaded again"
            )  # fmt: skip

    def _open(self) -> Any:
        """Returns the server's answer."""
        from http.client import HTTPException
        from urllib.error import HTTPError
        from urllib.request import HTTPRedirectHandler, Request, build_opener

        url = self.url

        class SafeRedirects(HTTPRedirectHandler):
            """Follows a server to other addresses of https only."""

            def redirect_request(self, *arguments: Any) -> Request | None:
                if not (newurl := arguments[-1]).startswith("https://"):
                    raise DataError(url, f"the server leads on to {newurl}, which is not https; give another address")
                return super().redirect_request(*arguments)

        try:
            return build_opener(SafeRedirects).open(Request(url, headers={"User-Agent": "seqpar"}), timeout=SILENT_S)
        except DataError:
            raise
        except HTTPError as error:
            why = _plain(error.reason)
            raise DataError(url, f"the server answers {error.code} ({why}); check the address") from error
        except (OSError, HTTPException, ValueError) as error:
            why = _plain(getattr(error, "reason", error))
            raise DataError(
                url, f"cannot be reached ({why}); check the network and the address, or download it elsewhere and put "
                f"it at {self.path}"
            ) from error  # fmt: skip

    def _receive(self, file: IO[bytes]) -> None:
        """Writes what the server sends into a file; raises DataError if that is not the file of the address."""
        answer = self._answer()
        size = next(answer)  # of a file that comes in chunks, 0
        if (free := shutil.disk_usage(self.folder).free) < size:
            raise DataError(
                self.folder, f"has {free / 1e6:.0f} MB free, and {self.url} needs {size / 1e6:.0f}: free space, or "
                "name another folder by SEQPAR_CACHE"
            )  # fmt: skip
        told = f" ({size / 1e6:.1f} MB)" if size else ""
        print(f"downloading {self.url}{told} to {self.path}", file=sys.stderr, flush=True)
        count, found = 0, hashlib.sha256()
        for piece in answer:
            count += len(piece)
            found.update(piece)
            file.write(piece)
        if count < size:
            raise self._broken(f"after {count} of {size} bytes")
        if found.hexdigest() != self.sha256:
            raise DataError(
                self.url, f"what came ({count} bytes) has sha256 {found.hexdigest()}, and the address says "
                f"{self.sha256}: compare that with what its publisher names; nothing of it is kept"
            )  # fmt: skip

    def _answer(self) -> Iterator[Any]:
        """Yields the size that the server names, then the file in pieces; raises DataError if it is silent or too slow.

        A thread asks the server, since a limit of the socket's own would begin anew with each byte.
        """
        from http.client import HTTPException  # with urllib some 40 ms, which no other run needs

        pieces = Queue[Any](16)

        def ask() -> None:
            try:
                with self._open() as response:
                    pieces.put(response.length or 0)
                    while piece := response.read(_PIECE):
                        pieces.put(piece)
                pieces.put(b"")
            except HTTPException as error:
                pieces.put(self._broken(f"{type(error).__name__}: {error}"))
            except Exception as error:
                pieces.put(error if isinstance(error, DataError) else self._broken(str(error)))

        Thread(target=ask, daemon=True).start()
        limit, what = ANSWER_S, "answer"
        while True:
            try:
                piece = pieces.get(timeout=limit)
            except Empty:
                raise self._broken(f"the server did not {what} within {limit:g} s") from None
            if isinstance(piece, Exception):
                raise piece
            if piece == b"":
                return
            yield piece
            limit, what = SILENT_S, f"send {_PIECE / 1000:.0f} kB"

    def _broken(self, why: str) -> DataError:
        return DataError(self.url, f"the download broke off ({_plain(why)}); start it again")


def _plain(said: object) -> str:
    """Returns what a server said as text of one line: a terminal obeys some characters."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in str(said)).split())[:200]


@dataclass(frozen=True)
class _OfHub:
    """A file in a repository of the hub; huggingface_hub names the copy by its checksum.

    A file that was downloaded stays the same, also if the branch of the repository moves on.
    """

    text: str
    repository: str
    revision: str
    file: str
    sha256: str

    @property
    def folder(self) -> Path:
        return user_cache() / "hub" / f"models--{self.repository.replace('/', '--')}"

    def find(self) -> Path | None:
        try:
            return self._ask_hub(local_files_only=True)
        except FileNotFoundError:
            return None

    def download(self) -> Path:
        try:
            print(f"downloading {self.text} to {self.folder}", file=sys.stderr, flush=True)
            return self._ask_while_it_grows()
        except (MemoryError, DataError):
            raise
        except Exception as error:  # of its many kinds, most are those of the library that it asks by
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                self.text, f"cannot be downloaded ({why}); check the network, owner, name, file and revision, and for "
                "a repository that asks for it your login (hf auth login)"
            ) from error  # fmt: skip

    def check(self, path: Path) -> None:
        """Raises DataError for other bytes than the checksum says: that of the address, else that of the copy's name.

        Where the file system has no links, the copy's name is none.
        """
        name = path.resolve().name
        kinds = {64: "sha256", 40: "git"} if re.fullmatch(r"[0-9a-f]+", name) else {}
        wanted, kind = (self.sha256, "sha256") if self.sha256 else (name, kinds.get(len(name), ""))
        if kind and (found := digest_once(kind, path)) != wanted:
            raise DataError(
                path, f"has the checksum {found}, and {wanted} is needed for {self.text}: if that is right, remove "
                f"{path.resolve()}, and it is downloaded again"
            )  # fmt: skip

    def _ask_while_it_grows(self) -> Path:
        """Returns the file once the hub has sent it; raises DataError where its folder stops growing.

        A thread asks, since the library's own limits begin anew with each byte. The library writes in steps of 10 MB.
        """
        answers, growth = Queue[Any](1), _Growth(self.folder)

        def ask() -> None:
            try:
                answers.put(self._ask_hub(local_files_only=False))
            except BaseException as error:
                answers.put(error)

        Thread(target=ask, daemon=True).start()
        while growth.silent_s() < START_S:
            with suppress(Empty):
                answer = answers.get(timeout=_POLL_S)
                if isinstance(answer, BaseException):
                    raise answer
                return Path(answer)
        raise DataError(self.text, f"the download broke off (next to nothing came in {START_S:.0f} s); start it again")

    def _ask_hub(self, local_files_only: bool) -> Path:
        try:
            from huggingface_hub import hf_hub_download
        except ImportError:
            raise ValueError(f"{self.text}: hf:// needs huggingface_hub: {install_hint('hub')}") from None
        try:
            where = hf_hub_download(
                repo_id=self.repository,
                filename=self.file,
                revision=self.revision or None,
                cache_dir=str(self.folder.parent),
                local_files_only=local_files_only,
            )
        except FileNotFoundError:  # which in some versions is a ValueError too
            raise
        except ValueError as error:
            raise ValueError(f"{self.text}: {str(error).splitlines()[0]}") from None
        return Path(where)


def _parse(source: str | Path) -> _Https | _OfHub:
    """Returns the address in a text; raises ValueError that says how to write one."""
    text = str(source) if "://" in str(source) else str(source).replace(":/", "://", 1)  # of a Path
    if match := _HUB.fullmatch(text):
        repository, revision, file, sha256 = match.groups(default="")
        return _OfHub(text, repository, unquote(revision), file, sha256.lower())
    if text.startswith("hf://"):
        raise ValueError(f"{text}: write hf://OWNER/NAME/FILE, or hf://OWNER/NAME@REVISION/FILE")
    if not text.startswith("https://"):
        raise ValueError(f"{text}: files are downloaded by https:// and hf:// only; give one of these, or a local path")
    try:
        parts = urlsplit(text)
    except ValueError as error:  # of brackets
        raise ValueError(f"{text}: is no address ({error}); write https://HOST/FILE#sha256=DIGITS") from None
    if not parts.hostname or "@" in parts.netloc:
        raise ValueError(f"{text}: write https://HOST/FILE#sha256=DIGITS, without a user name")
    match = _HTTPS.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text}: a file of a server needs its checksum: write {text.partition('#')[0]}#sha256=DIGITS, with the 64 "
            "hexadecimal digits that its publisher names, or that sha256sum prints of a copy that you trust"
        )
    return _Https(text, match[1].lower())


@contextmanager
def _one_at_a_time(folder: Path, what: str) -> Iterator[None]:
    """Lets one process into the block; the others wait as long as files in the folder grow.

    Where a file system has no locks, all are let in: each writes a file of its own, and the last one stays.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise unwritable(folder, error) from error
    with file:
        growth = _Growth(folder)
        while not _locks(file):
            if growth.silent_s() > START_S:
                raise DataError(
                    what, f"another process downloads it to {folder}, and nothing has come for {START_S:.0f} s: end "
                    "that process, and start again"
                )  # fmt: skip
            time.sleep(_POLL_S)
        yield


def _locks(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # as above
        pass
    return True


class _Growth:
    """Tells for how long files in a folder have not grown by a piece; a few bytes now and then count as silence."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.size, self.since = folder, -_PIECE, time.monotonic()

    def silent_s(self) -> float:
        size = 0
        for path in self.folder.rglob("*"):
            with suppress(OSError):
                size += path.lstat().st_size
        if not self.size - _PIECE < size < self.size + _PIECE:
            self.size, self.since = size, time.monotonic()
        return time.monotonic() - self.since


def digest_once(kind: str, path: Path) -> str:
    """Returns the checksum of a file's bytes, computed once per process and state of the file.

    - ``kind``: sha256, or git for git's name of a file
    """
    state = path.stat()
    return _digest(kind, path, (state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=64)
def _digest(kind: str, path: Path, state: tuple[int, int, int]) -> str:
    if kind == "git":
        found = hashlib.sha1(b"blob %d\0" % state[1], usedforsecurity=False)
    else:
        found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()
