"""Counts the launches of a training step on a GPU, without one and without data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.models.loss import loss_of
from seqpar.models.outline import outline
from seqpar.parallel.mesh import Group
from seqpar.parallel.meta_tensors import standing_for
from seqpar.planner.launch_counter import LaunchCounter
from seqpar.planner.memory_counter import as_autocast
from seqpar.settings.config import Config
from seqpar.vit.dropout import DropoutKey


@dataclass(frozen=True)
class Launches:
    """What forward, loss and backward of a step launch, and how often they fetch something from the host."""

    launches: int
    fetches: int
    by_name: dict[str, int]


def count_launches(
    config: Config,
    rank: int = 0,
    channels: int = 4,
    outputs: int = 4,
    regions: tuple[tuple[int, ...], ...] = (),
    ignore_label: int | None = None,
    steps: int = 2,
) -> list[Launches]:
    """Returns what each of the first steps launches on one rank of a sequence group; the first one makes tables.

    Not counted is what comes before the forward: the tiles, and the key of what is dropped. Nor is the update.
    """
    group = Group("seq", tuple(range(config.seqpar)), rank)
    net = outline(config, group, channels, outputs, Group("data"))
    loss_fn = net.training_loss(loss_of(config, regions, ignore_label))
    loss_groups = net.loss_groups(Group("data"), config.batch)
    counts = []
    with standing_for("cuda"):
        for step in range(steps):
            image, label = _part(config, net.layout.counts[rank], channels, net.layout.patch)
            key = net.drawn(DropoutKey(config.seed, step, tuple(range(config.batch))), image.device)
            net.zero_grad()
            with LaunchCounter() as counter:
                with as_autocast(torch.bfloat16 if config.precision == "bf16" else None, on_gpu=True):
                    logits = net(image, None, key)
                loss_fn(logits, net.arrange(label), loss_groups).backward()
            counts.append(Launches(counter.launches.total(), counter.fetches.total(), dict(counter.launches)))
    return counts


def _part(config: Config, tokens: int, channels: int, patch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns a rank's image ``b n c p p p`` and label ``b n p p p``."""
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    image = torch.empty(config.batch, tokens, channels, *patch, dtype=dtype, device="meta")
    return image, torch.empty(config.batch, tokens, *patch, dtype=torch.uint8, device="meta")
