"""Counts what a device would be asked to do: the kernels that are launched, and what is fetched from the host."""

import itertools
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqpar.parallel.meta_tensors import times

# operators that make a tensor without filling it, or hand one on
NO_KERNELS = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "detach",
}


class _Numbers(TorchFunctionMode):
    """Counts tensors that are made on a device of Python's numbers."""

    def __init__(self, device_type: str, fetches: Counter[str]) -> None:
        self._device_type, self._fetches = device_type, fetches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and result.device.type == self._device_type:
            self._fetches[func.__name__] += not isinstance(args[0], Tensor)
        return result


class LaunchCounter(TorchDispatchMode):
    """Counts operators below autograd whose results lie on ``device_type``, by name.

    An operator that makes or changes values there counts as one launch; torch may need several for it. Views and
    memory without values count nothing. Tensors without data ("meta") will do, where all that is computed is so.

    - ``launches``: operators that compute
    - ``fetches``: those that take values from the host: copies of its tensors, and tensors of Python's numbers
    """

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()
        self.launches, self.fetches = Counter[str](), Counter[str]()
        self._device_type = device_type
        self._numbers = _Numbers(device_type, self.fetches)

    def __enter__(self) -> "LaunchCounter":
        self._numbers.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._numbers.__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch asks; else the first operator would import its compiler
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.device.type == self._device_type]
        if not made:
            return result
        inputs = [t for t in itertools.chain(tree_leaves(args), tree_leaves(kwargs)) if isinstance(t, Tensor)]
        name = func._overloadpacket.__name__
        if any(t.ndim and t.device.type != self._device_type for t in inputs):
            self.fetches[name] += 1
        known = {t.untyped_storage()._cdata for t in inputs}
        is_new = any(t.untyped_storage()._cdata not in known for t in made)
        if name not in NO_KERNELS and (is_new or func._schema.is_mutable):
            self.launches[name] += times()
        return result
