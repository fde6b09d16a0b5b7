"""Networks of every kind in small: on the device against float64 on the CPU, and what a step launches and waits for."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seqpar.cluster.acceptance.check import MEASURED, Error, Outcome, Site, judged, relative
from seqpar.cluster.torch_setup import set_arithmetic
from seqpar.losses import DiceCE
from seqpar.models.build import NETWORKS, build_network
from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Group
from seqpar.planner.launch_counter import LaunchCounter, count_launches
from seqpar.settings.config import Config

CHANNELS, OUTPUTS, SAMPLES = 2, 3, 2
VIT = Config(
    tile=(12, 8, 8), patch=(4, 4, 4), embed_dim=24, depth=2, heads=2, decoder_width=4, positions="rope", layer_scale=0.5
)
# MedNeXts between the smallest and the largest: slow, and of no other kind
BETWEEN = ("mednext-b", "mednext-m", "mednext-l", "mednext-s-k5", "mednext-b-k5", "mednext-m-k5")
STAGES = "133:111 333:122 333:222 333:211"
# Bounds of logits, and of loss and gradients: in float32 a value next to a kink or a tie has another gradient.
BOUNDS = {"fp64": (torch.float64, 1e-10, 1e-10), "fp32": (torch.float32, 1e-4, 2e-2)}
HALF, HALF_OF_GRADIENTS = 0.2, 0.5  # by autocast to bfloat16: with few features the errors hardly average out


def small_networks() -> dict[str, Config]:
    """Returns a config of each network by name, of MedNeXts the smallest and the largest.

    The vision transformer has one for each decoder.
    """
    configs = {f"vit, {decoder}": replace(VIT, decoder=decoder) for decoder in ("plain", "unetr", "primus")}
    of_stages = replace(VIT, encoder="hierarchical", decoder="unetr", stage_depths=(1, 1), tile=(16, 8, 8))
    configs["vit, hierarchical"] = of_stages
    for name in NETWORKS:
        if name != "vit" and name not in BETWEEN:
            tile, stages = ((16, 8, 12), STAGES) if name.startswith("nnunet") else ((64, 32, 32), "")
            configs[name] = Config(network=name, tile=tile, stages=stages, features=2)
    return configs


@dataclass(frozen=True)
class Step:
    """A training step: this rank's logits, and the loss and the gradients, averaged over the group."""

    logits: Tensor
    loss: Tensor
    gradients: Mapping[str, Tensor]

    def error(self, exact: "Step") -> float:
        """Returns the error of the loss and of all gradients together: single ones that should be zero are noise."""
        names = exact.gradients.keys()
        ours, theirs = (torch.cat([step.gradients[n].flatten() for n in names]) for step in (self, exact))
        loss = float((self.loss - exact.loss).abs() / exact.loss.abs())
        return max(loss, float((ours - theirs).norm() / theirs.norm()))


class SmallNetwork:
    """A network and a batch for it, the same on any number of ranks."""

    def __init__(self, config: Config, group: Group, device: torch.device, dtype: torch.dtype) -> None:
        self.net, self.group = build_network(config, CHANNELS, OUTPUTS, group), group
        dice = torch.Generator().manual_seed(1)
        with torch.no_grad():  # a norm whose weight is 0 would hide what feeds it
            for p in self.net.parameters():
                p.add_(torch.randn(p.shape, generator=dice), alpha=0.1)
        self.net.to(device, dtype)
        image = torch.randn(SAMPLES, CHANNELS, *config.tile, generator=dice, dtype=torch.float64).to(device, dtype)
        label = torch.randint(OUTPUTS, (SAMPLES, *config.tile), generator=dice).to(device)
        self.part = self.net.layout.cut(image, group.index)
        self.target = self.net.arrange(self.net.layout.cut(label, group.index))
        self.loss, self.loss_groups = self.net.training_loss(DiceCE()), self.net.mode.loss_groups(batch=SAMPLES)

    def run(self, in_bf16: bool = False) -> tuple[Tensor, Tensor]:
        """Runs forward, by autocast if ``in_bf16``, and backward; returns the finest logits and this rank's loss."""
        with torch.autocast(self.part.device.type, torch.bfloat16, enabled=in_bf16):
            logits = self.net(self.part)
        loss = self.loss(logits, self.target, self.loss_groups)
        loss.backward()
        return logits[0] if isinstance(logits, list) else logits, loss

    def step(self, in_bf16: bool = False) -> Step:
        """Returns one step, as float64 on the CPU."""
        logits, loss = self.run(in_bf16)
        gradients = {name: self._mean(p.grad) for name, p in self.net.named_parameters() if p.grad is not None}
        return Step(logits.detach().double().cpu(), self._mean(loss), gradients)

    def _mean(self, x: Tensor) -> Tensor:
        return all_reduce(x.detach(), self.group).double().cpu() / self.group.size


def step_of(config: Config, group: Group, device: torch.device, dtype: torch.dtype, in_bf16: bool = False) -> Step:
    """Returns one step of the config's network."""
    return SmallNetwork(config, group, device, dtype).step(in_bf16)


def check_networks(site: Site) -> Outcome:
    """Compares logits, loss and gradients of every kind of network with float64 on the CPU, from the same weights."""
    errors, tf32 = dict[str, Error](), dict[str, float]()
    alone = Group("seq")
    for name, config in small_networks().items():
        exact = step_of(config, alone, torch.device("cpu"), torch.float64)
        for precision, (dtype, bound, bound_of_gradients) in BOUNDS.items():
            step = step_of(config, alone, site.device, dtype)
            errors[f"{name}, {precision}, logits"] = Error(relative(step.logits, exact.logits), bound)
            errors[f"{name}, {precision}, gradients"] = Error(step.error(exact), bound_of_gradients)
        half = step_of(config, alone, site.device, torch.float32, in_bf16=True)
        errors[f"{name}, bf16, logits"] = Error(relative(half.logits, exact.logits), HALF)
        errors[f"{name}, bf16, gradients"] = Error(half.error(exact), HALF_OF_GRADIENTS)
        if site.on_gpu:
            set_arithmetic("tf32")
            tf32[name] = relative(step_of(config, alone, site.device, torch.float32).logits, exact.logits)
            set_arithmetic("fp32")
    outcome = judged(errors, {"tf32": tf32} if tf32 else {})
    said = f"; logits in TF32 differ by up to {max(tf32.values()):.1e}" if tf32 else ""
    return replace(outcome, text=outcome.text + said)


def count_a_step(site: Site) -> Outcome:
    """Counts the launches of a step of a small UNETR, and on a GPU how often it waits for the device.

    Also reports the launches that the planner counts for the same step without a device.
    """
    config = replace(VIT, decoder="unetr", batch=SAMPLES, precision="fp32")
    network = SmallNetwork(config, Group("seq"), site.device, torch.float32)
    network.run()  # creates constants
    with LaunchCounter(site.device.type) as counter:
        network.run()
    figures = {"launches": counter.launches.total(), "fetches": counter.fetches.total()}
    figures["launches planned for a GPU"] = count_launches(config, 0, CHANNELS, OUTPUTS)[-1].launches
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
