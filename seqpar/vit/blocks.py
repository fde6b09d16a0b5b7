"""A transformer block on this rank's tokens, and the parts of it that backward recomputes.

Legend: b batch, n tokens, e embedding; ``n/s`` is this rank's share of the tokens.

Dropout is keyed, so that a recomputed block draws the same numbers without keeping its random state. All ranks
recompute in the same order, so that their messages match.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.attention.partition import Rotary
from seqpar.attention.self_attention import ParallelAttention
from seqpar.attention.window_attention import Windows
from seqpar.parallel.half_precision import LayerNorm, Linear, half_dtype, with_normed
from seqpar.parallel.recomputation import checkpointed
from seqpar.vit.dropout import DropoutKey, drop_path_factors, keyed_drop_path, keyed_dropout

ATTENTION_SITE, MLP_SITE, HIDDEN_SITE = range(3)
MLPS = ("gelu", "swiglu")
RECOMPUTED = ("none", "attention", "full")
Spread = Sequence[int] | Windows


class Mlp(nn.Module):
    """Two linear layers with GELU in between."""

    def __init__(self, embed_dim: int, hidden_dim: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = Linear(embed_dim, hidden_dim)
        self.fc2 = Linear(hidden_dim, embed_dim)
        self.dropout = dropout

    def forward(self, x: Tensor, key: DropoutKey | None, tokens: Tensor) -> Tensor:
        hidden = F.gelu(self.fc1(x))
        return self.fc2(keyed_dropout(hidden, self.dropout, key and key.at(HIDDEN_SITE), tokens))


class GatedMlp(nn.Module):
    """SwiGLU with an inner norm, as in EVA-02: SiLU of one linear layer times another."""

    def __init__(self, embed_dim: int, hidden_dim: int, dropout: float, norm_eps: float) -> None:
        super().__init__()
        self.gate = Linear(embed_dim, hidden_dim)
        self.fc1 = Linear(embed_dim, hidden_dim)
        self.norm = LayerNorm(hidden_dim, norm_eps)
        self.fc2 = Linear(hidden_dim, embed_dim)
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
        self.norm1 = LayerNorm(embed_dim, norm_eps)
        self.attn = attn
        self.ls1 = LayerScale(embed_dim, layer_scale) if layer_scale is not None else nn.Identity()
        self.norm2 = LayerNorm(embed_dim, norm_eps)
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
        x, normed = with_normed(x, self.norm1)
        return self._add(x, self.attn(normed, spread, rotary), self.ls1, ATTENTION_SITE, tokens, key)

    def _mlp_branch(self, x: Tensor, tokens: Tensor, key: DropoutKey | None) -> Tensor:
        x, normed = with_normed(x, self.norm2)
        return self._add(x, self.mlp(normed, key, tokens), self.ls2, MLP_SITE, tokens, key)

    def _add(
        self, x: Tensor, branch: Tensor, scale: nn.Module, site: int, tokens: Tensor, key: DropoutKey | None
    ) -> Tensor:
        """Returns ``x`` plus a branch, which is scaled and dropped."""
        here = key and key.at(site)
        if half_dtype(x) is None or self.dropout or not isinstance(scale, LayerScale):
            branch = keyed_dropout(scale(branch), self.dropout, here, tokens)
            return x + keyed_drop_path(branch, self.drop_path, here)
        factors = drop_path_factors(x, self.drop_path, here)
        known = here.draws.scales.get(here.site) if here is not None and here.draws is not None else None
        return _ScaledSum.apply(x, branch, scale.gamma, factors, known)  # type: ignore[no-any-return]


def with_scales(key: DropoutKey, blocks: Mapping[int, Block]) -> DropoutKey:
    """Returns a key, with its draws, that also has the products of LayerScales and drop-path factors of some blocks.

    They take three launches, and otherwise one for each branch, as those of sharded LayerScales, which are gathered
    with their block, and of factors that are not drawn yet.
    """
    assert key.draws is not None
    known = key.draws.factors
    rows = {
        (*key.site, at, site): (scale.gamma.detach(), known[(*key.site, at, site), block.drop_path])
        for at, block in blocks.items()
        for site, scale in ((ATTENTION_SITE, block.ls1), (MLP_SITE, block.ls2))
        if isinstance(scale, LayerScale) and not hasattr(scale.gamma, "to_local")
        if ((*key.site, at, site), block.drop_path) in known
    }
    if not rows:
        return key
    gammas, factors = (torch.stack(each) for each in zip(*rows.values()))
    scales = dict(zip(rows, gammas[:, None, None] * factors[:, :, None, None]))  # b 1 e
    return replace(key, draws=replace(key.draws, scales=scales))


class _ScaledSum(Function):
    """``x`` plus a branch times a factor per channel and one per sample, for a GPU: no product is stored."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, gamma: Tensor, factors: Tensor | None, known: Tensor | None
    ) -> Tensor:
        scale = known
        if scale is None:
            scale = gamma if factors is None else gamma * factors[:, None, None]
        ctx.save_for_backward(branch, scale, factors)
        return torch.addcmul(x, branch, scale, out=x.new_empty(x.shape, dtype=gamma.dtype))  # autocast would cast first

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        branch, scale, factors = ctx.saved_tensors
        assert grad.shape == branch.shape
        dbranch = torch.mul(grad, scale, out=torch.empty_like(branch))
        dscale = torch.mul(grad, branch, out=torch.empty_like(branch)).sum(1, dtype=scale.dtype)  # b e
        return grad, dbranch, dscale.sum(0) if factors is None else factors @ dscale, None, None


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
