"""Multi-head self-attention of tokens that are spread over a group, by one of several strategies, all exact.

Legend: b batch, n tokens, e embedding, a heads, f features per head; ``n/s`` is this rank's share of the tokens.

``cost_model`` names the strategies and says what each moves and holds; ``head_exchange`` and ``token_gather``
carry them out. Nothing of whole-sequence size is held for the backward unless ``keep`` asks for it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.attention.head_exchange import exchange
from seqpar.attention.partition import Rotate
from seqpar.attention.strategies import Strategy
from seqpar.attention.token_gather import gather_x
from seqpar.mesh import Group
from seqpar.meta_tensors import autocast_dtype

__all__ = ["Attention", "Rotate"]


class Attention(nn.Module):
    """Multi-head self-attention of the tokens of all ranks, computed for this rank's queries.

    Keys have no bias: softmax does not see it, its gradient is zero, and Adam would amplify that zero's noise.
    ``norm_eps`` asks for a LayerNorm over the joined heads, before the projection. ``keep`` holds what was gathered
    until the backward; ``per_chunk`` is how many heads go together, chosen by size where it is None.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        group: Group | None = None,
        keep: bool = False,
        norm_eps: float | None = None,
        strategy: Strategy | None = None,
        per_chunk: int | None = None,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            fits = [h for h in range(1, embed_dim + 1) if embed_dim % h == 0 and h <= 2 * num_heads]
            raise ValueError(f"--heads {num_heads} does not divide --embed-dim {embed_dim}: use {fits[-3:]}")
        if per_chunk is not None and not 1 <= per_chunk <= num_heads:
            raise ValueError(f"--heads-per-chunk {per_chunk}: choose 1 to {num_heads}, or leave it to the size")
        self.num_heads, self.keep, self.per_chunk = num_heads, keep, per_chunk
        self.group = group or Group("seq")
        self.strategy = strategy or Strategy("gather-kv")
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(embed_dim)) if qkv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(embed_dim)) if qkv_bias else None
        self.norm = nn.LayerNorm(embed_dim, norm_eps) if norm_eps is not None else nn.Identity()
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, sizes: Sequence[int], rotate: Rotate | None = None) -> Tensor:
        """Returns the attended tokens; ``sizes`` are all ranks' token counts, ``rotate`` turns queries and keys."""
        if self.strategy.name == "gather-x":
            out = self._gathered(x, sizes, rotate)
        else:
            out = self._exchanged(x, sizes, rotate)
        return self.proj(self.norm(out.flatten(2)))

    def _exchanged(self, x: Tensor, sizes: Sequence[int], rotate: Rotate | None) -> Tensor:
        bias = None
        if self.q_bias is not None and self.v_bias is not None:
            bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias).unflatten(2, (3, self.num_heads, -1))  # b n/s 3 a f
        return exchange(qkv, self.group, sizes, self.strategy.inner, rotate, self.keep, self.per_chunk)

    def _gathered(self, x: Tensor, sizes: Sequence[int], rotate: Rotate | None) -> Tensor:
        given = (x, self.qkv.weight, self.q_bias, self.v_bias)
        dtype = autocast_dtype(x)
        if dtype is not None:  # before the gather, as a linear layer would
            given = tuple(t if t is None else t.to(dtype) for t in given)  # type: ignore[assignment]
        return gather_x(*given, self.num_heads, self.group, sizes, rotate, self.keep, self.per_chunk)
