"""``--scale-lr``: as a run begins, the rate grows with the sequence groups, and an epoch keeps its number of tiles."""

from collections.abc import Collection
from dataclasses import replace

from seqpar.settings.config import Config
from seqpar.text import flag_name

SCALED = {"lr", "iterations"}  # settings that a resumed run keeps as they were scaled when it began


def scale_learning_rate(config: Config, num_groups: int) -> tuple[Config, str]:
    """Returns the config of a run that begins on ``num_groups`` sequence groups, and a line on its rate and steps."""
    own = replace(config, lr=config.lr * num_groups, iterations=max(1, config.iterations // num_groups))
    groups = f"{num_groups} sequence group{'s' if num_groups > 1 else ''}"
    return own, f"--scale-lr: {groups}, so the rate is {own.lr:g}, and an epoch has {own.iterations} steps"


def settings_at_start(config: Config, num_groups: int) -> Config:
    """Returns the config with which a run begins on ``num_groups`` sequence groups."""
    return scale_learning_rate(config, num_groups)[0] if config.scale_lr else config


def keeps_scaled_rate(saved: Config, now: Config, names: Collection[str], num_groups: int = 0) -> bool:
    """Returns whether a resumed run keeps its scaled rate and steps, after refusing others.

    - ``now``: the config of the command line; ``names``: the settings in it
    - ``num_groups``: on which the run began; 0: it is not known
    """
    if not saved.scale_lr or "scale_lr" in names and not now.scale_lr:
        return False
    factor = saved.lr / now.lr
    whole = factor >= 1 and abs(factor - (num_groups or round(factor))) < 1e-6 * factor
    steps = now.iterations >= saved.iterations
    if num_groups:
        steps = max(1, now.iterations // num_groups) == saved.iterations
    is_as_it_began = {"lr": whole, "iterations": steps}
    for name in SCALED.intersection(names):
        if not is_as_it_began[name]:
            value = getattr(saved, name)
            raise ValueError(
                f"--{flag_name(name)}: a resumed run keeps what --scale-lr made of it, {value:g}: remove it, or "
                f"set it by --no-scale-lr --{flag_name(name)}"
            )
    return True
