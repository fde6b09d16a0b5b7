"""Whole networks of weights that lie at the places of a pipe: for files, and for predicting in training."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqpar.parallel.consensus import gather_texts
from seqpar.parallel.mesh import Group
from seqpar.parallel.messages import post
from seqpar.pipeline.weights import put_tensor


class Entry(NamedTuple):
    """A weight or buffer of a whole network, without its numbers."""

    place: int
    shape: torch.Size
    dtype: torch.dtype
    is_learned: bool


def entries_of(net: nn.Module, places: Mapping[str, int]) -> dict[str, Entry]:
    """Returns the entries of a whole network by their names; ``places``: where each will lie."""
    learned = {name for name, _ in net.named_parameters()}
    return {name: Entry(places[name], x.shape, x.dtype, name in learned) for name, x in net.state_dict().items()}


@contextmanager
def whole_network(net: nn.Module, entries: Mapping[str, Entry], pipe: Group, device: torch.device) -> Iterator[None]:
    """Brings the weights of all places to all of them, and drops them at the end."""
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


def collect(tensors: Mapping[str, Tensor], pipe: Group) -> dict[str, Tensor]:
    """Returns the tensors of all places at the first of them, on the CPU; an empty dict at the others."""
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
