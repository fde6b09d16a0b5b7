"""Attention kernels, forward and backward, without communication.

Legend: b batch, a heads, n queries, m keys, f features per head. A kernel's forward also returns what its backward
needs besides q, k, v and the output (the log-sum-exp), so that a caller who keeps those can run the backward alone.
``kernel_for`` chooses among torch's kernels, on a GPU by ``fastest_kernel``. ``PLAIN`` covers everything else: its
backward runs torch's public function again under autograd.

GPU kernels get q, k, v, the output and its gradient in one memory order, ``b n a f``. AMD's get them without gaps,
because its backward applies the strides of one of them to another.
"""

import importlib.util
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Any, ...]
Grads = tuple[Tensor, Tensor, Tensor]
aten = torch.ops.aten
LONG = 512  # number of keys from which cuDNN's kernels are worth their planning time


@dataclass(frozen=True)
class Kernel:
    """Attention forward and backward on tensors ``b a n f`` and ``b a m f`` in any memory order."""

    name: str
    _forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, State]]
    _backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, State], Grads]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
        """Returns softmax(q Kᵀ/√f) V and what else backward needs."""
        if q.numel() == 0:  # this rank has no head or no query
            return torch.empty_like(q), ()
        return self._forward(q, k, v)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: State) -> Grads:
        """Returns the gradients of q, k and v."""
        assert grad.shape == out.shape == q.shape, (grad.shape, out.shape, q.shape)
        if q.numel() == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        with _as_asked():
            dq, dk, dv = self._backward(grad, q, k, v, out, state)
        assert dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape, (dq.shape, dk.shape, dv.shape)
        return dq, dk, dv


@contextmanager
def _as_asked() -> Iterator[None]:
    """Makes torch's kernels deterministic on request even with ``warn_only``, under which torch would only warn."""
    if not torch.is_deterministic_algorithms_warn_only_enabled() or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def kernel_for(like: Tensor, head_dim: int, num_keys: int) -> Kernel:
    """Returns the kernel for heads of this width on the device and in the precision of ``like``."""
    kind = like.device.type
    if kind != "cuda":
        return fastest_kernel(kind, (0, 0), (), head_dim, num_keys)
    capability = torch.cuda.get_device_capability(like.device)
    kernel = fastest_kernel(kind, capability, _allowed(like, head_dim), head_dim, num_keys)
    if kernel is FLASH_3:
        _take_flash_3()
    return kernel


def fastest_kernel(
    kind: str, capability: tuple[int, int], allowed: Collection[str], head_dim: int, num_keys: int
) -> Kernel:
    """Returns the fastest kernel of a device.

    Flash attention 3 targets NVIDIA's 9.0 (Hopper); cuDNN's kernels are faster there and later, on long sequences.

    - ``kind``, ``capability``: of the device, as torch names them
    - ``allowed``: names of the kernels that torch can run there for such heads in this precision
    """
    if kind in ("cpu", "meta"):  # on meta tensors only shapes matter, which all fused kernels share
        return CPU_FLASH
    if "flash" in allowed and head_dim % 8:  # torch's public function pads heads first; its kernel does not
        return PLAIN
    if "flash 3" in allowed and capability == (9, 0):
        return FLASH_3
    if "cudnn" in allowed and capability >= (9, 0) and head_dim <= 128 and num_keys >= LONG:
        return CUDNN
    return FLASH if "flash" in allowed else EFFICIENT if "efficient" in allowed else PLAIN


def kernels_of(like: Tensor, head_dim: int) -> list[Kernel]:
    """Returns every kernel that supports heads of this width on the device and in the precision of ``like``."""
    if like.device.type != "cuda":
        return [CPU_FLASH, PLAIN]
    allowed = _allowed(like, head_dim) if head_dim % 8 == 0 else ()
    return [*(kernel for kernel in (FLASH, CUDNN, EFFICIENT) if kernel.name in allowed), PLAIN]


def _allowed(like: Tensor, head_dim: int) -> list[str]:
    """Returns the names of the kernels that torch can run on the device and in the precision of ``like``."""
    sample = like.new_empty((1, LONG, 1, head_dim)).transpose(1, 2).requires_grad_()  # in the kernels' memory order
    backends, allowed = torch.backends.cuda, []
    params = backends.SDPAParams(sample, sample, sample, None, 0.0, False, False)
    if backends.flash_sdp_enabled() and backends.can_use_flash_attention(params):
        allowed += ["flash", "flash 3"] if _offers_flash_3() else ["flash"]
    with _as_asked():  # cuDNN's gradients differ from time to time
        if backends.cudnn_sdp_enabled() and backends.can_use_cudnn_attention(params):
            allowed.append("cudnn")
    if backends.mem_efficient_sdp_enabled() and backends.can_use_efficient_attention(params):
        allowed.append("efficient")
    return allowed


@cache
def _offers_flash_3() -> bool:
    """Returns whether this version of torch supports flash attention 3 and its NVIDIA package is installed."""
    if torch.version.hip is not None:
        return False
    has_package = importlib.util.find_spec("flash_attn_interface") is not None
    return has_package and hasattr(torch.nn.attention, "activate_flash_attention_impl")


@cache
def _take_flash_3() -> None:
    """Replaces torch's own flash attention by flash attention 3 in this process."""
    torch.nn.attention.activate_flash_attention_impl("FA3")


def _tokens_first(*tensors: Tensor) -> list[Tensor]:
    """Returns the tensors ``b a n f`` stored in memory as ``b n a f``."""
    return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]


def _projected(*tensors: Tensor) -> list[Tensor]:
    """Returns queries, keys and values as a GPU's kernels take them: NVIDIA's read them where they were projected."""
    apart = torch.version.hip is not None or any(t.stride(-1) != 1 for t in tensors)
    return _tokens_first(*tensors) if apart else list(tensors)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
    out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return out, (log_sum,)


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: State) -> Grads:
    (log_sum,) = state
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, log_sum, dropout_p=0.0, is_causal=False
    )
    return dq, dk, dv


def _flash_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
    q, k, v = _projected(q, k, v)
    out, log_sum, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False
    )
    return out, (log_sum, seed, offset)


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: State) -> Grads:
    log_sum, seed, offset = state
    (q, k, v), (grad, out) = _projected(q, k, v), _tokens_first(grad, out)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        log_sum,
        cum_seq_q=None,  # for ragged batches only
        cum_seq_k=None,
        max_q=q.shape[2],
        max_k=k.shape[2],
        dropout_p=0.0,
        is_causal=False,
        philox_seed=seed,
        philox_offset=offset,
    )
    return dq, dk, dv


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
    q, k, v = _projected(q, k, v)
    out, log_sum, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, is_causal=False
    )
    return out, (log_sum, seed, offset)


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: State) -> Grads:
    log_sum, seed, offset = state
    (q, k, v), (grad, out) = _projected(q, k, v), _tokens_first(grad, out)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad,
        q,
        k,
        v,
        attn_bias=None,
        out=out,
        logsumexp=log_sum,
        philox_seed=seed,
        philox_offset=offset,
        dropout_p=0.0,
        grad_input_mask=[True, True, True, False],
        is_causal=False,
    )
    return dq, dk, dv


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
    q, k, v = _projected(q, k, v)
    out, log_sum, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, is_causal=False, return_debug_mask=False
    )
    return out, (log_sum, seed, offset)


def _cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: State) -> Grads:
    log_sum, seed, offset = state
    (q, k, v), (grad, out) = _projected(q, k, v), _tokens_first(grad, out)
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        logsumexp=log_sum,
        philox_seed=seed,
        philox_offset=offset,
        attn_bias=None,
        cum_seq_q=None,  # for ragged batches only
        cum_seq_k=None,
        max_q=q.shape[2],
        max_k=k.shape[2],
        dropout_p=0.0,
        is_causal=False,
    )
    return dq, dk, dv


def _plain_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
    return F.scaled_dot_product_attention(q, k, v), ()


def _plain_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: State) -> Grads:
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        dq, dk, dv = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), grad)
    return dq, dk, dv


CPU_FLASH = Kernel("flash, CPU", _cpu_forward, _cpu_backward)
FLASH = Kernel("flash", _flash_forward, _flash_backward)
FLASH_3 = Kernel("flash 3", _flash_forward, _flash_backward)
CUDNN = Kernel("cudnn", _cudnn_forward, _cudnn_backward)
EFFICIENT = Kernel("efficient", _efficient_forward, _efficient_backward)
PLAIN = Kernel("plain", _plain_forward, _plain_backward)
