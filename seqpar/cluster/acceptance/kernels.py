"""The device's attention kernels and convolutions against float64, and whether they repeat their bits if asked to."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.attention.kernels import LONG, Kernel, kernel_for, kernels_of
from seqpar.cluster.acceptance.check import Error, Outcome, Site, judged, relative
from seqpar.cluster.torch_setup import set_arithmetic
from seqpar.spatial.pooling import AvgPool3d, MaxPool3d, Upsample

WIDTHS = (8, 24, 64, 96, 128)
LENGTHS = ((64, 64), (37, 53), (129, 300), (512, 65), (65, LONG + 1))  # queries, keys
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def check_kernels(site: Site) -> Outcome:
    """Compares forward and backward of the kernel in use with float64, by dtype, head width and lengths.

    For long sequences it compares every other kernel of the device too.
    """
    errors, failed = dict[str, Error](), dict[str, str]()
    torch.manual_seed(0)
    for dtype, bound in BOUNDS.items():
        for width in WIDTHS:
            for queries, keys in LENGTHS:
                sizes = {"q": queries, "k": keys, "v": keys, "grad": queries}
                tensors = {name: torch.randn(2, 3, n, width).to(site.device, dtype) for name, n in sizes.items()}
                picked = kernel_for(tensors["q"], width, keys)
                others = kernels_of(tensors["q"], width) if keys >= LONG else ()
                for kernel in (picked, *(other for other in others if other != picked)):
                    case = f"{str(dtype).removeprefix('torch.')} {kernel.name} width {width}, {queries} x {keys}"
                    try:
                        errors[case] = Error(_attention_error(kernel, tensors), bound)
                    except RuntimeError as error:
                        errors[case], failed[case] = Error(math.inf, bound), str(error).splitlines()[0]
    return judged(errors, {"failed": failed} if failed else {})


def _attention_error(kernel: Kernel, tensors: dict[str, Tensor]) -> float:
    """Returns the largest error of the output and of the gradients."""
    q, k, v, grad = tensors.values()
    out, state = kernel.forward(q, k, v)
    ours = out, *kernel.backward(grad, q, k, v, out, state)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(-1, -2) / q.shape[-1] ** 0.5
    theirs = scores.softmax(-1) @ wide[2]
    gradients = torch.autograd.grad(theirs, wide, grad.double())
    return max(relative(a, b) for a, b in zip(ours, (theirs, *gradients)))


# Channels in and out, and the grid: levels of a tile of 96, the finest level of a whole brain.
ON_GPU = ((4, 16, (96, 96, 96)), (64, 32, (48, 48, 48)), (256, 128, (12, 12, 12)), (16, 16, (240, 240, 156)))
ON_CPU = ((4, 16, (24, 24, 24)), (64, 32, (12, 12, 12)), (16, 16, (40, 40, 26)))


def check_convolutions(site: Site) -> Outcome:
    """Compares bf16 convolutions with float32 ones of the same numbers, in both memory formats."""
    errors = dict[str, Error]()
    torch.manual_seed(0)
    for channels, out, grid in ON_GPU if site.full_size else ON_CPU:
        x = torch.randn(1, channels, *grid, device=site.device).bfloat16()
        weight = (torch.randn(out, channels, 3, 3, 3, device=site.device) / (27 * channels) ** 0.5).bfloat16()
        grad = torch.randn(1, out, *grid, device=site.device).bfloat16()
        exact = _convolved(x.float(), weight.float(), grad.float())
        for layout in (torch.contiguous_format, torch.channels_last_3d):
            halves = _convolved(x.to(memory_format=layout), weight, grad.to(memory_format=layout))
            name = f"{channels} to {out} at {'x'.join(map(str, grid))}, {str(layout).removeprefix('torch.')}"
            errors[name] = Error(max(_norm_error(a, b) for a, b in zip(halves, exact)), 1e-2)
    return judged(errors)


def _convolved(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = F.conv3d(x, weight, padding=1)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad)


def check_repeats(site: Site) -> Outcome:
    """Checks that attention, poolings, upsampling and convolutions give the same bits four times if asked to."""
    torch.manual_seed(0)
    x = torch.randn(2, 16, *(40, 40, 40) if site.full_size else (10, 10, 10), device=site.device)
    layers = {
        "convolution": nn.Conv3d(16, 16, 3, padding=1),
        "transposed convolution": nn.ConvTranspose3d(16, 16, 2, 2),
        "max pooling": MaxPool3d(3, 2, 1),
        "average pooling": AvgPool3d(2, 2),
        "upsampling": Upsample(scale_factor=2, mode="trilinear"),
    }
    keys = 4 * LONG if site.full_size else 64
    attended = [torch.randn(2, 4, keys, 64, device=site.device, dtype=torch.bfloat16) for _ in range(4)]
    set_arithmetic("bf16", deterministic=True)
    try:
        errors = {"attention": _spread(lambda: _attention(*attended))}
        errors |= {name: _spread(partial(_gradients, layer.to(site.device), x)) for name, layer in layers.items()}
    finally:
        set_arithmetic("fp32")
    return judged({name: Error(value, 1e-300) for name, value in errors.items()})


def _attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Sequence[Tensor]:
    kernel = kernel_for(q, q.shape[-1], k.shape[2])
    out, state = kernel.forward(q, k, v)
    return out, *kernel.backward(grad, q, k, v, out, state)


def _gradients(layer: nn.Module, x: Tensor) -> Sequence[Tensor]:
    """Returns the layer's output by autocast to bfloat16, and the gradients of the input and of its parameters."""
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    return y, *torch.autograd.grad(y, (x, *layer.parameters()), torch.cos(y.detach().float()).to(y.dtype))


def _spread(work: Callable[[], Sequence[Tensor]]) -> float:
    """Returns by how much four calls differ from each other."""
    first, *others = (work() for _ in range(4))
    return max(float((a - b).detach().abs().max()) for other in others for a, b in zip(first, other))


def _norm_error(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b).norm() / b.norm())
