"""Small convolutions in halves: torch's numbers, forward and backward, for what torch would convolve natively."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.meta_tensors import standing_for
from seqpar.spatial.convolution import Conv3d
from seqpar.spatial.cpu_convolution import ConvOptions, convolve, gradients, is_halved
from tests.support.ranks import relative


def numbers(stride: int = 1, padding: int = 1, dilation: int = 1) -> ConvOptions:
    return ConvOptions((stride,) * 3, (padding,) * 3, (dilation,) * 3, False, (0,) * 3, 1)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "shape, kernel, options",
    [
        ((6, 5, 4), 3, numbers()),
        ((5, 6, 4), 3, numbers()),  # the first dimension is odd
        ((7, 7, 9), 2, numbers(padding=0)),
        ((8, 9, 7), 3, numbers(stride=2)),
        ((9, 9, 8), 3, numbers(padding=2, dilation=2)),
    ],
)
def test_halves_are_the_whole(shape: tuple, kernel: int, options: ConvOptions, last: bool) -> None:
    order = torch.channels_last_3d if last else torch.contiguous_format
    x = torch.randn(1, 3, *shape).contiguous(memory_format=order).requires_grad_()
    weight, bias = torch.randn(4, 3, *[kernel] * 3, requires_grad=True), torch.randn(4, requires_grad=True)
    y = F.conv3d(x.double(), weight.double(), bias.double(), *(n[0] for n in (options.stride, options.padding)),
                 dilation=options.dilation)  # fmt: skip
    grad = torch.randn(y.shape)
    want = torch.autograd.grad((y * grad).sum(), (x, weight, bias))
    assert is_halved(x, weight, options)
    with torch.no_grad():
        assert relative(convolve(x, weight, bias, options).double(), y.detach()) < 1e-5
        got = gradients(grad, x, weight, True, options, (True, True, True))
    assert all(relative(a.double(), b.double()) < 1e-5 for a, b in zip(got, want))  # type: ignore[union-attr]
    assert gradients(grad, x.detach(), weight.detach(), False, options, (False, True, False))[0] is None


def test_only_what_torch_convolves_natively_is_halved() -> None:
    def asked(x: Tensor, side: int = 3, options: ConvOptions | None = None) -> bool:
        return is_halved(x, torch.empty(4, x.shape[1], *[side] * 3, device=x.device), options or numbers())

    small = torch.empty(1, 128, 12, 12, 12)
    assert asked(small)
    assert not asked(torch.empty(1, 144, 12, 12, 12)), "more than 20,480: oneDNN's already"
    assert not asked(torch.empty(2, 128, 12, 12, 12)), "two samples: oneDNN's already"
    assert not asked(small, side=1) and not asked(small, side=5)
    assert not asked(torch.empty(1, 128, 7, 7, 7)), "nothing even"
    assert not asked(small.double()) and not asked(small.bfloat16())
    with standing_for("cpu"):
        assert asked(small.to("meta"))
    with standing_for("cuda"):
        assert not asked(small.to("meta"))


@pytest.mark.parametrize("padding", [1, "same"])
def test_a_layer_of_one_process_takes_halves_and_saves_its_input_alone(padding: int | str) -> None:
    layer, x = Conv3d(8, 4, 3, padding=padding), torch.randn(1, 8, 6, 6, 6, requires_grad=True)
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y, _ = layer(x)
    assert "_Convolve" in type(y.grad_fn).__name__
    assert {t.untyped_storage()._cdata for t in saved} == {t.untyped_storage()._cdata for t in (x, layer.weight)}
    want = F.conv3d(x, layer.weight, layer.bias, padding=1)
    slope = torch.randn_like(want)
    leaves = x, layer.weight, layer.bias
    for a, b in zip(torch.autograd.grad((y * slope).sum(), leaves), torch.autograd.grad((want * slope).sum(), leaves)):
        assert relative(a, b) < 1e-5
