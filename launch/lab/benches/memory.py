"""Measures the memory of a training step, option by option: bytes saved for backward, and the peak of all ranks.

All cases run in new processes; ratios are medians over turns, to the first case. ``held`` counts the bytes saved for
backward. ``peak`` is the sum over ranks of the highest resident size, which includes the interpreter,
its libraries and building the network (on a GPU: the most that torch allocated). ``--large`` measures steps that one
process could hardly hold.
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lab.benches.series import Row, Runs, Series, alternate, measure_apart, ratio
from seqpar.cluster.devices import MIB, device_here
from seqpar.models.build import build_loss, build_network
from seqpar.models.network import Network
from seqpar.optimization.optimizers import make_optimizer
from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.consensus import max_over_ranks
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.rendezvous import start
from seqpar.planner.attention_choice import choose_fastest
from seqpar.planner.memory_counter import Saved
from seqpar.settings.config import Config
from seqpar.text import format_sides
from seqpar.training.data_parallel import shard
from seqpar.vit.dropout import DropoutKey

SMALL = Config(
    tile=(64, 64, 64),
    patch=(4, 4, 4),
    embed_dim=192,
    depth=6,
    heads=6,
    decoder_width=16,
    mode="halo",
    batch=1,
    device="cpu",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "all held": {},
    "attention again": {"grad_checkpoint": "attention"},
    "MLP in 4": {"mlp_chunks": 4},
    "attention again, MLP in 4": {"grad_checkpoint": "attention", "mlp_chunks": 4},
    "full": {"grad_checkpoint": "full"},
    "full, MLP in 4": {"grad_checkpoint": "full", "mlp_chunks": 4},
}


@dataclass(frozen=True)
class Case:
    """A training step on ``ranks`` processes, and its name in the table. The last of ``steps`` is timed."""

    name: str
    config: Config
    ranks: int = 1
    steps: int = 2


VOLUME = Config(
    tile=(240, 240, 156), patch=(4, 4, 4), seqpar=4, mode="halo", batch=1, device="cpu", precision="bf16", mlp_chunks=8,
    attention="gather-x", embed_dim=64, depth=2, heads=2, decoder_width=16,
)  # fmt: skip
LARGE = (Case("a whole volume of 240 x 240 x 155", VOLUME, 4, 1),)


def series(quick: bool = False) -> list[Series]:
    """Returns one series: every option on one rank and on a group, then weights in shards; the group alone if quick."""
    config, ranks = (replace(SMALL, tile=(32, 32, 32)), 2) if quick else (SMALL, 2)
    cases = [
        Case(name, replace(config, seqpar=size, **options), size)
        for size in ((ranks,) if quick else (1, ranks))
        for name, options in OPTIONS.items()
    ]
    cases.append(Case("full, shards", replace(config, seqpar=ranks, grad_checkpoint="full", shard_weights=True), ranks))
    what = f"memory of a training step, option by option, tile {'x'.join(map(str, config.tile))}"
    return [series_of(what, cases, 1 if quick else 3, 12.0 if quick else 25.0)]


def large_series(cases: Sequence[Case] = LARGE) -> list[Series]:
    """Returns one series: a whole volume at patch 4."""
    return [series_of("memory of a training step that one process could hardly hold", cases, 1, 800.0)]


Measured = Sequence[dict[str, float]]


def row(case: Case, runs: Measured, first: Measured) -> Row:
    """Returns a case's row of the table; ratios are to the runs of the ``first`` case in the same turns."""
    config, mid = case.config, statistics.median
    return {
        "case": case.name,
        "net": f"ViT {config.embed_dim} x {config.depth}, {config.decoder}, {config.precision}",
        "tile / patch": f"{'x'.join(map(str, config.tile))} / {format_sides(config.patch, 'x')}",
        "tokens": int(runs[0]["tokens"]),
        "ranks": case.ranks,
        "held MiB a rank": mid(r["held"] for r in runs) / MIB,
        "weights, gradients, states MiB a rank": runs[0]["state"] / MIB,
        "peak MiB, all ranks": mid(r["peak"] for r in runs) / MIB,
        "peak ratio": ratio([r["peak"] for r in runs], [f["peak"] for f in first]),
        "s a step": mid(r["seconds"] for r in runs),
        "time ratio": ratio([r["seconds"] for r in runs], [f["seconds"] for f in first]),
    }


def series_of(
    what: str,
    cases: Sequence[Case],
    turns: int,
    case_s: float,
    row: Callable[[Case, Measured, Measured], Row] = row,
) -> Series:
    """Returns the series of these cases; ``case_s``: seconds of each, ``row``: as the function of that name."""
    by_name = {f"{case.name}, {case.ranks} ranks": case for case in cases}
    names = tuple(by_name)

    def row_of(name: str, runs: Runs) -> Row:
        return row(by_name[name], runs[name], runs[names[0]])

    alternated = partial(alternate, names, lambda name: measure(by_name[name]))
    return Series(what, names, turns, case_s * len(names), alternated, row_of)


def measure(case: Case) -> dict[str, float]:
    """Returns bytes and seconds of one run in new processes."""
    threads = max(1, (os.cpu_count() or 1) // case.ranks)
    return measure_apart("memory", [json.dumps(dataclasses.asdict(case.config)), str(case.steps)], case.ranks, threads)


def step(config: Config, mesh: Mesh, steps: int) -> dict[str, float]:
    """Returns bytes saved for backward, bytes of states and seconds of this rank's last step, and all ranks' peak."""
    net = _build(config, mesh)
    optimizer, loss_fn = make_optimizer(net, config.optimizer_options), net.training_loss(build_loss(config))
    loss_groups = net.loss_groups(mesh.data, config.batch)
    part, label = _part(config, net, mesh)
    key = DropoutKey(config.seed, 0, tuple(range(config.batch)))
    seconds = saved_bytes = 0.0
    state = dict[str, int]()
    for _ in range(steps):
        max_over_ranks(0, mesh.world)
        began = time.perf_counter()
        with Saved(net) as saved:
            with torch.autocast(mesh.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                logits = net(part, None, key)
            loss = loss_fn(logits, label, loss_groups)
        saved_bytes = float(saved.total)
        loss.backward()
        del logits, loss
        if not config.shard_weights:
            average_gradients(net, mesh)
        optimizer.step()
        state = local_bytes(net, optimizer)
        optimizer.zero_grad()
        max_over_ranks(0, mesh.world)
        seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if mesh.device.type == "cuda" else resident_bytes("VmHWM")
    return {
        "held": saved_bytes,
        "state": float(sum(state.values())),
        "peak": float(all_reduce(torch.tensor(float(peak), dtype=torch.float64), mesh.world)),
        "seconds": seconds,
        "tokens": net.layout.num_tokens,
    }


def _build(config: Config, mesh: Mesh) -> Network:
    net = build_network(choose_fastest(config, device_here(mesh.device.type)), 1, 2, mesh.seq)
    net.to(torch.float64 if config.precision == "fp64" else torch.float32)
    if config.shard_weights:
        shard(net, mesh)
    else:
        net.to(mesh.device)
    return net


def _part(config: Config, net: Network, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Returns this rank's part of a random image and label; where nothing is labelled, the image is both."""
    layout = net.layout
    tokens = (config.batch, layout.counts[mesh.seq.index])
    part = torch.randn(*tokens, 1, *layout.patch, device=mesh.device, dtype=next(net.parameters()).dtype)
    if config.task == "pretrain":
        return part, net.arrange(part)
    return part, net.arrange(torch.randint(0, 2, (*tokens, *layout.patch), device=mesh.device))


def average_gradients(net: nn.Module, mesh: Mesh) -> None:
    """Averages gradients over all ranks, parameter by parameter."""
    for p in net.parameters() if mesh.world.size > 1 else ():
        if p.grad is not None:
            p.grad = all_reduce(p.grad, mesh.world) / mesh.world.size


def local_bytes(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Returns this rank's bytes of weights, gradients and optimizer states."""

    def size(tensors: Iterable[Any]) -> int:
        own = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in own)

    weights = list(net.parameters())
    states = [t for state in optimizer.state.values() for t in state.values()]
    return {"weights": size(weights), "gradients": size(p.grad for p in weights), "optimizer": size(states)}


def resident_bytes(name: str) -> int:
    """Returns this process's resident bytes as Linux counts them.

    - ``name``: VmRSS for the size now, VmHWM for the highest so far
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def main(arguments: Sequence[str]) -> None:
    """Measures some steps of a config in JSON; every rank runs this, and the first one prints the result."""
    config, steps = Config.from_dict(json.loads(arguments[0])), int(arguments[1])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with start(config.seqpar, device=config.device, timeout_s=7200) as mesh:
        result = step(config, mesh, steps)
        if mesh.is_first:
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
