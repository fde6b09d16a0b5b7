"""What training, planning and prediction ask of a network, whatever it is made of.

Legend: b batch, c channels, n tokens, k classes, p voxels of a patch along a direction, W D H voxels; ``n/s`` is
this rank's share of the tokens. A network without tokens has cubes of as many voxels as its strides need instead.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from seqpar.decoders.modes.mode import Mode
from seqpar.losses import DeepSupervision, Loss, LossGroups
from seqpar.losses.tile_network import TileNetwork, require_peers_of
from seqpar.parallel.collectives import with_mean_gradient
from seqpar.parallel.half_precision import weights_cast_at_once
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Group
from seqpar.pipeline.engine import StagedNet
from seqpar.spatial.box_grid import as_box
from seqpar.text import quantity
from seqpar.vit.dropout import DropoutKey
from seqpar.vit.tokens import resize_positions


@dataclass(frozen=True)
class ResizePositions:
    """Resizes a table ``1 n e`` of positions from the tokens of ``old`` to those of ``new``."""

    old: tuple[int, ...]
    new: tuple[int, ...]

    def __call__(self, table: Tensor) -> Tensor:
        """Returns the table resized linearly."""
        return resize_positions(table, self.old, self.new)


Resizing = Mapping[str, ResizePositions]  # by the tensor's name
NO_RESIZING: Resizing = MappingProxyType({})


def resize_tensors(tensors: Iterable[tuple[str, Tensor]], resizing: Resizing) -> Iterator[tuple[str, Tensor]]:
    """Yields named tensors; those in ``resizing`` resized, and with them what an optimizer holds for each token.

    An optimizer's tensors are named ``parameter/entry``. Means of gradients and of their squares follow the positions,
    as neighbouring tokens have similar ones (linear resizing keeps squares positive); what holds for all tokens stays:
    the count of steps, and Adafactor's columns.
    """
    for name, tensor in tensors:
        parameter, _, entry = name.partition("/")
        grid = resizing.get(parameter)
        each_token = tensor.ndim == 3 and grid is not None and tensor.shape[1] == math.prod(grid.old)
        yield name, grid(tensor) if grid and each_token and entry != "col_var" else tensor


class Network(TileNetwork):
    """A network on parts of a tile: logits of this rank's part, or, in a group of one, of a whole tile ``b c W D H``.

    - ``layout``: which part of a tile each rank of the sequence group holds
    - ``mode``: brings the parts to where logits are computed
    """

    attention: object = "none"  # how attention crosses ranks
    attention_choice: Sequence[str] = ()  # why, in lines
    settings: Mapping[str, Any] = MappingProxyType({})  # of the run with which it was built
    in_channels: int
    body: str  # what must fit pretrained weights, in a word
    counted = "tokens"  # what is done in a second
    piece = "token"  # of a tile, each on one rank

    def __init__(self, layout: Layout, mode: Mode) -> None:
        super().__init__()
        self.layout, self.mode, self.group = layout, mode, mode.group
        mode.check(layout)

    def forward(
        self, part: Tensor, layout: Layout | None = None, key: DropoutKey | None = None
    ) -> Tensor | list[Tensor]:
        """Returns logits ``b k W D H``, or this rank's share of them where the mode leaves them spread.

        In training, under deep supervision, a list: those of each level that is trained, the finest first.
        """
        require_peers_of(self, part)
        sides = None  # of a whole tile, before it is padded to the patch
        is_box = self.group.size > 1 and self.loss_groups(None, len(part)).voxels is not None
        if part.ndim == len(self.layout.tile) + 2:
            sides = part.shape[2:]
            part, layout = self.layout.place(part)
        with weights_cast_at_once(self):
            first, *others = self.logits(part, layout or self.layout, key)
        if sides is not None and sides != first.shape[2:]:
            if others:
                raise ValueError(
                    f"a tile of {' x '.join(map(str, sides))} came in training with deep supervision: its sides must "
                    f"be multiples of {' x '.join(map(str, self.layout.patch))}"
                )
            inside: tuple[Any, ...] = (..., *(slice(side) for side in sides))
            first = first[inside]
        if is_box:
            first, *others = map(as_box, (first, *others))
        return [first, *others] if others else first

    @abstractmethod
    def logits(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> list[Tensor]:
        """Returns the logits of a part, of each level that is trained."""

    def drawn(self, key: DropoutKey, device: torch.device) -> DropoutKey:
        """Returns the key of a step with all that the network draws by it, on the device."""
        return key

    def arrange(self, label: Tensor, layout: Layout | None = None) -> Tensor:
        """Returns the label ``b n/s p p p`` of a part as the logits are: their voxels, on the ranks that hold them."""
        return self.mode.voxels(label, layout or self.layout)

    def shard(self, whole: Tensor) -> Tensor:
        """Returns this rank's part ``b n c p p p`` of an image ``b c W D H``, or a label ``b W D H`` as the logits are.

        ``net(net.shard(image))`` and ``net.shard(label)`` are the logits and labels of the same voxels.
        """
        if self.group.size == 1:
            return whole
        part = self.layout.cut(whole, self.group.index)
        return part if whole.ndim == len(self.layout.tile) + 2 else self.arrange(part)

    def unshard(self, y: Tensor) -> Tensor:
        return self.mode.whole(y, self.layout) if self.group.size > 1 else y

    @property
    def samples_at_once(self) -> int:
        """A batch must be a multiple of this many samples."""
        return self.group.size if self.mode.name == "swap" else 1

    def on_whole(self, image: Tensor) -> Any:
        count = len(image)
        missing = -count % self.samples_at_once
        filled = torch.cat([image, image[-1:].expand(missing, *image.shape[1:])]) if missing else image
        output = super().on_whole(filled)
        return tree_map(lambda y: y[:count], output) if missing else output

    def group_and_dims(self) -> tuple[Group, int]:
        return self.group, len(self.layout.tile)

    def _shares(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        axes, samples = len(self.layout.tile), len(image)
        is_whole = image.ndim == axes + 2
        if self.group.size == 1 and is_whole:
            if label.ndim > axes and tuple(label.shape[-axes:]) not in (tuple(image.shape[-axes:]), self.layout.patch):
                raise ValueError(
                    f"a label of shape {tuple(label.shape)} came with an image of shape {tuple(image.shape)}: give the "
                    "label of the same voxels"
                )
            if label.shape[-axes:] == image.shape[-axes:]:
                return image, label
        image = self.shard(with_mean_gradient(image, self.group)) if is_whole else image
        if tuple(label.shape[-axes:]) == self.layout.tile and len(label) == samples:
            return image, self.arrange(self.layout.cut(label, self.group.index))
        return image, self.arrange(label) if label.ndim == axes + 2 else label

    def _compare_wholes(self, *tensors: Tensor) -> None:
        if self.group.size > 1:
            axes, image = len(self.layout.tile), tensors[0]
            sides = tuple(image.shape[-axes:]) if image.ndim == axes + 2 else self.layout.tile
            for x in tensors:
                if x.ndim <= axes + 2 and tuple(x.shape[-axes:]) == sides:
                    self._seen.note(x)
            self._seen.compare(self.group, image.device)

    def _loss_groups(self, data: Group, batch: int, part: Tensor) -> LossGroups:
        return self.loss_groups(data, batch)

    def label_shape(self, batch: int) -> tuple[int, ...]:
        """Returns the shape of the labels that ``arrange`` takes on this rank."""
        return batch, self.layout.counts[self.group.index], *self.layout.patch

    def loss_groups(self, data: Group | None, batch: int) -> LossGroups:
        """Returns over which ranks the loss sums; ``data``: the group whose ranks have other tiles."""
        groups, boxes = self.mode.loss_groups(data, batch), None
        if groups.voxels is not None and (grid := self.mode.box_grid(self.layout, batch)) is not None:
            boxes = grid.scaled(self.layout.patch)
        return replace(groups, boxes=boxes)

    def training_loss(self, loss: Loss) -> Loss | DeepSupervision:
        """Returns the loss of what ``forward`` returns in training; ``loss``: that of the finest logits."""
        return loss

    @abstractmethod
    def staged(self) -> StagedNet:
        """Returns the network as a list of cells, between which a pipe may cut it."""

    @abstractmethod
    def units(self) -> list[nn.Module]:
        """Returns the modules whose weights are sharded and gathered each by itself."""

    def resized(self, tile: Sequence[int]) -> Resizing:
        """Returns the tensors whose size follows the tile's, and how those of a network for ``tile`` become its own."""
        return {}

    def compiled(self) -> list[nn.Module]:
        """Returns the modules that gain by being compiled."""
        return []

    @abstractmethod
    def on_phases(self, act: Callable[[str], None]) -> None:
        """Calls ``act`` with the name of each phase that the next steps come to.

        "decoder" in the forward pass; in the backward pass, where blocks that are alike follow each other, "blocks
        backward" and then "embedding backward".
        """

    def num_counted(self) -> int:
        """Returns how many tokens, or whatever ``counted`` says, a tile has."""
        return self.layout.num_tokens

    def most_on_a_rank(self) -> int:
        """Returns how many of a tile's pieces the fullest rank holds."""
        return max(self.layout.counts)

    @abstractmethod
    def in_body(self, name: str) -> bool:
        """Returns whether a tensor of that name must fit pretrained weights; heads may begin afresh."""

    @abstractmethod
    def num_parameters(self) -> dict[str, int]:
        """Returns how many parameters each part of the network has."""

    def describe(self) -> str:
        """Returns the network's size, and how much of a tile a rank holds."""
        counts = self.num_parameters()
        parts = {name: f"{count / 1e6:.2f} M" for name, count in counts.items()}
        sizes = " + ".join(f"{name} {size}" if len(parts) > 1 else size for name, size in parts.items())
        per_rank = f", {self.most_on_a_rank()} per rank" if self.group.size > 1 else ""
        return f"{sizes} parameters; {self.describe_tile()} a tile{per_rank}"

    def refuse_whole(self, sides: Sequence[int]) -> None:  # noqa: B027  most take any volume of whole patches
        """Raises ValueError for a volume of that many voxels per direction that cannot pass whole."""

    def describe_tile(self) -> str:
        """Returns what a tile is made of."""
        return quantity(self.layout.num_tokens, self.piece)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Returns the context of a forward pass: only bf16 casts."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def num_parameters(module: nn.Module) -> int:
    """Returns how many parameters a module has."""
    return sum(p.numel() for p in module.parameters())
