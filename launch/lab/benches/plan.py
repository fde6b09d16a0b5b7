"""The planner against measurement on this machine: seconds a step and the bytes alive at the worst moment.

One thread a rank. Steps are timed by the clock and by the processor time of the busiest rank; the fastest step counts.
The planner uses its own measurement of cores and the doctor's of links, and was calibrated on ``CASES``, not on
``OTHERS``. The planned seconds include waiting for messages: compare them with the clock on an idle machine, with the
processor time on a busy one. ``published`` plans what nnU-Net has published of its own networks on an A100; ``answers``
times the planner itself.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from lab.benches.memory import average_gradients
from lab.benches.series import LAUNCH, Row, Runs, Series, alternate, measure_apart
from seqpar.cluster.cpu_speed import measure_cpu
from seqpar.cluster.devices import DEVICES, Device, measured, usable_cores
from seqpar.cluster.link_speed import measure_groups
from seqpar.cluster.torch_setup import keep_memory
from seqpar.losses import DiceCE
from seqpar.models.build import build_network
from seqpar.optimization.optimizers import make_optimizer
from seqpar.parallel.consensus import gather_texts
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.rendezvous import start
from seqpar.planner.memory_counter import MemoryCounter
from seqpar.planner.needs import RunToPlan, plan
from seqpar.settings.config import Config
from seqpar.settings.presets import PRESETS
from seqpar.text import format_sides

CHANNELS, CLASSES, STEPS = 2, 3, 4
NET = Config(tile=(48, 48, 48), patch=(4, 4, 4), depth=3, embed_dim=192, heads=6, decoder_width=32, batch=1)
CASES = (
    NET,
    replace(NET, tile=(64, 64, 64), depth=2, embed_dim=96, heads=3),
    replace(NET, patch=(8, 8, 8), depth=6, embed_dim=384),
    replace(NET, decoder="primus"),
    replace(NET, decoder="unetr", decoder_width=8),
    replace(NET, seqpar=2, mode="halo", attention="gather-kv"),
    replace(NET, seqpar=2, mode="halo", attention="ulysses"),
    replace(NET, seqpar=2, patch=(8, 8, 8), depth=6, embed_dim=384, attention="gather-x"),
    replace(NET, seqpar=2, mode="halo", decoder="unetr", decoder_width=8, attention="gather-x"),
)
OTHERS = (
    replace(NET, tile=(32, 32, 32), patch=(8, 8, 8), embed_dim=256, depth=4, heads=4, decoder_width=16),
    replace(NET, tile=(64, 48, 32), depth=4, embed_dim=128, heads=8, mlp_ratio=2.0, decoder_width=24),
    replace(
        NET, tile=(64, 64, 64), patch=(16, 16, 16), depth=8, embed_dim=512, heads=8, decoder="unetr", decoder_width=16
    ),
    replace(NET, seqpar=2, tile=(64, 48, 32), depth=4, embed_dim=128, heads=8, mode="halo", attention="gather-kv"),
    replace(NET, seqpar=2, tile=(32, 32, 64), depth=5, embed_dim=240, heads=5, decoder="primus", attention="ulysses"),
    replace(NET, seqpar=4, tile=(64, 48, 32), depth=4, embed_dim=128, heads=8, mode="halo", attention="gather-kv"),
    replace(NET, seqpar=4, depth=4, embed_dim=144, heads=4, decoder_width=16, mode="halo", attention="ulysses"),
)
EVERY = CASES + OTHERS
PLAN = LAUNCH / "plan.py"
COMMANDS = (
    "--volume 512 512 300 --patch 8 --classes 15 --channels 1 --device a100 --memory 40",
    "--tile 240 240 155 --patch 4 --preset modern --device mi250x",
    "--tile 128 --patch 4 --preset paper --device h100",
)
ERRORS = "error", "error to the clock"

# nnU-Net's documentation/resenc_presets.md: GB by nvidia-smi, hours of 1,000 epochs on an A100 of 40 GB. The tiles are
# what its planners choose for LiTS (432 x 512 x 512 voxels of 1 x 0.77 x 0.77 mm), two in a batch.
PUBLISHED = {
    "nnU-Net": ("nnunet-plain", (128, 128, 128), 7.70, 9),
    "ResEnc M": ("nnunet-resenc", (128, 128, 128), 9.10, 12),
    "ResEnc L": ("nnunet-resenc", (160, 224, 192), 22.70, 35),
    "ResEnc XL": ("nnunet-resenc", (192, 256, 256), 36.60, 66),
}
EPOCHS, TRAINED, VALIDATED = 1000, 250, 50  # steps of an epoch; one of validation is a forward, a third of a step


def series(quick: bool = False) -> list[Series]:
    """Returns one series: every network; if quick, those on which the planner was not calibrated."""
    configs = OTHERS if quick else EVERY
    cases = {_name(config): config for config in configs}

    def measure(turns: int) -> Generator[tuple[str, dict[str, float]], None, None]:
        for _ in range(turns):
            devices = {size: _device(size) for size in {config.seqpar for config in configs}}  # again in each turn
            for name, config in cases.items():
                need = plan(RunToPlan(config, devices[config.seqpar], CHANNELS, CLASSES), config.seqpar)
                alive = sum(need.memory[kind] for kind in ("input", "tokens", "decoder", "transient"))
                yield name, {"planned_s": need.step_seconds, "planned_bytes": alive, **_measured(EVERY.index(config))}

    turns = 1 if quick else 2
    what = "the planner's seconds and bytes of a training step against measured ones"
    return [
        Series(
            what,
            tuple(cases),
            turns,
            12.0 * len(cases),
            measure,
            lambda name, runs: _row(cases[name], runs[name]),
            spread_of_errors,
        )
    ]


def _device(ranks: int) -> Device:
    """Returns the device that ``ranks`` ranks share: cores as the planner measures them, links as the doctor does."""
    busy = min(ranks, usable_cores())
    device = replace(measure_cpu("fp32", busy), cores=busy)
    if ranks == 1:
        return device
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "doctor.json"
        record.write_text(json.dumps(measure_apart("plan", ["links", str(ranks)], ranks, 1)))
        return measured(str(record), device, "fp32")


def _name(config: Config) -> str:
    sizes = f"tile {'x'.join(map(str, config.tile))}, patch {format_sides(config.patch, 'x')}, width {config.embed_dim}"
    name = f"{config.decoder}, {sizes}"
    return f"{name}, {config.seqpar} ranks, {config.attention}" if config.seqpar > 1 else name


def _row(config: Config, runs: Sequence[dict[str, float]]) -> Row:
    """Returns a network's row from the fastest turn, both of the plan and of the steps.

    If ranks share a core, each of them computes for only its share of the planned seconds.
    """
    planned, processor, clock = (min(run[name] for run in runs) for name in ("planned_s", "processor", "clock"))
    working = planned * min(1.0, usable_cores() / config.seqpar)
    return {
        "calibrated": "on it" if config in CASES else "on others",
        "ranks": config.seqpar,
        "tokens": math.prod(side // p for side, p in zip(config.tile, config.patch)),
        "width": config.embed_dim,
        "decoder": config.decoder,
        "attention": config.attention if config.seqpar > 1 else "",
        "planned s": planned,
        "processor s": processor,
        "clock s": clock,
        "error": f"{working / processor - 1:+.0%}",
        "error to the clock": f"{planned / clock - 1:+.0%}",
        "planned MB": runs[0]["planned_bytes"] / 1e6,
        "alive MB": runs[0]["alive"] / 1e6,
    }


def spread_of_errors(rows: Sequence[Row]) -> str:
    """Returns mean and worst errors by number of ranks, for all networks and for those not used in calibration."""
    said = []
    for where in ("on others", "all"):
        chosen = [row for row in rows if where in (row["calibrated"], "all")]
        for ranks in sorted({row["ranks"] for row in chosen}):
            of_ranks = [row for row in chosen if row["ranks"] == ranks]
            errors = {name: [abs(int(row[name].rstrip("%"))) for row in of_ranks] for name in ERRORS}
            means = [f"mean {statistics.mean(values):.0f} %, worst {max(values)} %" for values in errors.values()]
            count = f"{ranks} rank{'s' * (ranks > 1)}, {len(of_ranks)} net{'s' * (len(of_ranks) > 1)}"
            said.append(f"{where}, {count}: {means[0]}; to the clock {means[1]}")
    return f"Errors {'. '.join(said)}."


def _measured(number: int) -> dict[str, float]:
    """Returns one run's seconds and bytes, measured in new processes."""
    return measure_apart("plan", ["net", str(number)], EVERY[number].seqpar, 1)


def _measure_links(ranks: int) -> None:
    """Prints, on the first rank, what the doctor's JSON file says of links."""
    torch.set_num_threads(1)
    with start(ranks, device="cpu") as mesh:
        groups = measure_groups(mesh)
        if mesh.is_first:
            print(json.dumps({"matmul_flops_per_s": {}, "groups": groups, "world": ranks}), flush=True)


def _worker(config: Config) -> None:
    """Measures one config; every rank runs it and the first one prints the maxima over ranks."""
    torch.set_num_threads(1)
    keep_memory()  # as in training
    with start(config.seqpar, device="cpu") as mesh:
        net = build_network(config, CHANNELS, CLASSES, mesh.seq)
        layout, loss_of = net.layout, DiceCE()
        tokens = (config.batch, layout.counts[mesh.seq.index])
        image = torch.randn(*tokens, CHANNELS, *layout.patch)
        label = torch.randint(0, CLASSES, (*tokens, *layout.patch), dtype=torch.uint8)
        loss_groups = net.mode.loss_groups(None, config.batch)

        def backward() -> None:
            loss_of(net(image), net.arrange(label), loss_groups).backward()

        alive = _bytes_alive(net, backward)
        processor, clock = _fastest_step(config, net, backward, mesh)
        ranks = [json.loads(text) for text in gather_texts(json.dumps([processor, clock, alive]), mesh.world)]
        if mesh.is_first:
            names = "processor", "clock", "alive"
            print(json.dumps({name: max(values) for name, values in zip(names, zip(*ranks))}), flush=True)


def _bytes_alive(net: nn.Module, backward: Callable[[], None]) -> int:
    """Returns the peak of bytes alive in forward and backward, without gradients, which are planned separately."""
    hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in net.parameters()]
    with MemoryCounter() as counter:
        backward()
    for hook in hooks:
        hook.remove()
    return counter.most


def _fastest_step(config: Config, net: nn.Module, backward: Callable[[], None], mesh: Mesh) -> tuple[float, float]:
    """Returns the smallest processor and clock seconds of ``STEPS`` steps, not counting the first."""
    optimizer = make_optimizer(net, config.optimizer_options)
    times = []
    for _ in range(STEPS):
        processor, clock = time.process_time(), time.perf_counter()
        backward()
        average_gradients(net, mesh)
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.process_time() - processor, time.perf_counter() - clock))
    least_processor, least_clock = map(min, zip(*times[1:]))
    return least_processor, least_clock


def published(quick: bool = False) -> list[Series]:
    """Returns one series: nnU-Net's four networks, or two if quick. Nothing is timed: any machine gives the same."""
    cases = tuple(PUBLISHED)[: 2 if quick else None]

    def measure(turns: int) -> Generator[tuple[str, Row], None, None]:
        return alternate(cases, planned_as_published, turns)

    what = "what nnU-Net has published of its networks on an A100, and what the planner says of ours in 16 bits"
    return [Series(what, cases, 1, 4.0 * len(cases), measure, lambda case, runs: {"network": case, **runs[case][0]})]


def planned_as_published(case: str) -> Row:
    """Returns memory and hours of a network, as planned and as published."""
    network, tile, published_gb, published_hours = PUBLISHED[case]
    config = replace(PRESETS["nnunet"](), network=network, tile=tile, precision="bf16")
    need = plan(RunToPlan(config, DEVICES["a100"], 1, 3), 1)
    steps = EPOCHS * (TRAINED + VALIDATED / 3)
    planned_gb, planned_hours = need.total / 2**30, need.step_seconds * steps / 3600
    return {
        "tile": format_sides(tile, "x"),
        "planned GB": planned_gb,
        "published GB": published_gb,
        "error": f"{planned_gb / published_gb - 1:+.0%}",
        "planned hours": planned_hours,
        "published hours": published_hours,
        "error of hours": f"{planned_hours / published_hours - 1:+.0%}",
    }


def answers(quick: bool = False) -> list[Series]:
    """Returns one series: every command line, or two of them if quick."""
    cases = COMMANDS[:2] if quick else COMMANDS
    what = "seconds until the planner's first row and until its whole answer, on one core"

    def measure(turns: int) -> Generator[tuple[str, Row], None, None]:
        return alternate(cases, timed_answer, turns)

    return [Series(what, cases, 1, 40.0 * len(cases), measure, _answer_row)]


def _answer_row(case: str, runs: Runs) -> Row:
    """Returns the fastest turn of a command line."""
    return {"plan": case, **min(runs[case], key=lambda run: float(run["whole answer s"]))}


def timed_answer(flags: str) -> Row:
    """Returns how long ``plan.py`` takes with these flags, in a new process on one core."""
    began, first_s, sizes, answer = time.perf_counter(), 0.0, 0, ""
    core = {min(os.sched_getaffinity(0))}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(PLAN), *flags.split()],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, core),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            answer = line.strip() or answer
            if line.strip().partition(" ")[0].isdigit():
                sizes += 1
                first_s = first_s or time.perf_counter() - began
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "first row s": first_s,
        "whole answer s": time.perf_counter() - began,
        "processor s": usage.ru_utime + usage.ru_stime,
        "sizes counted": sizes,
        "exit code": process.returncode,
        "answer": answer,
    }


if __name__ == "__main__":
    if sys.argv[1] == "links":
        _measure_links(int(sys.argv[2]))
    else:
        _worker(EVERY[int(sys.argv[2])])
