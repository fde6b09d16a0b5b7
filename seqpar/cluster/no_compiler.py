"""Training and counting without torch's compiler, whose import takes half as long as torch's own and changes no number.

Optimizers, DDP and tensors without data ask for it, whether or not anything is compiled.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from seqpar.settings.config import Config

_COMPILER = "torch._dynamo"
_KEPT = "__dynamo_disable"  # where torch keeps what ``disable`` returned for a function


def computes_again(config: Config) -> bool:
    """Returns whether blocks are computed again in backward: torch's checkpoint asks for the compiler's settings."""
    return config.grad_checkpoint != Config().grad_checkpoint or config.mlp_chunks > 1


@contextmanager
def no_compiler() -> Iterator[None]:
    """Puts a stand-in in the compiler's place, unless it is imported already; afterwards nothing is left of it.

    Where more is asked than the stand-in has, the compiler comes.
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
        self.utils = _Utils(self)

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


class _Utils:
    """Has what DDP asks of the compiler's ``utils``; where more is asked, the compiler comes."""

    def __init__(self, stand_in: _StandIn) -> None:
        self._stand_in = stand_in

    def get_optimize_ddp_mode(self) -> str:
        """Returns torch's default."""
        return "ddp_optimizer"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._stand_in.leave()
        return getattr(importlib.import_module(f"{_COMPILER}.utils"), name)
