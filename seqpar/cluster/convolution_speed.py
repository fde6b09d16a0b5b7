"""Times three of UNETR's convolutions in both memory layouts, and says which setting of MIOpen suits them."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from seqpar.parallel.launcher import MIOPEN_NHWC

NAIVE_SHARE = 0.01  # of the rate of matrix products: below it a convolution has no kernel of its own
WORTH = 1.15  # a layout is recommended where it is so much quicker


@dataclass(frozen=True)
class Shape:
    """A convolution of 3 x 3 x 3: channels in and out, on a cube."""

    channels: int
    out: int
    side: int

    @property
    def operations(self) -> float:
        """Of forward and backward."""
        return 3 * 2.0 * 27 * self.channels * self.out * self.side**3

    def __str__(self) -> str:
        return f"{self.channels} to {self.out} channels on {self.side}x{self.side}x{self.side} voxels"


# The finest level, one in the middle and the one next to the tokens, of tiles of 96; smaller ones on a CPU.
ON_GPU = (Shape(16, 16, 96), Shape(64, 32, 48), Shape(256, 128, 12))
ON_CPU = (Shape(8, 8, 24), Shape(16, 16, 12), Shape(64, 32, 6))


@dataclass(frozen=True)
class Timed:
    """Seconds of a convolution's forward and backward, by layout."""

    shape: Shape
    first_s: float
    last_s: float

    def __str__(self) -> str:
        return (
            f"convolution of {self.shape}: {self.first_s * 1e3:.3g} ms with channels first, "
            f"{self.last_s * 1e3:.3g} ms with channels last"
        )


def time_convolutions(device: torch.device, turns: int = 3) -> list[Timed]:
    """Returns the seconds of each shape in both layouts: in bf16 on a GPU, in float32 on a CPU."""
    on_gpu = device.type == "cuda"
    dtype, layouts = (torch.bfloat16 if on_gpu else torch.float32), (torch.contiguous_format, torch.channels_last_3d)
    timed = []
    for shape in ON_GPU if on_gpu else ON_CPU:
        seconds = [_seconds(shape, device, dtype, layout, turns) for layout in layouts]
        timed.append(Timed(shape, *seconds))
    return timed


def _seconds(shape: Shape, device: torch.device, dtype: torch.dtype, layout: torch.memory_format, turns: int) -> float:
    x = torch.ones(1, shape.channels, *(shape.side,) * 3, device=device, dtype=dtype)
    x = x.to(memory_format=layout).requires_grad_()
    weight = torch.ones(shape.out, shape.channels, 3, 3, 3, device=device, dtype=dtype, requires_grad=True)
    taken = []
    for _ in range(turns + 1):
        _wait(device)
        began = time.perf_counter()
        y = F.conv3d(x, weight, padding=1)
        torch.autograd.grad(y, (x, weight), y)
        _wait(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])  # the first one searches for its kernel


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def advise(
    timed: Sequence[Timed], rocm: bool, matmul_rate: float, env: Mapping[str, str], takes_last: bool
) -> list[str]:
    """Returns which settings of MIOpen to take, and why; none elsewhere.

    - ``matmul_rate``: operations a second of matrix products in the same precision
    - ``takes_last``: whether MIOpen now takes channels last without a copy
    """
    if not rocm:
        return []
    advice = []
    first, last = sum(each.first_s for each in timed), sum(each.last_s for each in timed)
    wants_last = last <= first
    if max(first, last) > WORTH * min(first, last) and takes_last != wants_last:
        quicker, slower = sorted((first, last))
        change = f"export {MIOPEN_NHWC}={int(wants_last)}"
        advice.append(f"{change}: {quicker * 1e3:.3g} ms instead of {slower * 1e3:.3g} ms")
    naive = [each.shape for each in timed if _rate(each) < NAIVE_SHARE * matmul_rate]
    if naive and env.get("MIOPEN_FIND_MODE") != "2":
        advice.append(
            f"export MIOPEN_FIND_MODE=2: the convolution of {naive[0]} runs at under {NAIVE_SHARE:.0%} of the speed "
            "of products, as if MIOpen had found no kernel for it"
        )
    return advice


def _rate(timed: Timed) -> float:
    return timed.shape.operations / min(timed.first_s, timed.last_s)
