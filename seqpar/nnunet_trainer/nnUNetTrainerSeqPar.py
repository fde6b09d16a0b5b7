"""nnU-Net's own training with its network on boxes: all ranks share each tile, which may be too large for one.

nnU-Net finds it where ``nnUNet_extTrainer`` names this folder, which therefore holds nothing else.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from seqpar.conversion.converted import Converted, convert
from seqpar.parallel.collectives import all_reduce, broadcast_tensors, equal_weights
from seqpar.parallel.launcher import read_launcher
from seqpar.parallel.mesh import Mesh, group_of_all
from seqpar.parallel.rendezvous import start

START_S = 1800.0  # seconds that a rank may wait for another one: also for one that validates more cases
_CUDA = torch.device("cuda")


class WholeOnBoxes(nn.Module):
    """A network that takes and returns whole tiles, and computes on this rank's box."""

    def __init__(self, net: Converted) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Any:
        """Returns the whole of each output, on every rank."""
        return tree_map(self.net.unshard, self.net(self.net.shard(image)))


class nnUNetTrainerSeqPar(nnUNetTrainer):
    """Trains nnU-Net's network on the ranks of torchrun, or on those of ``-num_gpus``, which all share each tile.

    The first rank loads and augments; losses, steps, logs, validation and checkpoints are nnU-Net's own.
    """

    network: nn.Module
    grad_scaler: Any

    def __init__(
        self,
        plans: dict[str, Any],
        configuration: str,
        fold: int,
        dataset_json: dict[str, Any],
        device: torch.device = _CUDA,
    ) -> None:
        group, self._mesh = group_of_all(), None
        if group.size == 1:
            self._mesh = _mesh_of_launcher(device)
            group = group if self._mesh is None else self._mesh.seq
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.is_ddp, self._group = False, group  # to nnU-Net, all ranks are one
        if self._mesh is not None:
            self.device = self._mesh.device
            self.grad_scaler = self.grad_scaler if self.device.type == "cuda" else None

    def initialize(self) -> None:
        """Builds nnU-Net's network, with the first rank's weights on all ranks."""
        super().initialize()
        if self._group.size == 1:
            return
        equal_weights(self.network, self._group)
        self._on_boxes = WholeOnBoxes(convert(self.network, self._group))
        for parameter in self.network.parameters():
            parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: Tensor) -> None:
        """Averages a gradient over the ranks: each has that of the whole tile's loss through its own box."""
        assert parameter.grad is not None
        parameter.grad = all_reduce(parameter.grad, self._group) / self._group.size

    def _do_i_compile(self) -> bool:
        return self._group.size == 1 and super()._do_i_compile()

    def get_dataloaders(self) -> tuple[Any, Any]:
        """Returns nnU-Net's loaders on the first rank; the others receive its batches."""
        if self._group.index == 0:
            return super().get_dataloaders()  # type: ignore[no-any-return]
        self.configure_rotation_dummyDA_mirroring_and_inital_patch_size()  # says along which axes prediction may flip
        return repeat({}), repeat({})

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Makes nnU-Net's step with the first rank's batch."""
        batch = self._shared(batch)
        with self._sharing():
            return super().train_step(batch)  # type: ignore[no-any-return]

    def validation_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Makes nnU-Net's step with the first rank's batch."""
        batch = self._shared(batch)
        with self._sharing():
            return super().validation_step(batch)  # type: ignore[no-any-return]

    def _shared(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the first rank's image and targets, on every rank."""
        if self._group.size == 1:
            return batch
        target = batch.get("target", [])
        sent = [batch["data"], *(target if isinstance(target, list) else [target])] if batch else []
        data, *targets = broadcast_tensors(sent, self._group, self.device)
        return {"data": data, "target": targets if self.enable_deep_supervision else targets[0]}

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        """Replaces the whole network by one on boxes, which has its weights."""
        alone = self.network
        if self._group.size > 1:
            self.network = self._on_boxes
        try:
            yield
        finally:
            self.network = alone

    def perform_actual_validation(self, save_probabilities: bool = False) -> None:
        """Validates as on nnU-Net's own several GPUs: each rank predicts other cases, alone."""
        self.is_ddp = self._group.size > 1
        try:
            super().perform_actual_validation(save_probabilities)
        finally:
            self.is_ddp = False
        if self._mesh is not None:
            self._mesh.stop()

    def set_deep_supervision_enabled(self, enabled: bool) -> None:
        """Sets it in the network, which no wrapper of several GPUs is around."""
        was, self.is_ddp = self.is_ddp, False
        super().set_deep_supervision_enabled(enabled)
        self.is_ddp = was

    def save_checkpoint(self, filename: str) -> None:
        """Saves under the name of nnU-Net's trainer, which has the same network: prediction then needs no other."""
        own = type(self)
        self.__class__ = nnUNetTrainer if own is nnUNetTrainerSeqPar else own
        try:
            nnUNetTrainer.save_checkpoint(self, filename)
        finally:
            self.__class__ = own


def _mesh_of_launcher(device: torch.device) -> Mesh | None:
    """Returns the mesh of the ranks that torchrun or Slurm started, which share each tile; None if there is one."""
    launcher = read_launcher(os.environ)
    if launcher.world == 1:
        return None
    if device.type == "cpu":  # nnU-Net's command gives each rank as many threads as there are cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launcher.local_world))
    return start(launcher.world, device=device.type, timeout_s=START_S)
