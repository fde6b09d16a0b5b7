"""Passes whole volumes through a classifier and shows where it looks."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from seqpar.data.boxes import read_box
from seqpar.data.sampling.tiles import middle_of
from seqpar.models.classifier import Classifier
from seqpar.models.network import Network, autocast


def crop_or_pad(image: Tensor | np.ndarray, tile: Sequence[int]) -> Tensor:
    """Returns a prepared image ``c W D H`` as training sees it: padded to the tile, or its middle."""
    first = middle_of(image.shape[1:], tile)
    return read_box(image, first, tile) if isinstance(image, Tensor) else torch.from_numpy(read_box(image, first, tile))


def part_of(net: Network, image: Tensor, device: torch.device) -> Tensor:
    """Returns this rank's part ``b n c p p p`` of a fitted image: one sample, or as many as swap needs, all alike."""
    copies = net.group.size if net.mode.name == "swap" else 1
    batch = image[None].expand(copies, *image.shape)
    part = net.layout.cut(batch, net.group.index)
    return part.to(device, next(net.parameters()).dtype)


def class_logits(nets: Sequence[Network], image: Tensor | np.ndarray, device: torch.device, precision: str) -> Tensor:
    """Returns the mean logits ``k`` of networks for a prepared image, float64, the same on all ranks of the group."""
    every = []
    with torch.no_grad(), autocast(precision, device):
        for net in nets:
            logits = net(part_of(net, crop_or_pad(image, net.layout.tile), device))
            every.append(logits[0].flatten().double())
    return torch.stack(every).mean(0)


def explain(
    nets: Sequence[Network],
    image: Tensor | np.ndarray,
    number: int,
    device: torch.device,
    precision: str,
    way: str = "",
) -> tuple[np.ndarray, tuple[float, ...]]:
    """Returns where networks see a class in a prepared image, ``W D H``: the mean of their maps, up to 1.

    Its maximum, 1, may be outside the image, where the tile is padded. Then how many voxels are between the points of
    a map: what is between them is interpolated.

    - ``number``: of the class
    - ``way``: one of the networks' ways, by default the usual one
    """
    maps, step = [], tuple[float, ...]()
    for net in nets:
        with torch.enable_grad(), autocast(precision, device):
            part = part_of(net, crop_or_pad(image, net.layout.tile), device)
            evidence = cast(Classifier, net).evidence(part, net.layout, number, way)
        fine, step = evidence.on_voxels(net.layout.tile), evidence.step(net.layout.tile)
        maps.append(fine / fine.max().clamp(min=1e-300))
    mean = torch.stack(maps).mean(0).cpu().numpy()
    mean /= max(mean.max(), 1e-300)
    shape = image.shape[1:]
    back = read_box(mean, [-first for first in middle_of(shape, mean.shape)], shape)
    return back.astype(np.float32), step
