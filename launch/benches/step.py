"""One training step of UNETR: MONAI's in one process against ours on as many cores, with the same weights.

MONAI comes with the extra ``bench``; without it its rows are left out.
"""

import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.decoders.modes.choose import choose_mode
from seqpar.decoders.unetr import UnetrDecoder, taps
from seqpar.launch.benches.apart import measure_apart
from seqpar.launch.benches.memory import average_gradients
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.planning.saved_bytes import saved_bytes
from seqpar.launch.weights.monai import load_monai
from seqpar.losses import DiceCE
from seqpar.mesh import Mesh
from seqpar.rendezvous import start
from seqpar.vit.encoder import SeqParViT

TILE, PATCH, CHANNELS, CLASSES = 96, 16, 4, 4
CORES, STEPS = 2, 3


def rows(turns: int = 3, batches: tuple[int, ...] = (1, 2)) -> list[dict[str, Any]]:
    """Returns a row per contender and batch: median seconds a step, median ratio to the first, MB saved per rank."""
    table = []
    for batch in batches:
        contenders = [("ours", 1, "gather"), ("ours", CORES, "halo" if batch % CORES else "swap")]
        if importlib.util.find_spec("monai"):
            contenders.insert(0, ("monai", 1, ""))
        measured: dict[tuple[str, int, str], list[dict[str, float]]] = {c: [] for c in contenders}
        for _ in range(turns):  # in turns: other load on the machine disturbs all alike
            for contender in contenders:
                measured[contender].append(_measured(*contender, batch))
        base = measured[contenders[0]]
        for (name, ranks, mode), runs in measured.items():
            table.append(
                {
                    "net": f"UNETR, {name}",
                    "batch": batch,
                    "ranks x threads": f"{ranks} x {CORES // ranks}",
                    "mode": mode,
                    "s a step": statistics.median(run["seconds"] for run in runs),
                    "ratio": statistics.median(a["seconds"] / b["seconds"] for a, b in zip(runs, base)),
                    "saved MB a rank": runs[0]["saved"] / 1e6,
                }
            )
    return table


def _measured(name: str, ranks: int, mode: str, batch: int) -> dict[str, float]:
    """Returns one run's seconds and saved bytes, measured in new processes."""
    return measure_apart("step", [name, mode, str(batch)], ranks, CORES // ranks)


def _worker(name: str, mode: str, batch: int) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    with start(ranks, device="cpu") as mesh:
        net = _monai() if name == "monai" else _ours(mode, mesh)
        image, label = torch.randn(batch, CHANNELS, *[TILE] * 3), torch.randint(0, CLASSES, (batch, *[TILE] * 3))
        step = _Step(net, image, label, mesh)
        saved = step.saved_bytes()
        step()  # the first one takes longer
        clocks = [time.perf_counter()]
        for _ in range(STEPS):
            step()
            clocks.append(time.perf_counter())
        seconds = statistics.median(b - a for a, b in itertools.pairwise(clocks))
        if mesh.is_first:
            print(json.dumps({"seconds": seconds, "saved": saved}), flush=True)


def _monai() -> nn.Module:
    from monai.networks.nets import UNETR  # type: ignore[import-not-found, unused-ignore]

    return UNETR(CHANNELS, CLASSES, (TILE,) * 3)  # type: ignore[no-any-return, unused-ignore]


def _ours(mode: str, mesh: Mesh) -> SegmentationNet:
    if importlib.util.find_spec("monai"):
        net = load_monai(_monai().state_dict(), (TILE,) * 3, group=mesh.seq, mode=mode)
        assert isinstance(net, SegmentationNet)
        return net
    cube = (PATCH,) * 3
    encoder = SeqParViT(CHANNELS, (TILE,) * 3, PATCH, group=mesh.seq)
    decoder = UnetrDecoder(CHANNELS, encoder.embed_dim, CLASSES, cube)
    return SegmentationNet(encoder, decoder, choose_mode(mode, mesh.seq), taps(len(encoder.blocks), cube))


class _Step:
    """Forward, loss and backward of one batch; gradients are then averaged over the ranks, without overlap."""

    def __init__(self, net: nn.Module, image: Tensor, label: Tensor, mesh: Mesh) -> None:
        self.net, self.loss_of, self.loss_groups, self.mesh = net, DiceCE(), None, mesh
        self.image, self.label = image, label
        if isinstance(net, SegmentationNet):
            layout = net.encoder.layout
            self.image, self.label = (layout.cut(whole, mesh.seq.index) for whole in (image, label))
            self.loss_groups = net.mode.loss_groups(None, len(image))

    def _forward(self) -> Tensor:
        label = self.net.arrange(self.label) if isinstance(self.net, SegmentationNet) else self.label
        return self.loss_of(self.net(self.image), label, self.loss_groups)  # type: ignore[no-any-return]

    def __call__(self) -> None:
        self.net.zero_grad()
        self._forward().backward()
        average_gradients(self.net, self.mesh)

    def saved_bytes(self) -> int:
        """Returns the bytes of distinct storages held for backward in a first step, parameters excluded."""
        return saved_bytes(self.net, self._forward)


if __name__ == "__main__":
    _worker(sys.argv[1], sys.argv[2], int(sys.argv[3]))
