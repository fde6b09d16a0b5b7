"""A transformer block on this rank's tokens, and how much of it is held for the backward.

Legend: b batch, n tokens, e embedding; ``n/s`` is this rank's share of the tokens.

What a block draws is keyed, so that what is computed again draws the same: random states need no replay. Ranks
compute again in one order, so that their messages meet.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqpar.attention.module import Attention, Rotate
from seqpar.meta_tensors import around_checkpoint
from seqpar.vit.dropout import DropoutKey, keyed_drop_path, keyed_dropout

ATTENTION_SITE, MLP_SITE, HIDDEN_SITE = range(3)
MLPS = ("gelu", "swiglu")
RECOMPUTED = ("none", "attention", "full")


class Mlp(nn.Module):
    """Two linear layers with GELU between, on each token by itself."""

    def __init__(self, embed_dim: int, hidden_dim: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, embed_dim)
        self.dropout = dropout

    def forward(self, x: Tensor, key: DropoutKey | None, token_ids: Tensor) -> Tensor:
        hidden = F.gelu(self.fc1(x))
        return self.fc2(keyed_dropout(hidden, self.dropout, key and key.at(HIDDEN_SITE), token_ids))


class GatedMlp(nn.Module):
    """SwiGLU with a norm inside, as in EVA-02: SiLU of one linear layer times another, on each token by itself."""

    def __init__(self, embed_dim: int, hidden_dim: int, dropout: float, norm_eps: float) -> None:
        super().__init__()
        self.gate = nn.Linear(embed_dim, hidden_dim)
        self.fc1 = nn.Linear(embed_dim, hidden_dim)
        self.norm = nn.LayerNorm(hidden_dim, norm_eps)
        self.fc2 = nn.Linear(hidden_dim, embed_dim)
        self.dropout = dropout

    def forward(self, x: Tensor, key: DropoutKey | None, token_ids: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.fc1(x)
        return self.fc2(self.norm(keyed_dropout(hidden, self.dropout, key and key.at(HIDDEN_SITE), token_ids)))


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch."""

    def __init__(self, embed_dim: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((embed_dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """A pre-norm transformer block on this rank's tokens.

    ``recompute`` is what the backward computes again from its input: nothing, the attention branch, or all. With
    ``mlp_chunks`` above 1 the MLP branch goes over so many runs of tokens in turn, of each of which the backward
    computes it again: nothing of the MLP's width is held, and of one run only is it there.
    """

    def __init__(
        self,
        embed_dim: int,
        attn: Attention,
        mlp: nn.Module,
        dropout: float,
        drop_path: float,
        layer_scale: float | None,
        norm_eps: float,
        recompute: str = "none",
        mlp_chunks: int = 1,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(embed_dim, norm_eps)
        self.attn = attn
        self.ls1 = LayerScale(embed_dim, layer_scale) if layer_scale is not None else nn.Identity()
        self.norm2 = nn.LayerNorm(embed_dim, norm_eps)
        self.mlp = mlp
        self.ls2 = LayerScale(embed_dim, layer_scale) if layer_scale is not None else nn.Identity()
        self.dropout, self.drop_path = dropout, drop_path
        self.recompute, self.mlp_chunks = recompute, mlp_chunks

    def forward(
        self, x: Tensor, sizes: Sequence[int], token_ids: Tensor, rotate: Rotate | None, key: DropoutKey | None
    ) -> Tensor:
        """Returns the tokens ``b n/s e`` after both branches; ``sizes`` are all ranks' token counts."""
        return _run(self._both, self.recompute == "full", x, sizes, token_ids, rotate, key)

    def _both(
        self, x: Tensor, sizes: Sequence[int], token_ids: Tensor, rotate: Rotate | None, key: DropoutKey | None
    ) -> Tensor:
        x = _run(self._attend, self.recompute == "attention", x, sizes, token_ids, rotate, key)
        if self.mlp_chunks == 1:
            return self._transform(x, token_ids, key)
        runs = zip(x.tensor_split(self.mlp_chunks, 1), token_ids.tensor_split(self.mlp_chunks))
        return torch.cat([_run(self._transform, True, mine, ids, key) for mine, ids in runs], 1)

    def _attend(
        self, x: Tensor, sizes: Sequence[int], token_ids: Tensor, rotate: Rotate | None, key: DropoutKey | None
    ) -> Tensor:
        return x + self._drop(self.ls1(self.attn(self.norm1(x), sizes, rotate)), ATTENTION_SITE, token_ids, key)

    def _transform(self, x: Tensor, token_ids: Tensor, key: DropoutKey | None) -> Tensor:
        return x + self._drop(self.ls2(self.mlp(self.norm2(x), key, token_ids)), MLP_SITE, token_ids, key)

    def _drop(self, branch: Tensor, site: int, token_ids: Tensor, key: DropoutKey | None) -> Tensor:
        here = key and key.at(site)
        return keyed_drop_path(keyed_dropout(branch, self.dropout, here, token_ids), self.drop_path, here)


def _run(act: Callable[..., Tensor], again: bool, *inputs: object) -> Tensor:
    """Returns what ``act`` makes of its inputs, which alone are held where it is to run ``again`` in the backward."""
    if not (again and torch.is_grad_enabled()):
        return act(*inputs)
    result: Tensor = checkpoint(
        act, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=around_checkpoint
    )
    return result
