"""Encoder and decoder meet here, and nowhere else.

Legend: b batch, c channels, n tokens, k classes, p voxels of a patch along a direction, W D H voxels; ``n/s`` is
this rank's share of the tokens.
"""

from torch import Tensor, nn

from seqpar.decoders.modes.mode import Mode
from seqpar.layout import Layout
from seqpar.vit.dropout import DropoutKey
from seqpar.vit.encoder import SeqParViT


class SegmentationNet(nn.Module):
    """An encoder and a decoder: logits of this rank's part, or, in a group of one, of a whole tile ``b c W D H``.

    - ``encoder``: gives each rank the tokens of its part
    - ``decoder``: ``(features, image, grid) -> (logits, grid)``, as ``PlainDecoder``; ``num_features`` says how many
      token grids it takes, ``uses_image`` whether it takes the image, else None comes
    - ``mode``: brings the tokens to where they are decoded (``choose_mode``)
    - ``taps``: the encoder's blocks whose tokens the decoder takes before the normed last ones
    """

    def __init__(self, encoder: SeqParViT, decoder: nn.Module, mode: Mode, taps: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.encoder, self.decoder, self.mode, self.taps = encoder, decoder, mode, taps
        mode.check(encoder.layout)
        if decoder.num_features != len(taps) + 1:
            raise ValueError(
                f"{type(decoder).__name__} takes {decoder.num_features} token grids; taps={taps} and the last tokens "
                f"make {len(taps) + 1}: give as many taps as it takes, less one"
            )

    def forward(self, part: Tensor, layout: Layout | None = None, key: DropoutKey | None = None) -> Tensor:
        """Returns logits ``b k W D H``, or this rank's share of them where the mode leaves them spread."""
        sides = None  # of a whole tile, before it is padded to the patch
        if part.ndim == len(self.encoder.layout.tile) + 2:
            sides = part.shape[2:]
            part, layout = self.encoder.place(part)
        layout = layout or self.encoder.layout
        last, taken = self.encoder.forward_intermediates(part, self.taps, layout, key)
        features = self.mode.features([*taken, last], layout)
        image = self.mode.voxels(part, layout) if self.decoder.uses_image else None
        box_grid = self.mode.box_grid(layout, len(part))
        logits, after = self.decoder(features, image, box_grid)
        assert after == (box_grid and box_grid.scaled(layout.patch)), (after, box_grid)
        return logits if sides is None else logits[(..., *(slice(side) for side in sides))]

    def arrange(self, label: Tensor, layout: Layout | None = None) -> Tensor:
        """Returns the label ``b n/s p p p`` of a part as the logits are: their voxels, on the ranks that hold them."""
        return self.mode.voxels(label, layout or self.encoder.layout)
