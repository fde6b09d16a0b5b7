"""The states of the optimizer and of the random generators, as plain tensors and JSON values."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from seqpar.parallel.collectives import full_tensor


def optimizer_tensors(net: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns the optimizer's state as tensors, named ``parameter/entry``."""
    state = {}
    for name, parameter in net.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                state[f"{name}/{entry}"] = torch.as_tensor(value)
    return state


def fill_optimizer(net: nn.Module, optimizer: Optimizer, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Restores the state that ``optimizer_tensors`` returned, from whole tensors; a rank with shards keeps its own."""
    parameters = dict(net.named_parameters())
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for key, value in tensors:
        name, _, entry = key.rpartition("/")
        own, parameter = value, parameters[name]
        if entry != "step" and value.shape == parameter.shape:
            own = torch.zeros_like(parameter)
            copy_into(own, value)
        elif entry != "step":  # Adafactor's rows and columns, which are not sharded
            own = value.to(parameter.device)
        elif fused:  # its kernels count steps where the parameters lie
            own = value.to(parameter.device, torch.float32)
        optimizer.state[parameter][entry] = own


def whole_tensors(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Returns the tensors gathered from their shards, or an empty dict on ranks without ``keep``.

    Every rank takes part. Tensors are gathered one by one, so that only ranks with ``keep`` hold them all.
    """
    gathered = {}
    for name, tensor in tensors.items():
        joined = full_tensor(tensor)
        if keep:
            gathered[name] = joined.cpu() if hasattr(tensor, "full_tensor") else joined
    return gathered


def copy_into(target: Tensor, values: Tensor) -> None:
    """Copies whole ``values`` into a tensor of the same size, or into this rank's shard of it (torch's DTensor)."""
    assert target.shape == values.shape, (target.shape, values.shape)
    own: Any = target.detach()
    if hasattr(own, "to_local"):
        (shard,) = own.placements
        pieces, at = values.chunk(own.device_mesh.size(), shard.dim), own.device_mesh.get_local_rank()
        values = pieces[at] if at < len(pieces) else values.narrow(shard.dim, 0, 0)
        own = own.to_local()
    own.copy_(values)


def random_states() -> dict[str, Any]:
    """Returns the states of python's, numpy's and torch's generators as JSON values."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restores the states that ``random_states`` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(states["cuda"]), dtype=torch.uint8))
