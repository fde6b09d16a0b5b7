"""The weights of stages: which place has which, the sum of their gradients, and the whole network for files and
prediction.

Names are those of the whole network everywhere; what another place has is None under its name.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqpar.parallel.collectives import all_gather, all_reduce, reduce_scatter
from seqpar.parallel.consensus import gather_texts, max_of_each_over_ranks
from seqpar.parallel.mesh import Group
from seqpar.parallel.messages import check_collective, post

BUCKET_BYTES = 25 << 20


def cells_of_names(names: Sequence[str], owns: Sequence[Sequence[str]]) -> dict[str, int]:
    """Returns the cell of each weight or buffer; ``owns`` has the name prefixes of each cell."""
    cells: dict[str, int] = {}
    for name in names:
        owners = [cell for cell, prefixes in enumerate(owns) if name.startswith(tuple(prefixes))]
        assert len(owners) == 1, (name, owners)
        cells[name] = owners[0]
    return cells


def places_of_names(
    names: Sequence[str], owns: Sequence[Sequence[str]], place_of_cells: Sequence[int]
) -> dict[str, int]:
    """Returns the place of each weight or buffer."""
    return {name: place_of_cells[cell] for name, cell in cells_of_names(names, owns).items()}


def keep_local_weights(net: nn.Module, places: Mapping[str, int], place: int) -> None:
    """Keeps the weights and buffers of one place; the others become None under their names.

    - ``places``: of every name in the network's ``state_dict``
    """
    learned = {name for name, _ in net.named_parameters()}
    for name in net.state_dict():
        if places[name] != place:
            put_tensor(net, name, None, name in learned)


def put_tensor(net: nn.Module, name: str, tensor: Tensor | None, is_learned: bool) -> None:
    """Sets a weight, or a buffer if ``is_learned`` is False, by its name; it may be None."""
    path, _, leaf = name.rpartition(".")
    module = net.get_submodule(path)
    if is_learned:
        module.register_parameter(leaf, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
    else:
        module.register_buffer(leaf, tensor)


def average_gradients(parameters: Sequence[nn.Parameter], stage: Group, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Averages the gradients over the ranks that hold the same weights.

    Sums run in rank order, so that they depend neither on which weights a place has nor on timing.
    """
    if stage.size == 1:
        return
    check_collective("gradients", stage)
    for bucket in _buckets([p.grad for p in parameters if p.grad is not None], bucket_bytes):
        flat = torch.cat([grad.flatten() for grad in bucket])
        share, rest = divmod(len(flat), stage.size)
        sizes = [share + (rank < rest) for rank in range(stage.size)]
        mean = reduce_scatter(flat / stage.size, stage, 0, sizes, "gradients")
        whole = all_gather(mean, stage, 0, sizes, "gradients")
        for grad, piece in zip(bucket, whole.split([grad.numel() for grad in bucket])):
            grad.copy_(piece.view_as(grad))


def _buckets(grads: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yields gradients of one dtype, up to ``limit`` bytes together; a larger gradient gets its own bucket."""
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        bucket, size = list[Tensor](), 0
        for grad in (grad for grad in grads if grad.dtype == dtype):
            if bucket and size + grad.nbytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(grad)
            size += grad.nbytes
        if bucket:
            yield bucket


def clip_gradients(
    net: nn.Module, names: Sequence[str], limit: float, pipe: Group, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Clips the norm of all places' gradients to ``limit``, and returns the norm before clipping.

    It is the same on all ranks, and bit-identical to that of one process.

    - ``names``: of the whole network's parameters, in order
    - ``dtype``: of the gradients
    """
    parameters = dict(net.named_parameters())
    own = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    device = next(iter(parameters.values())).device
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    norms = [torch.linalg.vector_norm(own[name]).double() if name in own else nothing for name in names]
    has_gradient = max_of_each_over_ranks([int(name in own) for name in names], pipe)  # on the host, without the device
    if not any(has_gradient):
        raise ValueError("no weight of the network has a gradient: at least one needs requires_grad=True")
    every = all_reduce(torch.stack(norms), pipe, "norms").unbind()
    norm = torch.linalg.vector_norm(torch.stack([x for x, has in zip(every, has_gradient) if has]).to(dtype))
    torch.nn.utils.clip_grads_with_norm_(list(net.parameters()), limit, norm)
    return norm


class TensorSpec(NamedTuple):
    """A weight or buffer of the whole network, without its data."""

    place: int
    shape: torch.Size
    dtype: torch.dtype
    is_learned: bool


def tensor_specs(net: nn.Module, places: Mapping[str, int]) -> dict[str, TensorSpec]:
    """Returns the specs of a whole network by name; ``places`` says where each tensor will be."""
    learned = {name for name, _ in net.named_parameters()}
    return {name: TensorSpec(places[name], x.shape, x.dtype, name in learned) for name, x in net.state_dict().items()}


@contextmanager
def whole_network(
    net: nn.Module, entries: Mapping[str, TensorSpec], pipe: Group, device: torch.device
) -> Iterator[None]:
    """Copies the weights of all places to each of them, and drops them at the end."""
    own = net.state_dict()
    for name, entry in entries.items():
        tensor = own.get(name)
        if tensor is not None:
            line = tensor.detach().contiguous()
            post(dict.fromkeys(pipe.peers, line), {}, pipe, "weights").wait()
        else:
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            post({}, {entry.place: tensor}, pipe, "weights").wait()
            put_tensor(net, name, tensor, entry.is_learned)
    try:
        yield
    finally:
        for name, entry in entries.items():
            if name not in own:
                put_tensor(net, name, None, entry.is_learned)


def gather_tensors(tensors: Mapping[str, Tensor], pipe: Group) -> dict[str, Tensor]:
    """Returns the tensors of all places at the first one, on the CPU; an empty dict at the others."""
    plans = [[name, list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in tensors.items()]
    every = [json.loads(text) for text in gather_texts(json.dumps(plans), pipe)]
    if pipe.index:
        for x in tensors.values():
            post({0: x.detach().cpu().contiguous()}, {}, pipe, "weights").wait()
        return {}
    whole = {name: x.detach() for name, x in tensors.items()}
    for place, plan in enumerate(every[1:], 1):
        for name, shape, dtype in plan:
            whole[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            post({}, {place: whole[name]}, pipe, "weights").wait()
    return whole
