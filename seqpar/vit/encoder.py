"""The sequence-parallel Vision Transformer: each rank holds some of the tokens, and attention sees all of them.

Legend: b batch, c channels, n tokens, e embedding, p voxels of a patch per axis, W D H voxels; ``n/s`` is this rank's
share of the tokens. With several stages, a part consists of *cubes*, and each ends as one token.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from seqpar.attention.cost_model import CPU, GPU, Layer, resolve
from seqpar.attention.partition import Rotary
from seqpar.attention.self_attention import ParallelAttention
from seqpar.attention.strategies import AttentionOptions, Strategy
from seqpar.attention.window_attention import Windows, refuse_window
from seqpar.parallel.consensus import refuse_different_tiles
from seqpar.parallel.half_precision import LayerNorm, half_dtype
from seqpar.parallel.layout import Layout, per_axis, plain_tensor, refuse_no_count
from seqpar.parallel.mesh import AnyGroup, as_group, warn_without_group
from seqpar.vit.blocks import (
    ATTENTION_SITE,
    HIDDEN_SITE,
    MLP_SITE,
    MLPS,
    RECOMPUTED,
    Block,
    GatedMlp,
    Mlp,
    Spread,
    with_scales,
)
from seqpar.vit.dropout import DropoutKey, keyed_dropout, token_numbers
from seqpar.vit.token_merging import PatchMerging, cube_of, make_stages, split_cubes
from seqpar.vit.tokens import POSITIONS, PatchEmbed, RotaryPositions, learned_positions, sincos_positions


def refuse_unknown(positions: str, mlp: str, recompute: str, dropout: float, drop_path: float) -> None:
    """Raises ValueError for unknown names and for rates out of bounds."""
    if positions not in POSITIONS:
        raise ValueError(f"positions={positions!r}: choose one of {', '.join(POSITIONS)}")
    if mlp not in MLPS:
        raise ValueError(f"mlp={mlp!r}: choose {' or '.join(MLPS)}")
    if recompute not in RECOMPUTED:
        raise ValueError(f"recompute={recompute!r}: choose {', '.join(RECOMPUTED)}")
    if not (0 <= dropout < 1 and 0 <= drop_path < 1):
        raise ValueError(f"dropout={dropout} and drop_path={drop_path} must be in [0, 1)")


class SeqParViT(nn.Module):
    """A Vision Transformer whose tokens are split over ``group``; without a group, a plain encoder of ``b c W D H``.

    Args:
        ``in_channels``: number of image channels.
        ``tile``: voxels, one number or one per axis. Only a default: volumes of other sizes are accepted too.
        ``patch``: voxels of a token, one number or one per axis.
        ``embed_dim``: embedding dimension.
        ``depth``: number of blocks, or of each stage's blocks. Between two stages, 2 x 2 x 2 tokens become one of twice
            the width; ``embed_dim``, ``num_heads`` and ``patch`` are then the first stage's, and parts consist of cubes
            of ``layout.patch`` voxels.
        ``num_heads``: number of attention heads.
        ``mlp_ratio``: hidden dimension of the MLP, as a multiple of ``embed_dim``.
        ``qkv_bias``: whether queries and values have a bias. Keys have none, because softmax is invariant to it.
        ``positions``: ``"learned"``, ``"sincos"``, ``"rope"``, ``"learned+rope"`` or ``"none"``.
        ``dropout``, ``drop_path``: rates in training. On several ranks, ``forward`` then needs a ``key``.
        ``layer_scale``: initial value of a learned factor on each residual branch; None: no such factor.
        ``norm_eps``: epsilon of the norms.
        ``mlp``: ``"gelu"``, or ``"swiglu"``: gated, with an inner norm, as in EVA-02.
        ``attention_norm``: apply a norm to the concatenated heads, as in EVA-02.
        ``attention``: how attention crosses ranks: a strategy, its name, or ``AttentionOptions``. ``"auto"`` selects
            the fastest for the default tile on this device; ``attention_choice`` says why. Does not change the result.
        ``recompute``: what backward recomputes: ``"none"``, the ``"attention"`` branches or ``"full"`` blocks. Does not
            change the result.
        ``mlp_chunks``: number of chunks of tokens that the MLP processes one at a time and recomputes in backward. Does
            not change the result.
        ``window``: side in tokens of the window to which each token attends, shifted by half a window in every second
            block; 0: attend to all tokens. Needs ``split="spatial"``, because parts of a window are fetched from other
            ranks' boxes.
        ``patch_embed``: a module that makes tokens ``b n/s e`` of ``(part, layout)``, such as ``ConvStem``; None: a
            linear layer.
        ``group``: the ranks that share a tile: ``start(...).seq``, torch's ``ProcessGroup``, or a one-dimensional
            ``DeviceMesh``; None: this process alone.
        ``split``: how tokens are assigned to ranks: ``"spatial"`` (boxes) or ``"ordered"`` (runs in raster order).
    """

    def __init__(
        self,
        in_channels: int,
        tile: int | Sequence[int],
        patch: int | Sequence[int],
        embed_dim: int = 768,
        depth: int | Sequence[int] = 12,
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
        window: int = 0,
        patch_embed: nn.Module | None = None,
        group: AnyGroup | None = None,
        split: str = "spatial",
    ) -> None:
        super().__init__()
        refuse_unknown(positions, mlp, recompute, dropout, drop_path)
        refuse_no_count(in_channels=in_channels, embed_dim=embed_dim, num_heads=num_heads)
        if mlp_ratio <= 0:
            raise ValueError(f"{mlp_ratio=}: it must be above 0")
        refuse_window(window, split)
        self.group = as_group(group)
        self._notices = group is None  # warn once in training, as ranks may have been meant to share a tile
        self._compares = self.group.size > 1  # whether the ranks cut the same tile, once
        self.stages = make_stages(depth, embed_dim, num_heads)
        sides = per_axis(tile, "tile")
        self.layout = Layout(sides, cube_of(patch, len(sides), self.stages), self.group.size, split)
        first = self.stages[0].layout(self.layout)
        if not 1 <= mlp_chunks <= min(self.layout.counts):
            least = min(self.layout.counts)
            raise ValueError(f"mlp_chunks={mlp_chunks}: a rank holds {least} tokens; choose 1 to {least}")
        options = attention if isinstance(attention, AttentionOptions) else AttentionOptions(attention)
        layer = Layer(first.counts, num_heads, embed_dim, per_chunk=options.heads_per_chunk)
        machine = GPU if torch.cuda.is_available() else CPU
        strategy, self.attention_choice = resolve(options.strategy, layer, machine, options.keep_kv)
        if window:
            self.attention_choice = (f"windows of {window} tokens along each axis",)
        self.attention, self.window = "windows" if window else strategy, window
        self.embed_dim, self.num_heads, self.positions, self.dropout = embed_dim, num_heads, positions, dropout
        self.draws = dropout > 0 or drop_path > 0
        self.in_channels = in_channels
        self.patch_embed = patch_embed or PatchEmbed(in_channels, first.patch, embed_dim)
        learned, self.rotates = "learned" in positions, "rope" in positions
        self.pos_embed = nn.Parameter(torch.zeros(1, first.num_tokens, embed_dim)) if learned else None
        crossing, last = (strategy, options.keep_kv, options.heads_per_chunk), self.stages[-1]

        def block(width: int, heads: int, rate: float) -> Block:
            hidden_dim, inner_eps = round(width * mlp_ratio), norm_eps if attention_norm else None
            attn = ParallelAttention(width, heads, qkv_bias, inner_eps, self.group, *crossing)
            gated = mlp == "swiglu"
            inner = GatedMlp(width, hidden_dim, dropout, norm_eps) if gated else Mlp(width, hidden_dim, dropout)
            return Block(width, attn, inner, dropout, rate, layer_scale, norm_eps, recompute, mlp_chunks)

        most = max(last.blocks.stop - 1, 1)
        self.blocks = nn.ModuleList(
            block(stage.embed_dim, stage.num_heads, drop_path * layer / most)
            for stage in self.stages
            for layer in stage.blocks
        )
        merged = 1 << len(self.layout.tile)  # tokens that become one
        self.merges = nn.ModuleList(PatchMerging(stage.embed_dim, merged, norm_eps) for stage in self.stages[:-1])
        self.norm = LayerNorm(last.embed_dim, norm_eps)
        if self.rotates:
            RotaryPositions(
                self.layout, self.group.index, embed_dim // num_heads, self.norm.weight
            )  # raises early if heads are too narrow
        self._init_weights()

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if isinstance(self.patch_embed, PatchEmbed):
            fan_in = math.prod(self.patch_embed.proj.weight.shape[1:])
            nn.init.trunc_normal_(self.patch_embed.proj.weight, std=fan_in**-0.5)
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, part: Tensor, layout: Layout | None = None, key: DropoutKey | None = None) -> Tensor:
        """Returns this rank's tokens ``b n/s e``.

        Args:
            ``part``: this rank's part ``b n/s c p p p``; without a group also a whole image ``b c W D H``.
            ``layout``: the layout of the part, if its tile is not the default one.
            ``key``: identifies the dropout draws; required in training with dropout on several ranks.
        """
        return self.forward_intermediates(part, (), layout, key)[0]

    def forward_intermediates(
        self,
        part: Tensor,
        indices: Sequence[int],
        layout: Layout | None = None,
        key: DropoutKey | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the normed tokens and, un-normed, the outputs of the blocks ``indices``, counted from 0.

        Tokens of a stage before the last one are ``b n/s (m e)``: those of a cube in one row, in nested order.
        """
        depth = len(self.blocks)
        if self._notices and self.training:
            self._notices = False
            warn_without_group(type(self).__name__)
        chosen = [index + depth if index < 0 else index for index in indices]
        if any(not 0 <= index < depth for index in chosen):
            raise ValueError(f"indices={list(indices)}: the encoder has {depth} blocks, numbered 0…{depth - 1}")
        part, layout = self._part_and_layout(part, layout)
        if self._compares and not part.is_meta:
            self._compares = False
            refuse_different_tiles(layout.fingerprint, self.group, part.device)
        key = self.dropout_key(key, part.shape[0])
        if key is not None and key.draws is None:
            key = self.drawn(key, part.device)
        x, outputs = self.embed(part, layout, key), dict[int, Tensor]()
        for stage in self.stages:
            x, taken = self.run_stage(stage.blocks, x, layout, key, chosen)
            outputs |= taken
        return self.norm(x), [outputs[index] for index in chosen]

    def run_stage(
        self, blocks: range, x: Tensor, layout: Layout, key: DropoutKey | None, chosen: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Runs ``blocks`` of one stage; returns their tokens ``b n/s e``, and those after ``chosen`` in rows of cubes.

        Before the first block of a stage tokens are merged; ``layout`` is that of the part.
        """
        (stage,) = [each for each in self.stages if blocks.start in each.blocks]
        if stage.number and blocks.start == stage.blocks.start:
            x = self.merges[stage.number - 1](x)
        own = stage.layout(layout)
        tokens, rotary = token_numbers(own, self.group.index, x), self.rotary(own, x)
        spreads = [self._spread(own, (index - stage.blocks.start) % 2 == 1, x.device) for index in blocks]
        x, taken = self._run(blocks, x, spreads, tokens, rotary, key, chosen)
        return x, {index: self.cubes(tokens, layout) for index, tokens in taken.items()}

    def _spread(self, layout: Layout, is_shifted: bool, device: torch.device) -> Spread:
        if not self.window:
            return layout.counts
        return Windows.of(layout, self.group, self.window, is_shifted, device)

    def cubes(self, x: Tensor, layout: Layout) -> Tensor:
        """Returns a stage's tokens ``b n/s (m e)``, those of a cube in one row; unchanged for the last stage."""
        return x.unflatten(1, (layout.counts[self.group.index], -1)).flatten(2)

    def run_blocks(
        self,
        x: Tensor,
        sizes: Sequence[int],
        tokens: Tensor,
        rotary: Rotary | None,
        key: DropoutKey | None,
        chosen: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs all blocks of a single stage; returns the normed tokens ``b n/s e`` and, un-normed, those after
        ``chosen``.

        - ``sizes``: each rank's token count
        - ``tokens``: numbers of this rank's tokens, which key the dropout
        """
        assert not self.window, "windows need the tokens of whole tiles"
        depth = len(self.blocks)
        x, taken = self._run(range(depth), x, [sizes] * depth, tokens, rotary, key, chosen)
        return self.norm(x), [taken[index] for index in chosen]

    def _run(
        self,
        blocks: range,
        x: Tensor,
        spreads: Sequence[Spread],
        tokens: Tensor,
        rotary: Rotary | None,
        key: DropoutKey | None,
        chosen: Sequence[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        outputs: dict[int, Tensor] = {}
        if key is not None and key.draws is not None and half_dtype(x) is not None:
            key = with_scales(key, {index: self.blocks[index] for index in blocks})  # type: ignore[misc]
        for index, spread in zip(blocks, spreads):
            x = self.blocks[index](x, spread, tokens, rotary, key and key.at(index))
            if index in chosen:
                outputs[index] = x
        return x, outputs

    def embed(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> Tensor:
        """Returns the tokens ``b n/s e`` of a part, with positions added: the input of the first block."""
        merges, own = self.stages[0].merges, self.stages[0].layout(layout)
        return self.add_positions(self.patch_embed(split_cubes(part, merges) if merges else part, own), layout, key)

    def add_positions(self, x: Tensor, layout: Layout, key: DropoutKey | None) -> Tensor:
        """Returns embedded patches ``b n/s e`` with positions added and dropout."""
        own = self.stages[0].layout(layout)
        positions = self.added_positions(own, x)
        x = x if positions is None else x + positions
        tokens = token_numbers(own, self.group.index, x)
        return keyed_dropout(x, self.dropout, key and key.at(len(self.blocks)), tokens)

    def rotary(self, layout: Layout, like: Tensor) -> RotaryPositions | None:
        """Returns the rotary positions that act in attention, or None; ``like`` has the tokens' dtype and device."""
        if not self.rotates:
            return None
        return RotaryPositions.of(layout, self.group.index, self.embed_dim // self.num_heads, like)

    def place(self, whole: Tensor) -> tuple[Tensor, Layout]:
        """Pads a whole image ``b c W D H`` to the patch; returns it as the part of a group of one, with its layout."""
        return self.layout.place(whole)

    def _part_and_layout(self, part: Tensor, layout: Layout | None) -> tuple[Tensor, Layout]:
        """Returns the part with its layout, given a part or a whole tile."""
        dims, part = len(self.layout.tile), plain_tensor(part)
        if part.ndim == dims + 2:
            return self.place(part)
        layout = layout or self.layout
        if part.ndim != dims + 3 or part.shape[1] != layout.counts[self.group.index]:
            raise ValueError(
                f"got a part of shape {tuple(part.shape)}, but rank {self.group.index} of {self.group.size} holds "
                f"{layout.counts[self.group.index]} tokens of tile {layout.tile}: (batch, tokens, channels, *patch); "
                "for another tile, pass its layout="
            )
        return part, layout

    def dropout_key(self, key: DropoutKey | None, batch: int) -> DropoutKey | None:
        """Returns the key of this forward pass, or None if nothing is dropped."""
        if not (self.training and self.draws):
            return None
        if key is None and self.group.size > 1:
            raise ValueError("dropout on several ranks needs key=DropoutKey(seed, step, samples)")
        if key is None:
            key = DropoutKey(int(torch.randint(2**62, ())), 0, tuple(range(batch)))
        if len(key.samples) != batch:
            raise ValueError(f"the dropout key has {len(key.samples)} samples, but the batch has {batch}")
        return key

    def drawn(self, key: DropoutKey, device: torch.device) -> DropoutKey:
        """Returns the key of a training step with all draws of the encoder, on the device."""
        depth, sites = len(self.blocks), list[tuple[int, ...]]()
        if self.dropout > 0:
            sites = [(at, site) for at in range(depth) for site in (ATTENTION_SITE, MLP_SITE, HIDDEN_SITE)] + [(depth,)]
        rates = {
            (at, site): float(block.drop_path)  # type: ignore[arg-type]
            for at, block in enumerate(self.blocks)
            for site in (ATTENTION_SITE, MLP_SITE)
        }
        return key.drawn(sites, {place: rate for place, rate in rates.items() if rate}, device)

    def added_positions(self, layout: Layout, like: Tensor) -> Tensor | None:
        """Returns the positions ``1 n/s e`` to add to the tokens, or None if there are none or only rotary ones.

        - ``layout``: of the first stage's tokens
        - ``like``: has the tokens' dtype and device
        """
        rank, width = self.group.index, self.embed_dim
        if self.pos_embed is not None:
            return learned_positions(self.pos_embed, self.stages[0].layout(self.layout).grid, layout, rank)
        if self.positions == "sincos":
            key = "sincos", rank, width, like.dtype, like.device
            return layout.once(key, lambda: sincos_positions(layout, rank, width, like))
        return None
