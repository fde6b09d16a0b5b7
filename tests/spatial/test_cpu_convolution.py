"""Convolutions on a CPU: torch's numbers where they are halved, and where weights get their gradients slab by slab."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.parallel.meta_tensors import meta_as_device
from seqpar.spatial import cpu_convolution
from seqpar.spatial.convolution import Conv3d, ConvTranspose3d
from seqpar.spatial.cpu_convolution import ConvOptions, convolve, gradients, uses_own_kernel
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
    assert uses_own_kernel(x, weight, options)
    with torch.no_grad():
        assert relative(convolve(x, weight, bias, options).double(), y.detach()) < 1e-5
        got = gradients(grad, x, weight, True, options, (True, True, True))
    assert all(relative(a.double(), b.double()) < 1e-5 for a, b in zip(got, want))  # type: ignore[union-attr]
    assert gradients(grad, x.detach(), weight.detach(), False, options, (False, True, False))[0] is None


def test_only_what_torch_convolves_natively_is_ours() -> None:
    def asked(x: Tensor, side: int = 3, options: ConvOptions | None = None) -> bool:
        return uses_own_kernel(x, torch.empty(4, x.shape[1], *[side] * 3, device=x.device), options or numbers())

    small = torch.empty(1, 128, 12, 12, 12)
    assert asked(small)
    assert not asked(torch.empty(1, 144, 12, 12, 12)), "more than 20,480: oneDNN's already"
    assert not asked(torch.empty(2, 128, 12, 12, 12)), "two samples: oneDNN's already"
    assert not asked(small, side=1) and not asked(small, side=5)
    assert not asked(torch.empty(1, 128, 7, 7, 7)), "nothing even"
    assert not asked(small.double()) and not asked(small.bfloat16())
    with meta_as_device("cpu"):
        assert asked(small.to("meta"))
    with meta_as_device("cuda"):
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


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("options", [numbers(), numbers(padding=0), numbers(stride=2), numbers(padding=2, dilation=2)])
def test_gradients_of_weights_slab_by_slab_are_those_of_the_whole(
    options: ConvOptions, last: bool, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without AVX-512: slabs of two rows, of one, and a rest."""
    order = torch.channels_last_3d if last else torch.contiguous_format
    x = torch.randn(samples, 8, 9, 6, 5).contiguous(memory_format=order)
    weight, bias, results = torch.randn(16, 8, 3, 3, 3), torch.randn(16), []
    monkeypatch.setattr(cpu_convolution, "_NATIVE", 0)  # nothing is halved
    for capability, rows in (("AVX512", 1), ("AVX2", 1), ("AVX2", 2), ("AVX2", 100)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert uses_own_kernel(x, weight, options) == (capability == "AVX2")
        y = convolve(x, weight, bias, options)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=order)
        monkeypatch.setattr(cpu_convolution, "_SLAB", rows * max(grad[:, :, 0].numel(), 8 * samples * 60))
        results.append([y, *gradients(grad, x, weight, True, options, (True, True, True))])
    want, *every = results
    assert all(relative(mine, torchs) < 1e-5 for got in every for mine, torchs in zip(got, want, strict=True))
    assert gradients(grad, x, weight, True, options, (True, False, False))[1:] == (None, None)
    dx, dweight, dbias = gradients(grad, x, weight, False, options, (False, True, False))
    assert dx is None and dbias is None and dweight is not None


def test_blocks_of_float32_alone_go_by_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    x, weight = torch.empty(1, 8, 80, 80, 4), torch.empty(16, 8, 3, 3, 3)
    assert uses_own_kernel(x, weight, numbers())
    assert not uses_own_kernel(x[:, :4], weight[:, :4], numbers()), "half a block of channels"
    assert not uses_own_kernel(x.double(), weight.double(), numbers()) and not uses_own_kernel(
        x, weight[..., :1, :1, :1], numbers()
    )
    with meta_as_device("cuda"):
        assert not uses_own_kernel(x.to("meta"), weight.to("meta"), numbers())


VOLUMES_IN_BF16 = [((2, 2, 2), 3), ((2, 5, 4), 3), ((1, 4, 4), 2), ((3, 4, 5), 5), ((4, 6, 6), 5)]


def refuses_unwritten_memory(x: Tensor, weight: Tensor, options: ConvOptions, limit: float, last: bool) -> None:
    """Compares gradients with float64's, where memory full of infinities has just been freed."""
    order = torch.channels_last_3d if last else torch.contiguous_format
    back = torch.ops.aten.convolution_backward
    y = torch.convolution(x.double(), weight.double(), None, *options.all)  # type: ignore[arg-type]
    grad = torch.randn(y.shape).to(x.dtype)
    want = back(grad.double(), x.double(), weight.double(), [y.shape[1]], *options.all, (True, True, True))
    x, grad = (t.contiguous(memory_format=order) for t in (x, grad))
    for _ in range(5):
        dirty = [torch.full((1 << power,), math.inf) for power in range(8, 20)]
        del dirty
        got = gradients(grad, x, weight, True, options, (True, True, True))
        for mine, exact in zip(got, want, strict=True):
            assert mine is not None and mine.shape == exact.shape and relative(mine.double(), exact) < limit
    assert gradients(grad, x, weight, True, options, (True, False, False))[1:] == (None, None)
    dx, dweight, dbias = gradients(grad, x, weight, True, options, (False, True, False))
    assert dx is None and dbias is None and dweight is not None


# where oneDNN does not know bf16, torch also sums in bfloat16
LIMIT = 0.01 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 0.05


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("volume, side", VOLUMES_IN_BF16)
@pytest.mark.parametrize("channels", [8, 16])
def test_gradients_of_bf16_where_kernels_are_longer_than_the_volume(
    channels: int, volume: tuple[int, int, int], side: int, last: bool
) -> None:
    x, weight = torch.randn(2, channels, *volume).bfloat16(), torch.randn(channels, channels, *[side] * 3).bfloat16()
    refuses_unwritten_memory(x, weight, numbers(padding=side // 2), LIMIT, last)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 16])
@pytest.mark.parametrize(
    "volume, side, stride, transposed, dtype",
    [
        ((2, 4, 4), 3, 1, False, torch.bfloat16),
        ((4, 4, 4), 5, 1, False, torch.bfloat16),
        ((4, 2, 2), 5, 2, False, torch.bfloat16),
        ((2, 2, 2), 3, 1, True, torch.bfloat16),
        ((2, 2, 2), 5, 2, True, torch.bfloat16),
        ((3, 3, 3), 5, 1, True, torch.bfloat16),
        ((4, 4, 4), 6, 2, False, torch.float32),
        ((5, 4, 4), 7, 2, False, torch.float32),
        ((7, 4, 4), 7, 2, False, torch.float32),
        ((3, 3, 3), 7, 2, True, torch.float32),
        ((4, 1, 4), 3, 2, False, torch.bfloat16),
        ((8, 1, 8), 5, 1, False, torch.bfloat16),
        ((4, 4, 1), 3, 2, False, torch.bfloat16),
        ((8, 8, 1), 5, 2, False, torch.bfloat16),
        ((8, 2, 8), 7, 1, False, torch.bfloat16),
        ((8, 1, 8), 5, 1, True, torch.bfloat16),
        ((6, 4, 4), 8, 3, False, torch.float32),
    ],
)
def test_gradients_with_groups_and_transposed_where_kernels_are_longer_than_the_volume(
    volume: tuple[int, int, int], side: int, stride: int, transposed: bool, dtype: torch.dtype, groups: int, last: bool
) -> None:
    """As MedNeXt's blocks, which filter each channel alone, and its upward ones."""
    extra = (stride - 1,) * 3 if transposed else (0,) * 3
    options = ConvOptions((stride,) * 3, (side // 2,) * 3, (1, 1, 1), transposed, extra, groups)
    x, weight = torch.randn(2, 16, *volume).to(dtype), torch.randn(16, 16 // groups, *[side] * 3).to(dtype)
    assert uses_own_kernel(x, weight, options)
    refuses_unwritten_memory(x, weight, options, LIMIT if dtype == torch.bfloat16 else 1e-4, last)
    long = torch.randn(2, 16, *[2 * side] * 3).to(dtype)
    assert not uses_own_kernel(long, weight, options), "longer than the kernel: oneDNN is right"


def test_an_upward_layer_in_bf16_takes_the_right_gradients() -> None:
    layer, x = ConvTranspose3d(16, 16, 5, stride=2, padding=2, output_padding=1, groups=16), torch.randn(1, 16, 2, 2, 2)
    wide = F.conv_transpose3d(x, layer.weight, layer.bias, stride=2, padding=2, output_padding=1, groups=16)
    slope = torch.randn_like(wide)
    want = torch.autograd.grad((wide * slope).sum(), (layer.weight, layer.bias))
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
    assert y.dtype == torch.bfloat16 and "_Convolve" in type(y.grad_fn).__name__
    got = torch.autograd.grad((y.float() * slope).sum(), (layer.weight, layer.bias))
    assert all(relative(mine, exact) < 0.02 for mine, exact in zip(got, want, strict=True))
    y, _ = layer(x)
    assert "_Convolve" not in type(y.grad_fn).__name__, "in float32 oneDNN is right"


@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_in_bf16_takes_the_right_gradients(autocast: bool) -> None:
    layer, x = Conv3d(16, 16, 3, padding=1), torch.randn(1, 16, 2, 2, 2)
    wide = F.conv3d(x, layer.weight, layer.bias, padding=1)
    slope = torch.randn_like(wide)
    want = torch.autograd.grad((wide * slope).sum(), layer.weight)[0]
    if not autocast:
        layer, x = layer.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, _ = layer(x)
    assert y.dtype == torch.bfloat16 and "_Convolve" in type(y.grad_fn).__name__
    (got,) = torch.autograd.grad((y.float() * slope).sum(), layer.weight)
    assert relative(got.float(), want) < 0.02
    y, _ = layer(torch.randn(1, 16, 3, 3, 3, dtype=x.dtype))
    assert autocast or "_Convolve" not in type(y.grad_fn).__name__, "as long as the kernel: oneDNN is right"
