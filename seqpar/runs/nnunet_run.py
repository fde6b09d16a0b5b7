"""An nnU-Net results folder in place of a run; opens either."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from seqpar.data.formats.nnunet_plans import BY_TORCH
from seqpar.data.preparation.as_nnunet import NnunetPreparation
from seqpar.data.preparation.prepared_case import Preparation
from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.unets.nnunet import network
from seqpar.models.cell_network import VolumeNet
from seqpar.models.network import Network
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Group, Mesh
from seqpar.planner.memory_counter import MemoryCounter
from seqpar.runs.trained_run import TrainedRun, read_run
from seqpar.settings.config import Config
from seqpar.weights.nnunet_results import (
    CHECKPOINT,
    REFUSE,
    TAKE,
    FoldCheckpoint,
    NnunetResults,
    fold_files,
    is_results,
    read_results,
)
from seqpar.weights.nnunet_weights import nets_of
from seqpar.weights.primus_weights import load_primus, settings_of_primus

NAMES = {"best": "checkpoint_best.pth", "latest": "checkpoint_latest.pth", "final": CHECKPOINT}


@dataclass(frozen=True)
class NnunetRun(TrainedRun):
    """Networks of several folds, and the plan that they predict with; axes are nnU-Net's.

    - ``files``: the folds' checkpoints
    """

    results: NnunetResults | None = None
    files: tuple[Path, ...] = ()

    @property
    def preparation(self) -> Preparation:
        """How cases are prepared: by the plan."""
        assert self.results is not None
        return NnunetPreparation.of(self.results.plan, self.results.declaration)

    @property
    def is_primus(self) -> bool:
        """Whether the networks are transformers, rather than the plan's U-Net."""
        return self.config.network == "vit"

    @property
    def averaged(self) -> str:
        """The folds whose networks are averaged, in words."""
        folds = [file.parent.name.removeprefix("fold_") for file in self.files]
        return f"folds {', '.join(folds)} of {self.path} are averaged" if len(folds) > 1 else ""

    @property
    def mirror(self) -> tuple[int, ...]:
        """The axes over whose flips predictions are averaged: those that training flipped."""
        assert self.results is not None
        return self.results.folds[0].mirror

    @property
    def window_rule(self) -> str:
        """Where windows lie and what they weigh."""
        return "nnU-Net"

    @property
    def rounds_resampled(self) -> bool:
        """Whether logits in half precision stay so when they are resampled: torch's resampling returns float32."""
        assert self.results is not None
        return self.results.plan.logit_resampling.function != BY_TORCH

    @property
    def why_not_whole(self) -> str:
        """Why a whole pass is another function than these networks were trained for."""
        if self.is_primus:
            return (
                "it would be another function than nnU-Net trained: a Primus has positions for windows of "
                f"{'x'.join(map(str, self.config.tile))}, and none beyond"
            )
        return (
            "it would be another function than nnU-Net trained: instance norm would take its statistics over the whole "
            f"volume instead of windows of {'x'.join(map(str, self.config.tile))}, and zeros would lie elsewhere, so "
            "that percents of the labels differ"
        )

    def window_group(self, sizes: Sequence[int], memory: float) -> int:
        """Returns the smallest of ``sizes`` with which a window fits a rank's memory; the last where none does."""
        return next((size for size in sizes if self.window_bytes(size) <= memory), sizes[-1])

    def check_share(self, size: int, mode: str = "") -> None:
        """Raises ValueError if ``size`` ranks cannot share the trained tile."""
        assert self.results is not None
        architecture = self.results.architecture
        Layout.of(self.config.tile, self.config.patch if architecture is None else architecture.unit, size)

    def window_bytes(self, size: int) -> int:
        """Returns the bytes that a window takes on the first of ``size`` ranks that share it, weights included."""
        assert self.results is not None
        group = Group("seq", tuple(range(size)))
        net: Network
        if self.results.architecture is None:
            net = self._primus(self.results.folds[0], group, "auto").to("meta").eval()
        else:
            with torch.device("meta"):
                unet = network(self.results.architecture)
            net = VolumeNet(unet, self.config.tile, choose_mode("auto", group)).eval()
        layout = net.layout
        part = torch.empty((1, layout.counts[0], len(self.recipe.modalities), *layout.patch), device="meta")
        with torch.no_grad(), MemoryCounter() as counter:
            net(part)
        return counter.most + len(self.files) * sum(p.nbytes for p in net.parameters())

    def weights_of(self, checkpoints: Sequence[str]) -> tuple[Path, ...]:
        """Returns the folds' checkpoints, which were chosen when the folder was opened."""
        return self.files

    def load_nets(self, files: Sequence[Path], mesh: Mesh, mode: str = "") -> list[Network]:
        """Returns the network of each fold."""
        assert self.results is not None and tuple(files) == self.files
        nets: Sequence[Network] = (
            [self._primus(fold, mesh.seq, mode or "auto") for fold in self.results.folds]
            if self.is_primus
            else nets_of(self.results, mesh.seq, mode or "auto")
        )
        if mesh.is_first and self.results.trainer_line:
            print(self.results.trainer_line, flush=True)
        if mesh.is_first and self.results.changes_line:
            print(self.results.changes_line, file=sys.stderr, flush=True)
        return [net.to(mesh.device, torch.float32).eval() for net in nets]

    def _primus(self, fold: FoldCheckpoint, group: Group, mode: str) -> Network:
        """Returns the network of a fold's Primus, for images in nnU-Net's axes."""
        return load_primus(fold.weights, self.config.tile, group=group, mode=mode)


def read_nnunet_run(
    path: str | Path, folds: Sequence[str] = (), checkpoints: Sequence[str] = (), trainer_unknown: str = TAKE
) -> NnunetRun:
    """Reads a results folder; for the arguments see ``open_run``."""
    if len(checkpoints) > 1:
        raise ValueError(f"--checkpoint {' '.join(checkpoints)}: of {path} one is taken of each fold; give one name")
    name = checkpoints[0] if checkpoints else CHECKPOINT
    files = fold_files(path, folds, NAMES.get(name, name))
    results = read_results(path, files)
    if trainer_unknown == REFUSE:
        results.refuse_unknown_trainers()
    plan, declaration = results.plan, results.declaration
    sides = plan.patch_size
    settings: dict[str, Any]
    if results.architecture is None:
        settings = settings_of_primus(results.folds[0].weights)
    else:
        settings = {"network": "nnunet-plain" if results.architecture.block == "plain" else "nnunet-resenc"}
    targets = "regions" if declaration.regions else "labels"
    config = Config(**settings, tile=sides, mode="auto", targets=targets)
    return NnunetRun(
        Path(path),
        config,
        NnunetPreparation.of(plan, declaration).recipe,
        declaration.labels,
        declaration.regions,
        declaration.regions_class_order,
        results=results,
        files=tuple(files),
    )


def open_run(
    path: str | Path, checkpoints: Sequence[str] = (), folds: Sequence[str] = (), trainer_unknown: str = TAKE
) -> TrainedRun:
    """Returns the run in a folder or archive.

    - ``checkpoints``: as in ``predict --checkpoint``; which of nnU-Net's files is read depends on it
    - ``folds``: of nnU-Net's networks; none: all that are there
    - ``trainer_unknown``: "take" nnU-Net's networks by trainers that are not its own if their tensors fit, or "refuse"
    """
    if is_results(path):
        return read_nnunet_run(path, folds, checkpoints, trainer_unknown)
    if folds and Path(path).exists():  # else read_run says that there is nothing
        raise ValueError(f"--folds {' '.join(folds)}: {path} is no nnU-Net results folder: remove --folds")
    run = read_run(path)
    if run.config.task == "pretrain":
        raise ValueError(f"{path} is a pretraining, which predicts no labels: train --weights {path} starts from it")
    return run
