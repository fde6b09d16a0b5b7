"""The tasks by name: a new task is a folder and a line of ``TASKS``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from seqpar.tasks.classify.classification import Classification
from seqpar.tasks.pretrain.pretraining import Pretraining
from seqpar.tasks.segment.segmentation import Segmentation
from seqpar.tasks.task import Task

if TYPE_CHECKING:
    from seqpar.settings.config import Config

TASKS: dict[str, Task] = {task.name: task for task in (Segmentation(), Classification(), Pretraining())}


def task_of(config: Config) -> Task:
    """Returns the task of a config."""
    return TASKS[config.task]


def task_of_predictions(paths: Sequence[Path]) -> Task:
    """Returns the task whose predictions lie at paths, segmentation if no other knows them.

    Raises ``ValueError`` if they belong to several tasks.
    """
    segment = TASKS["segment"]
    tasks = {path: next((task for task in TASKS.values() if task.has_predictions(path)), segment) for path in paths}
    (path, task), *others = tasks.items()
    for other, own in others:
        if own is not task:
            raise ValueError(f"{path} holds {task.predictions}, {other} {own.predictions}: evaluate each by itself")
    return task
