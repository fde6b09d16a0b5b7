"""Refuses configs that cannot work, before data, weights or other ranks are there."""

import importlib.util
import os
from collections.abc import Sequence

from seqpar.models.build import NETWORK_NAMES, build_on_meta, family_of, layout_of
from seqpar.parallel.mesh import Group
from seqpar.pipeline.named_placements import PLACEMENTS, parse_cuts
from seqpar.pipeline.placement import check_num_cells
from seqpar.settings.checks import check
from seqpar.settings.config import Config
from seqpar.settings.curriculum import Lesson


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


def check_lessons(lessons: Sequence[Lesson], num_groups: int = 1) -> None:
    """Refuses lessons that cannot work, and tiles for which the network is another one.

    - ``num_groups``: sequence groups, whose tiles are one batch
    """
    for lesson in lessons:
        try:
            check_feasible(lesson.config)
            family_of(lesson.config).refuse_batch(lesson.config, num_groups)
        except ValueError as error:
            if len(lessons) == 1:
                raise
            raise ValueError(f"--curriculum, lesson of tile {_by(lesson.config)}: {error}") from None
    shapes = [_shapes(lesson.config) for lesson in lessons] if len(lessons) > 1 else []
    for lesson, own in zip(lessons[1:], shapes[1:]):
        if differing := sorted(name for name in {**own, **shapes[0]} if own.get(name) != shapes[0].get(name)):
            raise ValueError(
                f"--curriculum: --network {lesson.config.network} is another network for tile {_by(lesson.config)} "
                f"than for {_by(lessons[0].config)} ({differing[0]} differs), so that its weights cannot go on: choose "
                "tiles for which it is the same, or another --network"
            )


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a network's tensors, without those that are resized with the tile."""
    net = build_on_meta(config, Group("seq", tuple(range(config.seqpar))))
    other = tuple(side + unit for side, unit in zip(net.layout.tile, net.layout.patch))
    resized = net.resized(other)
    return {name: tuple(tensor.shape) for name, tensor in net.state_dict().items() if name not in resized}


def _by(config: Config) -> str:
    return "x".join(map(str, config.tile))
