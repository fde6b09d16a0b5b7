"""The optimizer over a network's parameters: which of them decay, and how fast each layer learns."""

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from seqpar.optimization.optimizers import OPTIMIZERS, OptimizerOptions

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
