"""Refuses configs that cannot work, before data, weights or other ranks are there."""

import importlib.util
import os

from seqpar.models.build import NETWORK_NAMES, build_on_meta, layout_of
from seqpar.parallel.mesh import Group
from seqpar.pipeline.named_placements import PLACEMENTS, parse_cuts
from seqpar.pipeline.placement import check_num_cells
from seqpar.settings.checks import check
from seqpar.settings.config import Config


def check_feasible(config: Config) -> None:
    """Refuses a config that cannot work, before anything is allocated, naming the nearest that does."""
    check(config, NETWORK_NAMES)
    packages = {"tensorboard": "--tensorboard"} if config.tensorboard else {}
    packages |= {config.tracker: f"--tracker {config.tracker}"} if config.tracker != "none" else {}
    for package, flag in packages.items():
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{flag} needs a package that is not here: pip install 'seqpar[{package}]'")
    if config.weights and not config.resume and not os.path.exists(config.weights):  # a saved run needs them no more
        raise ValueError(f"--weights {config.weights}: no such file; give a safetensors or torch file of weights")
    group = Group("seq", tuple(range(config.seqpar)))
    layout_of(config)
    net = build_on_meta(config, group)
    net.mode.check(net.layout, config.batch or None)
    _refuse_wide_window(config)
    if config.pipe > 1:
        _refuse_places(config, len(net.staged().takes))


def _refuse_wide_window(config: Config) -> None:
    """Refuses a window that holds all tokens of a tile; lessons of a curriculum may begin with such tiles."""
    sides = [side // voxels for side, voxels in zip(config.tile, config.patch)]
    if config.window >= max(sides) and not config.curriculum:
        raise ValueError(
            f"--window {config.window} would do nothing: a tile has {' x '.join(map(str, sides))} tokens: use a "
            "smaller one, a larger --tile, or leave it out"
        )


def _refuse_places(config: Config, num_cells: int) -> None:
    """Refuses a placement that the network's cells do not allow."""
    check_num_cells(num_cells, config.pipe)
    if config.placement == "rings" and num_cells < 2 * config.pipe - 1:
        raise ValueError(
            f"--placement rings with --pipe {config.pipe} has {2 * config.pipe - 1} stages, and the network has "
            f"{num_cells} cells: use a smaller --pipe, or --placement cuts"
        )
    if config.placement not in PLACEMENTS:
        parse_cuts(config.placement, config.pipe, num_cells)


def require_peers(config: Config, num_ranks: int) -> None:
    """Raises where a config needs several ranks and there is one."""
    if config.shard_weights and num_ranks == 1:
        raise ValueError("--shard-weights shares with other ranks, and 1 was started: start 2 or more, or leave it out")
