"""Refuses configs that cannot work, before data, weights or other ranks are there."""

import importlib.util
import os
from collections.abc import Sequence

from seqpar.data.addresses import is_address, is_missing
from seqpar.models.build import NETWORK_NAMES, build_on_meta, family_of, layout_of
from seqpar.parallel.mesh import Group
from seqpar.pipeline.named_placements import PLACEMENTS, parse_cuts
from seqpar.pipeline.placement import check_num_cells
from seqpar.settings.checks import check
from seqpar.settings.config import Config
from seqpar.settings.lessons import Lesson
from seqpar.text import install_hint
from seqpar.weights.weight_files import refuse_unreadable


def check_feasible(config: Config) -> None:
    """Raises ValueError for a config that cannot work, before anything is allocated; names the nearest that does."""
    check(config, NETWORK_NAMES)
    packages = {"tensorboard": "--tensorboard"} if config.tensorboard else {}
    packages |= {config.tracker: f"--tracker {config.tracker}"} if config.tracker != "none" else {}
    for package, flag in packages.items():
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{flag} needs a package that is not installed: {install_hint(package)}")
    if config.weights and not config.resume:  # a resumed run has its own
        _refuse_weights(config.weights)
    group = Group("seq", tuple(range(config.seqpar)))
    layout_of(config)
    net = build_on_meta(config, group)
    net.mode.check(net.layout, config.batch or None)
    _refuse_wide_window(config)
    if config.pipe > 1:
        _refuse_places(config, len(net.staged().takes))


def _refuse_weights(path: str) -> None:
    """Refuses ``--weights`` that are no file of weights, by its first bytes; if they were not downloaded, by none."""
    from seqpar.weights.pretrained import weights_file  # it knows the names of four libraries

    if is_missing(path):
        return
    if not is_address(path) and not os.path.exists(path):
        raise ValueError(f"--weights {path}: no such file; give a safetensors or torch file of weights")
    refuse_unreadable(weights_file(path))


def _refuse_wide_window(config: Config) -> None:
    """Refuses a window that covers a whole tile, except in a curriculum, whose first tiles may be that small."""
    sides = [side // voxels for side, voxels in zip(config.tile, config.patch)]
    if config.window >= max(sides) and not config.curriculum:
        raise ValueError(
            f"--window {config.window} would do nothing: a tile has {' x '.join(map(str, sides))} tokens: use a "
            "smaller --window, a larger --tile, or remove it"
        )


def _refuse_places(config: Config, num_cells: int) -> None:
    """Refuses a placement that needs more cells than the network has."""
    check_num_cells(num_cells, config.pipe)
    if config.placement == "rings" and num_cells < 2 * config.pipe - 1:
        raise ValueError(
            f"--placement rings with --pipe {config.pipe} has {2 * config.pipe - 1} stages, and the network has "
            f"{num_cells} cells: use a smaller --pipe, or --placement cuts"
        )
    if config.placement not in PLACEMENTS:
        parse_cuts(config.placement, config.pipe, num_cells)


def require_peers(config: Config, num_ranks: int) -> None:
    """Raises ValueError if a config needs several ranks and only one was started."""
    if config.shard_weights and num_ranks == 1:
        raise ValueError("--shard-weights needs other ranks, and only 1 was started: start 2 or more, or remove it")


def check_lessons(lessons: Sequence[Lesson], num_groups: int = 1) -> None:
    """Raises ValueError for lessons that cannot work, or whose tiles need different networks.

    - ``num_groups``: sequence groups that share a batch
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
                f"--curriculum: --network {lesson.config.network} builds a different network for tile "
                f"{_by(lesson.config)} than for {_by(lessons[0].config)} ({differing[0]} differs), so weights do "
                "not carry over: choose tiles that give the same network, or another --network"
            )


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a network's tensors, except those that are resized with the tile."""
    net = build_on_meta(config, Group("seq", tuple(range(config.seqpar))))
    other = tuple(side + unit for side, unit in zip(net.layout.tile, net.layout.patch))
    resized = net.resized(other)
    return {name: tuple(tensor.shape) for name, tensor in net.state_dict().items() if name not in resized}


def _by(config: Config) -> str:
    return "x".join(map(str, config.tile))
