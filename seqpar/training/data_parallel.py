"""Data parallelism over all ranks: DDP, or shards of weights and states (FSDP2); one object for loops of one's own."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from seqpar.late_import import late
from seqpar.losses.tile_network import LossFunction, TileNetwork, require_peers_of
from seqpar.models.network import Network
from seqpar.parallel.collectives import average_bucket
from seqpar.parallel.layout import plain_tensor
from seqpar.parallel.mesh import Mesh
from seqpar.text import quantity

fsdp = late("torch.distributed.fsdp")  # takes longer to import than the rest of training together
tensor = late("torch.distributed.tensor")


def data_parallel(net: nn.Module, mesh: Mesh, shard_weights: bool) -> nn.Module:
    """Returns the module to call in training, whose backward averages gradients over all ranks.

    DDP around ``net``; ``net`` itself if its weights are sharded or there is one rank.
    """
    if shard_weights:
        shard(cast(Network, net), mesh)
        return net
    return wrap_data_parallel(net, mesh)


def wrap_data_parallel(net: nn.Module, mesh: Mesh, **options: Any) -> nn.Module:
    """Returns the module to call, whose backward averages gradients over all ranks meanwhile; one rank: ``net``.

    - ``options``: further ones of ``DistributedDataParallel``
    """
    if mesh.world.size == 1:
        return net
    module = DistributedDataParallel(net, process_group=mesh.world.handle, gradient_as_bucket_view=True, **options)
    if mesh.world.link is not None:
        module.register_comm_hook(mesh.world, average_bucket)  # through shared memory, without gloo's threads
    return module


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


class ParallelModel(nn.Module):
    """A network and the ranks that train it, as one object for a training loop.

    ``loss`` takes whole tiles or this rank's share, and its backward averages gradients over all ranks by DDP. Called,
    the model takes whole tiles and returns whole outputs on every rank, as MONAI's ``sliding_window_inference`` needs.
    All ranks of a group must call it together, also to validate. Save ``model.net.state_dict()``, which has the names
    of one process. A copy, such as ``AveragedModel`` (EMA) makes, predicts but does not train: save
    ``average.module.net.state_dict()``. Train a network of several inputs under ``DistributedDataParallel`` instead:
    any loss of ``net.unshard(ddp(net.shard(image), time))`` is right.

    DDP averages gradients in the first backward after each call. A second one, of the same graph (``retain_graph``) or
    of an earlier call, raises ValueError here. Under ``DistributedDataParallel`` itself it adds each rank's own
    gradients without a word. ``torch.autograd.grad`` of weights is averaged by neither.

    Args:
        ``net``: a network of ``seqpar``, such as ``UNETR``, or what ``convert`` returned. It is moved to the mesh's
            device, and all ranks get the first one's weights.
        ``mesh``: the ranks, from ``seqpar.init_mesh``; None: this process alone.
        ``options``: of ``DistributedDataParallel``, such as ``find_unused_parameters=True``, for layers that some steps
            do not use, or that are frozen later.
    """

    def __init__(self, net: TileNetwork, mesh: Mesh | None = None, **options: Any) -> None:
        super().__init__()
        if not isinstance(net, TileNetwork):
            raise ValueError(
                f"net is a {type(net).__name__}: give a network of seqpar, or seqpar.convert(net, mesh.seq)"
            )
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ValueError(f"mesh is a {type(mesh).__name__}: give all that seqpar.init_mesh returned")
        size, shared = (1, 1) if mesh is None else (mesh.world.size, mesh.seq.size)
        group, _ = net.group_and_dims()
        if mesh is None and group.size > 1:
            raise ValueError(
                f"the network shares tiles among {group.size} ranks: give mesh=, the one whose seq they are"
            )
        if group.size != shared:
            raise ValueError(
                f"the network shares tiles among {quantity(group.size, 'rank')}, but the mesh among {shared}: make it "
                "with mesh.seq, as in convert(net, mesh.seq) or group=mesh.seq"
            )
        self.net = net if mesh is None else net.to(mesh.device)
        self.data = None if mesh is None else mesh.data
        self._averages = size > 1  # then DDP is kept aside from the submodules, which keep their names
        self.__dict__["_trained"] = _Calls(net) if mesh is None else wrap_data_parallel(_Calls(net), mesh, **options)
        self.__dict__["_backward"] = backward = _OneBackward(net)
        if self._averages and not options.get("static_graph"):  # with which weights may be used by several backwards
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(backward.note)

    def forward(self, image: Tensor) -> Any:
        """Returns the whole outputs of whole tiles ``b c W D H``, the same on all ranks of a group.

        A loss of them trains too, if all ranks of a group compute the same; it needs the memory of whole logits.
        """
        image = plain_tensor(image)
        if self.training and torch.is_grad_enabled():
            return self._call("on_whole", image)
        with _in_terms_of_arguments(self.net, image):
            return self.net.on_whole(image)

    def loss(self, loss_fn: LossFunction, image: Tensor, label: Tensor) -> Tensor:
        """Returns the loss of tiles: on any number of ranks that share them, that of one process.

        A loss of ``seqpar.losses`` sums over ranks. Any other function gets whole logits and labels, which each rank
        then holds: the memory of the loss is that of one process.

        - ``loss_fn``: called with logits and label: a loss of ``seqpar.losses``, of MONAI, or any function. With
          several data groups, the mean of their results counts: a foreign loss that divides by sums over the batch
          (MONAI's ``batch=True``, class weights) divides by those of its group
        - ``image``, ``label``: whole tiles, the same on all ranks of a group, or this rank's share. The gradient of
          whole tiles is that of one process, on every rank. Ranks with different tiles raise ValueError: on a CPU at
          once, on a GPU within 16 calls
        """
        if not callable(loss_fn):
            raise ValueError(f"loss_fn is a {type(loss_fn).__name__}: give a function of logits and label")
        return self._call("loss", loss_fn, plain_tensor(image), label, self.data)  # type: ignore[no-any-return]

    def _call(self, name: str, *arguments: Any) -> Any:
        """Calls a method of the network so that backward averages its gradients."""
        if self._averages and "_trained" not in self.__dict__:
            raise ValueError(
                "this is a copy of a ParallelModel, which averages no gradients: call eval() to predict, train the "
                "original, or train ParallelModel(copy.net, mesh)"
            )
        image = next(x for x in arguments if isinstance(x, Tensor))
        require_peers_of(self.net, image)  # before DDP's messages
        trained = self.__dict__.get("_trained", _Calls(self.net))
        if torch.is_grad_enabled() and self._averages:
            self.__dict__["_backward"].begin(trained.require_backward_grad_sync)
        with _in_terms_of_arguments(self.net, image):
            return trained(name, *arguments)

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which gradients add up on this rank; the first backward after it averages them."""
        return no_sync(self.__dict__["_trained"])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_trained", "_backward")}


class _OneBackward:
    """Refuses a backward whose gradients DDP would leave as each rank has them: any but the first after a call."""

    def __init__(self, net: TileNetwork) -> None:
        self._seen, self._averages, self._noted = net._seen, False, set[int]()

    def begin(self, averages: bool) -> None:
        """Notes a call of the network; ``averages``: whether its backward averages gradients."""
        self._averages, self._noted = averages, set()
        self._seen.called_by = ref(self)

    def note(self, parameter: Tensor) -> None:
        """Raises ValueError if the parameter has got a gradient since the last call, unless another model called."""
        if self._seen.called_by is None or self._seen.called_by() is not self:
            return
        if self._averages and id(parameter) in self._noted:
            raise ValueError(
                "a second backward after one call of ParallelModel came, whose gradients would not be averaged over "
                "ranks: call it once for the sum of the losses, or call the model again before each backward"
            )
        self._noted.add(id(parameter))


@contextmanager
def _in_terms_of_arguments(net: nn.Module, image: Tensor) -> Iterator[None]:
    """Raises as ValueError what torch says of an image of another type than the weights, or of a label without output.

    A network may convert images by itself, so that nothing is refused before torch does.
    """
    try:
        yield
    except IndexError as error:
        if "Target" not in str(error):
            raise
        raise ValueError(f"label: {error} Give numbers of outputs, from 0, or the loss's ignored index") from error
    except RuntimeError as error:
        own = next((weight.dtype for weight in net.parameters() if weight.is_floating_point()), image.dtype)
        if image.dtype == own or image.is_floating_point() and torch.is_autocast_enabled(image.device.type):
            raise
        raise ValueError(
            f"an image of {image.dtype} came, and the weights are of {own}: give image.to({own}), or compute under "
            f"torch.autocast ({error})"
        ) from error


class _Calls(nn.Module):
    """A network whose methods are called by its forward, which is all that DDP wraps."""

    def __init__(self, net: TileNetwork) -> None:
        super().__init__()
        self.net = net

    def forward(self, name: str, *arguments: Any) -> Any:
        return getattr(self.net, name)(*arguments)
