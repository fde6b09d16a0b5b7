"""Reads torch's files without running anything of them: numpy's scalars, which trainers log, become None."""

import zipfile
from pathlib import Path
from typing import Any

import torch

_SCALARS = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")  # of numpy 2; of numpy 1


class _NumberType:
    """Stands for a number type of numpy's."""

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def _no_scalar(*arguments: Any) -> None:
    """Stands for the function that makes a scalar of numpy's."""


def load_torch(path: str | Path, mapped: bool = False) -> Any:
    """Returns what ``torch.save`` wrote: tensors, containers, numbers and text; anything else is refused.

    - ``mapped``: tensors are read from the file when they are used, where it is an archive, as all newer ones are
    """
    stubs = [(_NumberType, "numpy.dtype"), *((_no_scalar, name) for name in _SCALARS)]
    with torch.serialization.safe_globals(stubs):  # type: ignore[arg-type]
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipfile.is_zipfile(path))
