"""The sequence-parallel Vision Transformer: each rank holds some tokens, attention sees them all.

Legend: b batch, c channels, n tokens, e embedding, p voxels of a patch along a direction, W D H voxels; ``n/s``
is this rank's share of the tokens.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from seqpar.attention.cost_model import CPU, GPU, Layer, resolve
from seqpar.attention.module import Attention, Rotary
from seqpar.attention.strategies import AttentionOptions, Strategy
from seqpar.layout import Layout
from seqpar.mesh import AnyGroup, as_group, notice_that_none_shares
from seqpar.vit.blocks import MLPS, RECOMPUTED, Block, GatedMlp, Mlp
from seqpar.vit.dropout import DropoutKey, keyed_dropout
from seqpar.vit.tokens import POSITIONS, PatchEmbed, RotaryPositions, learned_positions, sincos_positions


class SeqParViT(nn.Module):
    """A Vision Transformer whose sequence is spread over ``group``; alone, a plain encoder of ``b c W D H``.

    - ``tile``: voxels, one number or one per direction: the default only, a volume of another size passes too
    - ``patch``: voxels of a token, one number or one per direction
    - ``qkv_bias``: whether queries and values have a bias; keys have none, softmax does not see it
    - ``positions``: "learned", "sincos", "rope", "learned+rope" or "none"
    - ``dropout``, ``drop_path``: rates in training; a group of several ranks needs ``key`` in ``forward`` then
    - ``layer_scale``: the start of a learned factor on each residual branch; None: no such factor
    - ``mlp``: "gelu", or "swiglu": gated, with a norm inside, as in EVA-02
    - ``attention_norm``: a norm over the joined heads, as in EVA-02
    - ``attention``: how attention crosses ranks: a strategy, its name, or ``AttentionOptions``; "auto" takes the
      quickest for the default tile on the device here. ``attention_choice`` says why. It changes no result
    - ``recompute``: what the backward computes again: "none", "attention" or "full" blocks. It changes no result
    - ``mlp_chunks``: the MLP takes so many runs of tokens in turn and computes them again. It changes no result
    - ``group``: the ranks that share a tile: ours (``start(...).seq``), torch's ``ProcessGroup``, or a ``DeviceMesh``
      of one direction; None: this process alone
    - ``split``: how tokens are divided over ranks, "spatial" (boxes) or "ordered" (runs of the raster order)
    """

    def __init__(
        self,
        in_channels: int,
        tile: int | Sequence[int],
        patch: int | Sequence[int],
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        positions: str = "learned",
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        norm_eps: float = 1e-5,
        mlp: str = "gelu",
        attention_norm: bool = False,
        attention: str | Strategy | AttentionOptions = "auto",
        recompute: str = "none",
        mlp_chunks: int = 1,
        group: AnyGroup | None = None,
        split: str = "spatial",
    ) -> None:
        super().__init__()
        _refuse_unknown(positions, mlp, recompute, dropout, drop_path)
        self.group = as_group(group)
        self._notices = group is None  # nobody said whether ranks share a tile: training says so, once
        self.layout = Layout.of(tile, patch, self.group.size, split)
        if not 1 <= mlp_chunks <= min(self.layout.counts):
            least = min(self.layout.counts)
            raise ValueError(f"--mlp-chunks {mlp_chunks}: a rank holds {least} tokens; choose 1 to {least}")
        options = attention if isinstance(attention, AttentionOptions) else AttentionOptions(attention)
        layer = Layer(self.layout.counts, num_heads, embed_dim, per_chunk=options.heads_per_chunk)
        machine = GPU if torch.cuda.is_available() else CPU
        self.attention, self.attention_choice = resolve(options.strategy, layer, machine, options.keep_kv)
        self.embed_dim, self.num_heads, self.positions, self.dropout = embed_dim, num_heads, positions, dropout
        self.draws = dropout > 0 or drop_path > 0
        self.patch_embed = PatchEmbed(in_channels, self.layout.patch, embed_dim)
        learned, self.rotates = "learned" in positions, "rope" in positions
        self.pos_embed = nn.Parameter(torch.zeros(1, self.layout.num_tokens, embed_dim)) if learned else None
        hidden_dim, crossing = round(embed_dim * mlp_ratio), (self.attention, options.keep_kv, options.heads_per_chunk)

        def block(rate: float) -> Block:
            inner_eps = norm_eps if attention_norm else None
            attn = Attention(embed_dim, num_heads, qkv_bias, inner_eps, self.group, *crossing)
            gated = mlp == "swiglu"
            inner = GatedMlp(embed_dim, hidden_dim, dropout, norm_eps) if gated else Mlp(embed_dim, hidden_dim, dropout)
            return Block(embed_dim, attn, inner, dropout, rate, layer_scale, norm_eps, recompute, mlp_chunks)

        self.blocks = nn.ModuleList(block(drop_path * layer / max(depth - 1, 1)) for layer in range(depth))
        self.norm = nn.LayerNorm(embed_dim, norm_eps)
        if self.rotates:
            RotaryPositions(self.layout, self.group.index, embed_dim // num_heads, self.norm.weight)  # refuses early
        self._init_weights()

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        fan_in = math.prod(self.patch_embed.proj.weight.shape[1:])
        nn.init.trunc_normal_(self.patch_embed.proj.weight, std=fan_in**-0.5)
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, part: Tensor, layout: Layout | None = None, key: DropoutKey | None = None) -> Tensor:
        """Returns this rank's tokens ``b n/s e`` of its part ``b n/s c p p p``, or, alone, of ``b c W D H``."""
        return self.forward_intermediates(part, (), layout, key)[0]

    def forward_intermediates(
        self,
        part: Tensor,
        indices: Sequence[int],
        layout: Layout | None = None,
        key: DropoutKey | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the normed tokens and, un-normed, the outputs of the blocks ``indices`` (from 0)."""
        depth = len(self.blocks)
        if self._notices and self.training:
            self._notices = False
            notice_that_none_shares(type(self).__name__)
        chosen = [index + depth if index < 0 else index for index in indices]
        if any(not 0 <= index < depth for index in chosen):
            raise ValueError(f"blocks {list(indices)} were asked for, but the encoder has {depth}: 0…{depth - 1}")
        part, layout = self._part_and_layout(part, layout)
        key = self.dropout_key(key, part.shape[0])
        x = self.embed(part, layout, key)
        token_ids, rotary = layout.token_ids(self.group.index).to(x.device), self.rotary(layout, x)
        outputs: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            x = block(x, layout.counts, token_ids, rotary, key and key.at(index))
            if index in chosen:
                outputs[index] = x
        return self.norm(x), [outputs[index] for index in chosen]

    def embed(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> Tensor:
        """Returns the tokens ``b n/s e`` of a part, with positions, as the first block takes them."""
        x = self._add_positions(self.patch_embed(part), layout)
        return keyed_dropout(
            x, self.dropout, key and key.at(len(self.blocks)), layout.token_ids(self.group.index).to(x.device)
        )

    def rotary(self, layout: Layout, like: Tensor) -> Rotary | None:
        """Returns the positions that act in attention, None where there are none; ``like``: of the tokens' type."""
        if not self.rotates:
            return None
        return RotaryPositions(layout, self.group.index, self.embed_dim // self.num_heads, like)

    def place(self, whole: Tensor) -> tuple[Tensor, Layout]:
        """Returns a whole image ``b c W D H`` as the part of a group of one, padded to the patch, with its layout."""
        return self.layout.place(whole)

    def _part_and_layout(self, part: Tensor, layout: Layout | None) -> tuple[Tensor, Layout]:
        """Returns the part of a part or a whole tile, with its layout."""
        dims = len(self.layout.tile)
        if part.ndim == dims + 2:
            return self.place(part)
        layout = layout or self.layout
        if part.ndim != dims + 3 or part.shape[1] != layout.counts[self.group.index]:
            raise ValueError(
                f"a part {tuple(part.shape)} came; rank {self.group.index} of {self.group.size} holds "
                f"{layout.counts[self.group.index]} tokens of tile {layout.tile}: (batch, tokens, channels, *patch); "
                "give the layout of another tile as layout="
            )
        return part, layout

    def dropout_key(self, key: DropoutKey | None, batch: int) -> DropoutKey | None:
        """Returns the key of this forward's draws; None where nothing is drawn."""
        if not (self.training and self.draws):
            return None
        if key is None and self.group.size > 1:
            raise ValueError("dropout over a sequence group needs key=DropoutKey(seed, step, samples)")
        if key is None:
            key = DropoutKey(int(torch.randint(2**62, ())), 0, tuple(range(batch)))
        if len(key.samples) != batch:
            raise ValueError(f"the dropout key names {len(key.samples)} samples, but the batch has {batch}")
        return key

    def _add_positions(self, x: Tensor, layout: Layout) -> Tensor:
        """Returns ``b n/s e`` with the positions that are added to tokens; rotary ones act in attention."""
        if self.pos_embed is not None:
            return x + learned_positions(self.pos_embed, self.layout.grid, layout, self.group.index)
        if self.positions == "sincos":
            return x + sincos_positions(layout, self.group.index, self.embed_dim).to(x)
        return x


def _refuse_unknown(positions: str, mlp: str, recompute: str, dropout: float, drop_path: float) -> None:
    if positions not in POSITIONS:
        raise ValueError(f"--positions {positions}: choose one of {', '.join(POSITIONS)}")
    if mlp not in MLPS:
        raise ValueError(f"--mlp {mlp}: choose {' or '.join(MLPS)}")
    if recompute not in RECOMPUTED:
        raise ValueError(f"--grad-checkpoint {recompute}: choose {', '.join(RECOMPUTED)}")
    if not (0 <= dropout < 1 and 0 <= drop_path < 1):
        raise ValueError(f"dropout {dropout} and drop-path {drop_path} must lie in [0, 1)")
