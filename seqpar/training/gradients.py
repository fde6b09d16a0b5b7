"""Gradients: forward and backward of a step's micro-batches, on this rank's part."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from seqpar.cluster.stop_request import StopRequest
from seqpar.data.sampling.loader import MicroBatch
from seqpar.losses import DeepSupervision, Loss, LossGroups, LossOf
from seqpar.models.network import Network, autocast
from seqpar.optimization.parameter_groups import use_fused
from seqpar.parallel.collectives import full_tensor
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.messages import check_collective
from seqpar.settings.config import Config
from seqpar.tasks.training_data import TrainingData, outputs_shown
from seqpar.training.data_parallel import data_parallel, frozen_running_statistics, gathered, no_sync
from seqpar.vit.dropout import DropoutKey
from seqpar.weights.states import whole_tensors


def losses_of_step(
    net: Network,
    loss: Loss | DeepSupervision,
    data: TrainingData,
    micros: Sequence[MicroBatch],
    loss_groups: LossGroups,
    device: torch.device,
) -> list[LossOf]:
    """Returns the loss of each micro-batch of a step, whose labels are arranged and counted together.

    - ``loss``: of what ``net`` returns in training
    """
    labels = [net.arrange(data.labels_of(micro)) for micro in micros]
    shown = [outputs_shown(data, micro.cases, net.mode, device) for micro in micros]
    return loss.of_step(labels, loss_groups, shown)


class Gradients:
    """Adds the gradients of ``net``, averaged over all ranks, with the settings of ``config``.

    ``loss``: of the finest logits.
    """

    roles: Sequence[str] = ()  # of the ranks: all do the same

    def __init__(self, config: Config, mesh: Mesh, data: TrainingData, net: Network, loss: Loss) -> None:
        self.config, self.mesh, self.data, self.net = config, mesh, data, net
        self.parallel_net = data_parallel(net, mesh, config.shard_weights)
        self.loss, self.num_sums = net.training_loss(loss), 1 + len(loss.terms)
        self.loss_groups = net.loss_groups(mesh.data, config.batch)

    def warm_up(self) -> None:
        """Runs one forward and backward whose gradients are dropped.

        DDP rearranges its buckets after the first backward, which changes the order of sums from 3 ranks up: so every
        start, fresh or resumed, has its first backward before the first step that counts.
        """
        layout, config, device = self.net.layout, self.config, self.mesh.device
        tokens = (config.batch, layout.counts[self.mesh.seq.index])
        image = torch.zeros(*tokens, self.data.num_channels, *layout.patch, device=device)
        label = torch.zeros(self.net.label_shape(config.batch), device=device, dtype=torch.long)
        with frozen_running_statistics(self.net):
            with self._autocast():
                logits = self.parallel_net(self._cast(image), None, DropoutKey(0, 0, tuple(range(config.batch))))
            shown = outputs_shown(self.data, self.data.train_ids[:1] * config.batch, self.net.mode, device)
            self.loss(logits, self.net.arrange(label), self.loss_groups, shown).backward()
            self.net.zero_grad()

    def gathered(self) -> AbstractContextManager[None]:
        """Returns a context in which this rank predicts with the whole network, as in validation."""
        return gathered(self.net, self.mesh, self.config.shard_weights)

    def whole_tensors(self, tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
        """Returns whole tensors of the network or its optimizer, or an empty dict on ranks without ``keep``."""
        return whole_tensors(tensors, keep)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the whole network's tensors."""
        return {name: tuple(x.shape) for name, x in self.net.state_dict().items()}

    def add(self, micros: list[MicroBatch], step: int, stopper: StopRequest) -> Tensor | None:
        """Returns the step's loss and its terms, None where all ranks leave between two micro-batches.

        The last backward averages the gradients over the ranks.
        """
        sums = torch.zeros(self.num_sums, dtype=torch.float64, device=self.mesh.device)
        losses = losses_of_step(self.net, self.loss, self.data, micros, self.loss_groups, self.mesh.device)
        for number, (micro, loss_of) in enumerate(zip(micros, losses)):
            is_last = number == len(micros) - 1
            if number and stopper.should_leave():
                return None
            if is_last:
                check_collective("gradients", self.mesh.world)
            with nullcontext() if is_last else no_sync(self.parallel_net):
                sums += self._backward(micro, step, loss_of)
        return sums

    def clip(self, limit: float) -> Tensor:
        """Returns the norm of all gradients, after scaling them to ``limit``: the same on all ranks."""
        parameters = list(self.net.parameters())
        return full_tensor(torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=use_fused(parameters)))

    def _backward(self, micro: MicroBatch, step: int, loss_of: LossOf) -> Tensor:
        """Returns a micro-batch's share of the loss and its terms, after adding its gradients."""
        with self._autocast():
            key = self.net.drawn(DropoutKey(self.config.seed, step, micro.samples), self.mesh.device)
            logits = self.parallel_net(self._cast(micro.image), None, key)
        parts = loss_of(logits)
        parts.total.backward()
        self.mesh.world.watch.clock.count_since_ready()
        return torch.stack([parts.total, *parts.terms.values()]).detach().double()

    def _cast(self, image: Tensor) -> Tensor:
        return image.double() if self.config.precision == "fp64" else image

    def _autocast(self) -> AbstractContextManager[None]:
        return autocast(self.config.precision, self.mesh.device)
