"""NCCL's collectives over gloo, behind the checks that NCCL makes of its tensors.

Messages travel in gloo's order: what NCCL's streams would overlap, or hang on, is not seen here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from pretended_kernels import for_cpu, silent_stderr, tensors_in
from torch import Tensor

TYPES = {
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
TAKE_DENSE = {"allreduce_", "broadcast_"}  # any order in memory without gaps
_libraries = list[torch.library.Library]()  # torch drops the kernels of a library that is collected


def has_no_gaps(tensor: Tensor) -> bool:
    """Returns whether the elements fill memory without gaps, in any order of their dimensions."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return True


def check(name: str, tensors: Sequence[Tensor]) -> None:
    """Raises what NCCL does for tensors that it cannot send."""
    for tensor in tensors:
        if not tensor.is_cuda:
            raise RuntimeError(f"{name}: a CPU tensor among CUDA tensors")
        if tensor.dtype not in TYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        dense = name in TAKE_DENSE and has_no_gaps(tensor)
        if not (tensor.is_contiguous() or dense):
            raise ValueError(f"Tensors must be contiguous: {name}")


def stand_in(op: Any) -> Callable[..., Any]:
    """Returns a collective on CUDA tensors that sends the same memory over gloo."""
    name = op._schema.name.partition("::")[2]

    def collective(*args: Any) -> Any:
        check(name, list(tensors_in(args)))
        result = op(*(for_cpu(argument) for argument in args))
        return (args[0], result[1]) if isinstance(result, (tuple, list)) and len(result) == 2 else result

    return collective


def all_reduce_past_groups(inputs: Sequence[Tensor], outputs: Sequence[Tensor], op: int, *of: Any) -> None:
    """Takes the place of NCCL's sum over the GPUs of one process."""
    check("all_reduce", [*inputs, *outputs])
    if op != torch.cuda.nccl.SUM:
        raise NotImplementedError(f"NCCL's operation {op} has no stand-in")
    total = sum(tensor.cpu() for tensor in inputs)
    for output in outputs:
        output.copy_(total)


def install() -> None:
    """Replaces the collectives of CUDA tensors, and starts gloo where NCCL is asked for."""
    torch._C._nccl_all_reduce = all_reduce_past_groups  # type: ignore[attr-defined]
    library = torch.library.Library("c10d", "IMPL")
    _libraries.append(library)
    with silent_stderr():
        for full in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            space, _, name = full.partition("::")
            if space == "c10d":
                library.impl(name, stand_in(getattr(torch.ops.c10d, name.partition(".")[0]).default), "CUDA")
    start = dist.init_process_group

    def start_with_gloo(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        start("cpu:gloo,cuda:gloo" if backend and "nccl" in backend else backend, *args, **kwargs)

    dist.init_process_group = start_with_gloo  # type: ignore[assignment]
