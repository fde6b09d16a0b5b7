"""A U-Net as the model."""

from collections.abc import Sequence

from torch import Tensor

from seqpar.decoders.modes.mode import Mode
from seqpar.decoders.unets.unet import UNet
from seqpar.losses import DeepSupervision, Loss
from seqpar.models.cells_net import CellsNet
from seqpar.parallel.layout import Layout
from seqpar.vit.dropout import DropoutKey


class VolumeNet(CellsNet):
    """A U-Net behind a mode.

    The layout's patch is what the sides of an image must be multiples of: a "token" is a point of the coarsest stage.

    - ``tile``: of training; another one passes where its layout is given
    - ``split``: how a tile is divided over ranks, "spatial" (boxes) or "ordered" (chunks of the raster order)
    - ``recompute``: what backward computes again: "none", or "full", all cells that hold more than their inputs
    """

    body = "U-Net"

    def __init__(
        self, unet: UNet, tile: Sequence[int], mode: Mode, split: str = "spatial", recompute: str = "none"
    ) -> None:
        unet.architecture.refuse_extents(tile)
        layout = Layout.of(tile, unet.architecture.unit, mode.group.size, split)
        super().__init__(unet, "unet", unet.architecture.in_channels, layout, mode, recompute)
        self.unet: UNet = unet

    def logits(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> list[Tensor]:
        """Returns the logits of a part, in training those of each supervised level."""
        return [x for x, _ in self.unet.on_boxes(*self.image(part, layout))]

    def training_loss(self, loss: Loss) -> Loss | DeepSupervision:
        """Returns the loss, of all supervised levels where there are several."""
        scales = self.unet.output_scales
        return DeepSupervision(loss, scales) if len(scales) > 1 else loss

    def refuse_whole(self, sides: Sequence[int]) -> None:
        """Raises ValueError for a volume whose last side is not the one that the network was made for."""
        style = self.unet.architecture.style
        if style.norm == "last axis" and sides[-1] != style.length:
            raise ValueError(
                f"a volume of {'x'.join(map(str, sides))} voxels cannot pass whole: the last side of this network's "
                f"images is always {style.length}: use sliding windows"
            )
