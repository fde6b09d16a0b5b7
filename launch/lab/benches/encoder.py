"""An encoder's forward and backward: MONAI's ViT in one process against ours on the same cores.

Gradients are averaged over the ranks during backward, and ours keeps freed memory, as in training. Ratios are medians
over turns, relative to the first row; ``saved`` is counted. In one row MONAI's is compiled, where torch finds a
compiler. MONAI comes with the extra ``bench``; without it, its rows are omitted.
"""

import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lab.benches.other_libraries import COMPILED, compiled, with_compiled
from lab.benches.series import Row, Runs, Series, alternate, measure_apart, ratio, spread
from seqpar.cluster.torch_setup import keep_memory
from seqpar.parallel.consensus import max_over_ranks
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.rendezvous import start
from seqpar.planner.memory_counter import saved_bytes
from seqpar.training.data_parallel import wrap_data_parallel
from seqpar.vit.encoder import SeqParViT

CORES = 2
KEPT = "monai, flash, memory kept"


@dataclass(frozen=True)
class Size:
    """A ViT and its tile."""

    tile: int
    patch: int
    embed_dim: int
    depth: int
    heads: int

    @property
    def tokens(self) -> int:
        return int((self.tile // self.patch) ** 3)


SIZES = (Size(96, 16, 768, 12, 12), Size(64, 4, 192, 4, 6))
QUICK = (Size(96, 16, 768, 4, 12), Size(48, 4, 192, 2, 6))


def series(quick: bool = False) -> list[Series]:
    """Returns a series per size: MONAI's ViT, plain and with fused attention, ours on one rank and on two."""
    return [_of_size(size, 1, 25.0) for size in QUICK] if quick else [_of_size(size, 3, 75.0) for size in SIZES]


def _of_size(size: Size, turns: int, turn_s: float) -> Series:
    contenders = {"ours, 1 rank": ("ours", 1), f"ours, {CORES} ranks": ("ours", CORES)}
    if importlib.util.find_spec("monai"):
        tuned = with_compiled(KEPT) if turns > 1 else [KEPT]
        contenders = {name: (name, 1) for name in ("monai", "monai, flash", *tuned)} | contenders
    base = next(iter(contenders))

    def measure(case: str) -> dict[str, float]:
        name, ranks = contenders[case]
        return measure_apart("encoder", [name, json.dumps(asdict(size))], ranks, CORES // ranks)

    def row(case: str, runs: Runs) -> Row:
        (name, ranks), seconds = contenders[case], {case: [run["seconds"] for run in runs[case]] for case in runs}
        return {
            "net": f"ViT {size.embed_dim} x {size.depth}, {name}",
            "tile / patch": f"{size.tile} / {size.patch}",
            "tokens": size.tokens,
            "ranks x threads": f"{ranks} x {CORES // ranks}",
            "s forward + backward": statistics.median(seconds[case]),
            "ratio": ratio(seconds[case], seconds[base]),
            "of turns": spread(seconds[case], seconds[base]),
            "saved MB a rank": runs[case][0]["saved"] / 1e6,
        }

    what = f"forward and backward of an encoder, {size.tokens} tokens, {size.depth} blocks of width {size.embed_dim}"
    return Series(what, tuple(contenders), turns, turn_s, partial(alternate, tuple(contenders), measure), row)


def _monai(size: Size, flash: bool) -> nn.Module:
    from monai.networks.nets import ViT  # type: ignore[import-not-result, unused-ignore]

    hidden, cube = 4 * size.embed_dim, (size.tile,) * 3
    net: nn.Module = ViT(1, cube, (size.patch,) * 3, size.embed_dim, hidden, size.depth, size.heads)
    for block in net.blocks:  # type: ignore[union-attr]
        assert not block.attn.use_flash_attention  # its blocks have the option, but its ViT does not pass it on
        block.attn.use_flash_attention = flash
    return net


def _worker(name: str, size: Size, mesh: Mesh) -> dict[str, float]:
    torch.manual_seed(0)
    if name == "ours" or name.startswith(KEPT):
        keep_memory()
    image = torch.randn(1, 1, *[size.tile] * 3)
    net: nn.Module
    if name.startswith("monai"):
        net = _monai(size, flash="flash" in name)
        net = compiled(net) if name.endswith(COMPILED) else net
    else:
        net = SeqParViT(1, size.tile, size.patch, size.embed_dim, size.depth, size.heads, group=mesh.seq)
        image = net.layout.cut(image, mesh.seq.index)

    trained = wrap_data_parallel(net, mesh)

    def forward(net: nn.Module) -> Tensor:
        out = net(image)
        tokens: Tensor = out[0] if isinstance(out, tuple) else out
        return (tokens * tokens.detach().sin()).sum()  # a gradient that is not constant

    saved = saved_bytes(net, partial(forward, net))
    seconds = []
    for _ in range(4):
        max_over_ranks(0, mesh.world)
        began = time.perf_counter()
        net.zero_grad()
        forward(trained).backward()
        max_over_ranks(0, mesh.world)
        seconds.append(time.perf_counter() - began)
    return {"seconds": statistics.median(seconds[1:]), "saved": float(saved)}  # the first pass takes longer


def main(arguments: Sequence[str]) -> None:
    """Measures on the ranks that were started; the first one prints seconds and saved bytes."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with start(int(os.environ["WORLD_SIZE"]), device="cpu") as mesh:
        result = _worker(arguments[0], Size(**json.loads(arguments[1])), mesh)
        if mesh.is_first:
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
