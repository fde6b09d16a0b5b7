"""Data parallelism over all ranks: DDP, or weights in shards."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seqpar.models.network import Network
from seqpar.parallel.mesh import Mesh


def data_parallel(net: Network, mesh: Mesh, shard_weights: bool) -> nn.Module:
    """Returns the module to call in training, whose backward averages gradients over all ranks.

    DDP around ``net``; ``net`` itself if its weights are sharded or there is one rank.
    """
    if shard_weights:
        from seqpar.training import sharded_weights

        sharded_weights.shard(net, mesh)
        return net
    return wrap_data_parallel(net, mesh)


def wrap_data_parallel(net: nn.Module, mesh: Mesh) -> nn.Module:
    """Returns the module to call, whose backward averages gradients over all ranks meanwhile; one rank: ``net``."""
    if mesh.world.size == 1:
        return net
    return DistributedDataParallel(net, process_group=mesh.world.handle, gradient_as_bucket_view=True)


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


def gathered(net: Network, mesh: Mesh, shard_weights: bool) -> AbstractContextManager[None]:
    """Returns a context in which no forward waits for other sequence groups, as validation needs it."""
    if not shard_weights:
        return nullcontext()
    from seqpar.training import sharded_weights

    return sharded_weights.gathered(net, mesh)
