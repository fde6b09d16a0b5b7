"""Channels last, where this device convolves faster in it."""

import os

import torch
from torch import Tensor

from seqpar.parallel.meta_tensors import autocast_dtype, device_type


def is_channels_last(x: Tensor) -> bool:
    """Returns whether the channels of ``b c W D H`` lie innermost."""
    return x.ndim == 5 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d)


def in_fastest_format(x: Tensor) -> Tensor:
    """Returns ``b c W D H`` in the memory format in which this device convolves fastest.

    Every operation of this room returns its result in the format of its input.
    """
    kind, dtype = device_type(x), autocast_dtype(x) or x.dtype
    if x.ndim != 5 or (kind == "cpu" and dtype == torch.float64):
        return x
    amd_takes_it = torch.version.hip is None or os.environ.get("PYTORCH_MIOPEN_SUGGEST_NHWC") == "1"
    last = prefers_channels_last(kind, dtype, amd_takes_it)
    return x.contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)


def prefers_channels_last(kind: str, dtype: torch.dtype, library_takes_it: bool) -> bool:
    """Returns whether a device convolves faster with channels innermost.

    On a CPU it does (bench: 1.7 times as fast at full resolution), but torch has no such kernels for float64. On a GPU
    the matrix units take half precision so; in float32 channels first leaves norms to the library, and AMD's library
    would lay each tensor out anew unless it is told to take it.

    - ``kind``: of the device, as torch names it
    - ``library_takes_it``: whether torch hands such tensors to the GPU's library as they lie
    """
    if kind == "cpu":
        return dtype != torch.float64
    return library_takes_it and dtype.itemsize == 2


def match_memory_format(y: Tensor, x: Tensor) -> Tensor:
    """Returns ``y`` in the memory format of ``x``: torch returns small convolutions in another."""
    return y.contiguous(memory_format=torch.channels_last_3d) if is_channels_last(x) else y
