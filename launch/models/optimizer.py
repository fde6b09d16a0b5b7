"""The optimiser and its learning rate: the rate is a pure function of the step, so that it needs no state."""

import math

import torch
from torch import nn
from torch.optim import Optimizer

from seqpar.launch.settings.config import Config


def make_optimizer(config: Config, net: nn.Module) -> Optimizer:
    """Returns the optimiser; matrices and kernels decay, norms, biases, positions and scales do not."""
    decayed = [p for name, p in net.named_parameters() if p.ndim > 1 and "pos_embed" not in name]
    chosen = {id(p) for p in decayed}
    plain = [p for p in net.parameters() if id(p) not in chosen]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.betas[0], nesterov=config.betas[0] > 0)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    first, second = config.betas
    return kind(groups, lr=config.lr, betas=(first, second))


def learning_rate(config: Config, step: int) -> float:
    """Returns the learning rate of a step: linear warm-up, then the schedule down to (almost) zero."""
    warm = config.warmup * config.iterations
    if step < warm:
        return config.lr * (step + 1) / warm
    done = (step - warm) / max(config.steps - warm, 1)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "poly":
        return config.lr * (1 - done) ** 0.9
    return config.lr


def set_learning_rate(optimiser: Optimizer, rate: float) -> None:
    """Puts the rate into all of the optimiser's groups."""
    for group in optimiser.param_groups:
        group["lr"] = rate
