"""U-Nets that others wrote, and one of torch's modules alone, for comparison with ours.

``dynamic-network-architectures`` (nnU-Net's own) is taken where it is installed; a plain install of it brings another
torch, ``pip install --no-deps`` does not.
"""

import importlib.util
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from seqpar.decoders.unets.architecture import ONE, Architecture, Three, three


class PlainUNet(nn.Module):
    """nnU-Net's PlainConvUNet of torch's own modules: convolution, instance norm, leaky ReLU; no box knows of it."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        widths = (a.in_channels, *a.features)
        self.down = nn.ModuleList(
            nn.Sequential(*_blocks(channels, width, count, kernel, stride))
            for (channels, width), count, kernel, stride in zip(
                itertools.pairwise(widths), a.encoder, a.kernels, a.strides
            )
        )
        levels = list(reversed(range(len(a.features) - 1)))
        self.ups = nn.ModuleList(
            nn.ConvTranspose3d(a.features[level + 1], a.features[level], stride, stride)
            for level in levels
            for stride in [a.strides[level + 1]]
        )
        self.joins = nn.ModuleList(
            nn.Sequential(*_blocks(2 * a.features[level], a.features[level], count, a.kernels[level], ONE))
            for level, count in zip(levels, a.decoder)
        )
        self.classes = nn.Conv3d(a.features[0], a.num_outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
        for up, join, skip in zip(self.ups, self.joins, reversed(skips[:-1])):
            x = join(torch.cat([up(x), skip], 1))
        logits: Tensor = self.classes(x)
        return logits


def _blocks(channels: int, width: int, count: int, kernel: Three, stride: Three) -> list[nn.Module]:
    layers, padding = list[nn.Module](), three([side // 2 for side in kernel])
    for number in range(count):
        conv = nn.Conv3d(width if number else channels, width, kernel, ONE if number else stride, padding)
        layers += [conv, nn.InstanceNorm3d(width, affine=True), nn.LeakyReLU(inplace=True)]
    return layers


def _nnunets_own(a: Architecture) -> nn.Module:
    from dynamic_network_architectures.architectures.unet import (  # type: ignore[import-not-found, unused-ignore]
        PlainConvUNet,
    )

    net: nn.Module = PlainConvUNet(
        a.in_channels, len(a.features), a.features, nn.Conv3d, a.kernels, a.strides, a.encoder, a.num_outputs,
        a.decoder, conv_bias=True, norm_op=nn.InstanceNorm3d, norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True},
    )  # fmt: skip
    return net


def _basic(a: Architecture) -> nn.Module:
    from monai.networks.nets import BasicUNet  # type: ignore[import-not-found, unused-ignore]

    net: nn.Module = BasicUNet(3, a.in_channels, a.num_outputs)
    return net


def _dynamic(a: Architecture) -> nn.Module:
    from monai.networks.nets import DynUNet  # type: ignore[import-not-found, unused-ignore]

    norm = ("INSTANCE", {"affine": True})
    net: nn.Module = DynUNet(
        3, a.in_channels, a.num_outputs, a.kernels, a.strides, a.strides[1:], a.features, norm_name=norm
    )
    return net


PEERS: dict[str, tuple[str, Callable[[Architecture], nn.Module]]] = {  # name → the package it needs, and how it is made
    "dynamic-network-architectures": ("dynamic_network_architectures", _nnunets_own),
    "torch's own modules": ("torch", PlainUNet),
    "MONAI DynUNet": ("monai", _dynamic),
    "MONAI BasicUNet": ("monai", _basic),
}


def peers_here() -> list[str]:
    """Returns the peers whose package is installed."""
    return [name for name, (package, _) in PEERS.items() if importlib.util.find_spec(package)]


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Gives a network of the same layers the weights of another, kind by kind in order; heads from the finest on."""
    for ours, theirs in zip(_by_kind(target), _by_kind(source)):
        for a, b in zip(ours, theirs):
            a.load_state_dict(b.state_dict())


def _by_kind(net: nn.Module) -> list[list[nn.Module]]:
    """Returns convolutions, transposed ones, norms, and heads, the finest first, each in order."""
    convs, ups, norms, heads = list[nn.Module](), list[nn.Module](), list[nn.Module](), list[nn.Module]()
    for module in net.modules():
        if isinstance(module, nn.ConvTranspose3d):
            ups.append(module)
        elif isinstance(module, nn.InstanceNorm3d):
            norms.append(module)
        elif isinstance(module, nn.Conv3d):
            (heads if max(module.kernel_size) == 1 else convs).append(module)
    return [convs, ups, norms, heads[::-1]]
