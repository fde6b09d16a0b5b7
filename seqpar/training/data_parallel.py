"""Data parallelism over all ranks: DDP, or weights, gradients and optimizer states in shards (FSDP2)."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seqpar.late_import import late
from seqpar.models.network import Network
from seqpar.parallel.mesh import Mesh

fsdp = late("torch.distributed.fsdp")  # takes longer to import than the rest of training together
tensor = late("torch.distributed.tensor")


def data_parallel(net: Network, mesh: Mesh, shard_weights: bool) -> nn.Module:
    """Returns the module to call in training, whose backward averages gradients over all ranks.

    DDP around ``net``; ``net`` itself if its weights are sharded or there is one rank.
    """
    if shard_weights:
        shard(net, mesh)
        return net
    return wrap_data_parallel(net, mesh)


def wrap_data_parallel(net: nn.Module, mesh: Mesh) -> nn.Module:
    """Returns the module to call, whose backward averages gradients over all ranks meanwhile; one rank: ``net``."""
    if mesh.world.size == 1:
        return net
    return DistributedDataParallel(net, process_group=mesh.world.handle, gradient_as_bucket_view=True)


def shard(net: Network, mesh: Mesh) -> None:
    """Leaves each rank of data x seq its shard of the weights, and so of the gradients and optimizer states.

    The weights of a unit (a block, a cell) are gathered for its forward and again for its backward; all others form
    one such unit.
    """
    ranks = mesh.line()
    # logits may be a view of the upsampled grid; nothing here writes into them
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)

    def sharded_dim(p: nn.Parameter) -> Any:
        """Returns the dimension to cut where the first one is too short, None for the first one."""
        divisible = [dim for dim, size in enumerate(p.shape) if size % mesh.world.size == 0]
        return tensor.Shard(divisible[0]) if p.shape[0] < mesh.world.size and divisible else None

    for unit in net.units():
        fsdp.fully_shard(unit, mesh=ranks, shard_placement_fn=sharded_dim)
    fsdp.fully_shard(net, mesh=ranks, shard_placement_fn=sharded_dim)


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which DDP adds gradients up on this rank alone; shards are reduced in every backward."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


@contextmanager
def frozen_running_statistics(net: Network) -> Iterator[None]:
    """Restores running statistics behind a forward that does not count."""
    before = [buffer.clone() for buffer in net.buffers()]
    yield
    for buffer, value in zip(net.buffers(), before):
        buffer.copy_(value)


@contextmanager
def gathered(net: Network, mesh: Mesh, shard_weights: bool) -> Iterator[None]:
    """Keeps sharded weights gathered if there are several sequence groups, as in validation.

    They predict different numbers of windows, so none may wait for another to gather weights.
    """
    sharded = [module for module in net.modules() if isinstance(module, fsdp.FSDPModule)] if shard_weights else []
    for module in sharded if mesh.data.size > 1 else ():
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    yield
    for module in sharded:
        module.reshard()
        module.set_reshard_after_forward(module is not net, recurse=False)
