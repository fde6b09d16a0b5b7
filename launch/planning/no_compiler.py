"""Counting without torch's compiler, which optimizers and tensors without data import: seconds that change no count."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_KEPT = "__dynamo_disable"  # where torch keeps what ``disable`` returned for a function


@contextmanager
def no_compiler() -> Iterator[None]:
    """Puts an empty module in the compiler's place, unless it is imported already.

    Not where a block is computed again in backward: torch's checkpoint asks the compiler for its settings.
    """
    if _COMPILER in sys.modules:
        yield
        return
    stand_in = sys.modules[_COMPILER] = _StandIn(_COMPILER)
    try:
        yield
    finally:
        del sys.modules[_COMPILER]
        for function in stand_in.functions:
            vars(function).pop(_KEPT, None)  # so that torch asks the real compiler the next time


class _StandIn(ModuleType):
    """Has what is called of the compiler: functions are to be left out of what it compiles, which is nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.functions = list[Callable[..., Any]]()

    def graph_break(self, *of: Any) -> None: ...

    def disable(self, function: Callable[..., Any], *of: Any, **how: Any) -> Callable[..., Any]:
        self.functions.append(function)
        return function
