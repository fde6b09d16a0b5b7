"""What networks with an encoder of tokens have in common, whatever is made of the tokens."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from seqpar.decoders.modes.mode import Mode
from seqpar.models.network import Network, ResizePositions, Resizing
from seqpar.text import quantity
from seqpar.vit.dropout import DropoutKey
from seqpar.vit.encoder import SeqParViT


class TokenNetwork(Network):
    """A network with an ``encoder``, which gives each rank the tokens of its part."""

    body = "encoder"

    def __init__(self, encoder: SeqParViT, mode: Mode) -> None:
        super().__init__(encoder.layout, mode)
        self.encoder = encoder
        self.attention, self.attention_choice = encoder.attention, encoder.attention_choice
        self.in_channels = encoder.in_channels

    def drawn(self, key: DropoutKey, device: torch.device) -> DropoutKey:
        """Returns the key with what the encoder drops."""
        return self.encoder.drawn(key, device)

    def units(self) -> list[nn.Module]:
        """Returns the encoder's blocks."""
        return list(self.encoder.blocks)

    def resized(self, tile: Sequence[int]) -> Resizing:
        """Returns the learned positions, if there are any."""
        if self.encoder.pos_embed is None or tuple(tile) == self.layout.tile:
            return {}
        own = self.encoder.stages[0].layout(self.layout)
        grid = tuple(side // voxels for side, voxels in zip(tile, own.patch))
        return {"encoder.pos_embed": ResizePositions(grid, own.grid)}

    def num_counted(self) -> int:
        """Returns how many tokens the first stage has of a tile."""
        return self.encoder.stages[0].layout(self.layout).num_tokens

    def most_on_a_rank(self) -> int:
        """Returns how many tokens of the first stage the fullest rank holds."""
        return max(self.encoder.stages[0].layout(self.layout).counts)

    def describe_tile(self) -> str:
        """Returns how many tokens each stage has."""
        first, *others = (stage.layout(self.layout).num_tokens for stage in self.encoder.stages)
        return quantity(first, self.piece) + (f", merged to {', then '.join(map(str, others))}" if others else "")

    def compiled(self) -> list[nn.Module]:
        """Returns the MLPs of the encoder's blocks."""
        return [block.mlp for block in self.encoder.blocks]  # type: ignore[misc]

    def on_phases(self, act: Callable[[str], None]) -> None:
        """Calls ``act`` as backward comes to the blocks and to the embedding."""

        def in_backward(phase: str, tensor: Tensor) -> None:
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: act(phase))

        self.encoder.norm.register_forward_hook(lambda module, args, output: in_backward("blocks backward", output))
        first = self.encoder.blocks[0]
        first.register_forward_pre_hook(lambda module, args: in_backward("embedding backward", args[0]))

    def in_body(self, name: str) -> bool:
        """Returns whether the tensor is the encoder's."""
        return name.startswith("encoder.")
