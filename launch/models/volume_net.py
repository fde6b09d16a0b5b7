"""A U-Net as the model: it has no tokens, and works on boxes of the image.

Legend: b batch, c channels, n cubes of the layout, p voxels of a cube along a direction, W D H voxels; ``/s`` is this
rank's share.
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from seqpar.decoders.modes.mode import Mode
from seqpar.decoders.unets.unet import UNet
from seqpar.launch.models.net import Net, num_parameters
from seqpar.launch.models.stages import VolumeCells
from seqpar.layout import Layout
from seqpar.losses import DeepSupervision, Loss
from seqpar.pipeline.cells import Value
from seqpar.spatial.memory_format import for_convolutions
from seqpar.vit.dropout import DropoutKey

RECOMPUTED = ("none", "full")


class VolumeNet(Net):
    """A U-Net behind a mode.

    The layout's patch is what the sides of an image must be multiples of: a "token" is a point of the coarsest stage.

    - ``tile``: of training; another one passes where its layout is given
    - ``split``: how a tile is divided over ranks, "spatial" (boxes) or "ordered" (chunks of the raster order)
    - ``recompute``: what backward computes again: "none", or "full", all cells that hold more than their inputs
    """

    body, counted, pieces = "U-Net", "voxels", "cubes"

    def __init__(
        self, unet: UNet, tile: Sequence[int], mode: Mode, split: str = "spatial", recompute: str = "none"
    ) -> None:
        if recompute not in RECOMPUTED:
            raise ValueError(
                f"--grad-checkpoint {recompute}: a U-Net has no such part: choose {' or '.join(RECOMPUTED)}"
            )
        if recompute == "full":
            unet.recompute()
        unet.architecture.refuse_extents(tile)
        super().__init__(Layout.of(tile, unet.architecture.unit, mode.group.size, split), mode)
        self.unet, self.in_channels = unet, unet.architecture.in_channels

    def logits(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> list[Tensor]:
        """Returns the logits of a part, in training those of each supervised level."""
        return [x for x, _ in self.unet.on_boxes(*self._image(part, layout))]

    def _image(self, part: Tensor, layout: Layout) -> Value:
        box_grid = self.mode.box_grid(layout, len(part))
        return self.mode.voxels(part, layout), box_grid and box_grid.scaled(layout.patch)

    def staged(self) -> VolumeCells:
        """Returns the U-Net's cells."""

        def image(part: Tensor, layout: Layout) -> Value:
            x, grid = self._image(part, layout)
            return for_convolutions(x), grid

        return VolumeCells(self.unet, image, "unet.")

    def training_loss(self, loss: Loss) -> Loss | DeepSupervision:
        """Returns the loss, of all supervised levels where there are several."""
        scales = self.unet.output_scales
        return DeepSupervision(loss, scales) if len(scales) > 1 else loss

    def units(self) -> list[nn.Module]:
        """Returns the cells that have weights."""
        return [cell for cell in self.unet.cells.values() if any(True for _ in cell.parameters())]

    def on_phases(self, act: Callable[[str], None]) -> None:
        """Calls ``act`` as the U-Net begins: all of it counts as decoder, and no cells are alike."""
        self.register_forward_pre_hook(lambda *_: act("decoder"))

    def num_counted(self) -> int:
        """Returns the voxels of a tile."""
        return math.prod(self.layout.tile)

    def in_body(self, name: str) -> bool:
        """Returns whether the tensor is the U-Net's, but not a head's."""
        return name.startswith("unet.") and not name.startswith("unet.cells.classes")

    def num_parameters(self) -> dict[str, int]:
        """Returns how many parameters the U-Net has."""
        return {"U-Net": num_parameters(self.unet)}

    def describe_tile(self) -> str:
        """Returns how many cubes a tile has, and their size."""
        return f"{self.layout.num_tokens} cubes of {'x'.join(map(str, self.layout.patch))} voxels"
