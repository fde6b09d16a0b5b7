"""Measures the device's speed and memory: figures for the record, without a verdict."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqpar.attention.kernels import kernel_for
from seqpar.cluster.acceptance.check import MEASURED, Outcome, Site
from seqpar.cluster.convolution_speed import time_convolutions
from seqpar.cluster.devices import GIB, device_here
from seqpar.losses import DiceCE
from seqpar.models.build import build_network
from seqpar.optimization.optimizers import make_optimizer
from seqpar.parallel.mesh import Group
from seqpar.planner.needs import RunToPlan, plan_complete_config
from seqpar.settings.config import Config
from seqpar.settings.presets import PRESETS

TURNS, CHANNELS, OUTPUTS = 3, 4, 4
WARM_UPS, WARM_S = 6, 10.0  # uncounted calls: until there are six, or until ten seconds have passed
KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def seconds_of(work: Callable[[], Any], site: Site) -> float:
    """Returns the median seconds of ``TURNS`` calls after warm-ups, in which memory grows and kernels are loaded."""
    taken = list[float]()
    while len(taken) < WARM_UPS and sum(taken) < WARM_S:
        taken.append(_seconds(work, site))
    return statistics.median(_seconds(work, site) for _ in range(TURNS))


def _seconds(work: Callable[[], Any], site: Site) -> float:
    _wait(site)
    began = time.perf_counter()
    work()
    _wait(site)
    return time.perf_counter() - began


def _wait(site: Site) -> None:
    if site.on_gpu:
        torch.cuda.synchronize(site.device)


def measure_steps(site: Site) -> Outcome:
    """Times steps of the presets: seconds, MFU, and on a GPU peak memory next to the planned one."""
    figures = dict[str, Any]()
    for name, config in step_configs().items():
        config = replace(config, batch=1, attention="gather-kv")
        if not site.full_size:
            config = replace(config, tile=(32, 32, 32), patch=(8, 8, 8), embed_dim=96, heads=config.heads // 3)
            config = replace(config, depth=2, precision=config.precision if site.on_gpu else "fp32")
        plan = plan_complete_config(RunToPlan(config, device_here(site.device.type), CHANNELS, OUTPUTS), 1)
        if site.on_gpu and plan.total > torch.cuda.get_device_properties(site.device).total_memory:
            figures[name] = {"seconds": None, "planned_gib": plan.total / GIB}
            continue
        seconds, peak = _step(config, site)
        row = {"seconds": seconds, "mfu": plan.mfu * plan.step_seconds / seconds, "planned_gib": plan.total / GIB}
        figures[name] = row | ({"peak_gib": peak / GIB} if site.on_gpu else {})
    return Outcome(MEASURED, "; ".join(_words(name, row) for name, row in figures.items()), figures)


def _words(name: str, row: Mapping[str, float | None]) -> str:
    if row["seconds"] is None:
        return f"{name} needs {row['planned_gib']:.0f} GiB, more than there is"
    memory = f", {row['peak_gib']:.2f} GiB ({row['planned_gib']:.2f} planned)" if "peak_gib" in row else ""
    return f"{name} {row['seconds']:.3g} s a step" + (f", MFU {row['mfu']:.0%}{memory}" if memory else "")


def step_configs() -> dict[str, Config]:
    """Returns the settings whose steps are timed: presets, and ViT-B at the smallest patch of the paper."""
    modern = PRESETS["modern"]()
    fine = replace(modern, patch=(4, 4, 4))
    return {
        "paper": PRESETS["paper"](),
        "modern": modern,
        "modern, 6 heads": replace(modern, heads=6),
        "patch 4": fine,
        "patch 4, whole brain": replace(fine, tile=(240, 240, 160), grad_checkpoint="full"),
    }


def _step(config: Config, site: Site) -> tuple[float, float]:
    """Returns the seconds of a training step, and torch's peak of reserved bytes on a GPU."""
    net = build_network(config, CHANNELS, OUTPUTS, Group("seq")).to(site.device)
    optimizer, loss = make_optimizer(net, config.optimizer_options), net.training_loss(DiceCE())
    image = torch.randn(1, CHANNELS, *config.tile, device=site.device)
    label = torch.zeros(1, *config.tile, dtype=torch.uint8, device=site.device)
    part, target = net.layout.cut(image, 0), net.arrange(net.layout.cut(label, 0))
    groups = net.mode.loss_groups(batch=1)

    def step() -> None:
        with torch.autocast(site.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            logits = net(part)
        loss(logits, target, groups).backward()
        optimizer.step()
        optimizer.zero_grad()

    if site.on_gpu:
        torch.cuda.reset_peak_memory_stats(site.device)
    seconds = seconds_of(step, site)
    return seconds, float(torch.cuda.max_memory_reserved(site.device)) if site.on_gpu else 0.0


def measure_attention(site: Site) -> Outcome:
    """Times attention of one of eight ranks that share a whole brain, by kernel and by heads at a time."""
    queries, keys, heads = (17550, 140400, 12) if site.full_size else (256, 1024, 4)
    dtype = torch.bfloat16 if site.on_gpu else torch.float32
    q, grad = (torch.randn(1, heads, queries, 64, device=site.device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(1, heads, keys, 64, device=site.device, dtype=dtype) for _ in range(2))
    figures = dict[str, Any]()
    for name in KERNELS[: None if keys < 10000 else -1]:  # plain attention would store all scores
        figures[name.lower()] = _by_backend(getattr(SDPBackend, name, None), (q, k, v, grad), site)
    ours = kernel_for(q, 64, keys)

    def in_chunks(size: int) -> None:
        for begin in range(0, heads, size):
            end = begin + size
            q_part, k_part, v_part = (x[:, begin:end] for x in (q, k, v))
            out, state = ours.forward(q_part, k_part, v_part)
            ours.backward(grad[:, begin:end], q_part, k_part, v_part, out, state)

    chunks = [size for size in (1, 2, 3, 4, 6, 12) if heads % size == 0]
    figures["heads_at_a_time"] = {str(size): seconds_of(partial(in_chunks, size), site) for size in chunks}
    best = min(figures["heads_at_a_time"].items(), key=lambda pair: pair[1])
    words = [f"{name} {seconds:.3g} s" for name, seconds in figures.items() if isinstance(seconds, float)]
    words.append(f"ours ({ours.name}) {best[1]:.3g} s with {best[0]} heads at a time")
    return Outcome(MEASURED, f"{queries:,} x {keys:,}: {', '.join(words)}", figures)


def _by_backend(backend: Any, tensors: tuple[torch.Tensor, ...], site: Site) -> float | str:
    """Returns the seconds of torch's attention by one of its kernels, or why it cannot run."""
    if backend is None:
        return "not in this torch"
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])

    def work() -> None:
        with sdpa_kernel(backend):
            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), tensors[3])

    try:
        return seconds_of(work, site)
    except RuntimeError as error:
        return str(error).splitlines()[0][:100]


def measure_convolutions(site: Site) -> Outcome:
    """Times UNETR's convolutions in both memory formats, with and without cuDNN's search for the fastest kernel."""
    figures, words = dict[str, Any](), []
    before = torch.backends.cudnn.benchmark
    try:
        for searches in (False, True) if site.on_gpu else (False,):
            torch.backends.cudnn.benchmark = searches
            for each in time_convolutions(site.device):
                name = f"{each.shape}{', searched' if searches else ''}"
                figures[name] = {"channels_first_s": each.first_s, "channels_last_s": each.last_s}
                words.append(f"{name}: {each.first_s * 1e3:.3g}, {each.last_s * 1e3:.3g} ms")
    finally:
        torch.backends.cudnn.benchmark = before
    return Outcome(MEASURED, "channels first, last: " + "; ".join(words), figures)
