"""Chooses channels last on devices that convolve faster with it."""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from seqpar.parallel.half_precision import half_dtype
from seqpar.parallel.launcher import MIOPEN_NHWC
from seqpar.parallel.meta_tensors import autocast_dtype, device_type


def is_channels_last(x: Tensor) -> bool:
    """Returns whether the channels of ``x``, ``b c W D H``, are innermost in memory."""
    return x.ndim == 5 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d)


def in_fastest_format(x: Tensor) -> Tensor:
    """Returns ``x``, ``b c W D H``, in the memory format in which this device convolves fastest.

    Every operation of ``seqpar.spatial`` returns its result in the format of its input. On a GPU it is also in the
    precision of the convolutions, because one launch does both.
    """
    kind, dtype = device_type(x), autocast_dtype(x) or x.dtype
    if x.ndim != 5 or (kind == "cpu" and dtype == torch.float64):
        return x
    last = prefers_channels_last(kind, dtype, kind == "cpu" or library_takes_channels_last())
    memory_format = torch.channels_last_3d if last else torch.contiguous_format
    return x.to(half_dtype(x) or x.dtype, memory_format=memory_format).contiguous(memory_format=memory_format)


def prefers_channels_last(kind: str, dtype: torch.dtype, library_takes_it: bool) -> bool:
    """Returns whether a device convolves faster with channels innermost.

    A CPU does (1.7 times as fast at full resolution in the bench), but torch has no such kernels for float64. On a GPU,
    matrix units take half precision in this format. In float32, channels first leaves norms to the library, and AMD's
    library would copy each tensor to another format unless it is told to accept it.

    - ``kind``: the device type, as torch names it
    - ``library_takes_it``: whether torch passes such tensors to the GPU's library without a copy
    """
    if kind == "cpu":
        return dtype != torch.float64
    return library_takes_it and dtype.itemsize == 2


def library_takes_channels_last() -> bool:
    """Returns whether torch passes volumes with channels last to the GPU's library without a copy."""
    if torch.version.hip is None:
        return True
    return miopen_takes_channels_last(os.environ, torch.__version__, torch.backends.cudnn.version() or 0)


def miopen_takes_channels_last(env: Mapping[str, str], torch_version: str, miopen: int) -> bool:
    """Returns whether AMD's library does: as ``env`` says, else by torch's default, which has changed twice.

    - ``miopen``: the version as torch numbers it, 3005000 for 3.5.0
    """
    told = env.get(MIOPEN_NHWC)
    if told in ("0", "1"):
        return told == "1"
    major, minor = (int(number) for number in torch_version.split(".")[:2])
    return (2, 10) <= (major, minor) < (2, 13) and miopen >= 3_005_000


def match_memory_format(y: Tensor, x: Tensor) -> Tensor:
    """Returns ``y`` in the memory format of ``x``, because torch returns small convolutions in another one."""
    return y.contiguous(memory_format=torch.channels_last_3d) if is_channels_last(x) else y
