"""Memory of a training step: what is held for backward, and how high all ranks rise together, option by option.

Each case runs in processes of its own, in turns; ratios are medians over turns, to the first case. ``held`` is
counted; ``peak`` is the highest resident size of all ranks added up, interpreter, libraries and building included
(on a GPU, what torch allocated). Rows that take half an hour are in ``bench_large``.
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from seqpar.collectives import all_reduce
from seqpar.consensus import agree
from seqpar.launch.benches.apart import measure_apart
from seqpar.launch.hardware.devices import device_here
from seqpar.launch.models.build import build
from seqpar.launch.models.optimizer import make_optimizer
from seqpar.launch.planning.saved_bytes import Saved
from seqpar.launch.settings.config import Config
from seqpar.launch.training.data_parallel import shard
from seqpar.losses import DiceCE
from seqpar.mesh import Mesh
from seqpar.rendezvous import start

SMALL = Config(
    tile=(64, 64, 64), patch=4, embed_dim=192, depth=6, heads=6, decoder_width=16, mode="halo", batch=1, device="cpu"
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
    """A training step on ``ranks`` processes, and its name in the table."""

    name: str
    config: Config
    ranks: int = 1
    steps: int = 2  # the last one's time counts


def rows(turns: int = 3, config: Config = SMALL, ranks: int = 2) -> list[dict[str, Any]]:
    """Returns a row per option on one rank and on a group, then weights replicated and in shards."""
    cases = [
        Case(name, replace(config, seqpar=size, **options), size)
        for size in (1, ranks)
        for name, options in OPTIONS.items()
    ]
    cases.append(Case("full, shards", replace(config, seqpar=ranks, grad_checkpoint="full", shard_weights=True), ranks))
    measured = [[measure(case) for case in cases] for _ in range(turns)]
    return [row(case, [turn[at] for turn in measured], [turn[0] for turn in measured]) for at, case in enumerate(cases)]


def row(case: Case, runs: Sequence[dict[str, float]], first: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Returns a case's row of the table."""
    config, mid = case.config, statistics.median
    return {
        "case": case.name,
        "net": f"ViT {config.embed_dim} x {config.depth}, {config.decoder}, {config.precision}",
        "tile / patch": f"{'x'.join(map(str, config.tile))} / {config.patch}",
        "tokens": int(runs[0]["tokens"]),
        "ranks": case.ranks,
        "held MiB a rank": mid(r["held"] for r in runs) / 2**20,
        "weights, gradients, states MiB a rank": runs[0]["state"] / 2**20,
        "peak MiB, all ranks": mid(r["peak"] for r in runs) / 2**20,
        "peak ratio": mid(r["peak"] / f["peak"] for r, f in zip(runs, first)),
        "s a step": mid(r["seconds"] for r in runs),
        "time ratio": mid(r["seconds"] / f["seconds"] for r, f in zip(runs, first)),
    }


def measure(case: Case) -> dict[str, float]:
    """Returns bytes and seconds of one run, in processes of their own."""
    threads = max(1, (os.cpu_count() or 1) // case.ranks)
    return measure_apart(__file__, [json.dumps(dataclasses.asdict(case.config)), str(case.steps)], case.ranks, threads)


def step(config: Config, mesh: Mesh, steps: int) -> dict[str, float]:
    """Returns what this rank's last step held and took, its weights' and states' bytes, and all ranks' peak."""
    machine = device_here(mesh.device.type).machine(mesh.seq.size, config.precision)
    net = build(config, 1, 2, mesh.seq, machine=machine).to(
        torch.float64 if config.precision == "fp64" else torch.float32
    )
    if config.shard_weights:
        shard(net, mesh)
    else:
        net.to(mesh.device)
    optimiser, loss, loss_groups = make_optimizer(config, net), DiceCE(), net.mode.loss_groups(mesh.data, config.batch)
    layout = net.encoder.layout
    tokens = (config.batch, layout.counts[mesh.seq.index])
    part = torch.randn(*tokens, 1, *layout.patch, device=mesh.device, dtype=next(net.parameters()).dtype)
    label = net.arrange(torch.randint(0, 2, (*tokens, *layout.patch), device=mesh.device))
    seconds = held = 0.0
    state = dict[str, int]()
    for _ in range(steps):
        agree(0, mesh.world)
        began = time.perf_counter()
        with Saved(net) as saved:
            with torch.autocast(mesh.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                logits = net(part)
            value = loss(logits, label, loss_groups)
        held = float(saved.total)
        value.backward()
        del logits, value
        for p in net.parameters() if mesh.world.size > 1 and not config.shard_weights else ():
            if p.grad is not None:
                p.grad = all_reduce(p.grad, mesh.world) / mesh.world.size
        optimiser.step()
        state = local_bytes(net, optimiser)
        optimiser.zero_grad()
        agree(0, mesh.world)
        seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if mesh.device.type == "cuda" else resident_bytes("VmHWM")
    together = float(all_reduce(torch.tensor(float(peak), dtype=torch.float64), mesh.world))
    return {
        "held": held,
        "state": float(sum(state.values())),
        "peak": together,
        "seconds": seconds,
        "tokens": layout.num_tokens,
    }


def local_bytes(net: torch.nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, int]:
    """Returns this rank's bytes of weights, gradients and what the optimiser holds."""

    def size(tensors: Iterable[Any]) -> int:
        own = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in own)

    weights = list(net.parameters())
    states = [t for held in optimiser.state.values() for t in held.values()]
    return {"weights": size(weights), "gradients": size(p.grad for p in weights), "optimiser": size(states)}


def resident_bytes(name: str) -> int:
    """Returns a size of this process as Linux counts it: VmRSS now, VmHWM at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def main(arguments: Sequence[str]) -> None:
    """Measures on the ranks that were started; the first one prints what all came to."""
    config = Config.from_dict(json.loads(arguments[0]))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with start(config.seqpar, device=config.device, timeout_s=7200) as mesh:
        found = step(config, mesh, int(arguments[1]))
        if mesh.is_first:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
