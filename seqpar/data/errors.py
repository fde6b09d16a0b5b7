"""DataError: what is wrong with a user's data, and in which file."""

from pathlib import Path


class DataError(ValueError):
    """A file or folder cannot be used. The message names it and says what came, what is needed and what to change."""

    def __init__(self, path: str | Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path, self.problem = str(path), problem

    def __reduce__(self) -> tuple[type["DataError"], tuple[str, str]]:
        return (type(self), (self.path, self.problem))  # worker processes send it to their parent


def unreadable(path: str | Path, error: OSError) -> DataError:
    """Returns the DataError for a file that the system refuses to read."""
    return DataError(path, f"cannot be read ({error.strerror or error}); check the path and its permissions")


def unwritable(path: str | Path, error: OSError) -> DataError:
    """Returns the DataError for a file that the system refuses to write."""
    return DataError(path, f"cannot be written ({error.strerror or error}); free space or choose another folder")
