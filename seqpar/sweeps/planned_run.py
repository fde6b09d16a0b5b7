"""PlannedRun: a training run of a list, by its settings; and how far the run folder of it is."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError
from seqpar.data.preparation.fingerprint import Fingerprint
from seqpar.models.build import NETWORK_NAMES, family_of
from seqpar.planner.feasibility import check_feasible
from seqpar.runs.run_folder import read_config
from seqpar.settings.command_line import naming_preset, parse, shortened_warmup
from seqpar.settings.config import Config
from seqpar.settings.rules import refuse_settings_without_effect
from seqpar.tasks.lookup import task_of
from seqpar.text import flag_name


@cache
def _headers(task: str, data: str) -> Fingerprint:
    """Returns what the headers of a task's data say, whose volumes are taken whole."""
    config = Config(task=task, data=data)
    return task_of(config).read_headers(config)


@dataclass(frozen=True)
class PlannedRun:
    """A run of ``train``.

    - ``name``: of its folder
    - ``preset``: what its settings begin with
    - ``settings``: the others, by their names in Config
    - ``groups``: sequence groups, which train on different tiles
    - ``before``: the run from whose weights it starts, in a folder next to its own
    """

    name: str
    preset: str
    settings: Mapping[str, Any]
    groups: int = 1
    before: "PlannedRun | None" = None

    @property
    def ranks(self) -> int:
        return self.groups * int(self.settings.get("seqpar", 1)) * int(self.settings.get("pipe", 1))

    @property
    def flags(self) -> list[str]:
        """The flags of train that begin the run, all but the folders: --out and --weights."""
        own = (word for name, value in self.settings.items() for word in flag_values(name, value))
        return ["--preset", self.preset, *own]

    def line(self, run: Path) -> list[str]:
        """Returns the flags of train that begin the run in this folder."""
        weights = ["--weights", str(run.with_name(self.before.name))] if self.before else []
        return [*self.flags, "--out", str(run), *weights]


def flag_values(name: str, value: Any) -> list[str]:
    """Returns the words of a setting on the command line."""
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{flag_name(name)}"]
    return [f"--{flag_name(name)}", *map(str, value if isinstance(value, tuple) else [value])]


def has_begun(run: Path) -> bool:
    """Returns whether a run folder has a config.json, from which its training can resume."""
    return (run / "config.json").exists()


def has_finished(run: Path) -> bool:
    """Returns whether the training of a run folder came to its end."""
    return read_status(run).get("state") == "finished"


def read_status(run: Path) -> dict[str, Any]:
    """Returns the content of a run folder's status.json, {} if there is none."""
    try:
        return dict(json.loads((run / "status.json").read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def refuse_other_flags(
    planned: PlannedRun, run: Path, instead: str = "name another --out, or the flags of then"
) -> None:
    """Refuses a run folder that was begun by other flags than those of ``planned``, or on other ranks.

    - ``instead``: what to do then
    """
    content = read_config(run)
    try:
        began, ranks = content["history"][0]["command"][1:], content["layout"]["ranks"]
    except (KeyError, IndexError, TypeError) as error:
        raise DataError(run / "config.json", f"does not say how the run began ({error}); remove {run}") from None
    now = planned.flags
    if began[: len(now)] == now and began[len(now) : len(now) + 1] == ["--out"]:
        return
    was, asked = _by_flag(began), _by_flag(now)
    for name in ("--out", "--weights", "--time-limit"):
        was.pop(name, None)
    other = [name for name in {**was, **asked} if was.get(name) != asked.get(name)]
    changes = "; ".join(f"{was.get(name) or f'no {name}'}, and now {asked.get(name) or f'no {name}'}" for name in other)
    raise ValueError(
        f"{run} was made with {changes or f'the same flags in another order, on {ranks} ranks'}: {instead}"
    )


def _by_flag(line: list[str]) -> dict[str, str]:
    """Returns each flag of a command line with its values."""
    flags, name = dict[str, str](), ""
    for word in line:
        name = word if word.startswith("--") else name
        flags[name] = f"{flags[name]} {word}" if name in flags else word
    return flags


def config_of(planned: PlannedRun, acting: Collection[str] = ()) -> Config:
    """Returns the config of a run; raises ValueError where its settings cannot be, before any run begins.

    - ``acting``: settings that have an effect whatever the others are
    """
    _, config, names = parse(planned.flags, planned.preset, NETWORK_NAMES)
    with naming_preset(planned.preset, names):
        family_of(config)  # refuses a network of another task
        refuse_settings_without_effect(config, names.difference(acting))
        config, _ = shortened_warmup(config, names)
        if not config.tile:
            config = task_of(config).with_tile(config, _headers(config.task, config.data))
        if config.batch or not config.curriculum:
            check_feasible(config)
    return config
