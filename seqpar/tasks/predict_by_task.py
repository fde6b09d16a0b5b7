"""Predicts by what runs were trained for: label maps, or a class for each case."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.cluster.torch_setup import keep_memory
from seqpar.parallel.mesh import Mesh
from seqpar.prediction.run_average import EnsembleMember, check_compatible_runs
from seqpar.runs.trained_run import TrainedRun
from seqpar.tasks.classify.prediction import ExplanationRequest, predict_classes
from seqpar.tasks.segment.prediction import Request, predict_cases

Picture = Callable[[Path, str, np.ndarray, np.ndarray, Sequence[float], bool], None]


@dataclass(frozen=True)
class Explanation:
    """How it is shown where the class of a case is seen.

    - ``picture``: draws it
    - ``way``: in which it is found, "" for the network's usual one
    """

    picture: Picture
    way: str


@dataclass(frozen=True)
class _Prediction:
    """How the runs of a task predict.

    - ``does``: what such a run does with a case, in words
    - ``idle``: flags that then do nothing, with their values where they are not given
    - ``act``: predicts the requested cases; returns what went wrong, a line per fault, on all ranks
    """

    does: str
    idle: Mapping[str, Any]
    act: Callable[[Request, Sequence[EnsembleMember], Mesh, Explanation | None], list[str]]


def _label_maps(request: Request, members: Sequence[EnsembleMember], mesh: Mesh, _: Explanation | None) -> list[str]:
    return predict_cases(request, members, mesh)


def _classes(
    request: Request, members: Sequence[EnsembleMember], mesh: Mesh, explanation: Explanation | None
) -> list[str]:
    if explanation is None:
        return predict_classes(request, members, mesh)
    picture, neurological = explanation.picture, members[0].run.config.neurological

    def draw(path: Path, title: str, image: np.ndarray, seen: np.ndarray, spacing: Sequence[float]) -> None:
        picture(path, title, image, seen, spacing, neurological)

    return predict_classes(request, members, mesh, ExplanationRequest(draw, explanation.way))


_OF_WINDOWS = {"window": None, "force": False, "overlap": None, "weights": None, "window_batch": None, "mirror": None}
_OF_LABEL_MAPS = {"probabilities": False, "statistics": False, "min_component": "0"}
_TASKS = {
    "segment": _Prediction("labels voxels, and no whole cases", {"explain": False, "explain_by": ""}, _label_maps),
    "classify": _Prediction("gives each case one class", _OF_WINDOWS | _OF_LABEL_MAPS, _classes),
}


def refuse_runs(options: argparse.Namespace, runs: Sequence[TrainedRun]) -> None:
    """Refuses runs that do not fit together, and flags that do nothing for them; ``options``: of predict."""
    check_compatible_runs(runs)
    run, task = runs[0], _TASKS[runs[0].config.task]
    if idle := [name for name, usual in task.idle.items() if getattr(options, name) != usual]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        raise ValueError(f"{flags} would do nothing: {run.path} {task.does}: leave it out")


def predict(
    request: Request, members: Sequence[EnsembleMember], mesh: Mesh, explanation: Explanation | None = None
) -> list[str]:
    """Predicts the requested cases; returns what went wrong, a line per fault, on all ranks.

    - ``explanation``: write where the class of a case is seen too
    """
    if mesh.device.type == "cpu":
        keep_memory()
    return _TASKS[members[0].run.config.task].act(request, members, mesh, explanation)
