"""Refuses configs that cannot work, before data, weights or other ranks are there."""

import importlib.util
import os

from seqpar.decoders.modes.choose import choose_mode
from seqpar.launch.models.build import NETWORKS, layout_of
from seqpar.launch.planning.outline import outline
from seqpar.launch.settings.checks import check
from seqpar.launch.settings.config import Config
from seqpar.mesh import Group


def refuse(config: Config) -> None:
    """Refuses a config that cannot work, before anything is allocated, naming the nearest that does."""
    check(config, tuple(NETWORKS))
    packages = {"tensorboard": "--tensorboard"} if config.tensorboard else {}
    packages |= {config.tracker: f"--tracker {config.tracker}"} if config.tracker != "none" else {}
    for package, flag in packages.items():
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{flag} needs a package that is not here: pip install 'seqpar[{package}]'")
    if config.weights and not config.resume and not os.path.exists(config.weights):  # a saved run needs them no more
        raise ValueError(f"--weights {config.weights}: no such file; give a safetensors or torch file of weights")
    group = Group("seq", tuple(range(config.seqpar)))
    choose_mode(config.mode, group).check(layout_of(config), config.batch or None)
    outline(config, group)


def refuse_lonely(config: Config, num_ranks: int) -> None:
    """Raises where a config needs several ranks and there is one."""
    if config.shard_weights and num_ranks == 1:
        raise ValueError("--shard-weights shares with other ranks, and 1 was started: start 2 or more, or leave it out")
