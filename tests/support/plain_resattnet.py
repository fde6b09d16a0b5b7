"""3D-ResAttNet once more, of torch's functions alone, from weights by name: the reference of the network on boxes."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


def logits_of(image: Tensor, weights: Weights, blocks: Sequence[int]) -> Tensor:
    """Returns logits ``b k`` of images ``b c W D H``, by the batch's statistics; attention is where weights are."""
    x = F.max_pool3d(_layer(image, weights, "stem", stride=2).relu(), 3, 2, 1)
    for stage, count in enumerate(blocks):
        for number in range(count):
            x = _block(x, weights, f"stage{stage}_{number}", 2 if stage and not number else 1)
            x = _attend(x, weights, f"attention{stage}_{number}")
    x = _attend(x, weights, "attention")
    return x.mean((2, 3, 4)) @ weights["cells.classes.linear.weight"].T + weights["cells.classes.linear.bias"]


def _layer(x: Tensor, weights: Weights, name: str, stride: int = 1) -> Tensor:
    kernel = weights[f"cells.{name}.conv.weight"]
    x = F.conv3d(x, kernel, None, stride, kernel.shape[-1] // 2)
    mean, variance = x.mean((0, 2, 3, 4), keepdim=True), x.var((0, 2, 3, 4), keepdim=True, correction=0)
    factor, shift = (weights[f"cells.{name}.norm.{which}"].view(1, -1, 1, 1, 1) for which in ("weight", "bias"))
    return (x - mean) / torch.sqrt(variance + 1e-5) * factor + shift


def _block(x: Tensor, weights: Weights, name: str, stride: int) -> Tensor:
    y = _layer(_layer(x, weights, f"{name}.first", stride).relu(), weights, f"{name}.second")
    if f"cells.{name}.shortcut.conv.weight" in weights:
        x = _layer(x, weights, f"{name}.shortcut", stride)
    return (x + y).relu()


def _attend(x: Tensor, weights: Weights, cell: str) -> Tensor:
    """One matrix of scores over all voxels, a loop over nothing."""
    if f"cells.{cell}.weight" not in weights:
        return x

    def mixed(t: Tensor, name: str) -> Tensor:
        matrix, bias = weights[f"cells.{cell}.{name}.weight"], weights.get(f"cells.{cell}.{name}.bias")
        y = torch.einsum("oc,bcn->bon", matrix[:, :, 0, 0, 0], t)
        return y if bias is None else y + bias[:, None]

    voxels = x.flatten(2)  # b c n
    query, key, value = (mixed(voxels, name) for name in ("query", "key", "value"))
    scores = torch.einsum("bcn,bcm->bnm", query, key) / query.shape[1] ** 0.5
    taken = mixed(torch.einsum("bnm,bcm->bcn", scores.softmax(2), value), "out")
    return x + weights[f"cells.{cell}.weight"] * taken.view_as(x)
