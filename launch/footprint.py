"""How much memory a whole-volume pass takes on each rank, counted before it starts.

The decoder is run on tensors without data and what is alive is counted; the encoder, whose attention keeps no
scores, is a sum of its tensors' sizes. Legend: n tokens, e embedding, k classes, V voxels.
"""

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar.launch.inference import padded_shape
from seqpar.launch.model import SegmentationNet
from seqpar.mesh import Mesh


@dataclass(frozen=True)
class Footprint:
    """Bytes on the rank that needs most."""

    encoder: int
    decoder: int
    sums: int
    weights: int

    @property
    def total(self) -> int:
        """Encoder and decoder run one after the other."""
        return max(self.encoder, self.decoder) + self.sums + self.weights

    def __str__(self) -> str:
        parts = {"encoder": self.encoder, "decoder": self.decoder, "sums": self.sums, "weights": self.weights}
        told = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in parts.items())
        return f"about {self.total / 2**20:.1f} MiB on each rank ({told})"


def footprint(net: SegmentationNet, shape: Sequence[int], num_classes: int, mesh: Mesh) -> Footprint:
    """Returns what one pass over a whole volume of that shape takes."""
    encoder = net.encoder
    layout = encoder.layout.of_tile(padded_shape(shape, encoder.layout))
    first = next(net.parameters())
    width, dim = first.element_size(), encoder.embed_dim
    tokens, mine = layout.num_tokens, max(layout.counts)
    channels = encoder.patch_embed.proj.weight.shape[1]
    image = channels * math.prod(layout.patch) * mine
    hidden = max((len(p) for name, p in encoder.named_parameters() if ".mlp." in name and p.ndim > 1), default=0)
    attention = 8 * mine * dim + 2 * tokens * dim  # keys and values of all tokens come to each rank
    within = max(attention, mine * (2 * dim + 2 * hidden)) + len(net.taps) * mine * dim
    boxes = 1 if net.mode.name == "gather" else layout.num_ranks
    grid = torch.empty(1, dim, *layout.grid, dtype=first.dtype, device="meta")
    features = [grid] * (len(net.taps) + 1)
    picture = torch.empty(1, channels, *layout.tile, dtype=first.dtype, device="meta")
    decoder = copy.deepcopy(net.decoder).to("meta")
    with torch.no_grad(), Alive(width * (sum(f.numel() for f in features) + picture.numel())) as alive:
        decoder(features, picture if decoder.uses_image else None, None)
    voxels = math.prod(shape)
    sums = (2 * num_classes + 1) * -(-voxels // mesh.world.size) * max(width, 4)
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    return Footprint(width * (image + within), alive.most // boxes, sums, weights)


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive at once, ``most`` at the worst moment."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.now = self.most = begin
        self._users: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not self._users[key]:
            self.now += size
            self.most = max(self.most, self.now)
        self._users[key] += 1
        finalize(tensor, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            self.now -= size
