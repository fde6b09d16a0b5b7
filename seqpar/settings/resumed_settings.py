"""The settings of a run that goes on: those that it has, changed by the command line where they may."""

import dataclasses
import os
from dataclasses import replace
from typing import Any

from seqpar.settings.config import Config
from seqpar.settings.curriculum import is_same
from seqpar.text import flag_name

# Beside the network's settings, what a resumed run cannot change: its weights or optimizer states depend on it.
_FIXED = ("task", "tile", "patch", "targets", "optimizer", "amsgrad", "spacing", "join_labels", "crop_to", "normalise",
          "curriculum")  # fmt: skip


def settings_on_resume(saved: Config, now: Config, names: set[str]) -> Config:
    """Returns the settings of a resumed run: the saved ones, changed by the command line.

    ``now``: the config of the command line; ``names``: the settings in it.
    """
    if is_same(now.curriculum, saved.curriculum):  # as a scheduler repeats the line
        now = replace(now, curriculum=saved.curriculum)
    fixed = [f.name for f in dataclasses.fields(Config) if f.metadata["topic"] == "network" or f.name in _FIXED]
    for name in fixed:
        if name in names and getattr(now, name) != getattr(saved, name):
            before = _typed(getattr(saved, name))
            raise ValueError(
                f"--{flag_name(name)} cannot change in a run that goes on ({before} so far): leave it out, "
                f"or begin another run with --weights {now.out}/model.safetensors"
            )
    began_without = saved.optimizer == "rmsprop" and not any(saved.betas[:1])
    if "betas" in names and began_without and now.betas[0] > 0:
        raise ValueError(
            "--betas cannot begin with a momentum in a run that goes on without: rmsprop has no state of it"
        )
    if "weights" in names and now.weights != (saved.weights and os.path.abspath(saved.weights)):
        began = f"from {saved.weights}" if saved.weights else "without"
        raise ValueError(
            f"--weights {now.weights} would do nothing: --resume goes on with the run's own weights, which began "
            f"{began}: leave one of both out, or name another --out"
        )
    of_now = {name: getattr(now, name) for name in names | {"dry_run", "take_over"}}
    return replace(saved, **{**of_now, "resume": True})


def _typed(value: Any) -> str:
    """Returns a setting's value as its flag takes it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
