"""One rank's own work in a larger sequence group, on one device: its queries against all keys, messages left out.

Every row is a step of the encoder, forward and backward, in a process of its own: the group is pretended, so that
the code is the one of a real group while nothing travels. ``MFU`` counts the operations of the model, without what
is computed again, over the dense rate of the device where that is known; ``peak`` is what torch allocated on a GPU.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from seqpar.launch.hardware.devices import known
from seqpar.mesh import Group
from seqpar.rendezvous import pretend
from seqpar.vit.encoder import SeqParViT


@dataclass(frozen=True)
class Work:
    """An encoder on one of ``ranks``, and how it holds less."""

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
SMALL = Work((48, 48, 48), 4, 192, 2, 6, precision="fp32", steps=3)  # where there is no GPU


def rows(groups: Sequence[int] = (1, 2, 4, 8)) -> list[dict[str, Any]]:
    """Returns a row per size of the group and setting; those that do not fit say so."""
    if torch.cuda.is_available():
        settings = [("none", 1), ("none", 8), ("attention", 8), ("full", 1)]
        works = [Work(t, ranks=p, recompute=r, mlp_chunks=c)
                 for t in ((128,) * 3, VOLUME) for p in groups for r, c in settings]  # fmt: skip
    else:
        works = [Work(**{**asdict(SMALL), "ranks": ranks}) for ranks in groups]
    return [_apart(work) for work in works]


def _apart(work: Work) -> dict[str, Any]:
    """Returns a row, measured in a process of its own: a group can be pretended once in each."""
    code = [sys.executable, "-m", "seqpar.launch.benches.rank", json.dumps(asdict(work))]
    done = subprocess.run(code, capture_output=True, text=True)
    if done.returncode:
        if "out of memory" in done.stderr.lower():
            return {**described(work), "s a step": "out of memory"}
        raise RuntimeError(f"{work} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def described(work: Work) -> dict[str, Any]:
    """Returns the columns that say what was measured."""
    return {
        "net": f"ViT {work.embed_dim} x {work.depth}, {work.precision}",
        "tile / patch": f"{'x'.join(map(str, work.tile))} / {work.patch}",
        "rank of": work.ranks,
        "computed again": work.recompute,
        "MLP in": work.mlp_chunks,
    }


def measure(work: Work, group: Group, device: torch.device) -> dict[str, Any]:
    """Returns the row of the first rank of ``group``."""
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

    act()  # first times are longer
    seconds = statistics.median(act() for _ in range(work.steps))
    on_gpu = device.type == "cuda"
    done = operations(net.layout.counts[0], net.layout.num_tokens, work)
    what = known(torch.cuda.get_device_name(device)) if on_gpu else None
    rate = what.peak[work.precision] if what else None
    return {
        **described(work),
        "attention": str(net.attention),
        "s a step": seconds,
        "TFLOP/s": done / seconds / 1e12,
        "MFU": done / seconds / rate if rate else "",
        "peak GiB": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else "",
    }


def operations(mine: int, tokens: int, work: Work, mlp_ratio: float = 4.0) -> float:
    """Returns the operations of a rank's step: its tokens through all matrices, its queries against all keys.

    Forward and twice as much backward; a product and a sum are two operations. What a rank projects of others'
    tokens is not counted: it is the price of a strategy.
    """
    linear = 2 * mine * work.embed_dim**2 * (4 + 2 * mlp_ratio)
    attention = 4 * mine * tokens * work.embed_dim
    embedding = 2 * mine * work.patch ** len(work.tile) * work.embed_dim
    return 3.0 * (work.depth * (linear + attention)) + 2.0 * embedding  # no gradient at the image


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(arguments: Sequence[str]) -> None:
    """Prints the row of the work that the argument describes."""
    values = json.loads(arguments[0])
    work = Work(**{**values, "tile": tuple(values["tile"])})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    print(json.dumps(measure(work, pretend(work.ranks), device)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
