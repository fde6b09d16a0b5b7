"""Data parallelism: DDP, or weights in shards."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.mesh import Mesh


def shard(net: SegmentationNet, mesh: Mesh) -> None:
    """Leaves each rank of data x seq its share of the weights, and so of their gradients and optimiser states.

    A block's weights come together for its forward and again for its backward; the rest is one such unit.
    """
    ranks = mesh.line()
    # logits may be a view of the upsampled grid; nothing here writes into them
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)

    def place(p: torch.nn.Parameter) -> Shard | None:
        """Returns the direction that is cut where it is not the first one, which is too short."""
        fits = [dim for dim, size in enumerate(p.shape) if size % mesh.world.size == 0]
        return Shard(fits[0]) if p.shape[0] < mesh.world.size and fits else None

    for block in net.encoder.blocks:
        fully_shard(block, mesh=ranks, shard_placement_fn=place)
    fully_shard(net, mesh=ranks, shard_placement_fn=place)


@contextmanager
def at_hand(net: SegmentationNet, mesh: Mesh) -> Iterator[None]:
    """Where several groups see different numbers of windows, sharded weights are whole: none may wait for another."""
    sharded = [module for module in net.modules() if isinstance(module, FSDPModule)]
    for module in sharded if mesh.data.size > 1 else ():
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    yield
    for module in sharded:
        module.reshard()
        module.set_reshard_after_forward(module is not net, recurse=False)
