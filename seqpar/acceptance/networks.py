"""Every network on the device against the CPU, and what a step of one launches and waits for."""

import warnings
from dataclasses import replace

import torch

from seqpar.acceptance.check import MEASURED, Error, Outcome, Site, judged, relative
from seqpar.acceptance.small_networks import CHANNELS, OUTPUTS, SAMPLES, VIT, SmallNetwork, small_networks, step_of
from seqpar.cluster.torch_setup import set_arithmetic
from seqpar.parallel.mesh import Group
from seqpar.planner.launch_counter import LaunchCounter, count_launches

# Of logits, then of loss and gradients: in float32 a value beside a kink or a tie has another gradient.
BOUNDS = {"fp64": (torch.float64, 1e-10, 1e-10), "fp32": (torch.float32, 1e-4, 2e-2)}


def check_networks(site: Site) -> Outcome:
    """Logits, loss and gradients of every network on the device against float64 on the CPU, with the same weights."""
    errors, tf32 = dict[str, Error](), dict[str, float]()
    alone = Group("seq")
    for name, config in small_networks().items():
        exact = step_of(config, alone, torch.device("cpu"), torch.float64)
        for precision, (dtype, bound, bound_of_gradients) in BOUNDS.items():
            step = step_of(config, alone, site.device, dtype)
            errors[f"{name}, {precision}, logits"] = Error(relative(step.logits, exact.logits), bound)
            errors[f"{name}, {precision}, gradients"] = Error(step.error(exact), bound_of_gradients)
        if site.on_gpu:
            set_arithmetic("tf32")
            tf32[name] = relative(step_of(config, alone, site.device, torch.float32).logits, exact.logits)
            set_arithmetic("fp32")
    outcome = judged(errors, {"tf32": tf32} if tf32 else {})
    said = f"; logits in TF32 are off by up to {max(tf32.values()):.1e}" if tf32 else ""
    return replace(outcome, text=outcome.text + said)


def count_a_step(site: Site) -> Outcome:
    """What one step of a small UNETR launches, and how often it waits for the device (seen by torch on a GPU alone).

    Beside it what the same step was counted to launch without a device.
    """
    config = replace(VIT, decoder="unetr", batch=SAMPLES, precision="fp32")
    network = SmallNetwork(config, Group("seq"), site.device, torch.float32)
    network.run()  # makes what is made once
    with LaunchCounter(site.device.type) as counter:
        network.run()
    figures = {"launches": counter.launches.total(), "fetches": counter.fetches.total()}
    figures["launches of a GPU, foretold"] = count_launches(config, 0, CHANNELS, OUTPUTS)[-1].launches
    if site.on_gpu:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                network.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        figures["waits"] = sum("synchroniz" in str(each.message) for each in caught)
    return Outcome(MEASURED, ", ".join(f"{count} {name}" for name, count in figures.items()), figures)
