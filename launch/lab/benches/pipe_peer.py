"""A step by torch's own pipelining, one stage a rank, of a U-Net of ours and with our cut."""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from seqpar.models.network import Network
from seqpar.models.pipelined import PartOfBatch
from seqpar.parallel.mesh import Mesh
from seqpar.pipeline.cells import IMAGE
from seqpar.pipeline.stages import StageMap

_PIPELINING = "torch.distributed.pipelining"


class PeerStage(nn.Module):
    """One of two stages, as torch takes it: tensors in, tensors out; ``micro``: a micro-batch like all others."""

    def __init__(self, net: Network, stages: StageMap, stage: int, micro: PartOfBatch) -> None:
        super().__init__()
        self.net, self.staged, self.stages, self.stage, self.micro = net, net.staged(), stages, stage, micro

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...] | Tensor:
        entering = [value for value, _, _ in self.stages.enters(self.stage)] if self.stage else [IMAGE]
        values = dict(zip(entering, tensors))
        for cell in self.stages.runs(self.stage):
            inputs = [(values[value], None) for value in self.stages.takes[cell]]
            values[cell] = self.staged.run_cell(cell, inputs, self.micro)[0]
        if self.stage:
            return values[self.stages.outputs[0]]
        leaving = [values[value] for value, _, _ in reversed(self.stages.leaves(0))]
        return tuple(x.contiguous() for x in leaving)  # gloo sends no others


def torchs_step(
    net: Network,
    stages: StageMap,
    micro: PartOfBatch,
    label: Tensor,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    micros: int,
    mesh: Mesh,
) -> Callable[[], None]:
    """Returns a step of 1F1B that adds the gradients of so many micro-batches, all alike.

    ``net``: whole, on both ranks; each uses its own stage's weights.
    """
    pipelining = importlib.import_module(_PIPELINING)
    place = mesh.pipe.index
    image, _ = net.staged().image(micro)
    between = PeerStage(net, stages, 0, micro)(image)
    half = PeerStage(net, stages, place, micro)
    inputs = tuple(x.detach().requires_grad_() for x in between) if place else (image.contiguous(),)
    outputs = half(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = tuple(x.detach().requires_grad_() for x in outputs)
    stage = pipelining.PipelineStage(
        half, place, mesh.pipe.size, mesh.device, input_args=inputs, output_args=outputs, group=mesh.pipe.handle
    )

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return loss_of(y, target) / micros

    schedule = pipelining.Schedule1F1B(stage, micros, loss, scale_grads=False)
    images, labels = torch.cat([image] * micros), torch.cat([label] * micros)
    return lambda: schedule.step(target=labels) if place else schedule.step(images)
