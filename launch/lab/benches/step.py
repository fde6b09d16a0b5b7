"""Forward, loss and backward of UNETR: MONAI's in one process against ours on the same cores, with the same weights.

Gradients are averaged over the ranks; there is no optimizer. Each run has new processes. Ours keeps freed memory, as
training on a CPU does; MONAI's is measured without that, as its users run it, with it, and compiled as well, where
torch finds a compiler. MONAI comes with the extra ``bench``; without it, its rows are omitted.
"""

import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from functools import partial

import torch
from torch import Tensor, nn

from lab.benches.other_libraries import COMPILED, compiled, with_compiled
from lab.benches.series import Row, Runs, Series, alternate, measure_apart, ratio, spread
from seqpar.cluster.torch_setup import keep_memory
from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.unetr import UnetrDecoder, skip_blocks
from seqpar.losses import DiceCE
from seqpar.models.network import Network
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.rendezvous import start
from seqpar.planner.memory_counter import saved_bytes
from seqpar.training.data_parallel import no_sync, wrap_data_parallel
from seqpar.vit.encoder import SeqParViT
from seqpar.weights.monai_weights import load_monai

TILE, PATCH, CHANNELS, CLASSES = 96, 16, 4, 4
CORES, STEPS = 2, 3
KEPT = "monai, memory kept"


def series(quick: bool = False) -> list[Series]:
    """Returns a series per batch: MONAI's net, ours on one rank, ours on two."""
    return (
        [_of_batch(1, 1, 1, 60.0)] if quick else [_of_batch(batch, 3, STEPS, 50.0 + 55.0 * batch) for batch in (1, 2)]
    )


def _of_batch(batch: int, turns: int, steps: int, turn_s: float) -> Series:
    contenders = {
        "ours, 1 rank": ("ours", 1, "gather"),
        "ours, 2 ranks": ("ours", CORES, "swap" if batch > 1 else "halo"),
    }
    if importlib.util.find_spec("monai"):
        peers = ["monai", *(with_compiled(KEPT) if turns > 1 else [KEPT])]
        contenders = {**{name: (name, 1, "") for name in peers}, **contenders}
    base = next(iter(contenders))

    def measure(case: str) -> dict[str, float]:
        name, ranks, mode = contenders[case]
        return measure_apart("step", [name, mode, str(batch), str(steps)], ranks, CORES // ranks)

    def row(case: str, runs: Runs) -> Row:
        (name, ranks, mode), seconds = contenders[case], {case: [run["seconds"] for run in runs[case]] for case in runs}
        return {
            "net": f"UNETR, {name}",
            "batch": batch,
            "ranks x threads": f"{ranks} x {CORES // ranks}",
            "mode": mode,
            "s forward, loss, backward": statistics.median(seconds[case]),
            "ratio": ratio(seconds[case], seconds[base]),
            "of turns": spread(seconds[case], seconds[base]),
            "saved MB a rank": runs[case][0]["saved"] / 1e6,
        }

    what = f"forward, loss and backward of UNETR, tile {TILE}, batch {batch}"
    return Series(what, tuple(contenders), turns, turn_s, partial(alternate, tuple(contenders), measure), row)


def _worker(name: str, mode: str, batch: int, steps: int) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    if name != "monai":
        keep_memory()
    with start(ranks, device="cpu") as mesh:
        net = unetr(mode, mesh) if name == "ours" else _monai()
        net = compiled(net) if name.endswith(COMPILED) else net
        image, label = torch.randn(batch, CHANNELS, *[TILE] * 3), torch.randint(0, CLASSES, (batch, *[TILE] * 3))
        measured = measure_steps(Step(net, image, label, mesh), steps)
        if mesh.is_first:
            print(json.dumps(measured), flush=True)


def _monai() -> nn.Module:
    from monai.networks.nets import UNETR  # type: ignore[import-not-found, unused-ignore]

    return UNETR(CHANNELS, CLASSES, (TILE,) * 3)  # type: ignore[no-any-return, unused-ignore]


def unetr(mode: str, mesh: Mesh) -> SegmentationNet:
    """Returns ours, with MONAI's weights if MONAI is installed."""
    if importlib.util.find_spec("monai"):
        net = load_monai(_monai().state_dict(), (TILE,) * 3, 12, mesh.seq, mode)
        assert isinstance(net, SegmentationNet)
        return net
    cube = (PATCH,) * 3
    encoder = SeqParViT(CHANNELS, (TILE,) * 3, PATCH, group=mesh.seq)
    decoder = UnetrDecoder(CHANNELS, encoder.embed_dim, CLASSES, cube)
    return SegmentationNet(encoder, decoder, choose_mode(mode, mesh.seq), skip_blocks(len(encoder.blocks), cube))


class Step:
    """Forward, loss and backward of one batch; gradients are averaged over the ranks during backward, as in training.

    ``image`` and ``label`` are whole on every rank; a ``net`` of ours takes its part.
    """

    def __init__(self, net: nn.Module, image: Tensor, label: Tensor, mesh: Mesh) -> None:
        self.net, self.loss_of, self.loss_groups, self.mesh = net, DiceCE(), None, mesh
        self.image, self.label = image, label
        if isinstance(net, Network):
            self.image, self.label = (net.layout.cut(whole, mesh.seq.index) for whole in (image, label))
            self.loss_groups = net.mode.loss_groups(None, len(image))
        self.trained = wrap_data_parallel(net, mesh)

    def _forward(self, net: nn.Module) -> Tensor:
        label = self.net.arrange(self.label) if isinstance(self.net, Network) else self.label
        return self.loss_of(net(self.image), label, self.loss_groups)  # type: ignore[no-any-return]

    def __call__(self) -> None:
        self.net.zero_grad()
        self._forward(self.trained).backward()

    def loss(self) -> float:
        """Returns the loss of the batch."""
        with torch.no_grad():
            return float(self._forward(self.net))

    def differentiate(self) -> None:
        """Computes this rank's own gradients, without averaging."""
        self.net.zero_grad()
        with no_sync(self.trained):
            self._forward(self.trained).backward()

    def saved_bytes(self) -> int:
        """Returns the bytes of distinct storages saved for backward, parameters excluded."""
        return saved_bytes(self.net, partial(self._forward, self.net))


def measure_steps(step: Step, steps: int = STEPS) -> dict[str, float]:
    """Returns the median seconds of ``steps`` steps, and the bytes that one saves for backward."""
    saved = step.saved_bytes()
    step()  # the first one takes longer
    clocks = [time.perf_counter()]
    for _ in range(steps):
        step()
        clocks.append(time.perf_counter())
    return {"seconds": statistics.median(b - a for a, b in itertools.pairwise(clocks)), "saved": saved}


if __name__ == "__main__":
    _worker(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
