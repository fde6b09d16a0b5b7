"""The adjoint test <Ax, y> = <x, A'y> of what crosses ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Mesh


def adjoint_gap(mesh: Mesh, x: Tensor, forward: Callable[[Tensor], Tensor]) -> float:
    """Returns |<Ax, y> - <x, A'y>|, relative, with both products summed over the ranks."""
    x = x.detach().requires_grad_()
    image = forward(x)
    y = torch.randn(image.shape, dtype=image.dtype, generator=torch.Generator().manual_seed(mesh.seq.index + 99))
    (back,) = torch.autograd.grad(image, x, y)
    sides = torch.stack([(image.detach() * y).sum(), (x.detach() * back).sum()]).double()
    left, right = all_reduce(sides, mesh.seq)
    scale = all_reduce((image.detach() * y).abs().sum().double(), mesh.seq)
    return float((left - right).abs() / scale.clamp(min=1e-300))


def rows(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns the random values that this rank holds, which every rank can make."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)
