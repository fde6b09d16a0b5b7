"""Reads the files of a checkpoint: sizes, tensors one by one, digests."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of a safetensors file."""
    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def tensors_in(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a file one by one, so that no rank holds all of them."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def digest(path: Path) -> str:
    """Returns a hash of a file's bytes."""
    bytes_hash = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            bytes_hash.update(block)
    return bytes_hash.hexdigest()
