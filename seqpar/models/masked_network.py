"""A masked autoencoder as the network of a run.

Legend: b batch, c channels, n tokens, p voxels of a patch along a direction, r hidden tokens of all samples; ``/s`` is
this rank's share.
"""

from collections.abc import Callable

from torch import Tensor, nn

from seqpar.decoders.modes.gather import Gather
from seqpar.decoders.modes.mode import groups_with_peers
from seqpar.losses import LossGroups
from seqpar.models.network import num_parameters
from seqpar.models.token_network import TokenNetwork
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Group
from seqpar.pipeline.engine import StagedNet
from seqpar.vit.dropout import DropoutKey
from seqpar.vit.encoder import SeqParViT
from seqpar.vit.masked_autoencoder import MaskedDecoder, decode_masked


class _OwnParts(Gather):
    """No rank decodes what others hold: each rebuilds hidden patches of its own part, from what all ranks see."""

    name = "parts"

    def check(self, layout: Layout, batch: int | None = None) -> str:
        """Returns how it rebuilds; any layout and batch will do."""
        return "each rank rebuilds the hidden patches of its part"


class MaskedNet(TokenNetwork):
    """An encoder of visible tokens and a rebuilder of hidden patches; "labels" are this rank's part of the image.

    - ``ratio``: the share of a tile's tokens that is hidden
    """

    def __init__(self, encoder: SeqParViT, rebuilder: MaskedDecoder, ratio: float) -> None:
        super().__init__(encoder, _OwnParts(encoder.group))
        self.rebuilder, self.ratio = rebuilder, ratio

    def forward(
        self, part: Tensor, layout: Layout | None = None, key: DropoutKey | None = None
    ) -> Tensor | list[Tensor]:
        """Returns rebuilt patches ``r/s c p p p``, and their places ``r/s`` among this rank's tokens of all samples.

        - ``key``: from which follows what is hidden
        """
        if part.ndim == len(self.layout.tile) + 2:
            part, layout = self.layout.place(part)
        return self.logits(part, layout or self.layout, key)

    def logits(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> list[Tensor]:
        """Returns rebuilt patches and their places."""
        if key is None:
            raise ValueError("what is hidden follows from a key: give key=DropoutKey(seed, step, samples)")
        return list(decode_masked(self.encoder, self.rebuilder, part, layout, key, self.ratio))

    def arrange(self, label: Tensor, layout: Layout | None = None) -> Tensor:
        """Returns this rank's part of the image unchanged."""
        return label

    def label_shape(self, batch: int) -> tuple[int, ...]:
        """Returns the shape of this rank's part of the image."""
        return batch, self.layout.counts[self.group.index], self.in_channels, *self.layout.patch

    def loss_groups(self, data: Group | None, batch: int) -> LossGroups:
        """Returns the ranks that share a tile, and those with others."""
        return LossGroups(voxels=self.group, samples=groups_with_peers(data))

    def staged(self) -> StagedNet:
        """Refuses: what it is made of is not cut."""
        raise ValueError("--pipe: a masked autoencoder is not cut into stages: use --seqpar, or --shard-weights")

    def units(self) -> list[nn.Module]:
        """Returns the blocks of both networks."""
        return [*self.encoder.blocks, *self.rebuilder.vit.blocks]

    def compiled(self) -> list[nn.Module]:
        """Returns the MLPs of all blocks."""
        return [block.mlp for block in self.units()]  # type: ignore[misc]

    def on_phases(self, act: Callable[[str], None]) -> None:
        """Calls ``act`` as the rebuilder begins, and as backward comes to the encoder's blocks and to its embedding."""
        self.rebuilder.register_forward_pre_hook(lambda *_: act("decoder"))
        super().on_phases(act)

    def num_parameters(self) -> dict[str, int]:
        """Returns how many parameters encoder and rebuilder have."""
        return {"encoder": num_parameters(self.encoder), "rebuilder": num_parameters(self.rebuilder)}
