"""The sequence-parallel Vision Transformer: each rank holds some tokens, attention sees them all.

Legend: b batch, c channels, n tokens, e embedding, p voxels of a patch along a direction, W D H voxels; ``n/s``
is this rank's share of the tokens.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.attention.cost_model import CPU, GPU, Layer, Machine, choose
from seqpar.attention.module import Attention, Rotate
from seqpar.attention.strategies import Strategy, check_strategy
from seqpar.layout import Layout
from seqpar.mesh import Group
from seqpar.vit.blocks import MLPS, RECOMPUTED, Block, GatedMlp, Mlp
from seqpar.vit.dropout import DropoutKey, keyed_dropout
from seqpar.vit.tokens import POSITIONS, PatchEmbed, Rotation, learned_positions, sincos_positions


class SeqParViT(nn.Module):
    """A Vision Transformer whose sequence is spread over ``group``; alone, a plain encoder of ``b c W D H``.

    ``tile`` and ``patch`` are voxels, one number or one per direction; ``tile`` is the default only, a volume of
    another size passes too. Dropout is keyed: a group of several ranks needs ``key`` in training.
    ``mlp="swiglu"`` (gated, with a norm inside) and ``attention_norm`` (a norm over the joined heads) are EVA-02's.
    ``attention`` is how attention crosses ranks (``seqpar.attention.cost_model``), ``auto`` the one that ``machine``
    runs quickest for the default tile within ``memory_left`` bytes; ``attention_choice`` says why. ``recompute``
    and ``mlp_chunks`` hold less for the backward (``seqpar.vit.blocks``) and change no result.
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
        keep_kv: bool = False,
        recompute: str = "none",
        mlp_chunks: int = 1,
        group: Group | None = None,
        split: str = "spatial",
        mlp: str = "gelu",
        attention_norm: bool = False,
        attention: str = "auto",
        heads_per_chunk: int | None = None,
        machine: Machine | None = None,
        memory_left: float | None = None,
    ) -> None:
        super().__init__()
        if positions not in POSITIONS:
            raise ValueError(f"--positions {positions}: choose one of {', '.join(POSITIONS)}")
        if mlp not in MLPS:
            raise ValueError(f"--mlp {mlp}: choose {' or '.join(MLPS)}")
        if recompute not in RECOMPUTED:
            raise ValueError(f"--grad-checkpoint {recompute}: choose {', '.join(RECOMPUTED)}")
        if not (0 <= dropout < 1 and 0 <= drop_path < 1):
            raise ValueError(f"dropout {dropout} and drop-path {drop_path} must lie in [0, 1)")
        self.group = group or Group("seq")
        self.layout = Layout.of(tile, patch, self.group.size, split)
        if not 1 <= mlp_chunks <= min(self.layout.counts):
            least = min(self.layout.counts)
            raise ValueError(f"--mlp-chunks {mlp_chunks}: a rank holds {least} tokens; choose 1 to {least}")
        self.attention, self.attention_choice = self._choose_attention(
            attention,
            Layer(self.layout.counts, num_heads, embed_dim, per_chunk=heads_per_chunk),
            machine,
            keep_kv,
            memory_left,
            depth,
        )
        self.embed_dim, self.positions, self.dropout = embed_dim, positions, dropout
        self.draws = dropout > 0 or drop_path > 0
        self.patch_embed = PatchEmbed(in_channels, self.layout.patch, embed_dim)
        learned, self.rotates = "learned" in positions, "rope" in positions
        self.pos_embed = nn.Parameter(torch.zeros(1, self.layout.num_tokens, embed_dim)) if learned else None
        rates = [drop_path * layer / max(depth - 1, 1) for layer in range(depth)]
        hidden_dim = round(embed_dim * mlp_ratio)

        def block(rate: float) -> Block:
            attn = Attention(
                embed_dim,
                num_heads,
                qkv_bias,
                self.group,
                keep_kv,
                norm_eps if attention_norm else None,
                self.attention,
                heads_per_chunk,
            )
            inner = (
                GatedMlp(embed_dim, hidden_dim, dropout, norm_eps)
                if mlp == "swiglu"
                else Mlp(embed_dim, hidden_dim, dropout)
            )
            return Block(embed_dim, attn, inner, dropout, rate, layer_scale, norm_eps, recompute, mlp_chunks)

        self.blocks = nn.ModuleList(block(rate) for rate in rates)
        self.norm = nn.LayerNorm(embed_dim, norm_eps)
        if self.rotates:
            Rotation(self.layout, self.group.index, embed_dim // num_heads, self.norm.weight)  # refuses early
        self.num_heads = num_heads
        self._fill()

    @staticmethod
    def _choose_attention(
        name: str, layer: Layer, machine: Machine | None, keep: bool, memory_left: float | None, depth: int
    ) -> tuple[Strategy, tuple[str, ...]]:
        """Returns the strategy and why it is this one."""
        if name == "auto":
            machine = machine or (GPU if torch.cuda.is_available() else CPU)
            return choose(layer, machine, keep, memory_left, depth)
        if machine is not None or memory_left is not None:
            raise ValueError(f"machine and memory_left choose for --attention auto; it is {name}: leave them")
        strategy = check_strategy(name, layer.ranks, layer.heads, keep)
        return strategy, (f"{strategy} was asked for",)

    def _fill(self) -> None:
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
        wanted = [index + depth if index < 0 else index for index in indices]
        if any(not 0 <= index < depth for index in wanted):
            raise ValueError(f"blocks {list(indices)} were asked for, but the encoder has {depth}: 0…{depth - 1}")
        part, layout = self._placed(part, layout)
        rank = self.group.index
        key = self._drawn(key, part.shape[0])
        token_ids = layout.token_ids(rank).to(part.device)
        x = self._positioned(self.patch_embed(part), layout)
        x = keyed_dropout(x, self.dropout, key and key.at(depth), token_ids)
        rotate: Rotate | None = None
        if self.rotates:
            rotate = Rotation(layout, rank, self.embed_dim // self.num_heads, x)
        taken: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            x = block(x, layout.counts, token_ids, rotate, key and key.at(index))
            if index in wanted:
                taken[index] = x
        return self.norm(x), [taken[index] for index in wanted]

    def place(self, whole: Tensor) -> tuple[Tensor, Layout]:
        """Returns a whole image ``b c W D H`` as the part of a group of one, padded to the patch, with its layout."""
        if self.group.size > 1:
            raise ValueError(
                f"a whole tile {tuple(whole.shape)} came to a sequence group of {self.group.size}: give each rank "
                "its part, layout.cut(tile, rank)"
            )
        patch = self.layout.patch
        short = [-side % p for side, p in zip(whole.shape[2:], patch)]
        whole = F.pad(whole, [edge for missing in reversed(short) for edge in (0, missing)])
        layout = self.layout.of_tile(whole.shape[2:])
        return layout.cut(whole, 0), layout

    def _placed(self, part: Tensor, layout: Layout | None) -> tuple[Tensor, Layout]:
        """Returns the part with the layout that it belongs to."""
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

    def _drawn(self, key: DropoutKey | None, batch: int) -> DropoutKey | None:
        if not (self.training and self.draws):
            return None
        if key is None and self.group.size > 1:
            raise ValueError("dropout over a sequence group needs key=DropoutKey(seed, step, samples)")
        if key is None:
            key = DropoutKey(int(torch.randint(2**62, ())), 0, tuple(range(batch)))
        if len(key.samples) != batch:
            raise ValueError(f"the dropout key names {len(key.samples)} samples, but the batch has {batch}")
        return key

    def _positioned(self, x: Tensor, layout: Layout) -> Tensor:
        if self.pos_embed is not None:
            return x + learned_positions(self.pos_embed, self.layout.grid, layout, self.group.index)
        if self.positions == "sincos":
            return x + sincos_positions(layout, self.group.index, self.embed_dim).to(x)
        return x
