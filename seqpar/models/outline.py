"""Networks without data: on the meta device, where tensors have a shape and nothing else."""

import copy

import torch
from torch import nn

from seqpar.models.build import build
from seqpar.models.network import Net
from seqpar.parallel.mesh import Group
from seqpar.settings.config import Config


def outline(config: Config, group: Group, channels: int = 1, outputs: int = 2, data: Group | None = None) -> Net:
    """Builds the network of a config on the meta device, so that each of its parts refuses what it cannot do."""
    state = torch.get_rng_state()
    net = build(config, channels, outputs, group, device="meta", data=data)
    torch.set_rng_state(state)
    return net.double() if config.precision == "fp64" else net


def without_numbers(net: Net) -> Net:
    """Returns a copy of a network on the meta device, whose group sends nothing."""
    known: dict[int, object] = {id(t): torch.empty_like(t, device="meta") for t in net.buffers()}
    known |= {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in net.parameters()}
    groups = {id(g): g for module in net.modules() for g in vars(module).values() if isinstance(g, Group)}
    groups[id(net.mode.group)] = net.mode.group
    known |= {place: Group(g.name, g.ranks, g.index) for place, g in groups.items()}
    return copy.deepcopy(net, known)
