"""Runs a training lesson by lesson in one folder; without a curriculum there is one lesson."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from seqpar.cluster.kept_memory import keep_memory
from seqpar.cluster.no_compiler import computes_again, no_compiler
from seqpar.cluster.stop_request import Stopper
from seqpar.parallel.mesh import Mesh
from seqpar.runs.run_folder import Status
from seqpar.settings.config import Config
from seqpar.settings.curriculum import Lesson, lesson_at
from seqpar.tasks.training_data import TrainingData
from seqpar.training.run_request import RunRequest
from seqpar.training.setup import make_trainer
from seqpar.weights import checkpoint


def run_lessons(request: RunRequest, mesh: Mesh, data: TrainingData, status: Status, stopper: Stopper) -> bool:
    """Returns whether the run finished; else all ranks left it, and it can be resumed.

    A lesson begins from the checkpoint that the one before it left, as a resumed run does. So what a run becomes does
    not depend on where it was interrupted.
    """
    if mesh.device.type == "cpu":
        keep_memory()
    saved = _find(status, mesh) if request.config.resume else None
    number = lesson_at(request.config, checkpoint.read_progress(saved).step) if saved else 0
    is_first = True
    while True:
        lesson = request.lessons[number]
        with _compiler(lesson.config):
            trainer = make_trainer(request, mesh, _tiles_of(lesson, data), status, number, saved, is_first)
            if not trainer.run(stopper):
                return False
        number, is_first = number + 1, False
        if number == len(request.lessons):
            return True
        saved = _find(status, mesh)
        mesh.set_timeout(request.config.start_timeout)  # another tile: everything runs for the first time again


def _compiler(config: Config) -> AbstractContextManager[None]:
    """Returns a context without torch's compiler, or with it where the run may ask for it."""
    return nullcontext() if config.compile or config.shard_weights or computes_again(config) else no_compiler()


def _tiles_of(lesson: Lesson, data: TrainingData) -> TrainingData:
    """Returns the data with tiles of the lesson's size and places."""
    return data.with_tiles(replace(lesson.config, foreground=lesson.foreground))


def _find(status: Status, mesh: Mesh) -> Path | None:
    return checkpoint.find_together(status.path.parent / "checkpoints", mesh.world)
