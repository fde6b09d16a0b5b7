"""Networks that give a volume one class: its logits are those of a volume of one voxel, so that any loss takes them.

Legend: b batch, c channels, n tokens, e embedding, k classes, p voxels of a patch along a direction; ``n/s`` is this
rank's share, ``b/s`` its samples where each rank has whole ones.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.decoders.modes.mode import Mode
from seqpar.decoders.resattnet import ResAttNet
from seqpar.losses import LossGroups
from seqpar.models.cell_network import CellNetwork
from seqpar.models.network import Network, num_parameters
from seqpar.models.pipelined import EncoderCells, PartOfBatch
from seqpar.models.token_network import TokenNetwork
from seqpar.parallel.collectives import all_reduce, all_sum
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Group
from seqpar.pipeline.cells import Value
from seqpar.spatial.box_grid import BoxGrid
from seqpar.vit.dropout import DropoutKey, numbers_of, token_numbers
from seqpar.vit.encoder import SeqParViT

POOLINGS = ("mean", "token")
POINTS = 6  # fewest of a map, along each direction, that is to show where a class is seen
WAYS = ("hirescam", "grad-cam", "gradient-x-input")  # to show where a class is seen


class Evidence(NamedTuple):
    """A coarse map ``w d h`` of where something speaks for a class.

    ``stride``: voxels from one point to the next; the first point is on the first voxel of the tile; 0: points
    are patches, which fill the tile.
    """

    points: Tensor
    stride: int = 0

    def on_voxels(self, tile: Sequence[int]) -> Tensor:
        """Returns the map ``W D H`` of a tile, each point in its place, linear between them."""
        x = self.points[None, None]
        if not self.stride:
            return F.interpolate(x, list(tile), mode="trilinear", align_corners=False)[0, 0]
        sides = [(count - 1) * self.stride + 1 for count in self.points.shape]
        beyond = [n for side, own in zip(reversed(tile), reversed(sides)) for n in (0, side - own)]
        return F.pad(F.interpolate(x, sides, mode="trilinear", align_corners=True), beyond, mode="replicate")[0, 0]

    def step(self, tile: Sequence[int]) -> tuple[float, ...]:
        """Returns how many voxels of a tile are from one point to the next, along W, D and H."""
        return tuple(self.stride or side / count for side, count in zip(tile, self.points.shape))


class Classifier(Network):
    """Logits ``b k 1 1 1`` of whole volumes, whichever ranks share them; labels are class numbers ``b``."""

    ways: tuple[str, ...]  # to show where a class is seen, the usual one first

    def arrange(self, label: Tensor, layout: Layout | None = None) -> Tensor:
        """Returns the classes ``b`` of the group's samples as the logits are: ``b 1 1 1``, or those of this rank's."""
        return self.mode.samples(label)[:, None, None, None]

    def label_shape(self, batch: int) -> tuple[int, ...]:
        """Returns the shape of the labels: a number for each sample."""
        return (batch,)

    def loss_groups(self, data: Group | None, batch: int) -> LossGroups:
        """Returns the groups of samples: the logits of a sample are those of its whole volume, on every rank."""
        return LossGroups(samples=self.mode.loss_groups(data, batch).samples)

    @abstractmethod
    def evidence(self, part: Tensor, layout: Layout, number: int, way: str = "") -> Evidence:
        """Returns where the first sample of a part speaks for a class, the same on all ranks.

        - ``number``: of the class
        - ``way``: one of ``ways``, by default the usual one
        """

    def known_way(self, way: str) -> str:
        """Returns a way to show where a class is seen, for "" the usual one; raises ValueError for one it has not."""
        if way and way not in self.ways:
            raise ValueError(
                f"--explain-by {way}: this network has no such way: use --explain-by {', '.join(self.ways)}"
            )
        return way or self.ways[0]

    def _class_logit(self, logits: Tensor, number: int) -> tuple[Tensor, int]:
        """Returns the class's logit of this rank's first sample, and on how many ranks this is one and the same."""
        return logits[0, number].sum(), 1 if self.mode.name == "swap" else self.group.size


class VolumeClassifier(Classifier, CellNetwork):
    """A ResAttNet behind a mode.

    - ``tile``: of training; another one passes where its layout is given
    - ``unit``: what a tile's sides must be multiples of
    - ``split``, ``recompute``: as in ``VolumeNet``
    """

    ways = ("hirescam", "grad-cam")

    def __init__(
        self,
        network: ResAttNet,
        tile: Sequence[int],
        unit: Sequence[int],
        mode: Mode,
        split: str = "spatial",
        recompute: str = "none",
    ) -> None:
        layout = Layout.of(tile, unit, mode.group.size, split)
        super().__init__(network, "resattnet", network.in_channels, layout, mode, recompute)
        self.resattnet: ResAttNet = network

    def logits(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> list[Tensor]:
        """Returns the logits of a part's volumes."""
        return [x for x, _ in self.resattnet.on_boxes(*self.image(part, layout))]

    def evidence(self, part: Tensor, layout: Layout, number: int, way: str = "") -> Evidence:
        """Returns a stage's map times its slopes, summed over its channels, where that is positive.

        HiResCAM takes the slope at each voxel, Grad-CAM a channel's mean slope. The stage is the last one whose map is
        ``POINTS`` long in every direction, which the last of all rarely is. All that halves is centred on the first
        voxel, and so are the points.
        """
        image, grid = self.image(part, layout)
        sides = image.shape[2:] if grid is None else grid.extents
        fine = [n for n in range(len(self.resattnet.stage_ends)) if min(sides) >= POINTS * 4 << n]
        stage = max(fine, default=0)
        cells, stride = (self.resattnet.stage_ends[stage], self.resattnet.outputs[0]), 4 << stage
        (x, boxes), (logits, _) = self.resattnet.on_boxes(image, grid, cells)
        logit, count = self._class_logit(logits, number)
        (slopes,) = torch.autograd.grad(logit, x)
        x, slopes = x[0].detach().double(), slopes[0].double()
        if boxes is not None:
            slopes = slopes / count  # of the sum of all ranks' logits
        if self.known_way(way) == "grad-cam":
            slopes = _means(slopes, boxes)
        own = (x * slopes).sum(0).relu()
        if boxes is None:
            return Evidence(own, stride)
        whole = x.new_zeros(boxes.extents)
        whole[tuple(slice(*side) for side in boxes.box)] = own
        return Evidence(all_reduce(whole, boxes.group), stride)


class TokenClassifier(Classifier, TokenNetwork):
    """An encoder whose tokens are averaged, or that has a class token, and a matrix from there to classes.

    - ``num_outputs``: classes
    - ``mode``: whether each rank has all samples of the group in the end, or whole ones of its own
    - ``pooling``: "mean", or "token": one that lies on the first rank and is seen by all
    """

    ways = ("gradient-x-input",)

    def __init__(self, encoder: SeqParViT, num_outputs: int, mode: Mode, pooling: str = "mean") -> None:
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r}: choose {' or '.join(map(repr, POOLINGS))}")
        super().__init__(encoder, mode)
        self.pooling, self.class_token = pooling, None
        if pooling == "token":
            if encoder.rotates:
                raise ValueError(
                    f"pooling='token' with positions={encoder.positions!r}: a class token has no position to rotate it "
                    "by: use pooling='mean', or positions='learned' or 'sincos'"
                )
            self.class_token = nn.Parameter(torch.zeros(1, 1, encoder.embed_dim))
            nn.init.trunc_normal_(self.class_token, std=0.02)
        self.classes = nn.Linear(encoder.embed_dim, num_outputs)

    def logits(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> list[Tensor]:
        """Returns the logits of a part's volumes, of this rank's where each has whole samples."""
        return [self.scores(self._tokens(part, layout, key), layout)]

    def _tokens(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> Tensor:
        """Returns this rank's normed tokens ``b n/s e``, the class token included."""
        if self.pooling == "mean":
            return self.encoder(part, layout, key)  # type: ignore[no-any-return]
        encoder = self.encoder
        key = encoder.dropout_key(key, len(part))
        if key is not None and key.draws is None:
            key = encoder.drawn(key, part.device)
        x = self.embed(part, layout, key)
        return encoder.run_blocks(x, *self.sizes_and_numbers(layout, x), None, key)[0]

    def embed(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> Tensor:
        """Returns this rank's tokens ``b n/s e``, behind which the first rank has the class token, if there is one."""
        x = self.encoder.embed(part, layout, key)
        if self.class_token is None:
            return x
        own = self.class_token[:, : int(self.group.index == 0)]  # nothing on other ranks, whose gradient is zero
        return torch.cat([x, own.expand(len(x), -1, -1)], 1)

    def sizes_and_numbers(self, layout: Layout, x: Tensor) -> tuple[Sequence[int], Tensor]:
        """Returns how many tokens each rank has, and the numbers of this rank's; the class token's is the last."""
        counts, numbers = layout.counts, token_numbers(layout, self.group.index, x)
        if self.pooling == "mean":
            return counts, numbers
        own = numbers.new_full((int(self.group.index == 0),), layout.num_tokens)
        return (counts[0] + 1, *counts[1:]), torch.cat([numbers, numbers_of(own, x)])

    def scores(self, tokens: Tensor, layout: Layout) -> Tensor:
        """Returns the logits of normed tokens ``b n/s e``: of their mean, or of the class token."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        if self.pooling == "mean":
            pooled = tokens.sum(1, dtype=wide) / layout.num_tokens
        else:
            pooled = tokens[:, layout.counts[self.group.index] :].sum(1, dtype=wide)  # none on the other ranks
        whole = all_sum(pooled, self.group, "statistics").to(tokens.dtype)  # b e
        return self.classes(self.mode.samples(whole))[:, :, None, None, None]  # type: ignore[no-any-return]

    def evidence(self, part: Tensor, layout: Layout, number: int, way: str = "") -> Evidence:
        """Returns each token's product with the class's slope at it, where that is positive."""
        taken = list[Tensor]()
        hook = self.encoder.blocks[0].register_forward_pre_hook(lambda module, args: taken.append(args[0]))
        try:
            (logits,) = self.logits(part, layout, None)
        finally:
            hook.remove()
        logit, count = self._class_logit(logits, number)
        (slopes,) = torch.autograd.grad(logit, taken[0])
        ids = layout.token_ids(self.group.index, part.device)
        product = (taken[0].detach().double() * slopes.double()).sum(2)[0, : len(ids)] / count
        whole = product.new_zeros(layout.num_tokens)
        whole[ids] = product.relu()
        return Evidence(all_reduce(whole, self.group).view(layout.grid))

    def staged(self) -> "PooledCells":
        """Returns the embedding, a cell a block, and one of the classes."""
        return PooledCells(self)

    def on_phases(self, act: Callable[[str], None]) -> None:
        """Calls ``act`` as the classes begin, and as backward comes to the blocks and to the embedding."""
        self.classes.register_forward_pre_hook(lambda *_: act("decoder"))
        super().on_phases(act)

    def num_parameters(self) -> dict[str, int]:
        """Returns how many parameters the encoder and what follows it have."""
        encoder = num_parameters(self.encoder)
        return {"encoder": encoder, "classes": num_parameters(self) - encoder}


class PooledCells(EncoderCells):
    """The cells of a token classifier: the class token begins in the first, and the last pools."""

    def __init__(self, net: TokenClassifier) -> None:
        depth = len(net.encoder.blocks)
        super().__init__(net.encoder, ((depth,),), (("encoder.norm.", "classes."),), ("class_token",))
        self.net = net

    def embed(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> Tensor:
        """Returns the tokens that the first block takes, the class token included."""
        return self.net.embed(part, layout, key)

    def run_block(self, block: int, x: Tensor, layout: Layout, key: DropoutKey | None) -> Tensor:
        """Returns the tokens ``b n/s e`` after a block, the class token included."""
        sizes, numbers = self.net.sizes_and_numbers(layout, x)
        rotary = self.encoder.rotary(layout, x)
        return self.encoder.blocks[block](x, sizes, numbers, rotary, key and key.at(block))  # type: ignore[no-any-return]

    def run_following(self, number: int, inputs: Sequence[Value], micro: PartOfBatch) -> Value:
        """Returns the logits."""
        ((x, _),) = inputs
        return self.net.scores(self.encoder.norm(x), micro.layout), None


def _means(x: Tensor, boxes: BoxGrid | None) -> Tensor:
    """Returns the means ``c 1 1 1`` of channels over the whole volume."""
    if boxes is None:
        return x.mean((1, 2, 3), keepdim=True)
    return all_reduce(x.sum((1, 2, 3), keepdim=True), boxes.group) / math.prod(boxes.extents)
