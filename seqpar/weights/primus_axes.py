"""Weights of Primus for exchanged axes: of tokens, of which some files have another order, or of images.

nnU-Net reads the last axis of a file first. Rotary positions turn a head's features axis by axis: where queries and
keys exchange those of two axes, their products stay.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

State = dict[str, Tensor]
TABLE = "encoder.pos_embed"
OF_AXES = (".attn.q.weight", ".attn.k.weight", ".attn.q_bias")  # ends of the names of what rotary positions turn


def exchange_tokens(state: State, num_heads: int, grid: Sequence[int] | None = None) -> None:
    """Makes weights of tokens ``(h w d)``, under our names, those of the same network of tokens ``(w h d)``.

    - ``grid``: of the tile that they were trained on; None: a cube. Its sides w and h must be equal
    """
    count = state[TABLE].shape[1] if TABLE in state else 0
    sides = (round(count ** (1 / 3)),) * 3 if grid is None else tuple(grid)
    if sides[0] != sides[1] or (TABLE in state and math.prod(sides) != count):
        known = "" if grid is None else f" but {'x'.join(map(str, sides))}"
        raise ValueError(
            f"token order hwd: the weights have {count} positions, which are no cube{known}: weights trained with "
            "exchanged axes only fit a grid whose first two sides are equal"
        )
    _exchange_positions(state, num_heads, sides, 0, 1)


def reverse_images(state: State, num_heads: int, grid: Sequence[int]) -> None:
    """Makes weights for images ``c W D H``, under our names, those of the same network for images ``c H D W``.

    - ``grid``: of the learned positions, along W, D and H
    """
    for name, tensor in state.items():
        if tensor.ndim == 5:  # kernels
            state[name] = tensor.transpose(2, 4).contiguous()
    _exchange_positions(state, num_heads, grid, 0, 2)


def _exchange_positions(state: State, num_heads: int, grid: Sequence[int], first: int, second: int) -> None:
    """Exchanges two axes of learned positions, and what rotary ones of these axes turn."""
    if TABLE in state:
        state[TABLE] = state[TABLE].unflatten(1, tuple(grid)).transpose(1 + first, 1 + second).flatten(1, 3)
    for name, tensor in state.items():
        if name.endswith(OF_AXES):
            by_head = tensor.unflatten(0, (num_heads, -1))  # a f e, or a f
            third = by_head.shape[1] // 6 * 2
            *pieces, rest = by_head.split([third, third, third, by_head.shape[1] - 3 * third], 1)
            pieces[first], pieces[second] = pieces[second], pieces[first]
            state[name] = torch.cat([*pieces, rest], 1).flatten(0, 1)
