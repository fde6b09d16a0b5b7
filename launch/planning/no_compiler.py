"""Counting without torch's compiler, which optimizers and tensors without data import: seconds that change no count."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_KEPT = "__dynamo_disable"  # where torch keeps what ``disable`` returned for a function


@contextmanager
def no_compiler() -> Iterator[None]:
    """Puts a stand-in in the compiler's place, unless it is imported already; afterwards nothing is left of it.

    Where more is asked than the stand-in has, the compiler comes. Not for blocks that are computed again in backward:
    torch's checkpoint asks for the compiler's settings, amid a count.
    """
    if _COMPILER in sys.modules:
        yield
        return
    stand_in = _StandIn(_COMPILER)
    sys.modules[_COMPILER] = stand_in
    try:
        yield
    finally:
        stand_in.leave()


class _StandIn(ModuleType):
    """Has what is called of the compiler: functions are to be left out of what it compiles, which is nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._functions = list[Any]()

    def graph_break(self, *of: Any) -> None: ...

    def disable(self, function: Any = None, *of: Any, **how: Any) -> Any:
        if function is None:  # a decorator with options
            return self.disable
        self._functions.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # which the import of a submodule asks for
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(_COMPILER), name)

    def leave(self) -> None:
        """Makes way for the compiler: torch asks it the next time, for these functions too."""
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        while self._functions:
            with suppress(AttributeError):
                delattr(self._functions.pop(), _KEPT)
