"""How much memory a whole-volume pass takes on each rank, counted before it starts.

The network runs on meta tensors, and the bytes that are alive are counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from seqpar.launch.hardware.devices import MIB
from seqpar.launch.inference.sliding_window import fitting_batch, padded_shape
from seqpar.launch.models.net import Net
from seqpar.launch.planning.memory_counter import MemoryCounter
from seqpar.launch.planning.outline import without_numbers
from seqpar.mesh import Mesh


@dataclass(frozen=True)
class Footprint:
    """Bytes that a whole-volume pass takes on a rank."""

    encoder: int
    decoder: int
    sums: int
    weights: int

    @property
    def total(self) -> int:
        """The larger of encoder and decoder, which run one after the other, with what stays during both."""
        return max(self.encoder, self.decoder) + self.sums + self.weights

    def __str__(self) -> str:
        parts = {"encoder": self.encoder, "decoder": self.decoder, "sums": self.sums, "weights": self.weights}
        sizes = ", ".join(f"{name} {size / MIB:.1f}" for name, size in parts.items())
        return f"about {self.total / MIB:.1f} MiB on each rank ({sizes})"


def footprint(net: Net, shape: Sequence[int], num_classes: int, mesh: Mesh) -> Footprint:
    """Returns what one pass over a whole volume of that shape takes on this rank.

    A volume that the network cannot pass raises ValueError, as the pass would; call it on all ranks, so that all do.
    """
    meta_net = without_numbers(net).eval()
    layout = meta_net.layout.of_tile(padded_shape(shape, meta_net.layout))
    dtype = next(meta_net.parameters()).dtype
    num_tokens = layout.counts[meta_net.group.index]
    with torch.no_grad(), MemoryCounter() as counter:
        counter.phase = "encoder"
        part_shape = fitting_batch([net], 1), num_tokens, net.in_channels, *layout.patch  # b n/s c p p p
        part = torch.empty(part_shape, dtype=dtype, device="meta")
        meta_net.on_phases(lambda phase: setattr(counter, "phase", phase))
        meta_net(part, layout)
    sums = (2 * num_classes + 1) * -(-math.prod(shape) // mesh.world.size) * max(dtype.itemsize, 4)
    weights = sum(p.nbytes for p in net.parameters())
    return Footprint(counter.peaks["encoder"], counter.peaks["decoder"], sums, weights)
