"""Forward, loss and backward of nnU-Net's plain network, 1 channel and 3 classes: others' against ours, same cores.

``converted`` compares a network of torch's own modules with what ``seqpar.convert`` makes of it, and on two ranks with
one of ``seqpar.spatial``'s modules, layer by layer the same.

All keep freed memory, as our training does. Others' networks are compiled in rows of their own, where torch finds a
compiler. Ours takes the weights of the first contender; ``logits apart`` is how far its logits then are from that
one's. Each run has new processes. Packages that are not installed are omitted.
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

from lab.benches.other_libraries import COMPILED, UNETS, PlainUNet, compiled, copy_weights, unets_here, with_compiled
from lab.benches.series import Row, Runs, Series, alternate, measure_apart, ratio, spread
from lab.benches.step import CORES, Step, measure_steps
from seqpar import spatial
from seqpar.cluster.torch_setup import keep_memory
from seqpar.conversion.converted import convert
from seqpar.decoders.unets.nnunet import FEATURES, architecture_of_stages, topology
from seqpar.losses import LossGroups
from seqpar.losses.tile_network import BoxNetwork
from seqpar.models.build import build_network
from seqpar.models.cell_network import VolumeNet
from seqpar.parallel.mesh import Group
from seqpar.parallel.rendezvous import start
from seqpar.pipeline.cells import Value
from seqpar.settings.config import Config
from seqpar.spatial.box_grid import BoxGrid

CHANNELS, CLASSES = 1, 3
OURS = {"nnunet-plain, 1 rank": ("gather", 1), "nnunet-plain, 2 ranks": ("halo", CORES)}  # name → mode, ranks
ORIGINAL, ALONE, SPREAD, BY_HAND = "torch's own modules", "converted, 1 rank", "converted, 2 ranks", "by hand, 2 ranks"
RANKS = {ORIGINAL: 1, ALONE: 1, SPREAD: CORES, BY_HAND: CORES}


def series(quick: bool = False) -> list[Series]:
    """Returns one series: others' networks, ours on one rank, ours on two."""
    return [of_tile(64 if quick else 96, turns=1 if quick else 3)]


def of_tile(tile: int, turns: int, features: int = 0, peers: Sequence[str] = ()) -> Series:
    """Returns the series on cubic tiles; ``peers``: the networks to compare with (default: all that are installed)."""
    contenders = (*(peers or (unets_here() if turns == 1 else with_compiled(*unets_here()))), *OURS)
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


def converted(quick: bool = False) -> list[Series]:
    """Returns one series: a network of torch's modules, converted on one rank and on two, and written by hand."""
    return [of_converted(64 if quick else 96, turns=1 if quick else 5)]


def of_converted(tile: int, turns: int, features: int = 0) -> Series:
    """Returns the series on cubic tiles."""
    bases = {ORIGINAL: ORIGINAL, ALONE: ORIGINAL, BY_HAND: BY_HAND, SPREAD: BY_HAND}

    def measure(case: str) -> dict[str, float]:
        return measure_apart("unets", [case, "convert", str(tile), str(features)], RANKS[case], CORES // RANKS[case])

    def row(case: str, runs: Runs) -> Row:
        base = bases[case]
        seconds = {case: [run["seconds"] for run in runs[case]] for case in runs}
        return {
            "net": case,
            "tile": tile,
            "ranks x threads": f"{RANKS[case]} x {CORES // RANKS[case]}",
            "to": base,
            "s forward, loss, backward": statistics.median(seconds[case]),
            "ratio": ratio(seconds[case], seconds[base]),
            "of turns": spread(seconds[case], seconds[base]),
            "saved MB a rank": runs[case][0]["saved"] / 1e6,
            "saved MB more": (runs[case][0]["saved"] - runs[base][0]["saved"]) / 1e6,
            "loss": runs[case][0]["loss"],
        }

    what = f"forward, loss and backward of a plain U-Net of torch's modules and what convert makes of it, tile {tile}"
    seconds = 60.0 * (tile / 96) ** 3 * len(bases)
    return Series(what, tuple(bases), turns, seconds, partial(alternate, tuple(bases), measure), row)


class ByHand(BoxNetwork):
    """A ``PlainUNet`` whose layers are ``seqpar.spatial``'s, each of which takes the grid of its boxes."""

    def __init__(self, plain: PlainUNet, group: Group) -> None:
        super().__init__()
        self.plain, self.group = plain, group

    def group_and_dims(self) -> tuple[Group, int]:
        return self.group, 3

    def _cut(self, extents: tuple[int, ...]) -> BoxGrid:
        grid = BoxGrid.even(extents, self.group)
        assert grid is not None
        return grid

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits of this rank's box."""
        grid, skips = self._seen.grids.get(x), []
        for stage in self.plain.down:
            x, grid = _through(stage, x, grid)
            skips.append((x, grid))
        for up, join, (skip, at) in zip(self.plain.ups, self.plain.joins, reversed(skips[:-1])):
            x, grid = _through(join, torch.cat([up(x, grid)[0], skip], 1), at)
        return self.plain.classes(x, grid)[0]  # type: ignore[no-any-return]


def _through(layers: nn.Module, x: torch.Tensor, grid: BoxGrid | None) -> Value:
    for layer in layers.children():
        x, grid = (layer(x), grid) if isinstance(layer, nn.LeakyReLU) else layer(x, grid)
    return x, grid


def _converted_worker(case: str, tile: int, features: int) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_memory()
    with start(RANKS[case], device="cpu") as mesh:
        torch.manual_seed(0)
        image, label = torch.randn(1, CHANNELS, *[tile] * 3), torch.randint(CLASSES, (1, *[tile] * 3))
        kernels, strides = topology((tile,) * 3)
        architecture = architecture_of_stages(CHANNELS, CLASSES, kernels, strides, features=features or FEATURES)
        plain = PlainUNet(architecture, spatial if case == BY_HAND else nn)
        if case == ORIGINAL:
            step = Step(plain, image, label, mesh)
        else:
            net: BoxNetwork = ByHand(plain, mesh.seq) if case == BY_HAND else convert(plain, mesh.seq)
            step = Step(net, net.shard(image), net.shard(label), mesh)
            step.loss_groups = LossGroups(voxels=mesh.seq)
        measured = {**measure_steps(step), "loss": step.loss()}
        if mesh.is_first:
            print(json.dumps(measured), flush=True)


def _worker(case: str, base: str, tile: int, features: int) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_memory()
    config = Config(network="nnunet-plain", tile=(tile,) * 3, features=features, seqpar=ranks)
    with start(ranks, device="cpu") as mesh:
        torch.manual_seed(0)
        image, label = torch.randn(1, CHANNELS, *config.tile), torch.randint(CLASSES, (1, *config.tile))
        own = build_network(replace(config, mode=OURS.get(case, ("gather",))[0]), CHANNELS, CLASSES, mesh.seq)
        assert isinstance(own, VolumeNet)
        peer = UNETS[base if case in OURS else case.removesuffix(COMPILED)][1](own.unet.architecture)
        apart = {}
        if case in OURS:
            copy_weights(peer, own)
            if ranks == 1:
                apart = {"apart": logits_apart(own, peer, image)}
        net = own if case in OURS else compiled(peer) if case.endswith(COMPILED) else peer
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
    case, base, *numbers = sys.argv[1:]
    if base == "convert":
        _converted_worker(case, *map(int, numbers))
    else:
        _worker(case, base, *map(int, numbers))
