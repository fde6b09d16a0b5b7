"""torch's optimizers by name; which parameters decay, and how fast each layer learns."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Groups = Iterable[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerOptions:
    """An optimizer and what it takes; which parameters decay, and how fast each layer learns.

    - ``lr``, ``betas``, ``amsgrad``: of the optimizer; no ``betas``: its own
    - ``name``: of ``OPTIMIZERS``
    - ``weight_decay``: of matrices and kernels; with ``decay_all`` of norms, biases and positions too
    - ``layer_decay``: ratio of a layer's rate to that of the next; ``blocks``: those of each stage of the encoder
    - ``fused``: update all parameters in a few launches; ``shards``: parameters are shards: both set by
      ``make_optimizer``
    """

    lr: float
    betas: tuple[float, ...] = ()
    amsgrad: bool = False
    name: str = "adam"
    weight_decay: float = 0.0
    decay_all: bool = False
    layer_decay: float = 1.0
    blocks: tuple[int, ...] = ()
    fused: bool | None = None
    shards: bool = False


@dataclass(frozen=True)
class OptimizerKind:
    """How an optimizer is made of groups of parameters.

    - ``betas``: its decay rates by default
    - ``has_amsgrad``: whether it has that variant
    - ``whole``: whether a step looks at whole parameters, so that it cannot take shards
    """

    make: Callable[[Groups, OptimizerOptions], Optimizer]
    betas: tuple[float, ...] = ()
    has_amsgrad: bool = False
    whole: bool = False


def adam(groups: Groups, options: OptimizerOptions) -> Optimizer:
    """Returns Adam, whose weight decay is added to the gradient."""
    beta1, beta2 = options.betas
    return torch.optim.Adam(groups, options.lr, (beta1, beta2), amsgrad=options.amsgrad, fused=options.fused)


def adamw(groups: Groups, options: OptimizerOptions) -> Optimizer:
    """Returns Adam with decoupled weight decay."""
    beta1, beta2 = options.betas
    return torch.optim.AdamW(groups, options.lr, (beta1, beta2), amsgrad=options.amsgrad, fused=options.fused)


def sgd(groups: Groups, options: OptimizerOptions) -> Optimizer:
    """Returns SGD with Nesterov's momentum, the first of betas."""
    momentum = options.betas[0]
    fused, foreach = (None, options.fused) if options.shards else (options.fused, None)  # no fused kernel takes shards
    return torch.optim.SGD(groups, options.lr, momentum, nesterov=momentum > 0, fused=fused, foreach=foreach)


def rmsprop(groups: Groups, options: OptimizerOptions) -> Optimizer:
    """Returns RMSProp; betas are its momentum and the decay of the squares (torch: alpha)."""
    momentum, alpha = options.betas
    return torch.optim.RMSprop(groups, options.lr, alpha, momentum=momentum, foreach=options.fused)


def adafactor(groups: Groups, options: OptimizerOptions) -> Optimizer:
    """Returns Adafactor, whose states are rows and columns of each parameter's last two directions."""
    return torch.optim.Adafactor(groups, options.lr)


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adafactor": OptimizerKind(adafactor, whole=True),
    "adam": OptimizerKind(adam, (0.9, 0.999), has_amsgrad=True),
    "adamw": OptimizerKind(adamw, (0.9, 0.999), has_amsgrad=True),
    "rmsprop": OptimizerKind(rmsprop, (0.0, 0.99)),
    "sgd": OptimizerKind(sgd, (0.9,)),
}


_BLOCK, _MERGE = re.compile(r"encoder\.blocks\.(\d+)\."), re.compile(r"encoder\.merges\.(\d+)\.")


def make_optimizer(net: nn.Module, options: OptimizerOptions) -> Optimizer:
    """Returns the optimizer; weight decay acts on matrices and kernels, with ``decay_all`` on all parameters.

    With a ``layer_decay`` each layer's parameters form groups of their own, each with the ``scale`` of its rate.
    """
    members: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, p in net.named_parameters():
        is_decayed = options.decay_all or (p.ndim > 1 and not name.endswith(("pos_embed", "class_token")))
        members.setdefault((is_decayed, layer_lr_scale(name, options)), []).append(p)
    groups: list[dict[str, Any]] = [
        {"params": members[key], "weight_decay": options.weight_decay * key[0], "scale": key[1]}
        for key in sorted(members, reverse=True)  # those that decay come first
    ]
    kind = OPTIMIZERS[options.name]
    betas = (options.betas or kind.betas)[: len(kind.betas)]
    shards = any(hasattr(p, "to_local") for p in net.parameters())
    return kind.make(groups, replace(options, betas=betas, fused=use_fused(net.parameters()), shards=shards))


def use_fused(parameters: Iterable[Tensor]) -> bool | None:
    """Returns whether updates and norms take all parameters at once, as on GPUs; None: torch chooses.

    By itself torch takes shards one after the other.
    """
    return all(p.is_cuda for p in parameters) or None


def layer_lr_scale(name: str, options: OptimizerOptions) -> float:
    """Returns the factor of a parameter's learning rate: the nearer its layer is to the image, the smaller.

    It is 1 behind the encoder's blocks, ``layer_decay`` in the last block, and least before the first.
    """
    block, merged, last = _BLOCK.match(name), _MERGE.match(name), sum(options.blocks) + 1
    before = ("encoder.patch_embed.", "encoder.pos_embed", "class_token")
    layer = int(block[1]) + 1 if block else 0 if name.startswith(before) else last
    if merged:  # as the block that follows it
        layer = sum(options.blocks[: int(merged[1]) + 1]) + 1
    return math.pow(options.layer_decay, last - layer)
