"""Encoder and decoder meet here, and nowhere else.

Legend: b batch, c channels, n tokens, k classes, p voxels of a patch along a direction, W D H voxels; ``n/s`` is
this rank's share of the tokens.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from seqpar.decoders.modes.mode import Mode
from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.unetr import UnetrDecoder, skip_blocks
from seqpar.models.network import num_parameters
from seqpar.models.pipelined import TokenCells, refuse_other_grid
from seqpar.models.token_network import TokenNetwork
from seqpar.parallel.layout import Layout, refuse_no_count
from seqpar.parallel.mesh import AnyGroup
from seqpar.vit.dropout import DropoutKey
from seqpar.vit.encoder import SeqParViT


class SegmentationNet(TokenNetwork):
    """An encoder and a decoder.

    - ``encoder``: gives each rank the tokens of its part
    - ``decoder``: ``(features, image, grid) -> (logits, grid)``, as ``PlainDecoder``; ``num_features`` says how many
      token grids it takes, ``uses_image`` whether it takes the image; if not, it gets None. A module that returns
      logits alone works in modes in which every rank decodes whole volumes
    - ``mode``: brings the tokens to where they are decoded (``choose_mode``)
    - ``taps``: the encoder's blocks whose tokens the decoder takes before the normed last ones
    """

    def __init__(self, encoder: SeqParViT, decoder: nn.Module, mode: Mode, taps: tuple[int, ...] = ()) -> None:
        super().__init__(encoder, mode)
        self.decoder, self.taps = decoder, taps
        if decoder.num_features != len(taps) + 1:
            raise ValueError(
                f"{type(decoder).__name__} takes {decoder.num_features} token grids; taps={taps} and the last tokens "
                f"make {len(taps) + 1}: give as many taps as it takes, less one"
            )

    def logits(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> list[Tensor]:
        """Returns the logits of a part."""
        last, taken = self.encoder.forward_intermediates(part, self.taps, layout, key)
        features = self.mode.features([*taken, last], layout)
        image = self.mode.voxels(part, layout) if self.decoder.uses_image else None
        box_grid = self.mode.box_grid(layout, len(part))
        output = self.decoder(features, image, box_grid)
        logits, grid = (output, None) if isinstance(output, Tensor) else output
        refuse_other_grid(grid, box_grid and box_grid.scaled(layout.patch), self.decoder, self.mode)
        return [logits]

    def staged(self) -> TokenCells:
        """Returns the embedding, one cell per block, and the decoder's cells."""
        return TokenCells(self.encoder, self.decoder, self.mode, self.taps)

    def on_phases(self, act: Callable[[str], None]) -> None:
        """Calls ``act`` as the decoder begins, and as backward comes to the blocks and to the embedding."""
        self.decoder.register_forward_pre_hook(lambda *_: act("decoder"))
        super().on_phases(act)

    def num_parameters(self) -> dict[str, int]:
        """Returns how many parameters encoder and decoder have."""
        return {"encoder": num_parameters(self.encoder), "decoder": num_parameters(self.decoder)}


class UNETR(SegmentationNet):
    """UNETR, with its arguments in MONAI's order: a ``SeqParViT``, a ``UnetrDecoder`` and a mode.

    ``load_monai`` loads MONAI's weights; with the default ``patch`` and ``depth``, ``export_monai`` gives them back.
    Train it as a ``ParallelModel``, or call ``loss``, ``on_whole``, ``shard`` and ``unshard``, which all networks have.

    Args:
        ``in_channels``, ``out_channels``: of the image and of the logits.
        ``img_size``: voxels of a tile: one number for a cube, or one for each of two or three directions.
        ``feature_size``: number of channels at full resolution.
        ``hidden_size``, ``mlp_dim``, ``num_heads``: of the encoder's blocks.
        ``patch``, ``depth``: voxels of a token; number of blocks.
        ``qkv_bias``: whether queries and values have a bias.
        ``mode``: what each rank decodes, as in ``choose_mode``.
        ``group``: the ranks that share a tile, such as ``mesh.seq``; None: this process alone.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        img_size: int | Sequence[int],
        feature_size: int = 16,
        hidden_size: int = 768,
        mlp_dim: int = 3072,
        num_heads: int = 12,
        *,
        patch: int | Sequence[int] = 16,
        depth: int = 12,
        qkv_bias: bool = False,
        mode: str = "auto",
        group: AnyGroup | None = None,
    ) -> None:
        refuse_no_count(in_channels=in_channels, out_channels=out_channels, feature_size=feature_size)
        refuse_no_count(hidden_size=hidden_size, mlp_dim=mlp_dim, num_heads=num_heads)
        encoder = SeqParViT(
            in_channels, img_size, patch, hidden_size, depth, num_heads, mlp_dim / hidden_size, qkv_bias, group=group
        )
        sides = encoder.layout.patch
        decoder = UnetrDecoder(in_channels, hidden_size, out_channels, sides, feature_size)
        super().__init__(encoder, decoder, choose_mode(mode, encoder.group), skip_blocks(depth, sides))
