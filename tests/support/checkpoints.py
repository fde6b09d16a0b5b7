"""Small checkpoints of a network that took some steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from seqpar.data.files import write_json
from seqpar.parallel.mesh import Group
from seqpar.runs.run_folder import window_content
from seqpar.weights import checkpoint
from seqpar.weights.checkpoint import Progress

ALONE = Group("world")


def stepped(seed: int, kind: str = "adamw", steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    makers = {
        "adamw": lambda: torch.optim.AdamW(net.parameters(), lr=0.1),
        "sgd": lambda: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    }
    optimizer = makers[kind]()
    for _ in range(steps):
        net(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def save(folder, step: int, is_best: bool = False, refuse_lost=lambda: None, **more):
    net, optimizer = stepped(step)
    progress = Progress(step, global_batch=2, **more)
    return checkpoint.save(folder, net, optimizer, progress, ALONE, "{}", is_best, refuse_lost)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_window(
    run: Path,
    windows: Mapping[str, float],
    step: int,
    whole_grid: Sequence[int] = (),
    temperatures: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Writes window.json, about the best checkpoint, as a training does."""
    write_json(run / "window.json", window_content(windows, step, whole_grid, temperatures))
