"""The optimizer and its learning rate, which is a pure function of the step: there is no state to save."""

import math

import torch
from torch import nn
from torch.optim import Optimizer

from seqpar.launch.settings.config import Config


def make_optimizer(config: Config, net: nn.Module) -> Optimizer:
    """Returns the optimizer; weight decay acts on matrices and kernels, not on norms, biases, positions and scales."""
    decayed = [p for name, p in net.named_parameters() if p.ndim > 1 and "pos_embed" not in name]
    decayed_ids = {id(p) for p in decayed}
    others = [p for p in net.parameters() if id(p) not in decayed_ids]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.betas[0], nesterov=config.betas[0] > 0)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    beta1, beta2 = config.betas
    return kind(groups, lr=config.lr, betas=(beta1, beta2))


def learning_rate(config: Config, step: int) -> float:
    """Returns the learning rate of a step: linear warm-up, then the schedule down to (almost) zero."""
    warmup_steps = config.warmup * config.iterations
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(config.steps - warmup_steps, 1)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "poly":
        return config.lr * (1 - done) ** 0.9
    return config.lr


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Sets the rate of all of the optimizer's groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
