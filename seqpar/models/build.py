"""Builds the network and the loss of a config, with weights or on the meta device."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqpar.losses import Loss, MaskedError, SoftLabels, make_loss
from seqpar.models.classifier_families import CLASSIFIERS
from seqpar.models.network import Network
from seqpar.models.network_family import NetworkFamily
from seqpar.models.pretraining_family import PRETRAINED
from seqpar.models.transformer_families import HierarchicalTransformer, VisionTransformer
from seqpar.models.unet_families import UNETS
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Group
from seqpar.settings.config import Config

NETWORKS: dict[str, NetworkFamily] = {"vit": VisionTransformer(), **UNETS}  # for labels of voxels
_OF_TASKS: dict[str, dict[str, NetworkFamily]] = {"segment": NETWORKS, "classify": CLASSIFIERS, "pretrain": PRETRAINED}
NETWORK_NAMES = tuple(dict.fromkeys(name for networks in _OF_TASKS.values() for name in networks))
_OF_STAGES = HierarchicalTransformer()  # instead of vit, with --encoder hierarchical


def family_of(config: Config) -> NetworkFamily:
    """Returns the kind of a config's network."""
    networks = _OF_TASKS[config.task]
    if config.network not in networks:
        raise ValueError(f"--network {config.network} with --task {config.task}: choose one of {', '.join(networks)}")
    kind = networks[config.network]
    if config.encoder == "plain" or not kind.attends:  # it has no encoder
        return kind
    if config.task != "segment":
        raise ValueError(
            f"--encoder {config.encoder} with --task {config.task}: it is made for labels of voxels: "
            "use --encoder plain"
        )
    return _OF_STAGES


def build_network(
    config: Config,
    in_channels: int,
    num_outputs: int,
    group: Group,
    has_regions: bool = False,
    device: str = "cpu",
    data: Group | None = None,
) -> Network:
    """Returns the network of a config, its weights drawn from the config's seed: equal on all ranks.

    - ``has_regions``: outputs are regions by themselves; else they are classes, and the first is background
    - ``device``: on "meta" the network has shapes alone
    - ``data``: the group whose ranks have other tiles; batch norm in training runs over them
    """
    family = family_of(config)
    if config.grad_checkpoint not in family.recomputed:
        raise ValueError(
            f"--grad-checkpoint {config.grad_checkpoint}: --network {config.network} has no such part: choose "
            f"{' or '.join(family.recomputed)}"
        )
    torch.manual_seed(config.seed)
    with torch.device(device), _Undrawn() if device == "meta" else nullcontext():
        net = family.build(config, in_channels, num_outputs, group, data, has_regions)
    net.settings = asdict(config)
    return net


class _Undrawn(TorchFunctionMode):
    """Draws no weights: on "meta" torch would import its compiler for it, which takes 2 s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in (Tensor.normal_, Tensor.uniform_) else func(*args, **(kwargs or {}))


def layout_of(config: Config) -> Layout:
    """Returns how a tile is divided over the ranks of a sequence group; raises ValueError where it cannot be."""
    kind = family_of(config)
    kind.refuse_tile(config)
    return Layout.of(config.tile, kind.unit(config), config.seqpar, config.split)


def build_loss(
    config: Config,
    regions: Sequence[Sequence[int]] = (),
    ignore_label: int | None = None,
    soft: SoftLabels | None = None,
) -> Loss:
    """Returns the loss that ``--loss`` names; ``regions`` where the outputs are regions by themselves.

    ``soft`` says what labels with doubt are codes of.

    That of ``--task pretrain`` is the error of what was hidden.
    """
    if config.task == "pretrain":
        return MaskedError(config.normalised_targets)
    own = config.loss_options, config.loss_weights, regions, ignore_label, config.class_weights
    return make_loss(config.loss, *own, soft)


def build_on_meta(
    config: Config, group: Group, channels: int = 1, outputs: int = 2, data: Group | None = None
) -> Network:
    """Builds the network of a config on the meta device, so that each of its parts refuses what it cannot do."""
    state = torch.get_rng_state()
    net = build_network(config, channels, outputs, group, device="meta", data=data)
    torch.set_rng_state(state)
    return net.double() if config.precision == "fp64" else net


def to_meta(net: Network) -> Network:
    """Returns a copy of a network on the meta device, whose group sends nothing."""
    known: dict[int, object] = {id(t): torch.empty_like(t, device="meta") for t in net.buffers()}
    known |= {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in net.parameters()}
    groups = {id(g): g for module in net.modules() for g in vars(module).values() if isinstance(g, Group)}
    groups[id(net.mode.group)] = net.mode.group
    known |= {place: Group(g.name, g.ranks, g.index) for place, g in groups.items()}
    return copy.deepcopy(net, known)
