"""A masked autoencoder on this rank's tokens: visible tokens are encoded, and hidden patches are decoded from them.

Legend: b batch, c channels, n tokens, k visible tokens of a tile, e width of the encoder, f of the decoder, p voxels of
a patch per axis, r rows: tokens of all samples, one after the other; ``/s`` is this rank's share.
"""

import math

import torch
from torch import Tensor, nn

from seqpar.parallel.half_precision import Linear
from seqpar.parallel.layout import Layout
from seqpar.parallel.remaps import remap
from seqpar.vit.dropout import DropoutKey, keyed_dropout, numbers_of, token_numbers
from seqpar.vit.encoder import SeqParViT
from seqpar.vit.masking import LISTED, Visible, count_visible, make_visible, token_positions


class MaskedDecoder(nn.Module):
    """Decodes hidden patches from encoded tokens: a projection, mask tokens for the hidden ones, and blocks.

    - ``encoder_width``: of the encoded tokens
    - ``in_channels``: of the image
    - ``vit``: provides blocks and positions, for the encoder's tile, patch and group; its patch embedding is removed
      because it gets tokens
    """

    def __init__(self, encoder_width: int, in_channels: int, vit: SeqParViT) -> None:
        super().__init__()
        del vit.patch_embed
        self.vit, self.project = vit, Linear(encoder_width, vit.embed_dim)
        self.mask_token = nn.Parameter(torch.zeros(vit.embed_dim))
        self.patches = Linear(vit.embed_dim, in_channels * math.prod(vit.layout.patch))
        nn.init.trunc_normal_(self.project.weight, std=0.02)
        nn.init.zeros_(self.project.bias)
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(self, rows: Tensor, visible: Visible, layout: Layout) -> Tensor:
        """Returns the hidden patches ``r/s (c p p p)`` decoded from the encoded tokens ``r/s e``."""
        rows, count = self.project(rows), layout.counts[self.vit.group.index]  # r/s f
        num_rows = len(visible.shown) + len(visible.hidden)
        every = self.mask_token.to(rows.dtype).expand(num_rows, -1).index_copy(0, visible.shown, rows)
        x = self.vit.add_positions(every.unflatten(0, (-1, count)), layout, None)  # b n/s f
        tokens = token_numbers(layout, self.vit.group.index, x)
        x, _ = self.vit.run_blocks(x, layout.counts, tokens, self.vit.rotary(layout, x), None)
        return self.patches(x.flatten(0, 1).index_select(0, visible.hidden))  # type: ignore[no-any-return]


def encode_visible(
    encoder: SeqParViT, part: Tensor, visible: Visible, layout: Layout, key: DropoutKey | None = None
) -> Tensor:
    """Returns this rank's own visible tokens ``r/s e``, encoded; no rank computes anything for hidden tokens.

    - ``part``: this rank's part ``b n/s c p p p``
    - ``key``: of the encoder's dropout
    """
    group, rank, batch = encoder.group, encoder.group.index, len(part)
    x = encoder.patch_embed(part.flatten(0, 1).index_select(0, visible.shown)[None])[0]  # r/s e
    positions = encoder.added_positions(layout, x)
    if positions is not None:
        x = x + positions[0].index_select(0, visible.shown % layout.counts[rank])
    x = remap(x, group, 0, visible.moves, "visible").unflatten(0, (batch, -1))  # b k/s e: as many on every rank
    numbers = numbers_of(visible.ids[rank].to(x.device), x)
    key = encoder.dropout_key(key, batch)
    if key is not None and key.draws is None:
        key = encoder.drawn(key, x.device)
    x = keyed_dropout(x, encoder.dropout, key and key.at(len(encoder.blocks)), numbers)
    rotary = encoder.rotary(layout, x)
    if rotary is not None:
        rotary = rotary.chosen(*(token_positions(layout, ids, x.device) for ids in (visible.ids[rank], visible.ids)))
    x, _ = encoder.run_blocks(x, visible.sizes, numbers, rotary, key)
    return remap(x.flatten(0, 1), group, 0, visible.moves.reversed(), "visible")


def decode_masked(
    encoder: SeqParViT, rebuilder: MaskedDecoder, part: Tensor, layout: Layout, key: DropoutKey, ratio: float
) -> tuple[Tensor, Tensor]:
    """Returns a part's decoded hidden patches ``r/s c p p p``, and their positions ``r/s`` among this rank's tokens.

    - ``part``: this rank's part ``b n/s c p p p``
    - ``key``: seed, step and samples, which determine what is hidden and what the encoder drops
    - ``ratio``: share of a tile's tokens that is hidden
    """
    rank = encoder.group.index
    if part.is_meta and len(part) * layout.num_tokens > LISTED:
        visible = count_visible(len(part), layout, rank, ratio)
    else:
        visible = make_visible(key, layout, rank, ratio).on(part.device)
    rows = encode_visible(encoder, part, visible, layout, key)
    return rebuilder(rows, visible, layout).unflatten(1, part.shape[2:]), visible.hidden
