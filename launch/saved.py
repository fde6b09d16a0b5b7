"""How much is held for backward: counted, not guessed."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def saved_bytes(net: nn.Module, run: Callable[[], Tensor]) -> int:
    """Returns the bytes of distinct storages that ``run()``'s result holds for its backward, parameters excluded."""
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    held: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        place = t.untyped_storage()
        if place.data_ptr() not in weights:
            held[place.data_ptr()] = place.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = run()
    assert output.requires_grad, "nothing is held for what has no gradient"
    return sum(held.values())
