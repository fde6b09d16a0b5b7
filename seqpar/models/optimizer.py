"""The optimizer and its learning rate, which is a pure function of the step: there is no state to save."""

import math
import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from seqpar.optimization.optimizers import OPTIMIZERS, OptimizerOptions
from seqpar.optimization.schedules import SCHEDULES, Moment
from seqpar.settings.config import Config

_BLOCK, _MERGE = re.compile(r"encoder\.blocks\.(\d+)\."), re.compile(r"encoder\.merges\.(\d+)\.")


def make_optimizer(config: Config, net: nn.Module) -> Optimizer:
    """Returns the optimizer; weight decay acts on matrices and kernels, on the rest only with ``--decay-all``.

    With ``--layer-decay`` each layer's parameters are groups of their own, with the ``scale`` of their learning rate.
    """
    members: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, p in net.named_parameters():
        is_decayed = config.decay_all or (p.ndim > 1 and not name.endswith(("pos_embed", "class_token")))
        members.setdefault((is_decayed, layer_lr_scale(name, config)), []).append(p)
    groups: list[dict[str, Any]] = [
        {"params": members[key], "weight_decay": config.weight_decay * key[0], "scale": key[1]}
        for key in sorted(members, reverse=True)  # those that decay come first
    ]
    kind = OPTIMIZERS[config.optimizer]
    betas = (config.betas or kind.betas)[: len(kind.betas)]
    fused, shards = use_fused(net.parameters()), any(hasattr(p, "to_local") for p in net.parameters())
    return kind.make(groups, OptimizerOptions(config.lr, betas, config.amsgrad, fused, shards))


def use_fused(parameters: Iterable[Tensor]) -> bool | None:
    """Returns whether updates and norms take all parameters at once, as on GPUs; None: as torch chooses.

    Left to itself torch takes shards one after the other.
    """
    return all(p.is_cuda for p in parameters) or None


def layer_lr_scale(name: str, config: Config) -> float:
    """Returns by what the learning rate of a parameter is multiplied: less, the nearer its layer is to the image.

    Behind the encoder's blocks it is 1, in the last of them ``--layer-decay``, before the first one the least.
    """
    stages = (config.depths,) if isinstance(config.depths, int) else config.depths
    block, merged, last = _BLOCK.match(name), _MERGE.match(name), sum(stages) + 1
    before = ("encoder.patch_embed.", "encoder.pos_embed", "class_token")
    layer = int(block[1]) + 1 if block else 0 if name.startswith(before) else last
    if merged:  # as the block before which it stands
        layer = sum(stages[: int(merged[1]) + 1]) + 1
    return math.pow(config.layer_decay, last - layer)


def learning_rate(config: Config, step: int) -> float:
    """Returns the learning rate of a step: linear warm-up, then the schedule."""
    warmup_steps = config.warmup * config.iterations
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    decay_steps = config.decay_epochs * config.iterations
    moment = Moment(
        step - warmup_steps,
        config.steps - warmup_steps,
        decay_steps,
        config.decay_factor,
        config.iterations,
        config.cycle_epochs * config.iterations,
    )
    return config.lr * SCHEDULES[config.schedule](moment)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Sets the rate of all of the optimizer's groups, each by its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
