"""Fills in what a curriculum leaves open: the size of whole volumes, the group's size, and each lesson's batch."""

import math
from collections.abc import Sequence
from dataclasses import replace

from seqpar.models.build import build_on_meta, family_of
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group
from seqpar.planner.auto_settings import choose_group_and_batch
from seqpar.planner.feasibility import check_feasible
from seqpar.settings.config import Config
from seqpar.settings.parallel_settings import AUTO
from seqpar.settings.curriculum import format_curriculum, in_micro_batches, parse_curriculum
from seqpar.settings.lessons import Lesson, lessons_of
from seqpar.text import quantity

Choices = dict[str, tuple[str, ...]]


def is_open(config: Config) -> bool:
    """Returns whether a curriculum has a lesson whose tile or batch is not known."""
    return any(not entry.tile or not entry.batch for entry in parse_curriculum(config.curriculum))


def fill_pipeline(config: Config, flags: set[str]) -> tuple[Config, Choices]:
    """Returns the config whose lessons, a preset's, have micro-batches enough for the places of a pipe, and why.

    ``flags``: the settings on the command line, which may say themselves what a step has
    """
    typed = flags & {"curriculum", "accumulate", "global_batch"}
    if config.pipe == 1 or config.resume or typed or not config.curriculum:
        return config, {}
    lessons = in_micro_batches(config.curriculum, 2 * config.pipe)
    why = f"--curriculum {lessons}: with --pipe {config.pipe} a step's tiles are dealt out to micro-batches"
    return replace(config, curriculum=lessons), {"micro_batches": (why,)}


def choose_lessons(
    config: Config, launcher: Launcher, largest: Sequence[int] = (), channels: int = 1, outputs: int = 2
) -> tuple[Config, Choices]:
    """Returns the config whose curriculum says each lesson's tile and batch, and the reasons of what was chosen.

    - ``largest``: voxels per direction that hold every case; padded to the network's unit, a whole volume's tile
    - ``channels``, ``outputs``: of the data; looked at where a batch is open
    """
    entries = [replace(entry, tile=entry.tile or tuple(largest)) for entry in parse_curriculum(config.curriculum)]
    if any(entry.micros for entry in entries):  # a run that goes on has the number of the lesson that it was in
        entries = [replace(entry, micros=entry.micros or config.accumulate) for entry in entries]
    config = family_of(config).pinned(replace(config, tile=entries[0].tile))
    unit = family_of(config).unit(config)
    entries = [replace(entry, tile=_padded(entry.tile, unit)) if entry.is_whole else entry for entry in entries]
    accumulate, why = config.accumulate, Choices()
    configs = [
        replace(config, tile=entry.tile, batch=entry.batch, accumulate=entry.micros or accumulate) for entry in entries
    ]
    if config.seqpar == AUTO:
        answers = [choose_group_and_batch(each, launcher, channels, outputs) for each in configs]
        config, reasons = max(answers, key=lambda answer: answer[0].seqpar)
        why["seqpar_choice"] = reasons["seqpar_choice"]
        configs = [replace(each, seqpar=config.seqpar) for each in configs]
    for number, each in enumerate(configs):
        if not each.batch:
            configs[number], reasons = choose_group_and_batch(each, launcher, channels, outputs)
            (sentence,) = reasons["batch_choice"]
            why[f"batch_choice_{number + 1}"] = (f"tile {'x'.join(map(str, each.tile))}: {sentence}",)
    filled = [replace(entry, batch=each.batch) for entry, each in zip(entries, configs)]
    return replace(configs[0], accumulate=accumulate, curriculum=format_curriculum(filled)), why


def _padded(sides: Sequence[int], unit: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.ceil(side / step) * step for side, step in zip(sides, unit))


def refuse_lessons(lessons: Sequence[Lesson], num_groups: int = 1) -> None:
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


def _tiles(config: Config) -> str:
    """Returns the tiles of a micro-batch, and how many of these a step has."""
    return f"{config.batch} x {config.accumulate}" if config.accumulate > 1 else str(config.batch)


def _by(config: Config) -> str:
    return "x".join(map(str, config.tile))


def describe_lessons(config: Config) -> str:
    """Returns a curriculum's lessons, a line each; "" for none."""
    if not config.curriculum:
        return ""
    lines = [
        f"  tile {_by(lesson.config)}, {_tiles(lesson.config)} a group: steps {lesson.steps.start + 1} to "
        f"{lesson.steps.stop}{', centred on labelled voxels' if lesson.foreground == 1 else ''}"
        for lesson in lessons_of(config)
    ]
    return "\n".join([f"curriculum of {quantity(len(lines), 'lesson')}:", *lines])
