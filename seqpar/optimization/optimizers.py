"""torch's optimizers by name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
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
