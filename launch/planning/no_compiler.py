"""Counting without torch's compiler: an optimizer imports it, which takes seconds and changes nothing here."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch.optim import Optimizer

_COMPILER = "torch._dynamo"


@contextmanager
def no_compiler() -> Iterator[None]:
    """Puts an empty module in the compiler's place, unless it is imported already."""
    if _COMPILER in sys.modules:
        yield
        return
    sys.modules[_COMPILER] = _StandIn(_COMPILER)
    try:
        yield
    finally:
        del sys.modules[_COMPILER]
        _forget_disabled(Optimizer.add_param_group)


class _StandIn(ModuleType):
    """Has what an optimizer calls of the compiler: to be left out of what it compiles, which is nothing."""

    @staticmethod
    def graph_break(*of: Any) -> None: ...

    @staticmethod
    def disable(function: Callable[..., Any], *of: Any, **how: Any) -> Callable[..., Any]:
        return function


def _forget_disabled(wrapped: Any) -> None:
    """Lets torch ask the real compiler the next time: it keeps what ``disable`` returned at the first call."""
    function = getattr(wrapped, "__wrapped__", None)
    if getattr(function, "__dynamo_disable", None) is function and function is not None:
        del function.__dynamo_disable
