"""Every network in small, one training step of it: the loss and all gradients, on any device and group."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seqpar.losses import DiceCE
from seqpar.models.build import NETWORKS, build_network
from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Group
from seqpar.settings.config import Config

CHANNELS, OUTPUTS, SAMPLES = 2, 3, 2
VIT = Config(
    tile=(12, 8, 8), patch=(4, 4, 4), embed_dim=24, depth=2, heads=2, decoder_width=4, positions="rope", layer_scale=0.5
)
STAGES = "133:111 333:122 333:222 333:211"


def small_networks() -> dict[str, Config]:
    """Returns a config of each network, of the Vision Transformer one for each decoder, by name."""
    configs = {f"vit, {decoder}": replace(VIT, decoder=decoder) for decoder in ("plain", "unetr", "primus")}
    of_stages = replace(VIT, encoder="hierarchical", decoder="unetr", stage_depths=(1, 1), tile=(16, 8, 8))
    configs["vit, hierarchical"] = of_stages
    for name in NETWORKS:
        if name != "vit":
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
        """Returns how far loss and gradients are off; gradients together, as those that are zero in truth are noise."""
        names = exact.gradients.keys()
        ours, theirs = (torch.cat([step.gradients[n].flatten() for n in names]) for step in (self, exact))
        loss = float((self.loss - exact.loss).abs() / exact.loss.abs())
        return max(loss, float((ours - theirs).norm() / theirs.norm()))


class SmallNetwork:
    """A network of a config with a batch for it, the same on any number of ranks."""

    def __init__(self, config: Config, group: Group, device: torch.device, dtype: torch.dtype) -> None:
        self.net, self.group = build_network(config, CHANNELS, OUTPUTS, group), group
        dice = torch.Generator().manual_seed(1)
        with torch.no_grad():  # norms that begin at 0 would hide what lies behind them
            for p in self.net.parameters():
                p.add_(torch.randn(p.shape, generator=dice), alpha=0.1)
        self.net.to(device, dtype)
        image = torch.randn(SAMPLES, CHANNELS, *config.tile, generator=dice, dtype=torch.float64).to(device, dtype)
        label = torch.randint(OUTPUTS, (SAMPLES, *config.tile), generator=dice).to(device)
        self.part = self.net.layout.cut(image, group.index)
        self.target = self.net.arrange(self.net.layout.cut(label, group.index))
        self.loss, self.loss_groups = self.net.training_loss(DiceCE()), self.net.mode.loss_groups(batch=SAMPLES)

    def run(self) -> tuple[Tensor, Tensor]:
        """Runs forward and backward; returns the finest logits and the loss of this rank."""
        logits = self.net(self.part)
        loss = self.loss(logits, self.target, self.loss_groups)
        loss.backward()
        return logits[0] if isinstance(logits, list) else logits, loss

    def step(self) -> Step:
        """Returns one step, in float64 on the CPU."""
        logits, loss = self.run()
        gradients = {name: self._mean(p.grad) for name, p in self.net.named_parameters() if p.grad is not None}
        return Step(logits.detach().double().cpu(), self._mean(loss), gradients)

    def _mean(self, x: Tensor) -> Tensor:
        return all_reduce(x.detach(), self.group).double().cpu() / self.group.size


def step_of(config: Config, group: Group, device: torch.device, dtype: torch.dtype) -> Step:
    """Returns one step of a network of a config."""
    return SmallNetwork(config, group, device, dtype).step()
