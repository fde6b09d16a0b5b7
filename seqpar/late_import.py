"""Modules that are imported when something of them is first used: scipy takes as long as most of ours together."""

import importlib
from types import ModuleType
from typing import Any


class _Late(ModuleType):
    """Stands for a module and imports it when it is first asked for something."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def late(name: str) -> ModuleType:
    """Returns a module that is imported when something of it is first used."""
    return _Late(name)
