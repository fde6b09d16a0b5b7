"""Multi-head self-attention over tokens that are split over a group, by one of several strategies, all exact.

Legend: b batch, n tokens, e embedding, a heads, f features per head; ``n/s`` is this rank's share of the tokens.

``strategies`` names the strategies, and ``cost_model`` says what each sends and stores; ``head_exchange`` and
``token_gather`` implement them. ``window_attention`` restricts attention to nearby tokens. Nothing as large as the
whole sequence is kept for backward unless ``keep_kv`` is set.
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor, nn

from seqpar.attention.head_exchange import attend_by_head_exchange
from seqpar.attention.partition import Rotary
from seqpar.attention.strategies import Strategy, check_strategy
from seqpar.attention.token_gather import attend_to_gathered_tokens
from seqpar.attention.window_attention import Windows, attend_in_windows
from seqpar.parallel.device_constants import cached
from seqpar.parallel.half_precision import LayerNorm, Linear, half, half_dtype, linear
from seqpar.parallel.layout import refuse_no_count
from seqpar.parallel.mesh import AnyGroup, as_group
from seqpar.parallel.meta_tensors import autocast_dtype

__all__ = ["ParallelAttention", "Rotary"]


class ParallelAttention(nn.Module):
    """Multi-head self-attention over the tokens of all ranks, computed for this rank's queries.

    Keys have no bias: softmax is invariant to it, its gradient is zero, and Adam would amplify that zero's noise.

    Args:
        ``embed_dim``, ``num_heads``: width of the tokens, and the number of heads, which must divide it.
        ``qkv_bias``: whether queries and values have a bias.
        ``norm_eps``: epsilon of a LayerNorm over the concatenated heads, before the projection; None: no norm.
        ``group``: the ranks that share the tokens: a ``Group``, torch's ``ProcessGroup``, or a one-dimensional
            ``DeviceMesh``; None: this process alone.
        ``strategy``: how attention crosses ranks: ``"gather-kv"``, ``"gather-x"``, ``"ulysses"``, ``"hybrid"`` or
            ``"hybrid:U"``; does not change the result.
        ``keep_kv``: keep what was gathered until backward.
        ``heads_per_chunk``: heads that are attended at a time; None: by size.
    """

    cast_weights = ("q_bias", "v_bias")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        norm_eps: float | None = None,
        group: AnyGroup | None = None,
        strategy: Strategy | str = "gather-kv",
        keep_kv: bool = False,
        heads_per_chunk: int | None = None,
    ) -> None:
        super().__init__()
        refuse_no_count(embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            fits = [h for h in range(1, embed_dim + 1) if embed_dim % h == 0 and h <= 2 * num_heads]
            raise ValueError(
                f"num_heads={num_heads} does not divide embed_dim={embed_dim}: use num_heads="
                f"{' or '.join(map(str, fits[-3:]))}"
            )
        if heads_per_chunk is not None and not 1 <= heads_per_chunk <= num_heads:
            raise ValueError(
                f"heads_per_chunk={heads_per_chunk}: choose 1 to {num_heads}, or remove it to let the size decide"
            )
        self.num_heads, self.keep_kv, self.heads_per_chunk = num_heads, keep_kv, heads_per_chunk
        self.group = as_group(group)
        self.strategy = check_strategy(str(strategy), self.group.size, num_heads, keep_kv, "strategy")
        self.qkv = Linear(embed_dim, 3 * embed_dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(embed_dim)) if qkv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(embed_dim)) if qkv_bias else None
        if self.q_bias is not None:  # cached now, so that no counted step allocates them
            _zeros(embed_dim, self.q_bias.dtype, self.q_bias.device)
        self.norm = LayerNorm(embed_dim, norm_eps) if norm_eps is not None else nn.Identity()
        self.proj = Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, spread: Sequence[int] | Windows, rotary: Rotary | None = None) -> Tensor:
        """Returns the attended tokens ``b n/s e``.

        - ``spread``: each rank's token count, if each token attends to all; or the windows that it attends to instead
        - ``rotary``: rotary positions of this rank's tokens
        """
        if isinstance(spread, Windows):
            attended = attend_in_windows(self._project(x), spread, rotary, self.keep_kv)
        elif self.strategy.name == "gather-x":
            attended = self._gather_tokens(x, spread, rotary)
        else:
            how = self.strategy.inner, rotary, self.keep_kv, self.heads_per_chunk
            attended = attend_by_head_exchange(self._project(x), self.group, spread, *how)
        return self.proj(self.norm(rearrange(attended, "b n a f -> b n (a f)")))  # type: ignore[no-any-return]

    def _project(self, x: Tensor) -> Tensor:
        """Returns queries, keys and values ``b n/s 3 a f``."""
        zeros = None
        if self.q_bias is not None:
            zeros = _zeros(len(self.q_bias), half_dtype(x) or self.q_bias.dtype, self.q_bias.device)
        projected = linear(x, self.qkv.weight, self.q_bias, zeros, self.v_bias)
        return rearrange(projected, "b n (m a f) -> b n m a f", m=3, a=self.num_heads)

    def _gather_tokens(self, x: Tensor, sizes: Sequence[int], rotary: Rotary | None) -> Tensor:
        projection = self.qkv.weight, self.q_bias, self.v_bias
        dtype = autocast_dtype(x)
        if dtype is not None:  # cast before the gather, as a linear layer would
            x = x.to(dtype)
            projection = tuple(t if t is None else half(t).to(dtype) for t in projection)  # type: ignore[assignment]
        return attend_to_gathered_tokens(
            x, *projection, self.num_heads, self.group, sizes, rotary, self.keep_kv, self.heads_per_chunk
        )


@cached(256)
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns cached zeros that take the place of the keys' bias."""
    return torch.zeros(size, dtype=dtype, device=device)
