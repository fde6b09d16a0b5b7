"""Where a classifier looks: maps of its networks, brought from their coarse grids to that of the prepared image.

Legend: c channels, W D H voxels.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from seqpar.data.boxes import read_box
from seqpar.data.sampling.tiles import middle_of
from seqpar.models.classifier import Classifier
from seqpar.models.network import Net, autocast
from seqpar.tasks.classify.class_logits import fitted, part_of


def explain(
    nets: Sequence[Net], image: Tensor | np.ndarray, number: int, device: torch.device, precision: str, way: str = ""
) -> np.ndarray:
    """Returns where networks see a class in a prepared image, ``W D H``, from 0 to 1: the mean of their maps.

    - ``number``: of the class
    - ``way``: one of the networks' ways, by default the usual one
    """
    maps = []
    for net in nets:
        with torch.enable_grad(), autocast(precision, device):
            part = part_of(net, fitted(image, net.layout.tile), device)
            evidence = cast(Classifier, net).evidence(part, net.layout, number, way)
        fine = evidence.on_voxels(net.layout.tile)
        maps.append(fine / fine.max().clamp(min=1e-300))
    mean = torch.stack(maps).mean(0).cpu().numpy()
    shape = image.shape[1:]
    back = read_box(mean, [-first for first in middle_of(shape, mean.shape)], shape)
    return back.astype(np.float32)
