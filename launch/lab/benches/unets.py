"""Forward, loss and backward of nnU-Net's plain network, 1 channel and 3 classes: others' against ours, same cores.

Ours takes the weights of the first contender; ``logits apart`` is how far its logits then are from that one's. Each run
has new processes. Packages that are not installed are omitted.
"""

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from lab.benches.other_libraries import UNETS, copy_weights, unets_here
from lab.benches.series import Row, Runs, Series, alternate, measure_apart, ratio, spread
from lab.benches.step import CORES, Step, measure_steps
from seqpar.models.build import build_network
from seqpar.models.cell_network import VolumeNet
from seqpar.parallel.rendezvous import start
from seqpar.settings.config import Config

CHANNELS, CLASSES = 1, 3
OURS = {"nnunet-plain, 1 rank": ("gather", 1), "nnunet-plain, 2 ranks": ("halo", CORES)}  # name → mode, ranks


def series(quick: bool = False) -> list[Series]:
    """Returns one series: others' networks, ours on one rank, ours on two."""
    return [of_tile(64 if quick else 96, turns=1 if quick else 3)]


def of_tile(tile: int, turns: int, features: int = 0, peers: Sequence[str] = ()) -> Series:
    """Returns the series on cubic tiles; ``peers``: the networks to compare with (default: all that are installed)."""
    contenders = (*(peers or unets_here()), *OURS)
    base = contenders[0]

    def measure(case: str) -> dict[str, float]:
        ranks = OURS[case][1] if case in OURS else 1
        return measure_apart("unets", [case, base, str(tile), str(features)], ranks, CORES // ranks)

    def row(case: str, runs: Runs) -> Row:
        mode, ranks = OURS.get(case, ("", 1))
        seconds = {case: [run["seconds"] for run in runs[case]] for case in runs}
        return {
            "net": case,
            "tile": tile,
            "ranks x threads": f"{ranks} x {CORES // ranks}",
            "mode": mode,
            "s forward, loss, backward": statistics.median(seconds[case]),
            "ratio": ratio(seconds[case], seconds[base]),
            "of turns": spread(seconds[case], seconds[base]),
            "saved MB a rank": runs[case][0]["saved"] / 1e6,
            "saved to the first": runs[case][0]["saved"] / runs[base][0]["saved"],
            "logits apart": runs[case][0].get("apart", ""),
        }

    what = f"forward, loss and backward of nnU-Net's plain network, tile {tile}, batch 1"
    seconds = 60.0 * (tile / 96) ** 3 * len(contenders)
    return Series(what, contenders, turns, seconds, partial(alternate, contenders, measure), row)


def _worker(case: str, base: str, tile: int, features: int) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = Config(network="nnunet-plain", tile=(tile,) * 3, features=features, seqpar=ranks)
    with start(ranks, device="cpu") as mesh:
        torch.manual_seed(0)
        image, label = torch.randn(1, CHANNELS, *config.tile), torch.randint(CLASSES, (1, *config.tile))
        own = build_network(replace(config, mode=OURS.get(case, ("gather",))[0]), CHANNELS, CLASSES, mesh.seq)
        assert isinstance(own, VolumeNet)
        peer = UNETS[base if case in OURS else case][1](own.unet.architecture)
        apart = {}
        if case in OURS:
            copy_weights(peer, own)
            if ranks == 1:
                apart = {"apart": logits_apart(own, peer, image)}
        net = own if case in OURS else peer
        del own, peer
        measured = measure_steps(Step(net, image, label, mesh))
        if mesh.is_first:
            print(json.dumps({**measured, **apart}), flush=True)


def logits_apart(net: nn.Module, other: nn.Module, image: torch.Tensor) -> float:
    """Returns the largest difference of two networks' logits, relative to the largest logit of ``other``."""
    with torch.no_grad():
        have, want = net(image), other(image)
    return float((have - want).abs().max() / want.abs().max())


if __name__ == "__main__":
    _worker(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
