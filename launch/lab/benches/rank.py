"""The work of one rank of a sequence group, on one device: its queries against all keys, without messages.

Each run is forward and backward of the encoder in a new process. The group is a stand-in that sends nothing, so the
code is that of a real group. ``MFU`` divides the model's operations, recomputation not counted, by the device's dense
rate where that is known; ``peak`` is what torch allocated on a GPU.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from lab.benches.series import Row, Runs, Series, alternate, lab_on_path
from seqpar.cluster.devices import gpu_by_name
from seqpar.parallel.mesh import Group
from seqpar.parallel.rendezvous import fake_group
from seqpar.vit.encoder import SeqParViT


@dataclass(frozen=True)
class Work:
    """An encoder on one of ``ranks`` ranks, and how it saves memory; the median of ``steps`` counts."""

    tile: tuple[int, ...] = (128, 128, 128)
    patch: int = 4
    embed_dim: int = 768
    depth: int = 12
    heads: int = 12
    ranks: int = 1
    recompute: str = "none"
    mlp_chunks: int = 1
    precision: str = "bf16"
    steps: int = 5


VOLUME = (240, 240, 156)
FULL = "out of memory"
MEASURED = ("attention", "s a step", "TFLOP/s", "MFU", "peak GiB")
SMALL = Work((48, 48, 48), 4, 192, 2, 6, precision="fp32", steps=3)  # if there is no GPU


def series(quick: bool = False) -> list[Series]:
    """Returns one series: a case per size of the group and setting; those that do not fit in memory say so."""
    groups = (1, 4) if quick else (1, 2, 4, 8)
    if torch.cuda.is_available():
        settings = [("none", 1), ("none", 8), ("attention", 8), ("full", 1)]
        works = [Work(t, ranks=p, recompute=r, mlp_chunks=c)
                 for t in ((128,) * 3, VOLUME) for p in groups for r, c in settings]  # fmt: skip
    else:
        works = [Work(**{**asdict(SMALL), "ranks": ranks}) for ranks in groups]
    cases = {str(work): work for work in works}

    def row(case: str, runs: Runs) -> Row:
        by_time = sorted(runs[case], key=lambda run: math.inf if run["s a step"] == FULL else run["s a step"])
        return {**described(cases[case]), **by_time[len(by_time) // 2]}

    what = "one rank's own work in an encoder's step, messages left out"
    return [
        Series(
            what,
            tuple(cases),
            1,
            10.0 * len(cases),
            partial(alternate, tuple(cases), lambda case: _apart(cases[case])),
            row,
        )
    ]


def _apart(work: Work) -> dict[str, Any]:
    """Returns what a new process measures; each can have only one fake group."""
    code = [sys.executable, "-m", "lab.benches.rank", json.dumps(asdict(work))]
    process = subprocess.run(code, capture_output=True, text=True, env={**os.environ, **lab_on_path()})
    if process.returncode:
        if "out of memory" in process.stderr.lower():
            return dict.fromkeys(MEASURED, "") | {"s a step": FULL}
        raise RuntimeError(f"{work} failed:\n{process.stderr[-2000:]}")
    return dict(json.loads(process.stdout.strip().splitlines()[-1]))


def described(work: Work) -> dict[str, Any]:
    """Returns the columns that describe the work."""
    return {
        "net": f"ViT {work.embed_dim} x {work.depth}, {work.precision}",
        "tile / patch": f"{'x'.join(map(str, work.tile))} / {work.patch}",
        "rank of": work.ranks,
        "computed again": work.recompute,
        "MLP in": work.mlp_chunks,
    }


def measure(work: Work, group: Group, device: torch.device) -> dict[str, Any]:
    """Returns what a step of the first rank of ``group`` comes to."""
    torch.manual_seed(0)
    with device:
        net = SeqParViT(
            1, work.tile, work.patch, work.embed_dim, work.depth, work.heads, positions="none", group=group,
            recompute=work.recompute, mlp_chunks=work.mlp_chunks,
        )  # fmt: skip
        part = torch.randn(1, net.layout.counts[0], 1, *net.layout.patch)
        grad = torch.randn(1, net.layout.counts[0], work.embed_dim)

    def act() -> float:
        began = _now(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=work.precision == "bf16"):
            out = net(part)
        out.backward(grad.to(out.dtype))
        for p in net.parameters():
            p.grad = None
        return _now(device) - began

    act()  # the first one takes longer
    seconds = statistics.median(act() for _ in range(work.steps))
    on_gpu = device.type == "cuda"
    num_operations = operations(net.layout.counts[0], net.layout.num_tokens, work)
    known_device = gpu_by_name(torch.cuda.get_device_name(device)) if on_gpu else None
    rate = known_device.peak[work.precision] if known_device else None
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else ""
    per_second = num_operations / seconds
    return dict(
        zip(MEASURED, (str(net.attention), seconds, per_second / 1e12, per_second / rate if rate else "", peak))
    )


def operations(own: int, tokens: int, work: Work, mlp_ratio: float = 4.0) -> float:
    """Returns the operations of a rank's step: ``own`` of all ``tokens`` through all matrices, their queries against
    all keys.

    Backward takes twice as many as forward; a product and a sum are two operations. Projecting other ranks' tokens is
    not counted: it is what a strategy costs, no work of the model.
    """
    linear = 2 * own * work.embed_dim**2 * (4 + 2 * mlp_ratio)
    attention = 4 * own * tokens * work.embed_dim
    embedding = 2 * own * work.patch ** len(work.tile) * work.embed_dim
    return 3.0 * (work.depth * (linear + attention)) + 2.0 * embedding  # the image needs no gradient


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(arguments: Sequence[str]) -> None:
    """Measures the work that the argument describes, and prints the result."""
    values = json.loads(arguments[0])
    work = Work(**{**values, "tile": tuple(values["tile"])})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    print(json.dumps(measure(work, fake_group(work.ranks), device)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
