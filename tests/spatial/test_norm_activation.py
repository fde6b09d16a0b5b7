"""Norm and activation in one step: torch's own numbers, in every order of channels and precision."""

import pytest
import torch
from torch import Tensor, nn

from seqpar.spatial import cache_pieces
from seqpar.spatial.norm_activation import NormedActivation
from tests.support.ranks import relative


@pytest.mark.parametrize("kind", ["none", "plain", "normed"])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("samples", [0, 1, 2], ids=["a CPU's pieces", "a GPU's, sample by sample", "all samples"])
def test_normed_activations_are_torch_s_own(
    kind: str, dtype: torch.dtype, bound: float, last: bool, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_pieces, "fits_whole_samples", lambda x: samples > 0)
    monkeypatch.setattr(cache_pieces, "_GPU_AT_ONCE", samples * 3 * 6 * 5 * 4)
    monkeypatch.setattr(cache_pieces, "_AT_ONCE", 64)  # several pieces a volume, and a rest
    monkeypatch.setattr(cache_pieces, "_LINE", 14)
    order = torch.channels_last_3d if last else torch.contiguous_format
    dice = torch.Generator().manual_seed(0)
    x, other, slope = (torch.randn(2, 3, 6, 5, 4, generator=dice).double() * 3 + 1 for _ in range(3))
    step = NormedActivation(norm_other=kind == "normed")

    def added(a: Tensor, b: Tensor) -> Tensor:
        plus = {"none": 0.0 * b, "plain": b, "normed": nn.functional.instance_norm(b)}[kind]
        return nn.functional.instance_norm(a) + plus

    def run(mine: bool) -> list[Tensor]:
        wanted = dtype if mine else torch.float64
        a, b = (t.to(wanted, memory_format=order).requires_grad_() for t in (x, other))
        if mine:
            y, _ = step(a, None, None if kind == "none" else b)
            assert y.is_contiguous(memory_format=order)
        else:
            y = nn.functional.leaky_relu(added(a, b), 0.01)
        (y * slope.to(y.dtype)).sum().backward()
        return [y.detach(), a.grad, *([] if kind == "none" else [b.grad])]  # type: ignore[list-item]

    x, other, slope = (t.to(dtype).double() for t in (x, other, slope))
    slope *= added(x, other).abs() > 0.1  # nearer to the kink, rounding decides which side a half-precision value is on
    for got, want in zip(run(True), run(False)):
        assert got.dtype == dtype and relative(got.double(), want) < bound


def test_a_large_summand_does_not_swallow_the_normed_values_in_half_precision() -> None:
    dice = torch.Generator().manual_seed(0)
    x, other, slope = (torch.randn(1, 4, 5, 5, 5, generator=dice) for _ in range(3))
    other, slope = 100 * other, slope + x  # what the statistics owe depends on the normed values

    def gradient(dtype: torch.dtype) -> Tensor:
        a, b = (t.bfloat16().to(dtype).requires_grad_() for t in (x, other))
        y, _ = NormedActivation()(a, None, b)
        (y * slope.bfloat16().to(dtype)).sum().backward()
        assert a.grad is not None
        return a.grad.double()

    assert relative(gradient(torch.bfloat16), gradient(torch.float64)) < 2e-2
