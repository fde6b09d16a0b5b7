"""torch's optimizers by name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

Groups = Iterable[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerOptions:
    """What optimizers may take: the rate, ``betas`` as many as the optimizer has, and ``amsgrad``.

    ``fused``: update all parameters in a few launches, for optimizers that can. ``shards``: parameters are shards.
    """

    lr: float
    betas: tuple[float, ...]
    amsgrad: bool = False
    fused: bool | None = None
    shards: bool = False


@dataclass(frozen=True)
class OptimizerKind:
    """How an optimizer is made of groups of parameters.

    ``betas``: its decay rates where none are given; ``has_amsgrad``: whether it has that variant; ``whole``: whether a
    step looks at a whole parameter, so that it cannot be taken on shards.
    """

    make: Callable[[Groups, OptimizerOptions], Optimizer]
    betas: tuple[float, ...] = ()
    has_amsgrad: bool = False
    whole: bool = False


def _adam(groups: Groups, options: OptimizerOptions) -> Optimizer:
    """Returns Adam, whose weight decay is added to the gradient."""
    beta1, beta2 = options.betas
    return torch.optim.Adam(groups, options.lr, (beta1, beta2), amsgrad=options.amsgrad, fused=options.fused)


def _adamw(groups: Groups, options: OptimizerOptions) -> Optimizer:
    """Returns Adam with decoupled weight decay."""
    beta1, beta2 = options.betas
    return torch.optim.AdamW(groups, options.lr, (beta1, beta2), amsgrad=options.amsgrad, fused=options.fused)


def _sgd(groups: Groups, options: OptimizerOptions) -> Optimizer:
    """Returns SGD with Nesterov's momentum, the first of betas."""
    momentum = options.betas[0]
    fused, foreach = (None, options.fused) if options.shards else (options.fused, None)  # no fused kernel takes shards
    return torch.optim.SGD(groups, options.lr, momentum, nesterov=momentum > 0, fused=fused, foreach=foreach)


def _rmsprop(groups: Groups, options: OptimizerOptions) -> Optimizer:
    """Returns RMSProp; betas are its momentum and the decay of the squares (torch: alpha)."""
    momentum, alpha = options.betas
    return torch.optim.RMSprop(groups, options.lr, alpha, momentum=momentum, foreach=options.fused)


def _adafactor(groups: Groups, options: OptimizerOptions) -> Optimizer:
    """Returns Adafactor, whose states are rows and columns of each parameter's last two directions."""
    return torch.optim.Adafactor(groups, options.lr)


adam = OptimizerKind(_adam, (0.9, 0.999), has_amsgrad=True)
adamw = OptimizerKind(_adamw, (0.9, 0.999), has_amsgrad=True)
sgd = OptimizerKind(_sgd, (0.9,))
rmsprop = OptimizerKind(_rmsprop, (0.0, 0.99))
adafactor = OptimizerKind(_adafactor, whole=True)
OPTIMIZERS: dict[str, OptimizerKind] = {
    "adafactor": adafactor,
    "adam": adam,
    "adamw": adamw,
    "rmsprop": rmsprop,
    "sgd": sgd,
}
