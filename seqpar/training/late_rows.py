"""Steps are recorded one step late: by then the device has their numbers, so that nobody waits for it."""

from collections.abc import Callable
from types import TracebackType


class LateRows:
    """Calls each function that is put here when the next one comes, or at ``write``: the last one is never lost.

    A context manager, which calls what is left where an error ends it, too.
    """

    def __init__(self) -> None:
        self._last: Callable[[], None] | None = None

    def put(self, record: Callable[[], None]) -> None:
        """Calls the function before and keeps this one."""
        self.write()
        self._last = record

    def write(self) -> None:
        """Calls the function that is kept."""
        last, self._last = self._last, None
        if last is not None:
            last()

    def __enter__(self) -> "LateRows":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.write()
        except Exception:
            if error is None:  # else that error is the one to show: the device's numbers may be gone with it
                raise
