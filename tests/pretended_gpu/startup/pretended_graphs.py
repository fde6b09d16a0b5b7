"""CUDA graphs on a pretended GPU: a recording notes each kernel, and a replay runs the same ones on the same memory.

As on a GPU, what Python computes is not computed again, and nothing that is recorded may wait for the device.
"""

from typing import Any

import torch
from pretended_kernels import waits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def _detached(values: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, values)


class _Notes(TorchDispatchMode):
    """Notes the operators that compute on a GPU, with the memory that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = list[tuple[Any, Any, Any, list[Tensor]]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(waits)
        result = func(*args, **(kwargs or {}))
        if len(waits) > before:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func} ({waits[-1]})")
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_cuda]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_cuda]
        if (made or given) and "empty" not in func._overloadpacket.__name__:
            self.kernels.append((func, _detached(args), _detached(kwargs or {}), _detached(made)))
        return result


class PretendedGraph:
    """Takes the place of ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._notes = _Notes()

    def capture_begin(self, *pool: Any, **modes: Any) -> None:
        """Begins to record; ``modes``: of errors and, from torch 2.14 on, of inputs that are freed, all as usual."""
        if modes.get("check_input_liveness"):
            raise NotImplementedError("a recording here keeps its inputs, so it cannot tell which are freed")
        self._notes.__enter__()

    def capture_end(self) -> None:
        self._notes.__exit__(None, None, None)

    def replay(self) -> None:
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            for func, args, kwargs, recorded in self._notes.kernels:
                made = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor) and x.is_cuda]
                for new, old in zip(made, recorded, strict=True):
                    if new.data_ptr() != old.data_ptr():  # else a view, or written in place
                        old.copy_(new)


def install() -> None:
    """Makes programs record on a pretended GPU."""
    torch.cuda.CUDAGraph = PretendedGraph  # type: ignore[misc, assignment]
