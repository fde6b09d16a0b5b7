"""A transformer block on this rank's tokens, and the parts of it that backward recomputes.

Legend: b batch, n tokens, e embedding; ``n/s`` is this rank's share of the tokens.

Dropout is keyed, so that a recomputed block draws the same numbers without keeping its random state. All ranks
recompute in the same order, so that their messages match.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.attention.partition import Rotary
from seqpar.attention.self_attention import ParallelAttention
from seqpar.attention.window_attention import Windows
from seqpar.parallel.recomputation import checkpointed
from seqpar.vit.dropout import DropoutKey, keyed_drop_path, keyed_dropout

ATTENTION_SITE, MLP_SITE, HIDDEN_SITE = range(3)
MLPS = ("gelu", "swiglu")
RECOMPUTED = ("none", "attention", "full")
Spread = Sequence[int] | Windows


class Mlp(nn.Module):
    """Two linear layers with GELU in between."""

    def __init__(self, embed_dim: int, hidden_dim: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, embed_dim)
        self.dropout = dropout

    def forward(self, x: Tensor, key: DropoutKey | None, tokens: Tensor) -> Tensor:
        hidden = F.gelu(self.fc1(x))
        return self.fc2(keyed_dropout(hidden, self.dropout, key and key.at(HIDDEN_SITE), tokens))


class GatedMlp(nn.Module):
    """SwiGLU with an inner norm, as in EVA-02: SiLU of one linear layer times another."""

    def __init__(self, embed_dim: int, hidden_dim: int, dropout: float, norm_eps: float) -> None:
        super().__init__()
        self.gate = nn.Linear(embed_dim, hidden_dim)
        self.fc1 = nn.Linear(embed_dim, hidden_dim)
        self.norm = nn.LayerNorm(hidden_dim, norm_eps)
        self.fc2 = nn.Linear(hidden_dim, embed_dim)
        self.dropout = dropout

    def forward(self, x: Tensor, key: DropoutKey | None, tokens: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.fc1(x)
        return self.fc2(self.norm(keyed_dropout(hidden, self.dropout, key and key.at(HIDDEN_SITE), tokens)))


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch."""

    def __init__(self, embed_dim: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((embed_dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """A pre-norm transformer block on this rank's tokens.

    - ``dropout``, ``drop_path``: rates of both residual branches
    - ``layer_scale``: initial value of a learned factor on each branch; None: no such factor
    - ``recompute``: what backward recomputes: "none", the "attention" branch, or the "full" block
    - ``mlp_chunks``: above 1, the MLP processes the tokens in this many chunks and backward recomputes each, so that
      its hidden layer exists for one chunk at a time and is never kept
    """

    def __init__(
        self,
        embed_dim: int,
        attn: ParallelAttention,
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
        self, x: Tensor, spread: Spread, tokens: Tensor, rotary: Rotary | None, key: DropoutKey | None
    ) -> Tensor:
        """Returns the tokens ``b n/s e`` after both branches.

        - ``spread``: each rank's token count, or windows, as in ``ParallelAttention``
        - ``tokens``: ``token_numbers`` of this rank's tokens, which key the dropout
        """
        return _run(self._both_branches, self.recompute == "full", x, spread, tokens, rotary, key)

    def _both_branches(
        self, x: Tensor, spread: Spread, tokens: Tensor, rotary: Rotary | None, key: DropoutKey | None
    ) -> Tensor:
        x = _run(self._attention_branch, self.recompute == "attention", x, spread, tokens, rotary, key)
        if self.mlp_chunks == 1:
            return self._mlp_branch(x, tokens, key)
        runs = zip(x.tensor_split(self.mlp_chunks, 1), tokens.tensor_split(self.mlp_chunks, -1))
        return torch.cat([_run(self._mlp_branch, True, rows, numbers, key) for rows, numbers in runs], 1)

    def _attention_branch(
        self, x: Tensor, spread: Spread, tokens: Tensor, rotary: Rotary | None, key: DropoutKey | None
    ) -> Tensor:
        return x + self._drop(self.ls1(self.attn(self.norm1(x), spread, rotary)), ATTENTION_SITE, tokens, key)

    def _mlp_branch(self, x: Tensor, tokens: Tensor, key: DropoutKey | None) -> Tensor:
        return x + self._drop(self.ls2(self.mlp(self.norm2(x), key, tokens)), MLP_SITE, tokens, key)

    def _drop(self, branch: Tensor, site: int, tokens: Tensor, key: DropoutKey | None) -> Tensor:
        here = key and key.at(site)
        return keyed_drop_path(keyed_dropout(branch, self.dropout, here, tokens), self.drop_path, here)


def compile_blocks(module: nn.Module, **options: Any) -> nn.Module:
    """Compiles the parts of an encoder, or of a network with one, that send nothing: the MLP of each block.

    They are about two thirds of a block's matrix products, and each becomes one graph. Attention and decoders call
    collectives and torch's own kernels, which a compiler cannot fuse. Weights keep their names; works on any number of
    ranks, before or after ``ParallelModel``, ``DistributedDataParallel`` or ``fully_shard``.

    Args:
        ``module``: is changed in place and returned. A network without such blocks is refused.
        ``options``: as in ``torch.compile``.
    """
    parts = [part for part in module.modules() if isinstance(part, Mlp | GatedMlp)]
    if not parts:
        raise ValueError(
            f"{type(module).__name__} has no transformer blocks, whose MLPs compile_blocks compiles: use the network "
            "without it"
        )
    for part in parts:
        part.compile(**options)
    return module


def _run(fn: Callable[..., Tensor], recompute: bool, *inputs: object) -> Tensor:
    """Returns ``fn(*inputs)``; with ``recompute``, keeps only the inputs, and backward runs ``fn`` again."""
    return checkpointed(fn, *inputs) if recompute else fn(*inputs)
