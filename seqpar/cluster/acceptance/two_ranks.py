"""Two ranks against one process, and the library that carries their messages.

``check_modes`` runs this module as a program, which starts both ranks. The first one computes the
reference alone, and writes all errors to a file.
"""

import argparse
import json
import os
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from seqpar.cluster import exit_codes
from seqpar.cluster.acceptance.check import LEFT_OUT, RIGHT, WRONG, Error, Outcome, Site, judged, run_module
from seqpar.cluster.acceptance.networks import VIT, small_networks, step_of
from seqpar.cluster.start_ranks import run_local
from seqpar.cluster.torch_setup import set_arithmetic
from seqpar.data.files import write_json
from seqpar.parallel.collectives import all_gather, exchange_rows
from seqpar.parallel.consensus import gather_texts
from seqpar.parallel.launcher import OWN_SHARING, read_launcher
from seqpar.parallel.mesh import Group, Mesh
from seqpar.parallel.processes import die_with_parent
from seqpar.parallel.rendezvous import start
from seqpar.settings.config import Config
from seqpar.spatial import overlap

RANKS = 2
MODES, STRATEGIES = ("gather", "halo", "swap"), ("gather-kv", "gather-x", "ulysses")
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
SANITIZED = ("halo, gather-kv", "halo, nnunet-resenc")  # under the sanitizer an operation takes milliseconds
LIMIT_S = 400.0


def check_library(site: Site) -> Outcome:
    """Checks NCCL (RCCL) by itself on one rank: it starts, and sums every dtype that it knows."""
    if not site.on_gpu:
        return Outcome(LEFT_OUT, "NCCL needs a GPU")
    wrong = []
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    ):
        x = torch.arange(64, device=site.device).to(dtype)
        y = torch.zeros_like(x)
        torch.cuda.nccl.all_reduce([x], [y])
        torch.cuda.synchronize(site.device)
        if not torch.equal(x, y):
            wrong.append(str(dtype))
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return Outcome(WRONG if wrong else RIGHT, f"version {version}{': wrong ' if wrong else ''}{' '.join(wrong)}")


def check_modes(site: Site) -> Outcome:
    """Compares every mode and strategy on two ranks, which may share a GPU, with one process; sends every dtype."""
    return _check_on_ranks(site)


def check_overlap(site: Site) -> Outcome:
    """Compares mode halo with every halo overlapped, however small, while torch looks for reads that come too early."""
    if not site.on_gpu:
        return Outcome(LEFT_OUT, "halos are overlapped on a GPU only")
    return _check_on_ranks(site, "--overlap")


def _check_on_ranks(site: Site, *more: str) -> Outcome:
    record = site.folder / "on_ranks.json"
    record.unlink(missing_ok=True)
    arguments = ["--json", str(record), "--time-limit", str(LIMIT_S), *more]
    ended = run_module("cluster.acceptance.two_ranks", arguments, site, LIMIT_S)
    if ended.code or not record.exists():
        other_way = f"; from NCCL 2.30 on {OWN_SHARING}=1 is another way for ranks to share one GPU" * site.on_gpu
        return Outcome(WRONG, f"{ended}{other_way}", {"output": ended.output[-3000:]})
    results = json.loads(record.read_text())
    errors = {name: Error(error, 1e-10) for name, error in results["modes"].items()}
    errors |= {f"{name}, values changed": Error(count, 0.5) for name, count in results["types"].items()}
    return judged(errors)


def cases() -> dict[str, Config]:
    """Returns a config for every mode with every strategy, and for every other network in mode halo."""
    vit = replace(VIT, decoder="unetr", seqpar=RANKS)
    every = {f"{mode}, {name}": replace(vit, mode=mode, attention=name) for mode in MODES for name in STRATEGIES}
    others = {name: config for name, config in small_networks().items() if name != "vit, unetr"}
    return every | {f"halo, {name}": replace(config, mode="halo", seqpar=RANKS) for name, config in others.items()}


def errors_of_modes(mesh: Mesh, names: Collection[str]) -> dict[str, float]:
    """Returns on the first rank the error of loss and gradients of the named cases against one process, in float64."""
    errors = {}
    for name, config in cases().items():
        if name not in names:
            continue
        step = step_of(config, mesh.seq, mesh.device, torch.float64)
        if mesh.is_first:
            alone = replace(config, seqpar=1, mode="gather", attention="auto")
            errors[name] = step.error(step_of(alone, Group("seq"), mesh.device, torch.float64))
    return errors


def errors_of_overlap(mesh: Mesh) -> dict[str, float]:
    """Returns the errors of mode halo with every halo overlapped, of two cases again while torch looks for races."""
    overlap.ENOUGH = 0
    errors = errors_of_modes(mesh, [name for name, config in cases().items() if config.mode == "halo"])
    from torch.cuda._sanitizer import enable_cuda_sanitizer  # from then on, each event and allocation calls Python

    enable_cuda_sanitizer()
    return errors | {f"{name}, under the sanitizer": error for name, error in errors_of_modes(mesh, SANITIZED).items()}


def wrong_types(mesh: Mesh) -> dict[str, int]:
    """Returns, for each dtype, how many values arrive changed after an all-gather and an all-to-all."""
    wrong = {}
    for dtype in DTYPES:
        rows = [(torch.arange(12).view(RANKS, 6) % 5 + rank).to(mesh.device, dtype) for rank in range(RANKS)]
        mine, ones = rows[mesh.seq.index], [1] * RANKS
        whole = all_gather(mine, mesh.seq, 0, [RANKS] * RANKS)
        turned = exchange_rows(mine, mesh.seq, ones, ones)
        pairs = (whole, torch.cat(rows)), (turned, torch.stack([row[mesh.seq.index] for row in rows]))
        wrong[str(dtype).removeprefix("torch.")] = sum(int((a != b).sum()) for a, b in pairs)
    return wrong


def act(arguments: Sequence[str]) -> int:
    """Starts both ranks, or runs as one of them."""
    die_with_parent()
    parser = argparse.ArgumentParser("seqpar-acceptance")
    parser.add_argument("--device", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--time-limit", type=float, required=True)
    parser.add_argument("--overlap", action="store_true")
    options = parser.parse_args(list(arguments))
    if read_launcher(os.environ).world == 1:
        return run_local(RANKS, ["-m", "seqpar.cluster.acceptance.two_ranks", *arguments])
    clock = threading.Timer(options.time_limit, os._exit, (exit_codes.FAULT,))
    clock.daemon = True
    clock.start()
    set_arithmetic("fp64")
    with start(RANKS, device=options.device, timeout_s=options.time_limit) as mesh:
        errors = errors_of_overlap(mesh) if options.overlap else errors_of_modes(mesh, [*cases()])
        results = {"modes": errors, "types": {} if options.overlap else wrong_types(mesh)}
        gather_texts("done", mesh.world)
        if mesh.is_first:
            write_json(options.json, results)
    return 0


if __name__ == "__main__":
    exit_codes.leave(exit_codes.run(act))
