"""A converted network against the module that it was made from, in one process."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seqpar.conversion.converted import convert
from seqpar.parallel.mesh import Mesh
from tests.support.ranks import relative, summed


@dataclass
class Answers:
    """A module, its input, and what one process computes from them."""

    module: nn.Module
    image: Tensor
    outputs: list[Tensor]
    towards: list[Tensor]  # the loss's gradient at each output
    gradients: list[Tensor]  # of the input, then of each parameter
    buffers: list[Tensor]  # afterwards


def tensors(outputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def answers(make: Callable[[], nn.Module], shape: Sequence[int], seed: int = 0, train: bool = True) -> Answers:
    torch.manual_seed(seed)
    module = make().double().train(train)
    image = torch.randn(*shape, dtype=torch.float64)
    before = copy.deepcopy(module)
    image.requires_grad_()
    torch.manual_seed(seed)  # of what is dropped
    outputs = tensors(module(image))
    towards = [torch.randn_like(y) for y in outputs]
    inputs = [image, *module.parameters()]
    gradients = torch.autograd.grad(outputs, inputs, towards, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients)]
    return Answers(before, image.detach(), [y.detach() for y in outputs], towards, filled, list(module.buffers()))


def gaps(mesh: Mesh, want: Answers, seed: int = 0) -> dict[str, float]:
    """Returns the largest relative differences of outputs, gradients and buffers."""
    module = copy.deepcopy(want.module)
    net = convert(module, mesh.seq)
    assert list(net.state_dict()) == list(module.state_dict())
    assert all(ours is theirs for ours, theirs in zip(net.parameters(), module.parameters()))
    image = net.shard(want.image).requires_grad_()
    torch.manual_seed(seed + mesh.seq.index)  # of what is dropped: the first rank's counts
    outputs = tensors(net(image))
    pieces = [t / mesh.seq.size if y.shape == t.shape else net.shard(t) for t, y in zip(want.towards, outputs)]
    inputs = [image, *net.parameters()]
    gradients = torch.autograd.grad(outputs, inputs, pieces, allow_unused=True)
    dx, *dweights = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients)]
    wholes = [y if y.ndim < want.image.ndim else net.unshard(y.detach()) for y in outputs]
    scale = max(float(g.abs().max()) for g in want.gradients[1:])
    weights = []
    for a, b in zip(summed(dweights, mesh.seq), want.gradients[1:]):
        largest = float(b.abs().max())
        zero = largest < 1e-9 * scale  # a bias before a norm: its gradient is rounding
        weights.append(float((a - b).abs().max()) / (scale if zero else largest))
    return {
        "output": max(map(relative, wholes, want.outputs)),
        "input": relative(net.unshard(dx), want.gradients[0]),
        "weights": max(weights),
        "buffers": max([relative(a.double(), b.double()) for a, b in zip(net.buffers(), want.buffers)], default=0.0),
    }
