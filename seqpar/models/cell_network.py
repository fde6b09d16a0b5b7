"""What networks of cells have in common, and a U-Net as the model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from seqpar.decoders.modes.mode import Mode
from seqpar.decoders.unets.unet import UNet
from seqpar.losses import DeepSupervision, Loss
from seqpar.models.network import Network, num_parameters
from seqpar.models.pipelined import VolumeCells
from seqpar.parallel.consensus import refuse_different_tiles
from seqpar.parallel.layout import Layout
from seqpar.pipeline.cells import CellNet, Value
from seqpar.spatial.memory_format import in_fastest_format
from seqpar.text import quantity
from seqpar.vit.dropout import DropoutKey

RECOMPUTED = ("none", "full")


class CellNetwork(Network):
    """A network of cells behind a mode; a "token" is a cube of voxels that stays on one rank.

    - ``cells``: the network; ``name``: of it among this one's modules
    - ``recompute``: what backward computes again: "none", or "full", all cells that hold more than their inputs
    """

    body, counted, piece = "network", "voxels", "cube"

    def __init__(
        self, cells: CellNet, name: str, in_channels: int, layout: Layout, mode: Mode, recompute: str = "none"
    ) -> None:
        if recompute not in RECOMPUTED:
            raise ValueError(
                f"recompute={recompute!r}: a {self.body} has no such part: choose {' or '.join(map(repr, RECOMPUTED))}"
            )
        if recompute == "full":
            cells.recompute()
        super().__init__(layout, mode)
        self.in_channels, self._name = in_channels, name
        self.add_module(name, cells)

    @property
    def _cells(self) -> CellNet:
        return self.get_submodule(self._name)  # type: ignore[return-value]

    def image(self, part: Tensor, layout: Layout) -> Value:
        """Returns this rank's box of the image of a part, or all of it, and the grid of boxes."""
        box_grid = self.mode.box_grid(layout, len(part))
        return self.mode.voxels(part, layout), box_grid and box_grid.scaled(layout.patch)

    def staged(self) -> VolumeCells:
        """Returns the network's cells."""

        def image(part: Tensor, layout: Layout) -> Value:
            x, grid = self.image(part, layout)
            return in_fastest_format(x), grid

        return VolumeCells(self._cells, image, self.own_key, f"{self._name}.")

    def own_key(self, key: DropoutKey | None) -> DropoutKey | None:
        """Returns the key of the samples that this rank decodes; None if nothing is dropped."""
        if key is None or not self._cells.drops:
            return None
        own = self.mode.samples(torch.tensor(key.samples, device="cpu"))
        return replace(key, samples=tuple(own.tolist()), draws=None)

    def units(self) -> list[nn.Module]:
        """Returns the cells that have weights."""
        return [cell for cell in self._cells.cells.values() if any(True for _ in cell.parameters())]

    def on_phases(self, act: Callable[[str], None]) -> None:
        """Calls ``act`` as the network begins: all of it counts as decoder, and no cells are alike."""
        self.register_forward_pre_hook(lambda *_: act("decoder"))

    def num_counted(self) -> int:
        """Returns the voxels of a tile."""
        return math.prod(self.layout.tile)

    def in_body(self, name: str) -> bool:
        """Returns whether the tensor is the network's, but not one of its outputs'."""
        return name.startswith(f"{self._name}.") and not name.startswith(f"{self._name}.cells.classes")

    def num_parameters(self) -> dict[str, int]:
        """Returns how many parameters the network has."""
        return {self.body: num_parameters(self._cells)}

    def describe_tile(self) -> str:
        """Returns how many cubes a tile has, and their size."""
        return f"{quantity(self.layout.num_tokens, 'cube')} of {'x'.join(map(str, self.layout.patch))} voxels"


class VolumeNet(CellNetwork):
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
        self._compares = self.group.size > 1  # whether the ranks cut the same tile, once

    def logits(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> list[Tensor]:
        """Returns the logits of a part, in training those of each supervised level."""
        if self._compares and not part.is_meta:
            self._compares = False
            refuse_different_tiles(layout.fingerprint, self.group, part.device)
        return [x for x, _ in self.unet.on_boxes(*self.image(part, layout), self.own_key(key))]

    def training_loss(self, loss: Loss) -> Loss | DeepSupervision:
        """Returns the loss, of all supervised levels if there are several."""
        scales = self.unet.output_scales
        return DeepSupervision(loss, scales) if len(scales) > 1 else loss

    def refuse_whole(self, sides: Sequence[int]) -> None:
        """Raises ValueError for a volume whose last side is not the one that the network was made for."""
        style = self.unet.architecture.style
        if style.length and sides[-1] != style.length:
            raise ValueError(
                f"a volume of {'x'.join(map(str, sides))} voxels cannot pass whole: the last side of this network's "
                f"images is always {style.length}: use sliding windows"
            )
