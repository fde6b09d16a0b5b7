"""Other libraries' attention over a group, for the bench: those that are installed and run on a CPU.

DeepSpeed's ``DistributedAttention`` (Ulysses), and the ring inside torch's context parallelism, called with torch's CPU
kernel because its public function refuses the CPU. Both are optional.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from seqpar.parallel.mesh import Mesh

Act = Callable[[], object]
_TORCH = "torch.distributed.tensor.experimental._context_parallel._attention"


def peers(heads: int, head_dim: int) -> dict[str, Callable[[Mesh, Sequence[int]], Act]]:
    """Returns, for each peer that is installed, what makes its forward and backward."""
    makers: dict[str, Callable[[Mesh, Sequence[int]], Act]] = {}
    if importlib.util.find_spec("deepspeed") is not None:
        makers["DeepSpeed Ulysses"] = partial(_deepspeed, heads, head_dim)
    if importlib.util.find_spec(_TORCH) is not None:
        ring = importlib.import_module(_TORCH)
        if hasattr(ring, "_templated_ring_attention_backward") and hasattr(ring, "set_rotate_method"):
            makers["torch ring, all-gather"] = partial(_torch_ring, ring, "allgather", heads, head_dim)
            makers["torch ring, all-to-all"] = partial(_torch_ring, ring, "alltoall", heads, head_dim)
    return makers


def _inputs(shape: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    return [torch.randn(*shape, requires_grad=True) for _ in range(3)], torch.randn(*shape)


def _deepspeed(heads: int, head_dim: int, mesh: Mesh, sizes: Sequence[int]) -> Act:
    layer = importlib.import_module("deepspeed.sequence.layer")
    inside: Any = importlib.import_module("deepspeed.comm.torch")
    inside.build_shm_op = lambda: None  # it would compile a sum through shared memory, which Ulysses does not use
    comm = importlib.import_module("deepspeed.comm")
    comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)  # uses the process group that exists

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # b n a f
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2).contiguous()

    spread = layer.DistributedAttention(attend, mesh.seq.handle, 2, 1)
    leaves, weight = _inputs((1, sizes[mesh.seq.index], heads, head_dim))
    return lambda: torch.autograd.grad(spread(*leaves, 0), leaves, weight)


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: ModuleType, handle: object) -> Tensor:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sum = ring._templated_ring_attention(handle, 2, op, q, k, v, is_causal=False)
        ctx.how = ring, handle
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ring, handle = ctx.how
        q, k, v, out, log_sum = ctx.saved_tensors
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = ring._templated_ring_attention_backward(
            handle, 2, op, grad, "grad_out", q, k, v, out, log_sum, False, dropout_p=0.0
        )
        return dq, dk, dv, None, None


def _torch_ring(ring: ModuleType, rotation: str, heads: int, head_dim: int, mesh: Mesh, sizes: Sequence[int]) -> Act:
    leaves, weight = _inputs((1, heads, sizes[mesh.seq.index], head_dim))
    ring._cp_options.enable_load_balance = False  # without a causal mask there is nothing to balance

    def act() -> object:
        ring.set_rotate_method(rotation)
        return torch.autograd.grad(_Ring.apply(*leaves, ring, mesh.seq.handle), leaves, weight)

    return act
