"""The sizes of all tensors that come into being, forward and backward."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class NewTensors(TorchDispatchMode):
    """Collects how many numbers each new tensor has, views and results in place left out."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        storages = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in storages:
                self.sizes.append(made.numel())
        return result
