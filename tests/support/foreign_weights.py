"""Tiny weights of MONAI's UNETR, images for them, and outputs without gradients."""

import torch
from torch import Tensor, nn

from tests.support import references

TILE, HEADS = (32, 32, 16), 4
TINY = {"c": 2, "k": 3, "patch": 16, "grid": (2, 2, 1), "f": 3, "e": 24, "hidden": 40}


def image(*sides: int, c: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns two random images ``b c W D H`` (or ``b c W D``), always the same."""
    return torch.randn(2, c, *sides, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def tiny_unetr(seed: int = 0, dtype: torch.dtype = torch.float64, **changed: object) -> references.State:
    """Returns random weights of a small UNETR under MONAI's names; ``changed`` are its other sizes."""
    return references.draw(references.unetr_shapes(**{**TINY, **changed}), seed, dtype)  # type: ignore[arg-type]


@torch.no_grad()
def out(net: nn.Module, x: Tensor) -> Tensor:
    """Returns the network's output in evaluation mode."""
    return net.eval()(x)
