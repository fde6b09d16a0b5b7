"""How much memory a whole-volume pass takes on each rank, counted before it starts.

The network runs on tensors without data and what is alive is counted. Legend: b batch, n tokens, c channels, k
classes, p voxels of a patch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from seqpar.launch.inference.sliding_window import fitting_batch, padded_shape
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.planning.memory_counter import MemoryCounter
from seqpar.launch.planning.step_counter import without_numbers
from seqpar.mesh import Mesh


@dataclass(frozen=True)
class Footprint:
    """Bytes on a rank."""

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
    """Returns what one pass over a whole volume of that shape takes on this rank.

    A volume that the network cannot pass is refused, as the pass would: so that all ranks say so, all must ask.
    """
    bare = without_numbers(net).eval()
    layout = bare.encoder.layout.of_tile(padded_shape(shape, bare.encoder.layout))
    first = next(bare.parameters())
    channels = bare.encoder.patch_embed.proj.weight.shape[1]
    with torch.no_grad(), MemoryCounter() as alive:
        alive.phase = "encoder"
        counted = layout.counts[bare.encoder.group.index]
        part = torch.empty(fitting_batch([net], 1), counted, channels, *layout.patch, dtype=first.dtype, device="meta")
        bare.decoder.register_forward_pre_hook(lambda *_: setattr(alive, "phase", "decoder"))
        bare(part, layout)
    sums = (2 * num_classes + 1) * -(-math.prod(shape) // mesh.world.size) * max(first.element_size(), 4)
    weights = sum(p.nbytes for p in net.parameters())
    return Footprint(alive.peaks["encoder"], alive.peaks["decoder"], sums, weights)
