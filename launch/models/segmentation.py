"""Encoder and decoder meet here, and nowhere else.

Legend: b batch, c channels, n tokens, k classes, p voxels of a patch along a direction, W D H voxels; ``n/s`` is
this rank's share of the tokens.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from seqpar.decoders.modes.mode import Mode
from seqpar.launch.models.net import Net, num_parameters
from seqpar.launch.models.resized import NewGrid, Resizing
from seqpar.launch.models.stages import TokenCells
from seqpar.layout import Layout
from seqpar.spatial.box_grid import BoxGrid
from seqpar.vit.dropout import DropoutKey
from seqpar.vit.encoder import SeqParViT


class SegmentationNet(Net):
    """An encoder and a decoder.

    - ``encoder``: gives each rank the tokens of its part
    - ``decoder``: ``(features, image, grid) -> (logits, grid)``, as ``PlainDecoder``; ``num_features`` says how many
      token grids it takes, ``uses_image`` whether it takes the image, else None comes. One of torch's own modules may
      return the logits alone: it works in modes in which every rank decodes whole volumes
    - ``mode``: brings the tokens to where they are decoded (``choose_mode``)
    - ``taps``: the encoder's blocks whose tokens the decoder takes before the normed last ones
    """

    body = "encoder"

    def __init__(self, encoder: SeqParViT, decoder: nn.Module, mode: Mode, taps: tuple[int, ...] = ()) -> None:
        super().__init__(encoder.layout, mode)
        self.encoder, self.decoder, self.taps = encoder, decoder, taps
        self.attention, self.attention_choice = encoder.attention, encoder.attention_choice
        self.in_channels = encoder.patch_embed.proj.weight.shape[1]
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
        return [self._checked(self.decoder(features, image, box_grid), box_grid and box_grid.scaled(layout.patch))]

    def _checked(self, output: Tensor | tuple[Tensor, BoxGrid | None], needed: BoxGrid | None) -> Tensor:
        """Returns the decoder's logits; raises ValueError on all ranks where it did not decode on boxes as needed.

        - ``output``: the decoder's; logits alone will do where each rank decodes whole volumes
        - ``needed``: the box grid of the logits, None where they are whole
        """
        logits, grid = (output, None) if isinstance(output, Tensor) else output
        if grid == needed or grid is None and self.group.size == 1:
            return logits
        name = type(self.decoder).__name__
        if needed is None:
            raise ValueError(f"{name} returned {type(grid).__name__} beside its logits, where None is needed")
        beside = "no box grid" if grid is None else "another box grid than that of the voxels"
        raise ValueError(
            f"--mode {self.mode.name}: each of {self.group.size} ranks decodes a box, and {name} returned {beside} "
            "with its logits: modules of torch itself do not look beyond a box. It works with --mode gather or swap; "
            "for halo build it of seqpar.spatial, whose modules take and return a volume and its box grid"
        )

    def staged(self) -> TokenCells:
        """Returns the embedding, a cell a block, and the decoder's cells."""
        return TokenCells(self.encoder, self.decoder, self.mode, self.taps)

    def units(self) -> list[nn.Module]:
        """Returns the encoder's blocks."""
        return list(self.encoder.blocks)

    def resized(self, tile: Sequence[int]) -> Resizing:
        """Returns the learned positions, where there are any."""
        if self.encoder.pos_embed is None or tuple(tile) == self.layout.tile:
            return {}
        grid = tuple(side // voxels for side, voxels in zip(tile, self.layout.patch))
        return {"encoder.pos_embed": NewGrid(grid, self.layout.grid)}

    def compiled(self) -> list[nn.Module]:
        """Returns the MLPs of the encoder's blocks."""
        return [block.mlp for block in self.encoder.blocks]  # type: ignore[misc]

    def on_phases(self, act: Callable[[str], None]) -> None:
        """Calls ``act`` as the decoder begins, and as backward comes to the blocks and to the embedding."""

        def in_backward(phase: str, tensor: Tensor) -> None:
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: act(phase))

        self.decoder.register_forward_pre_hook(lambda *_: act("decoder"))
        self.encoder.norm.register_forward_hook(lambda module, args, output: in_backward("blocks backward", output))
        first = self.encoder.blocks[0]
        first.register_forward_pre_hook(lambda module, args: in_backward("embedding backward", args[0]))

    def in_body(self, name: str) -> bool:
        """Returns whether the tensor is the encoder's."""
        return name.startswith("encoder.")

    def num_parameters(self) -> dict[str, int]:
        """Returns how many parameters encoder and decoder have."""
        return {"encoder": num_parameters(self.encoder), "decoder": num_parameters(self.decoder)}
