"""A small network of nnU-Net's: a training step, and a prediction by windows, by nnU-Net itself and here, in turns.

It is PlainConvUNet of 8 to 64 features, in float32: its cost per operation shows. Where nnU-Net is not installed, ours
is measured alone. nnU-Net's is compiled in rows of its own, where torch finds a compiler, and all keep freed memory, as
our training and prediction do. One thread counts processor time, also on a busy machine; two threads count the clock.
"""

import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from lab.benches.other_libraries import COMPILED, UNETS, compiled, nnunets_predictor, with_compiled
from lab.benches.series import Row, Runs, Series, alternate, measure_apart, ratio, spread
from seqpar.cluster.torch_setup import keep_memory
from seqpar.models.build import build_loss, build_network
from seqpar.models.cell_network import VolumeNet
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.rendezvous import start
from seqpar.prediction.sliding_window import sliding_window
from seqpar.prediction.window_grid import Sliding
from seqpar.settings.presets import PRESETS

TILE, SHAPE, BATCH, CLASSES = (32, 32, 32), (128, 128, 64), 2, 3
STAGES = "333:111 333:222 333:222 333:222"
ACTS = {"training step": 12, "prediction of 128x128x64": 2}  # name → how often a turn does it; the least counts
NNUNET, OURS = "nnU-Net", "ours"


def series(quick: bool = False) -> list[Series]:
    """Returns one series: both acts on one thread and on two, by nnU-Net and here."""
    theirs = [NNUNET] if quick else with_compiled(NNUNET)
    who = (*theirs, OURS) if importlib.util.find_spec("nnunetv2") else (OURS,)
    acts = list(ACTS)[:1] if quick else list(ACTS)
    cases = {
        f"{name}, {act}, {n} thread{'s' * (n > 1)}": (name, act, n) for act in acts for n in (1, 2) for name in who
    }

    def measure(case: str) -> dict[str, float]:
        name, act, threads = cases[case]
        return measure_apart("nnunet", [name, act], 1, threads)

    def row(case: str, runs: Runs) -> Row:
        name, act, threads = cases[case]
        base = next(other for other, key in cases.items() if key[1:] == (act, threads))
        seconds, others = ([run["seconds"] for run in runs[one]] for one in (case, base))
        return {
            "what": act,
            "by": name,
            "threads": threads,
            "s": statistics.median(seconds),
            "ratio": ratio(seconds, others),
            "of turns": spread(seconds, others),
        }

    what = f"nnU-Net's plain network of 8 to 64 features, tile {'x'.join(map(str, TILE))}, batch {BATCH}"
    return [
        Series(what, tuple(cases), 1 if quick else 3, 15.0 * len(cases), partial(alternate, tuple(cases), measure), row)
    ]


def _worker(name: str, act: str) -> None:
    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    keep_memory()
    config = replace(
        PRESETS["nnunet"](), network="nnunet-plain", tile=TILE, features=8, stages=STAGES, precision="fp32"
    )
    with start(1, device="cpu") as mesh:
        torch.manual_seed(0)
        net = build_network(replace(config, batch=BATCH), 1, CLASSES, mesh.seq)
        assert isinstance(net, VolumeNet)
        if name == OURS:
            do = _our_step(net, mesh) if act == "training step" else _our_prediction(net, mesh)
        else:
            peer = UNETS["dynamic-network-architectures"][1](net.unet.architecture)
            peer.decoder.deep_supervision = act == "training step"  # type: ignore[union-attr]
            peer = compiled(peer) if name.endswith(COMPILED) else peer
            do = _their_step(peer) if act == "training step" else _their_prediction(peer)
        clock = time.thread_time if threads == 1 else time.perf_counter
        do()
        seconds = list[float]()
        for _ in range(ACTS[act]):
            began = clock()
            do()
            seconds.append(clock() - began)
        print(json.dumps({"seconds": min(seconds)}), flush=True)


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 1, *TILE), torch.randint(CLASSES, (BATCH, *TILE))


def _our_step(net: VolumeNet, mesh: Mesh) -> Callable[[], object]:
    image, label = (net.layout.cut(whole, 0) for whole in _batch())
    loss, optimizer = net.training_loss(build_loss(PRESETS["nnunet"]())), _optimizer(net)
    groups = net.loss_groups(mesh.data, BATCH)

    def step() -> None:
        optimizer.zero_grad()
        loss(net(image), net.arrange(label), groups).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 12)
        optimizer.step()

    return step


def _our_prediction(net: VolumeNet, mesh: Mesh) -> Callable[[], object]:
    image, sliding = torch.randn(1, *SHAPE), Sliding(TILE, 0.5, "gaussian", 1, (), "nnU-Net")
    net.eval()

    def predict() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([slab.logits for slab in sliding_window([net], image, sliding, mesh)], 1)

    return predict


def _their_step(net: nn.Module) -> Callable[[], object]:
    from nnunetv2.training.loss.compound_losses import (  # type: ignore[import-not-found, unused-ignore]
        DC_and_CE_loss,
    )
    from nnunetv2.training.loss.deep_supervision import (  # type: ignore[import-not-found, unused-ignore]
        DeepSupervisionWrapper,
    )
    from nnunetv2.training.loss.dice import (  # type: ignore[import-not-found, unused-ignore]
        MemoryEfficientSoftDiceLoss,
    )

    image, label = _batch()
    options = {"batch_dice": False, "smooth": 1e-5, "do_bg": False, "ddp": False}
    single = DC_and_CE_loss(options, {}, dice_class=MemoryEfficientSoftDiceLoss)
    weights, optimizer = np.array([1, 0.5, 0]) / 1.5, _optimizer(net)  # the coarsest has none
    loss, labels = (
        DeepSupervisionWrapper(single, weights),
        [label[:, None, :: 2**i, :: 2**i, :: 2**i] for i in range(3)],
    )

    def step() -> None:
        optimizer.zero_grad()
        loss(net(image), labels).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 12)
        optimizer.step()

    return step


def _their_prediction(net: nn.Module) -> Callable[[], object]:
    predictor = nnunets_predictor(net, TILE, CLASSES, mirror=False)
    image = torch.randn(1, *SHAPE)

    def predict() -> object:
        with torch.inference_mode():
            return predictor.predict_sliding_window_return_logits(image)

    return predict


if __name__ == "__main__":
    _worker(sys.argv[1], sys.argv[2])
