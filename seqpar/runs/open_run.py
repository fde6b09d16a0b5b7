"""Opens what predict takes: a run of ours, or a results folder of nnU-Net's."""

from collections.abc import Sequence
from pathlib import Path

from seqpar.runs.nnunet_run import read_nnunet_run
from seqpar.runs.trained_run import Run, read_run
from seqpar.weights.nnunet_results import is_results


def open_run(path: str | Path, checkpoints: Sequence[str] = (), folds: Sequence[str] = ()) -> Run:
    """Returns the run in a folder or archive.

    - ``checkpoints``: as in ``predict --checkpoint``; which of nnU-Net's files is read depends on it
    - ``folds``: of nnU-Net's networks; none: all that are there
    """
    if is_results(path):
        return read_nnunet_run(path, folds, checkpoints)
    if folds:
        raise ValueError(f"--folds {' '.join(folds)}: {path} is no results folder of nnU-Net's; leave it out")
    run = read_run(path)
    if run.config.task == "pretrain":
        raise ValueError(f"{path} is a pretraining, which predicts no labels: train --weights {path} starts from it")
    return run
