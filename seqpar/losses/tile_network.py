"""The interface of a network whose tiles several ranks share: its loss and its output, whole tiles in.

Legend: b batch, c channels, k classes, W D H voxels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from seqpar.losses.loss import Loss, LossGroups
from seqpar.losses.other_outputs import DeepSupervision
from seqpar.parallel.collectives import all_sum, with_mean_gradient
from seqpar.parallel.consensus import refuse_different_tiles, require_peers
from seqpar.parallel.layout import fingerprint_of, plain_tensor
from seqpar.parallel.mesh import AnyGroup, Group, as_group
from seqpar.spatial.box_grid import BoxGrid, as_box
from seqpar.spatial.halos import fetch_rows

LossFunction = Callable[..., Tensor]  # of logits and label


class TileNetwork(nn.Module, ABC):
    """A network on this rank's share of a tile.

    ``shard`` cuts the share of an image or label, the network computes on it, and ``unshard`` joins what it returns.
    ``loss`` and ``on_whole`` do all three. With a group of one, whole tiles pass as they are.
    """

    @abstractmethod
    def shard(self, whole: Tensor) -> Tensor:
        """Returns this rank's share of a whole image ``b c W D H``, or of a label ``b W D H`` as the logits are."""

    @abstractmethod
    def unshard(self, y: Tensor) -> Tensor:
        """Returns the whole logits ``b k W D H`` or label ``b W D H`` on every rank, given this rank's share.

        *forward:* all-gather.
        *backward:* the gradients at all ranks' copies are summed.
        """

    @abstractmethod
    def group_and_dims(self) -> tuple[Group, int]:
        """Returns the ranks that share a tile, and the number of its spatial dimensions."""

    @abstractmethod
    def _shares(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's shares of an image and its label; each may be whole, or a share already."""

    @abstractmethod
    def _compare_wholes(self, *tensors: Tensor) -> None:
        """Raises on all ranks if whole tiles among these tensors differ, unless ``forward`` compares them."""

    @property
    def _seen(self) -> "SeenTiles":
        return self.__dict__.setdefault("_seen_tiles", SeenTiles())  # type: ignore[no-any-return]

    @abstractmethod
    def _loss_groups(self, data: Group, batch: int, part: Tensor) -> LossGroups:
        """Returns over which ranks the loss sums; ``data``: the group whose ranks have other tiles.

        - ``part``: this rank's share of the image
        """

    def loss(self, loss_fn: LossFunction, image: Tensor, label: Tensor, data: AnyGroup | None = None) -> Tensor:
        """Returns the loss of tiles: on any number of ranks that share them, that of one process.

        Nothing here averages gradients over ranks: ``seqpar.ParallelModel``, DDP or FSDP does. A loss of
        ``seqpar.losses`` sums over ranks. Any other function, such as MONAI's losses, is called with whole tiles of all
        samples. If logits are spread over ranks (halo, swap, a converted network), each rank then holds the whole
        logits and labels and their gradient: the memory of the loss is that of one process.

        - ``loss_fn``: called with logits and label. With several data groups, the mean of their results counts: a
          foreign loss that divides by sums over the batch (MONAI's ``batch=True``, class weights) divides by those of
          its group
        - ``image``: whole tiles ``b c W D H``, the same on all ranks of the group, or this rank's share. The gradient
          of whole tiles is that of one process, on every rank
        - ``label``: whole tiles ``b W D H`` or ``b c W D H``, or this rank's share. Channels reach foreign losses;
          those of ``seqpar.losses`` take one at most
        - ``data``: ``mesh.data``, the group whose ranks have other tiles, over which sums over the batch then run too:
          those of ``batch_dice``, class weights and ``ignore_label`` in ``seqpar.losses``. It changes no other loss,
          and nothing if there is one sequence group; ``ParallelModel.loss`` gives it itself

        The ranks compare their whole tiles in every call; on a GPU, which then waits, in calls 1, 2, 4, 8, 16 and every
        16th, for all calls in between. Different tiles raise ValueError on all ranks.
        """
        group, dims = self.group_and_dims()
        image, label = plain_tensor(image), plain_tensor(label)
        _refuse_empty(image)
        require_peers_of(self, image)
        self._compare_wholes(image, label)
        is_ours = isinstance(loss_fn, Loss | DeepSupervision)
        if is_ours and label.ndim == dims + 2 and label.shape[1] == 1 and label.shape[2:] == image.shape[2:]:
            label = label[:, 0]
        samples = len(image)
        others = as_group(data, "data")
        everyone = LossGroups(group, (others,), agrees=True)
        part, label = everyone.own_work(lambda: self._shares(image, label), image.device)
        output = self(part)
        loss_groups = replace(self._loss_groups(others, samples, part), agrees=True)
        if is_ours:
            if isinstance(output, list | tuple) and not isinstance(loss_fn, DeepSupervision):
                raise ValueError(
                    f"the network returns {len(output)} outputs, and {type(loss_fn).__name__} takes one: give "
                    "DeepSupervision, as net.training_loss(DiceCE()) is, or a function of all outputs"
                )
            loss = loss_fn(output, label, loss_groups)
            return all_sum(loss, group, "loss") / group.size if group in loss_groups.samples else loss
        if group.size > 1 and (loss_groups.voxels is not None or group in loss_groups.samples):
            output, label = self._whole(output), self._whole(label)
        return loss_groups.own_work(lambda: loss_fn(output, label), image.device)

    def on_whole(self, image: Tensor) -> Any:
        """Returns the outputs for whole tiles ``b c W D H``, whole on every rank of the group.

        Each rank holds the whole output. All ranks of the group must call it with the same tiles.
        """
        group, dims = self.group_and_dims()
        image = plain_tensor(image)
        _refuse_empty(image)
        _refuse_axes(image, dims)
        if group.size == 1:
            return self(image)
        require_peers_of(self, image)
        self._compare_wholes(image)
        whole = self._whole(self(self.shard(with_mean_gradient(image, group))))
        # MONAI weighs windows in place, which autograd forbids for outputs of its functions.
        return tree_map(lambda y: y.clone() if isinstance(y, Tensor) and y.requires_grad else y, whole)

    def _whole(self, outputs: Any) -> Any:
        """Returns outputs or a label with every volume joined; the rest is the same on all ranks."""
        dims = self.group_and_dims()[1]
        return tree_map(lambda y: self.unshard(y) if isinstance(y, Tensor) and y.ndim > dims else y, outputs)


def _refuse_empty(image: Tensor) -> None:
    """Refuses an image without voxels, whose loss would be NaN."""
    if not image.numel():
        raise ValueError(f"an image of shape {tuple(image.shape)} has no voxels: give at least one sample")


def _refuse_axes(image: Tensor, dims: int) -> None:
    """Refuses what is no image: torch's modules would take a batch without channels as channels without a batch."""
    if image.ndim != dims + 2:
        raise ValueError(f"an image of shape {tuple(image.shape)} came: {order_of(dims)} is needed")


def require_peers_of(net: TileNetwork, x: Tensor) -> None:
    """Raises on all ranks if some of a group call a network and others do not, once in each of its modes; or traced."""
    group, _ = net.group_and_dims()
    if group.size > 1 and (torch.jit.is_tracing() or torch.compiler.is_exporting()):
        raise ValueError(
            f"this network sends messages on the {group}, which cannot be exported or traced: export the network of "
            "one process, built without a group, with the same state_dict()"
        )
    if group.size > 1 and not (x.is_meta or torch.compiler.is_compiling()):
        with_or_without = "with" if torch.is_grad_enabled() else "without"
        require_peers(f"{'train' if net.training else 'eval'}() {with_or_without} gradients", group)


class BoxNetwork(TileNetwork):
    """A network that computes one box of every volume on each rank."""

    @abstractmethod
    def _cut(self, extents: tuple[int, ...]) -> BoxGrid:
        """Returns the boxes of a volume; raises ValueError if it cannot be cut."""

    def _find_grid(self, box: Tensor, what: str) -> BoxGrid:
        """Returns the boxes to which a tensor belongs that neither ``shard`` nor the network returned."""
        raise ValueError(
            f"{what}: a tensor of shape {tuple(box.shape)} came that this network does not know: give what "
            "net.shard(whole) or the network itself returned, not what was computed from it"
        )

    def shard(self, whole: Tensor) -> Tensor:
        """Returns this rank's box of an image ``b c W D H`` or a label ``b W D H``."""
        group, dims = self.group_and_dims()
        if group.size == 1:
            return whole
        if whole.ndim not in (dims + 1, dims + 2):
            raise ValueError(
                f"shard: expected an image {order_of(dims)} or a label without the channels, got {tuple(whole.shape)}"
            )
        if whole in self._seen.grids:
            raise ValueError(f"shard: {tuple(whole.shape)} is this rank's box already: give the whole tile")
        self._seen.note(whole.as_subclass(Tensor))
        grid = self._cut(tuple(whole.shape[-dims:]))
        inside: tuple[Any, ...] = (..., *(slice(*interval) for interval in grid.box))
        return self._seen.remember(whole.as_subclass(Tensor)[inside].contiguous(), grid)

    def unshard(self, y: Tensor) -> Tensor:
        """Returns the whole of an output or label on every rank, given this rank's box.

        *forward:* all-gather of the boxes.
        *backward:* the gradients at all ranks' copies are summed.
        """
        group, dims = self.group_and_dims()
        if group.size == 1:
            return y
        if y.ndim < dims + 1:
            raise ValueError(f"unshard: expected an output {order_of(dims)} or a label, got {tuple(y.shape)}")
        if y not in self._seen.grids and tuple(y.shape[-dims:]) in self._seen.kept_whole:
            return y
        grid = self._seen.grids.get(y) or self._find_grid(y.as_subclass(Tensor), "unshard")
        rows = [[(0, extent)] * parts for extent, parts in zip(grid.extents, grid.parts)]
        channels = y.shape[1:-dims]  # none of a label; two axes of outputs that the network has stacked
        whole = fetch_rows(y.reshape(len(y), -1, *y.shape[-dims:]), grid, rows)
        return whole.reshape(len(y), *channels, *whole.shape[2:])

    def _output(self, y: Tensor, grid: BoxGrid) -> Tensor:
        """Returns this rank's box of an output, whose grid is known from now on."""
        y = self._seen.remember(y, grid)
        return as_box(y) if grid.group.size > 1 else y

    def _meet_peers(self, box: Tensor) -> None:
        """Raises on all ranks if only some call the network, or if they cut boxes of different tiles."""
        require_peers_of(self, box)
        self._seen.compare(self.group_and_dims()[0], box.device)

    def _compare_wholes(self, *tensors: Tensor) -> None:
        pass  # ``forward`` does, after ``shard``

    def _shares(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        group, dims = self.group_and_dims()
        _refuse_axes(image, dims)
        if group.size == 1:
            return image, label
        if image not in self._seen.grids:
            image = self.shard(with_mean_gradient(image, group))
        grid, sides = self._seen.grids[image], tuple(label.shape[-dims:])
        if label.ndim > dims and sides == grid.extents:
            label = self.shard(label)
        elif label.ndim > dims and sides != grid.sides:
            raise ValueError(
                f"a label of shape {tuple(label.shape)} came with an image of extents {grid.extents}, of which this "
                f"rank has {grid.sides}: give the whole label, or this rank's box of it"
            )
        return image, label

    def _loss_groups(self, data: Group, batch: int, part: Tensor) -> LossGroups:
        group, _ = self.group_and_dims()
        samples = (data,) if data.size > 1 else ()
        return LossGroups(group, samples, self._seen.grids[part]) if group.size > 1 else LossGroups(samples=samples)


class SeenTiles:
    """What a network remembers of its calls, which no copy inherits.

    - ``grids``: those of the boxes that it returned
    - ``kept_whole``: the extents of outputs that were too small to be cut
    - ``watched``: the modes, of training and gradients, in which all of its operations have been checked
    - ``called_by``: a weak reference to what checks the backwards of the model that called it last, of several
    """

    def __init__(self) -> None:
        self.grids, self.kept_whole = WeakIdKeyDictionary(), set[tuple[int, ...]]()
        self.watched = set[tuple[bool, bool]]()
        self.called_by: ReferenceType[Any] | None = None
        self._fingerprint: Tensor | None = None  # of the whole tiles that the ranks have not compared yet
        self._calls = 0

    def remember(self, box: Tensor, grid: BoxGrid) -> Tensor:
        """Returns the box, whose grid is known from now on."""
        self.grids[box] = grid
        return box

    def note(self, whole: Tensor) -> None:
        """Remembers a whole image or label, for the next comparison."""
        if not (whole.is_meta or torch.compiler.is_compiling()):
            own = fingerprint_of(whole)
            self._fingerprint = own if self._fingerprint is None else self._fingerprint + own

    def compare(self, group: Group, device: torch.device) -> None:
        """Raises ValueError on all ranks if they noted different tiles; all call it in every forward pass.

        On a GPU, where the result would be waited for, it compares in calls 1, 2, 4, 8, 16, and then in every 16th,
        always the tiles of all calls in between.
        """
        if device.type == "meta" or torch.compiler.is_compiling():
            return
        self._calls += 1
        if device.type == "cuda" and self._calls % 16 and self._calls & (self._calls - 1):
            return
        noted, self._fingerprint = self._fingerprint, None
        refuse_different_tiles(noted, group, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SeenTiles":
        return SeenTiles()

    def __reduce__(self) -> tuple[Any, ...]:
        return SeenTiles, ()


def order_of(dims: int) -> str:
    """Returns the order of an image's axes."""
    return f"(batch, channels, {', '.join('WDH'[:dims])})"
