"""What can be wrong with somebody's data, as one exception that names the file."""

from pathlib import Path


class DataError(ValueError):
    """A file or folder that cannot be used: names it, says what came, what is needed, what to change."""

    def __init__(self, path: str | Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path, self.problem = str(path), problem

    def __reduce__(self) -> tuple[type["DataError"], tuple[str, str]]:
        return (type(self), (self.path, self.problem))  # worker processes hand it to their parent


def unreadable(path: str | Path, error: OSError) -> DataError:
    """Returns the DataError for a file that the system does not let us read."""
    return DataError(path, f"cannot be read ({error.strerror or error}); check the path and its rights")


def unwritable(path: str | Path, error: OSError) -> DataError:
    """Returns the DataError for a file that the system does not let us write."""
    return DataError(path, f"cannot be written ({error.strerror or error}); free space or choose another folder")
