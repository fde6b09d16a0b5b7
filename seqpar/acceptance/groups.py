"""Ranks that share a tile against one process, and the library that carries their messages."""

import json

import torch

from seqpar.acceptance.check import LEFT_OUT, RIGHT, WRONG, Error, Outcome, Site, judged
from seqpar.acceptance.started import run_module
from seqpar.parallel.launcher import OWN_SHARING

LIMIT_S = 400.0


def check_library(site: Site) -> Outcome:
    """NCCL (RCCL) by itself, with one rank: it starts, and sums every type that it knows."""
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
    """Two ranks, on one GPU where there is one: every mode and strategy against one process, every type of number."""
    record = site.folder / "on_ranks.json"
    arguments = ["--json", str(record), "--time-limit", str(LIMIT_S)]
    ended = run_module("acceptance.on_ranks", arguments, site, LIMIT_S)
    if ended.code or not record.exists():
        other_way = f"; from NCCL 2.30 on {OWN_SHARING}=1 is another way for ranks to have one GPU" * site.on_gpu
        return Outcome(WRONG, f"{ended}{other_way}")
    results = json.loads(record.read_text())
    errors = {name: Error(error, 1e-10) for name, error in results["modes"].items()}
    errors |= {f"{name}, numbers changed": Error(count, 0.5) for name, count in results["types"].items()}
    return judged(errors)
