"""CPU kernels in place of CUDA's, on the same memory.

All else is torch's own: the caching allocator, streams and events, pinned memory, autocast, the threads of autograd.
What a GPU's kernels would refuse is refused here too: tensors of several devices, layouts and types that they lack.
"""

import ctypes
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")
aten = torch.ops.aten
_libraries = list[torch.library.Library]()  # torch drops the kernels of a library that is collected

# torch's own: they only look at a tensor, make one, or ask the allocator
KEPT = {
    *("set_", "resize_", "record_stream", "_pin_memory", "is_pinned", "is_set_to", "empty", "empty_strided"),
    *("as_strided", "view", "_reshape_alias", "unfold", "alias", "detach", "lift", "_has_same_storage_numel"),
    *("is_coalesced", "_coalesced_", "dense_dim", "sparse_dim", "_nnz", "_values", "_indices"),
    *("_fused_sdp_choice", "_cudnn_init_dropout_state", "_assert_async"),
}
TAKE_CPU_INDICES = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
REFUSE_CPU_SCALARS = {"cat", "mm", "addmm", "bmm", "stack", "index_select", "gather", "scatter", "convolution"}
# kernels whose result the host has to see, and copies that are not asynchronous
READ_BY_HOST = {"nonzero", "equal", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
MASKED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}  # with a mask: nonzero inside
TO_HOST, FROM_HOST = "copy to the host", "copy from the host"
waits = list[str]()  # what the host waited for, and from where
FLOATS_ONLY = {"mm", "addmm", "bmm", "baddbmm", "convolution"}


def cpu_view(tensor: Tensor) -> Tensor:
    """Returns a CPU tensor on the memory of a CUDA one."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a CUDA tensor of new memory with the numbers and strides of a CPU one."""
    if tensor.is_cuda:
        return tensor
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        cpu_view(result).copy_(tensor.resolve_neg())
    return result


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def for_cpu(value: Any) -> Any:
    """Returns an argument as the CPU's kernel takes it."""
    if isinstance(value, Tensor):
        return cpu_view(value) if value.is_cuda else value
    if isinstance(value, (list, tuple)):
        return type(value)(for_cpu(item) for item in value)
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, torch.Generator):
        return None if value.device.type == "cuda" else value
    return value


def for_cuda(value: Any, device: torch.device) -> Any:
    """Returns a result as torch expects it of CUDA's kernel."""
    if isinstance(value, Tensor):
        return on_device(value, device)
    if isinstance(value, (list, tuple)):
        return type(value)(for_cuda(item, device) for item in value)
    return value


def note_wait(what: str) -> None:
    """Notes that the host would wait for the device here."""
    stack = traceback.extract_stack()[:-2]
    if not stack and what == FROM_HOST:
        return  # DDP takes the sums out of gloo's memory, where NCCL's are on the device
    frames = [frame for frame in stack if "/seqpar/" in frame.filename] or stack
    waits.append(" < ".join([what, *(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-3:]))]))


def _as_tensor(number: float | bool, others: Sequence[Tensor]) -> Tensor:
    """Returns the tensor that a number stands for, which torch passes on for tensors without dimensions."""
    wide = type(number) is float and any(tensor.is_floating_point() for tensor in others)
    return torch.tensor(number, dtype=torch.float64 if wide else None)


def _refuse(name: str, tensors: Sequence[Tensor]) -> None:
    """Raises RuntimeError where CUDA's kernel would."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    strangers = () if name in TAKE_CPU_INDICES else (tensor for tensor in tensors if not tensor.is_cuda)
    strange = any(tensor.ndim or name in REFUSE_CPU_SCALARS for tensor in strangers)
    if len(devices) > 1 or (devices and strange):
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} got several")
    if devices and name in FLOATS_ONLY and not all(tensor.is_floating_point() for tensor in tensors):
        raise RuntimeError(f'"{name}_cuda" not implemented for {[tensor.dtype for tensor in tensors]}')


def stand_in(op: Any) -> Callable[..., Any]:
    """Returns a kernel for CUDA that computes with the CPU's kernel of ``op``."""
    schema = op._schema
    name = schema.name.partition("::")[2]
    takes_tensor = [str(argument.type) in ("Tensor", "Optional[Tensor]") for argument in schema.arguments]
    writes = [result.alias_info is not None and result.alias_info.is_write for result in schema.returns]
    written = [
        (at, argument.name)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    compute = SPECIAL.get(name, op)
    if any(writes) and not all(writes):
        raise NotImplementedError(f"{op} returns both arguments and new tensors")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors_in([*args, *kwargs.values()]))
        _refuse(name, tensors)
        if name in READ_BY_HOST or name in MASKED and any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:]):
            note_wait(name)
        asked = kwargs.get("device")
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), asked)
        if device is None or device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        cpu_args = [
            _as_tensor(value, tensors) if takes_tensor[at] and type(value) in (int, float, bool) else for_cpu(value)
            for at, value in enumerate(args)
        ]
        cpu_kwargs = {key: for_cpu(value) for key, value in kwargs.items()}
        if cpu_kwargs.get("pin_memory"):
            cpu_kwargs["pin_memory"] = False
        with torch._C._AutoDispatchBelowAutograd():
            result = compute(*cpu_args, **cpu_kwargs)
            if not schema.returns:
                return None
            if not all(writes):
                return for_cuda(result, device)
            outputs = [args[at] if at < len(args) else kwargs[key] for at, key in written]
            for output, value in zip(outputs, [result] if len(writes) == 1 else result):
                if isinstance(output, Tensor) and output.is_cuda and output.shape != value.shape:  # as out= may
                    output.resize_(value.shape)
                    cpu_view(output).copy_(value)
            return outputs[0] if len(writes) == 1 else tuple(outputs)

    return kernel


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    for host, what in (target, TO_HOST), (source, FROM_HOST):
        if not host.is_cuda and not (non_blocking and host.is_pinned()):
            note_wait(what)
    with torch._C._AutoDispatchBelowAutograd():
        for_cpu(target).copy_(for_cpu(source))
    return target


def local_scalar(tensor: Tensor) -> Any:
    note_wait("item")
    with torch._C._AutoDispatchBelowAutograd():
        return cpu_view(tensor).item()


# ---- attention: the layouts and types that each kernel takes, and the shapes that it returns ----


def _check_layout(name: str, tensors: Sequence[Tensor], half: bool, multiple: int, most: int) -> None:
    for tensor in tensors:
        if half and tensor.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError(f"{name} attention takes float16 and bfloat16, not {tensor.dtype}")
        if tensor.dtype == torch.float64 or tensor.stride(-1) != 1:
            raise RuntimeError(f"{name} attention takes contiguous features of at most 32 bits")
        if tensor.shape[-1] % multiple or tensor.shape[-1] > most:
            raise RuntimeError(f"{name} attention takes no heads of {tensor.shape[-1]} features")


def _like_kernels(x: Tensor) -> Tensor:
    """Returns ``x``, ``b a n f``, in the kernels' memory order, ``b n a f``."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _scores(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    return q.float() @ k.float().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, scale)
    return _like_kernels((scores.softmax(-1) @ v.float()).to(q.dtype)), scores.logsumexp(-1)


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    probabilities = (_scores(q, k, scale) - logsumexp[:, :, : q.shape[2], None]).exp()
    grad, out, wide_q, wide_k, wide_v = (tensor.float() for tensor in (grad, out, q, k, v))
    inner = grad @ wide_v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)
    dscores = probabilities * inner * factor
    grads = dscores @ wide_k, dscores.transpose(-1, -2) @ wide_q, probabilities.transpose(-1, -2) @ grad
    dq, dk, dv = (_like_kernels(tensor.to(q.dtype)) for tensor in grads)
    return dq, dk, dv


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None):  # type: ignore[no-untyped-def]
    _check_layout("flash", (q, k, v), True, 8, 256)
    out, logsumexp = _attend(q, k, v, scale)
    none, seed, offset = torch.empty(0), torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.int64)
    return out, logsumexp, none, none.clone(), q.shape[2], k.shape[2], seed, offset, torch.empty(0, dtype=q.dtype)


def flash_backward(grad, q, k, v, out, logsumexp, *others, scale=None):  # type: ignore[no-untyped-def]
    _check_layout("flash", (grad, q, k, v, out), True, 8, 256)
    return _attend_backward(grad, q, k, v, out, logsumexp, scale)


def efficient(q, k, v, bias, keep_logsumexp, dropout_p=0.0, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    _check_layout("efficient", (q, k, v), False, 4 if q.dtype == torch.float32 else 8, 2**16)
    out, logsumexp = _attend(q, k, v, scale)
    rows = -(-q.shape[2] // 32) * 32  # the kernel's blocks
    padded = torch.nn.functional.pad(logsumexp, (0, rows - q.shape[2]), value=float("inf"))
    return out, padded, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def efficient_backward(grad, q, k, v, bias, out, logsumexp, *others, scale=None):  # type: ignore[no-untyped-def]
    return *_attend_backward(grad, q, k, v, out, logsumexp, scale), None


def cudnn(q, k, v, bias, keep_logsumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None):  # type: ignore[no-untyped-def]
    _check_layout("cuDNN", (q, k, v), True, 8, 128)
    out, logsumexp = _attend(q, k, v, scale)
    none, seed = torch.empty(0), torch.zeros((), dtype=torch.int64)
    shape = q.shape[2], k.shape[2]
    return out, logsumexp[..., None], none, none.clone(), *shape, seed, seed.clone(), torch.empty(0, dtype=q.dtype)


def cudnn_backward(grad, q, k, v, out, logsumexp, *others, scale=None):  # type: ignore[no-untyped-def]
    _check_layout("cuDNN", (q, k, v, out), True, 8, 128)
    return _attend_backward(grad, q, k, v, out, logsumexp.reshape(q.shape[:3]), scale)


# ---- kernels that take what the CPU's do not ----


def softmax(x: Tensor, dim: int, to_float: bool) -> Tensor:
    return torch.softmax(x, dim, torch.float32 if to_float else None)


def log_softmax(x: Tensor, dim: int, to_float: bool) -> Tensor:
    return torch.log_softmax(x, dim, torch.float32 if to_float else None)


def softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return aten._softmax_backward_data(grad, out, dim, grad.dtype).to(dtype)


def log_softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return aten._log_softmax_backward_data(grad, out, dim, grad.dtype).to(dtype)


def cudnn_batch_norm(x, weight, bias, mean, var, training, momentum, eps):  # type: ignore[no-untyped-def]
    normed = aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
    return *normed, torch.empty(0, dtype=torch.uint8)


def cudnn_batch_norm_backward(x, grad, weight, mean, var, saved_mean, saved_var, eps, reserve):  # type: ignore[no-untyped-def]
    kept = mean, var, saved_mean, saved_var
    return aten.native_batch_norm_backward(grad, x, weight, *kept, True, eps, [True, True, True])


def in_float32(op: Any) -> Callable[..., Any]:
    """Returns ``op`` for half types, which the CPU's kernel lacks and CUDA's has."""

    def compute(x: Tensor, *of: Any, **more: Any) -> Tensor:
        if x.dtype not in (torch.float16, torch.bfloat16):
            return op(x, *of, **more)
        wide = (value.float() if isinstance(value, Tensor) else value for value in (x, *of))
        return op(*wide, **{key: value for key, value in more.items() if key != "out"}).to(x.dtype)

    return compute


def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, **out: Tensor) -> Tensor:
    """Returns the product of two matrices; a CPU has none of half precision in float32."""
    a, b = (a, b) if out_dtype is None else (a.to(out_dtype), b.to(out_dtype))
    return aten.mm(a, b, **out) if not out else aten.mm.out(a, b, **out)


def convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *of: Any) -> tuple[Tensor | None, ...]:
    """Returns a convolution's gradients, computed in float32: oneDNN's of bfloat16 contain uninitialized numbers if a
    kernel is longer than the volume.
    """
    if grad.dtype != torch.bfloat16:
        return aten.convolution_backward(grad, x, weight, *of)  # type: ignore[no-any-return]
    wide = aten.convolution_backward(grad.float(), x.float(), weight.float(), *of)
    return tuple(None if one is None else one.to(grad.dtype) for one in wide)


SPECIAL: dict[str, Callable[..., Any]] = {
    "mm": mm,
    "convolution_backward": convolution_backward,
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_softmax": softmax,
    "_log_softmax": log_softmax,
    "_softmax_backward_data": softmax_backward,
    "_log_softmax_backward_data": log_softmax_backward,
    "avg_pool3d": in_float32(aten.avg_pool3d),
    "avg_pool3d_backward": in_float32(aten.avg_pool3d_backward),
    "cudnn_batch_norm": cudnn_batch_norm,
    "cudnn_batch_norm_backward": cudnn_batch_norm_backward,
}


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Drops the line that torch writes for each kernel that replaces one of its own."""
    before, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nothing)


def install() -> None:
    """Replaces all kernels that torch has for CUDA, but for those that make views or are kept."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    registered = {*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")}
    composed = {"aten::convolution", "aten::convolution_backward"}  # torch would choose cuDNN's kernels inside them
    own: dict[str, Callable[..., Any]] = {"copy_": copy_, "_local_scalar_dense": local_scalar}
    with silent_stderr():
        for full in sorted(registered | composed):
            space, _, name = full.partition("::")
            base, _, overload = name.partition(".")
            if space != "aten" or base in KEPT | own.keys() or any(of in base for of in ("sparse", "nested", "quant")):
                continue
            op = getattr(getattr(aten, base, None), overload or "default", None)
            if op is None or any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns):
                continue
            library.impl(name, stand_in(op), "CUDA")
        for name, kernel in own.items():
            library.impl(name, kernel, "CUDA")
