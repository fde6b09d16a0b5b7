"""DataError: what is wrong with a user's data, and in which file."""

import os
import resource
from errno import EACCES, EAGAIN, EDQUOT, EEXIST, EFBIG, EMFILE, ENAMETOOLONG, ENOENT, ENOSPC, EPERM, EROFS
from pathlib import Path


class DataError(ValueError):
    """A file or folder cannot be used. The message names it and says what came, what is needed and what to change."""

    def __init__(self, path: str | Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path, self.problem = str(path), problem

    def __reduce__(self) -> tuple[type["DataError"], tuple[str, str]]:
        return (type(self), (self.path, self.problem))  # worker processes send it to their parent


def reason(error: OSError) -> str:
    """Returns why the system refused, in words; if a link on the way leads nowhere, which one it is."""
    path = Path(os.fsdecode(error.filename or "")) if isinstance(error.filename, (str, bytes)) else Path()
    if error.errno in (EEXIST, ENOENT):  # which is what the system says of it
        for link in (path, *path.parents):
            if os.path.islink(link) and not os.path.exists(link):
                return f"{link} is a link to {os.readlink(link)}, which leads nowhere"
    return f"{error.strerror or error}{limit_behind(error)}"


def limit_behind(error: OSError) -> str:
    """Returns which limit of this shell or system an error shows, to follow its words; "" for other errors."""
    if error.errno == EMFILE:
        return f": {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} are allowed; raise the limit, as by ulimit -n 4096"
    if error.errno == EAGAIN:  # of processes and threads
        allowed = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        count = "no more can be started" if allowed == resource.RLIM_INFINITY else f"{allowed} are allowed"
        return f": {count}; raise the limit, as by ulimit -u 4096 (and -v unlimited), or end other processes"
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno == EFBIG and allowed != resource.RLIM_INFINITY:
        return f": {allowed} bytes are allowed; raise the limit, as by ulimit -f unlimited"
    return ": mostly 255 bytes are allowed between two slashes; shorten it" if error.errno == ENAMETOOLONG else ""


_REMEDIES = {
    "make room": (ENOSPC, EDQUOT),
    "make the disk writable": (EROFS,),
    "correct the permissions": (EACCES, EPERM),
    "raise the limit on file sizes": (EFBIG,),
}


def remedy(told: object) -> str:
    """Returns what to do where a file could not be written, by the system's words in an error: libraries and other
    ranks hand on no number.
    """
    known = ((act, os.strerror(number)) for act, numbers in _REMEDIES.items() for number in numbers)
    return next((act for act, words in known if words in str(told)), "check the path and its disk")


def unreadable(path: str | Path, error: OSError) -> DataError:
    """Returns the DataError for a file that the system refuses to read."""
    return DataError(path, f"cannot be read ({reason(error)}); check the path and its permissions")


def unwritable(path: str | Path, error: OSError) -> DataError:
    """Returns the DataError for a file that the system refuses to write."""
    return DataError(path, f"cannot be written ({reason(error)}); {remedy(error)} or choose another folder")
