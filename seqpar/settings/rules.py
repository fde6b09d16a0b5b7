"""What the declarations say of a config: settings without effect, and what a resumed run keeps."""

import os
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from seqpar.data.addresses import absolute, is_address
from seqpar.data.errors import DataError
from seqpar.data.files import expand_home
from seqpar.data.formats.recognise import find_dataset
from seqpar.settings.config import SETTINGS, Config
from seqpar.settings.curriculum import is_same
from seqpar.settings.field import Circumstances
from seqpar.text import flag_name

FILES = ("data", "cache", "weights", "measured", "plans")  # settings that name a file or folder


def from_anywhere(name: str, value: str) -> str:
    """Returns the value of a setting of ``FILES`` that means the same in any folder; "" stays."""
    if not value or is_address(value):
        return value
    try:
        path = find_dataset(value) if name == "data" else expand_home(value)  # nnU-Net's have names and numbers, too
    except DataError:
        return os.path.abspath(value)
    plain = os.path.abspath(path)
    is_same = not path.exists() or os.path.exists(plain) and os.path.samefile(path, plain)
    return plain if is_same else str(path.absolute())  # ".." after a link


def with_absolute_paths(config: Config) -> Config:
    """Returns the config as a run records it, since it may be resumed or read from another folder."""
    absolute_paths: dict[str, Any] = {name: from_anywhere(name, getattr(config, name)) for name in FILES}
    return replace(config, **absolute_paths)


def setting_applies(config: Config, name: str) -> bool:
    """Returns whether a setting is one of the config's task and network."""
    own = SETTINGS[name]
    return config.task in own.tasks and (own.networks is None or own.networks.includes(config))


def why_without_effect(config: Config, name: str) -> str:
    """Returns why a setting does nothing in a run of ``config``; "" if it acts."""
    own = SETTINGS[name]
    if config.task not in own.tasks:
        return f"--task {config.task} does not use it"
    if own.networks and not own.networks.includes(config):
        encoder = f" with --encoder {config.encoder}" if config.network == "vit" else ""
        return f"--network {config.network}{encoder} does not have it, only {own.networks.text}"
    if own.acts_when is None or own.acts_when(config):
        return ""
    return own.why.format_map(vars(config)) if isinstance(own.why, str) else own.why(config)


def refuse_settings_without_effect(config: Config, typed: Collection[str]) -> None:
    """Raises ValueError for a setting on the command line (``typed``) that does nothing in a run of ``config``."""
    for name in SETTINGS:
        if name in typed and (why := why_without_effect(config, name)):
            raise ValueError(f"--{flag_name(name)} would do nothing: {why}: remove it")


def describe_settings_without_effect(config: Config, typed: Collection[str], here: Circumstances) -> str:
    """Returns a line on settings of the command line that do nothing ``here``; "" if there is none.

    They are not refused: the same line may start runs with more ranks, on GPUs or with other data.
    """
    flags_by_reason = dict[str, list[str]]()
    for name, own in SETTINGS.items():
        if name in typed and own.idle_here and (why := own.idle_here(config, here)):
            flags_by_reason.setdefault(why, []).append(as_typed(name, getattr(config, name)))
    return "; ".join(f"{', '.join(flags)}: no effect {why}" for why, flags in flags_by_reason.items())


def fixed_changes(saved: Config, now: Config, typed: Collection[str]) -> list[str]:
    """Returns the settings on the command line (``typed``) that are not those of a run, which no start changes."""
    same = {"curriculum"} if is_same(now.curriculum, saved.curriculum) else set[str]()
    asked = (name for name, own in SETTINGS.items() if own.fixed and name in typed and name not in same)
    return [name for name in asked if getattr(now, name) != getattr(saved, name)]


def settings_on_resume(saved: Config, now: Config, typed: set[str]) -> Config:
    """Returns the settings of a resumed run: the saved ones, changed by the command line.

    - ``now``: the config of the command line; ``typed``: the settings in it
    """
    if is_same(now.curriculum, saved.curriculum):  # as a scheduler repeats the line
        now = replace(now, curriculum=saved.curriculum)
    for name in fixed_changes(saved, now, typed):
        began = as_typed(name, getattr(saved, name))
        raise ValueError(
            f"--{flag_name(name)} cannot change when a run resumes (this one began with {began}): "
            f"{SETTINGS[name].fixed}. Remove it, or start another run with --weights {now.out}/model.safetensors"
        )
    began_without = saved.optimizer == "rmsprop" and not any(saved.betas[:1])
    if "betas" in typed and began_without and now.betas[0] > 0:
        raise ValueError(
            "--betas cannot add momentum to a run that began without: rmsprop has no saved state of it: remove it"
        )
    if "weights" in typed and now.weights != (saved.weights and absolute(saved.weights)):
        began = f"from {saved.weights}" if saved.weights else "without"
        raise ValueError(
            f"--weights {now.weights} would do nothing: --resume continues with the run's own weights, which began "
            f"{began}: remove one of the two, or name another --out"
        )
    changes = {name: getattr(now, name) for name in typed | {"dry_run", "take_over"}}
    return replace(saved, **{**changes, "resume": True})


def as_typed(name: str, value: Any) -> str:
    """Returns a setting as its flag is typed."""
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{flag_name(name)}"
    return " ".join([f"--{flag_name(name)}", *map(str, value if isinstance(value, tuple) else [value])])
