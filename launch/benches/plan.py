"""The planner against measurement on this machine: seconds a step and the bytes alive at the worst moment.

One thread a rank. Steps are measured by the clock and by the processor time of the busiest rank; the least of some
steps counts. What is said includes waiting for messages, so that the error to the clock is the one to look at where the
machine does nothing else, the other one where it does. The calibration was chosen by the first nets, not by ``OTHERS``.
"""

import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from seqpar.collectives import all_reduce
from seqpar.consensus import gather_texts
from seqpar.launch.benches.apart import measure_apart
from seqpar.launch.hardware.cpu_speed import this_cpu
from seqpar.launch.models.build import build
from seqpar.launch.models.optimizer import make_optimizer
from seqpar.launch.planning.memory_counter import MemoryCounter
from seqpar.launch.planning.needs import Run, plan
from seqpar.launch.settings.config import Config
from seqpar.losses import DiceCE
from seqpar.rendezvous import start

CHANNELS, CLASSES, STEPS = 2, 3, 4
NET = Config(tile=(48, 48, 48), patch=4, depth=3, embed_dim=192, heads=6, decoder_width=32, batch=1)
CASES = (
    NET,
    replace(NET, tile=(64, 64, 64), depth=2, embed_dim=96, heads=3),
    replace(NET, patch=8, depth=6, embed_dim=384),
    replace(NET, decoder="primus"),
    replace(NET, decoder="unetr", decoder_width=8),
    replace(NET, seqpar=2, mode="halo", attention="gather-kv"),
    replace(NET, seqpar=2, mode="halo", attention="ulysses"),
    replace(NET, seqpar=2, patch=8, depth=6, embed_dim=384, attention="gather-x"),
    replace(NET, seqpar=2, mode="halo", decoder="unetr", decoder_width=8, attention="gather-x"),
)

OTHERS = (
    replace(NET, tile=(32, 32, 32), patch=8, embed_dim=256, depth=4, heads=4, decoder_width=16),
    replace(NET, tile=(64, 48, 32), depth=4, embed_dim=128, heads=8, mlp_ratio=2.0, decoder_width=24),
    replace(NET, tile=(64, 64, 64), patch=16, depth=8, embed_dim=512, heads=8, decoder="unetr", decoder_width=16),
    replace(NET, seqpar=2, tile=(64, 48, 32), depth=4, embed_dim=128, heads=8, mode="halo", attention="gather-kv"),
    replace(NET, seqpar=2, tile=(32, 32, 64), depth=5, embed_dim=240, heads=5, decoder="primus", attention="ulysses"),
)
EVERY = CASES + OTHERS


def rows(turns: int = 2) -> list[dict[str, Any]]:
    """Returns a row per case: predicted and measured seconds and bytes, and how far they lie apart."""
    found: list[list[dict[str, float]]] = [[] for _ in EVERY]
    predicted: list[list[float]] = [[] for _ in EVERY]
    for _ in range(turns):  # the device is measured anew beside the steps
        device = this_cpu("fp32")
        for number, config in enumerate(EVERY):
            run = Run(config, replace(device, cores=config.seqpar), CHANNELS, CLASSES)
            predicted[number].append(plan(run, config.seqpar).step_seconds)
            found[number].append(_measured(number))
    return [_row(config, said, runs) for config, said, runs in zip(EVERY, predicted, found)]


def _row(config: Config, predicted: list[float], found: list[dict[str, float]]) -> dict[str, Any]:
    said, (processor, clock) = min(predicted), (min(f[name] for f in found) for name in ("processor", "clock"))
    memory = plan(Run(config, this_cpu("fp32"), CHANNELS, CLASSES), config.seqpar).memory
    alive = sum(memory[name] for name in ("input", "tokens", "decoder", "transient"))
    return {
        "calibrated": "on it" if config in CASES else "on others",
        "ranks": config.seqpar,
        "tokens": int(torch.tensor([side // config.patch for side in config.tile]).prod()),
        "width": config.embed_dim,
        "decoder": config.decoder,
        "attention": config.attention if config.seqpar > 1 else "",
        "said s": said,
        "processor s": processor,
        "clock s": clock,
        "error": f"{said / processor - 1:+.0%}",
        "error to the clock": f"{said / clock - 1:+.0%}",
        "said MB": alive / 1e6,
        "alive MB": found[0]["alive"] / 1e6,
    }


def _measured(number: int) -> dict[str, float]:
    """Returns one run's seconds and bytes, measured in processes of their own."""
    return measure_apart(__file__, [str(number)], EVERY[number].seqpar, 1)


def _worker(config: Config) -> None:
    torch.set_num_threads(1)
    with start(config.seqpar, device="cpu") as mesh:
        net = build(config, CHANNELS, CLASSES, mesh.seq)
        layout, optimiser, loss = net.encoder.layout, make_optimizer(config, net), DiceCE()
        tokens = (config.batch, layout.counts[mesh.seq.index])
        image = torch.randn(*tokens, CHANNELS, *layout.patch)
        label = torch.randint(0, CLASSES, (*tokens, *layout.patch), dtype=torch.uint8)
        loss_groups = net.mode.loss_groups(None, config.batch)

        def backward() -> None:
            loss(net(image), net.arrange(label), loss_groups).backward()

        with MemoryCounter() as alive:  # gradients count by themselves
            ends = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in net.parameters()]
            backward()
        for end in ends:
            end.remove()
        spent = []
        for _ in range(STEPS):
            began, clock = time.process_time(), time.perf_counter()
            backward()
            for p in net.parameters():
                if p.grad is not None and mesh.world.size > 1:
                    p.grad = all_reduce(p.grad, mesh.world) / mesh.world.size
            optimiser.step()
            optimiser.zero_grad()
            spent.append((time.process_time() - began, time.perf_counter() - clock))
        processor, clock = (min(times) for times in zip(*spent[1:]))
        every = [json.loads(text) for text in gather_texts(json.dumps([processor, clock, alive.most]), mesh.world)]
        if mesh.is_first:
            names = "processor", "clock", "alive"
            print(json.dumps({name: max(values) for name, values in zip(names, zip(*every))}), flush=True)


if __name__ == "__main__":
    _worker(EVERY[int(sys.argv[1])])
