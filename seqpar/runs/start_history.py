"""The starts of a run: at which step each began, and which settings it changed."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from seqpar.next_command import typed_command
from seqpar.settings.config import Config, dashed

Changes = Mapping[str, Sequence[Any]]  # name of a setting: what it was, what it is
_OF_ONE_START = ("out", "resume", "again", "take_over", "dry_run")  # these say how a run is started, not what it is


def changed_settings(before: Config, now: Config) -> dict[str, list[Any]]:
    """Returns the settings that differ, each with what it was and what it is."""
    pairs = {f.name: [getattr(before, f.name), getattr(now, f.name)] for f in fields(Config)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in _OF_ONE_START}


def changes_line(changes: Changes) -> str:
    """Returns the changes in a line, as typed on the command line; "" for none."""
    listed = ", ".join(f"--{dashed(name)} {_typed(was)} -> {_typed(new)}" for name, (was, new) in changes.items())
    return listed and f"changed since this run was last started: {listed}"


def _typed(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (" ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)) or "unset"


def with_this_start(history: Sequence[Any], step: int, ranks: int, changes: Changes) -> list[Any]:
    """Returns a run's history with this start of it; ``step``: from where it goes on."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return [*history, {"step": step, "time": now, "ranks": ranks, "changed": dict(changes), "command": typed_command()}]
