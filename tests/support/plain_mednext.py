"""MedNeXt (Roy et al., MICCAI 2023) of torch's modules alone, with the tensor names of its package."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PlainBlock(nn.Module):
    """A block at one resolution, to half of it ("down"), or to twice ("up")."""

    def __init__(self, channels: int, width: int, ratio: int, kernel: int, how: str = "") -> None:
        super().__init__()
        conv = nn.ConvTranspose3d if how == "up" else nn.Conv3d
        stride = 2 if how else 1
        self.conv1 = conv(channels, channels, kernel, stride, kernel // 2, groups=channels)
        self.norm = nn.GroupNorm(channels, channels)
        self.conv2 = nn.Conv3d(channels, ratio * channels, 1)
        self.conv3 = nn.Conv3d(ratio * channels, width, 1)
        self.how, self.res_conv = how, conv(channels, width, 1, stride) if how else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv3(F.gelu(self.conv2(self.norm(self.conv1(x)))))
        y = y + (x if self.res_conv is None else self.res_conv(x))
        return F.pad(y, (1, 0, 1, 0, 1, 0)) if self.how == "up" else y


class PlainHead(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.conv_out = nn.ConvTranspose3d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_out(x)


class PlainMedNeXt(nn.Module):
    """Returns the logits of all five levels, the finest first, or without deep supervision those of the finest."""

    def __init__(
        self,
        channels: int,
        outputs: int,
        features: int,
        blocks: tuple[int, ...],
        ratios: tuple[int, ...],
        kernel: int,
        supervised: bool,
    ) -> None:
        super().__init__()
        widths = [features << stage for stage in range(5)]

        def row(stage: int) -> nn.Sequential:
            block = (widths[stage], widths[stage], ratios[stage], kernel)
            return nn.Sequential(*(PlainBlock(*block) for _ in range(blocks[stage])))

        self.stem = nn.Conv3d(channels, features, 1)
        for stage in range(4):
            below = widths[stage + 1]
            self.add_module(f"enc_block_{stage}", row(stage))
            self.add_module(f"down_{stage}", PlainBlock(widths[stage], below, ratios[stage + 1], kernel, "down"))
            self.add_module(f"up_{stage}", PlainBlock(below, widths[stage], ratios[stage], kernel, "up"))
            self.add_module(f"dec_block_{stage}", row(stage))
        self.bottleneck = row(4)
        for level in range(5 if supervised else 1):
            self.add_module(f"out_{level}", PlainHead(widths[level], outputs))
        self.dummy_tensor = nn.Parameter(torch.ones(1))
        self.supervised = supervised

    def forward(self, x: Tensor) -> list[Tensor]:
        part, skips = self.get_submodule, []
        x = self.stem(x)
        for stage in range(4):
            x = part(f"enc_block_{stage}")(x)
            skips.append(x)
            x = part(f"down_{stage}")(x)
        x = self.bottleneck(x)
        logits = [part("out_4")(x)] if self.supervised else []
        for level in (3, 2, 1, 0):
            x = part(f"dec_block_{level}")(skips[level] + part(f"up_{level}")(x))
            if self.supervised or level == 0:
                logits.append(part(f"out_{level}")(x))
        return logits[::-1]


def plain_mednext(kernel: int = 3, features: int = 2, supervised: bool = True, seed: int = 0) -> PlainMedNeXt:
    """Returns a small one with the blocks and ratios of size B, in float64, whose norms do not begin at 1 and 0."""
    torch.manual_seed(seed)
    net = PlainMedNeXt(2, 3, features, (2,) * 5, (2, 3, 4, 4, 4), kernel, supervised).double()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if ".norm." in name:
                p += 0.3 * torch.randn_like(p)
    return net
