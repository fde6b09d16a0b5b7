"""The lessons of a run: the part of its steps that each tile and batch have."""

from dataclasses import dataclass, replace

from seqpar.settings.config import Config
from seqpar.settings.curriculum import parse_curriculum


@dataclass(frozen=True)
class Lesson:
    """A part of a run: ``config`` with its tile, batch and micro-batches, the ``steps`` of the run that are its own.

    ``foreground`` is the share of its tiles that are centred on a labelled voxel.
    """

    config: Config
    steps: range
    foreground: float


def lessons_of(config: Config) -> tuple[Lesson, ...]:
    """Returns the lessons of a run; without a curriculum one, of all its steps.

    All tiles before the last lesson are centred on labelled voxels, those of the last as ``--foreground`` says. A
    whole volume has one place.
    """
    entries, start = parse_curriculum(config.curriculum), 0
    if not entries:
        return (Lesson(config, range(config.steps), config.foreground),)
    lessons = []
    for entry in entries:
        share = config.foreground if entry is entries[-1] else 1.0
        steps = range(start, start + entry.epochs * config.iterations)
        own = replace(config, tile=entry.tile or config.tile, batch=entry.batch)
        own = replace(own, accumulate=entry.micros or config.accumulate)
        lessons.append(Lesson(own, steps, 0.0 if entry.is_whole else share))
        start = steps.stop
    return tuple(lessons)


def lesson_at(config: Config, step: int) -> int:
    """Returns the number of the lesson that a run is in after ``step`` steps, from 0; at a border the one that ends."""
    lessons = lessons_of(config)
    return next((number for number, lesson in enumerate(lessons) if step <= lesson.steps.stop), len(lessons) - 1)
