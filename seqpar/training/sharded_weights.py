"""Weights, gradients and optimizer states in shards over all ranks (FSDP2); imported where a run asks for it.

torch's module of shards takes longer to import than the rest of training together.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from seqpar.models.network import Network
from seqpar.parallel.mesh import Mesh


def shard(net: Network, mesh: Mesh) -> None:
    """Leaves each rank of data x seq its shard of the weights, and so of the gradients and optimizer states.

    The weights of a unit (a block, a cell) are gathered for its forward and again for its backward; all others form
    one such unit.
    """
    ranks = mesh.line()
    # logits may be a view of the upsampled grid; nothing here writes into them
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)

    def sharded_dim(p: nn.Parameter) -> Shard | None:
        """Returns the dimension to cut where the first one is too short, None for the first one."""
        divisible = [dim for dim, size in enumerate(p.shape) if size % mesh.world.size == 0]
        return Shard(divisible[0]) if p.shape[0] < mesh.world.size and divisible else None

    for unit in net.units():
        fully_shard(unit, mesh=ranks, shard_placement_fn=sharded_dim)
    fully_shard(net, mesh=ranks, shard_placement_fn=sharded_dim)


@contextmanager
def gathered(net: Network, mesh: Mesh) -> Iterator[None]:
    """Keeps the weights gathered if there are several sequence groups, as in validation.

    They predict different numbers of windows, so none may wait for another to gather weights.
    """
    sharded = [module for module in net.modules() if isinstance(module, FSDPModule)]
    for module in sharded if mesh.data.size > 1 else ():
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    yield
    for module in sharded:
        module.reshard()
        module.set_reshard_after_forward(module is not net, recurse=False)
