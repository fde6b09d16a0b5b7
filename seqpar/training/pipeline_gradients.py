"""Training over a pipe: this rank's stages, the gradients of their weights, and the whole network where it is needed.

A step is that of one process with the same micro-batches. Weights of other places are None under their names; files
hold whole networks.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from seqpar.cluster.stop_request import StopRequest
from seqpar.data.sampling.loader import MicroBatch
from seqpar.losses import Loss, LossOf
from seqpar.models.network import Network
from seqpar.models.pipelined import PartOfBatch
from seqpar.parallel.mesh import Mesh
from seqpar.pipeline.cells import Value
from seqpar.pipeline.engine import Engine
from seqpar.pipeline.schedule import make_timetable
from seqpar.pipeline.stage_weights import (
    average_gradients,
    clip_gradients,
    gather_tensors,
    keep_local_weights,
    places_of_names,
    tensor_specs,
    whole_network,
)
from seqpar.pipeline.stages import StageMap
from seqpar.settings.config import Config
from seqpar.tasks.training_data import TrainingData
from seqpar.training.gradients import losses_of_step
from seqpar.vit.dropout import DropoutKey


class PipeGradients:
    """Adds the gradients of this rank's stages, averaged over the ranks that hold the same.

    - ``net``: whole; it keeps the weights of this rank's place
    - ``loss``: of the finest logits
    - ``stages``: of its cells
    """

    def __init__(
        self, config: Config, mesh: Mesh, data: TrainingData, net: Network, loss: Loss, stages: StageMap
    ) -> None:
        self.config, self.mesh, self.data, self.net = config, mesh, data, net
        self.loss, self.num_sums = net.training_loss(loss), 1 + len(loss.terms)
        self.loss_groups = net.loss_groups(mesh.data, config.batch)
        self.roles = [_role(stages, place) for place in mesh.places]
        staged = net.staged()
        places = places_of_names(list(net.state_dict()), staged.owns, stages.place_of_cells)
        self.entries = tensor_specs(net, places)
        keep_local_weights(net, places, mesh.pipe.index)
        timetable = make_timetable(stages, config.accumulate, config.pipe_schedule)
        events = timetable.events[mesh.pipe.index]
        self.engine = Engine(staged, stages, events, mesh.pipe, mesh.seq, mesh.device, around=self._autocast)

    def warm_up(self) -> None:
        """Does nothing: sums of gradients have one order from the first step on."""

    def add(self, micros: Sequence[MicroBatch], step: int, stopper: StopRequest) -> Tensor:
        """Returns the step's loss and its terms, 0 on ranks without the last stage.

        Nobody leaves between two micro-batches: some ranks are always ahead of others.
        """
        sums = torch.zeros(self.num_sums, dtype=torch.float64, device=self.mesh.device)

        losses = list[LossOf]()
        if self.engine.has_loss:
            losses = losses_of_step(self.net, self.loss, self.data, micros, self.loss_groups, self.mesh.device)

        def judge(values: Sequence[Value], number: int) -> Tensor:
            logits = [x for x, _ in values]
            parts = losses[number](logits if len(logits) > 1 else logits[0])
            sums.add_(torch.stack([parts.total, *parts.terms.values()]).detach().double())
            return parts.total

        keys = [DropoutKey(self.config.seed, step, micro.samples) for micro in micros]
        layout = self.net.layout
        parts = [PartOfBatch(self._cast(micro.image), layout, key) for micro, key in zip(micros, keys)]
        self.engine.step(parts, judge, (len(micros[0].image), layout.tile))
        average_gradients(list(self.net.parameters()), self.mesh.stage)
        return sums

    def clip(self, limit: float) -> Tensor:
        """Returns the norm of all places' gradients, after scaling them to ``limit``: the same on all ranks."""
        names = [name for name, entry in self.entries.items() if entry.is_learned]
        dtype = torch.float64 if self.config.precision == "fp64" else torch.float32
        return clip_gradients(self.net, names, limit, self.mesh.pipe, dtype)

    def gathered(self) -> AbstractContextManager[None]:
        """Returns a context in which every rank has the whole network."""
        return whole_network(self.net, self.entries, self.mesh.pipe, self.mesh.device)

    def whole_tensors(self, tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
        """Returns the tensors of all places on ranks with ``keep``, to which the first may belong, else nothing."""
        is_of_first = self.mesh.data.index == self.mesh.seq.index == 0
        whole = gather_tensors(tensors, self.mesh.pipe) if is_of_first else {}
        return whole if keep else {}

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the whole network's tensors."""
        return {name: tuple(entry.shape) for name, entry in self.entries.items()}

    def _cast(self, image: Tensor) -> Tensor:
        return image.double() if self.config.precision == "fp64" else image

    def _autocast(self) -> AbstractContextManager[None]:
        is_half = self.config.precision == "bf16"
        return torch.autocast(self.mesh.device.type, torch.bfloat16) if is_half else nullcontext()


def _role(stages: StageMap, place: int) -> str:
    """Returns how a rank of a place is called: by its stages."""
    numbers = [str(stage) for stage in stages.stages_at(place)]
    return f"stage{'s' if len(numbers) > 1 else ''} {' and '.join(numbers)}"


def most_by_stage(
    roles: Sequence[str], every: Sequence[Sequence[float]], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Returns the most of each figure among the ranks of a role, by name and role; nothing without roles.

    ``every``: the figures of each rank, as ``names`` calls them.
    """
    rows = {role: [figures for other, figures in zip(roles, every) if other == role] for role in roles}
    most = {role: [max(column) for column in zip(*figures)] for role, figures in rows.items()}
    return {name: {role: of[at] for role, of in most.items()} for at, name in enumerate(names if roles else ())}
