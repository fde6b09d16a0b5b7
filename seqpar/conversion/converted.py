"""``convert``: makes any convolutional network of torch's modules compute on boxes, one per rank, exactly.

The network's own ``forward`` runs unchanged while a ``BoxMode`` intercepts torch's functions, so modules and weights
stay what they are. Legend: b batch, c channels, W D H voxels; ``/s`` after the letter that is split over the group.
"""

import copy
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from seqpar.conversion.box_mode import BareBoxes, BoxMode
from seqpar.conversion.shape_functions import SHAPE_FUNCTIONS
from seqpar.conversion.volume_functions import VOLUME_FUNCTIONS, WHOLE_FUNCTIONS
from seqpar.losses.tile_network import BoxNetwork, order_of
from seqpar.parallel.collectives import all_gather
from seqpar.parallel.mesh import AnyGroup, Group, as_group
from seqpar.spatial.box_grid import BoxGrid

_HANDLERS = {**VOLUME_FUNCTIONS, **SHAPE_FUNCTIONS}
_SPATIAL = {"1d": 1, "2d": 2, "3d": 3}
_REFUSED = {
    "SyncBatchNorm": "sends its own messages: use BatchNorm, whose statistics then include all boxes",
    "ScriptModule": "hides its functions: convert the module before it is scripted",
    "RecursiveScriptModule": "hides its functions: convert the module before it is scripted",
    "DistributedDataParallel": "must be around the converted module: convert first",
    "OptimizedModule": "hides its functions: convert the module before torch.compile",
}


def convert(module: nn.Module, group: AnyGroup | None = None, spatial_dims: int | None = None) -> "Converted":
    """Returns a network that computes on boxes, exactly: the same function of a volume that is spread over ranks.

    It takes this rank's box ``b c W/s D/s H/s`` of each image, which ``net.shard(whole)`` cuts, and returns this rank's
    box of each output, which ``net.unshard(y)`` joins. Weights, buffers and submodules are shared with ``module``,
    under the same names. Train it as a ``ParallelModel``, or call ``net.loss`` and ``net.on_whole`` with whole tiles.
    A loss of one box alone is right only as a plain mean over voxels, with boxes of one size: Dice, class weights and
    ``ignore_index`` divide by sums over the whole tile, which ``net.loss`` takes care of.

    A call in ``forward`` that is not known to be exact on boxes raises an error that names it. What bypasses torch's
    functions, as ``torch.jit.script`` and ``torch.vmap`` do, is found in the first forward pass in each of ``train()``
    and ``eval()``, with and without gradients. Volumes that are too
    small to be cut, and tokens (space flattened to one dimension, as by a ViT), are gathered and computed by all ranks.

    Args:
        ``module``: the network; its ``forward`` may call torch's functions too.
        ``group``: the ranks that share a volume: ``mesh.seq``, torch's ``ProcessGroup``, or a one-dimensional
            ``DeviceMesh``. None, or a group of one: the network computes as before.
        ``spatial_dims``: 2 or 3; None: as in the convolutions, norms or pooling layers of ``module``.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module is a {type(module).__name__}: give a network, made of torch.nn's modules")
    for name, part in module.named_modules():
        if isinstance(part, Converted):
            raise ValueError(
                f"{name or 'the module'}, a {type(part).__name__}, is converted already: convert the original, whole "
                "network once"
            )
        for kind in type(part).__mro__:
            if kind.__name__ in _REFUSED:
                raise ValueError(f"{name or 'the module'}, a {kind.__name__}, {_REFUSED[kind.__name__]}")
    taken = [name for name in ("shard", "unshard", "loss", "on_whole", "group_and_dims") if hasattr(module, name)]
    if taken:
        raise ValueError(
            f"{type(module).__name__} has its own {' and '.join(taken)}, which a converted network has too: rename it"
        )
    if "forward" in module.__dict__:
        raise ValueError("forward was replaced on this object, so that it cannot be converted: replace it on its class")
    dims = spatial_dims or _spatial_dims(module)
    if dims not in (2, 3):
        raise ValueError(f"spatial_dims={dims}: volumes have 2 or 3 dimensions of space; give spatial_dims=2 or 3")
    net = copy.copy(module)
    net.__class__ = _converted_class(type(module))  # type: ignore[arg-type]
    net.__dict__.update(_box_group=as_group(group), _box_dims=dims)
    assert isinstance(net, Converted)
    return net


class Converted(BoxNetwork):
    """What ``convert`` returns: the module's own class, with a ``forward`` that takes and returns this rank's boxes."""

    _box_group: Group
    _box_dims: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module's ``forward`` returns, of this rank's boxes."""
        if self._box_group.size == 1:
            return super().forward(*args, **kwargs)
        return _eagerly(self._on_boxes, super().forward, args, kwargs)

    def group_and_dims(self) -> tuple[Group, int]:
        return self._box_group, self._box_dims

    def _cut(self, extents: tuple[int, ...]) -> BoxGrid:
        grid = BoxGrid.even(extents, self._box_group)
        if grid is None:
            raise ValueError(
                f"shard: extents {extents} cannot be cut into {self._box_group.size} boxes: use larger tiles or a "
                "smaller group"
            )
        return grid

    def _on_boxes(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if tensors:
            self._meet_peers(tensors[0])
        mode = BoxMode(self._box_group, self._box_dims, _HANDLERS, WHOLE_FUNCTIONS)
        self._seen.kept_whole.clear()
        grids = list[BoxGrid]()

        def take(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            grid, value = self._seen.grids.get(value), value.as_subclass(Tensor)
            if value.ndim != self._box_dims + 2:
                return value
            grids.append(grid or self._find_grid(value, "forward"))
            return mode.mark_volume(value, grids[-1])

        args, kwargs = tree_map(take, (args, kwargs))
        if not grids:
            shapes = [tuple(x.shape) for x in args if isinstance(x, Tensor)]
            raise ValueError(
                f"expected a box of {order_of(self._box_dims)}, got {shapes}: give net.shard(whole) of these axes"
            )
        kind = self.training, torch.is_grad_enabled()
        bare = None if kind in self._seen.watched else BareBoxes(mode)
        try:
            with mode, bare or nullcontext():
                outputs = forward(*args, **kwargs)
        except Exception as error:
            refused = error if bare is None or bare.refused is None else bare.refused
            if not isinstance(refused, ValueError):
                raise
            where = self._where(error.__traceback__)
            raise (ValueError(f"{where}: {refused}") if where else refused) from error
        self._seen.watched.add(kind)
        return tree_map(lambda y: self._give(mode, y, grids), outputs)

    def _give(self, mode: BoxMode, y: Any, inputs: Sequence[BoxGrid]) -> Any:
        """Returns an output over the boxes into which ``shard`` cuts a label of its extents."""
        spread = mode.spread_of(y)
        if spread is not None:
            if spread.dims != tuple(range(y.ndim - self._box_dims, y.ndim)):
                shape = tuple(spread.whole_shape(y))
                raise mode.refusal("forward", f"returned a tensor {shape} whose last axes are not those of the image")
            grid = BoxGrid.even(spread.grid.extents, self._box_group)
            assert grid is not None
            return self._output(mode.recut(y, grid), grid)
        if not isinstance(y, Tensor) or y.ndim != self._box_dims + 2:
            return y
        for grid in inputs:
            sides = [{high - low for low, high in itertools.pairwise(edges)} for edges in grid.edges]
            if tuple(y.shape[2:]) != grid.extents and all(side in each for side, each in zip(y.shape[2:], sides)):
                raise mode.refusal(
                    "forward",
                    f"returned a bare tensor {tuple(y.shape)} of the size of one box: something in it, such as a "
                    "torch.jit.script function, torch.vmap or as_subclass, computed on this rank's box alone",
                )
        box, even = mode.cut_volume(y), BoxGrid.even(y.shape[2:], self._box_group)
        if box is None or even is None:
            self._seen.kept_whole.add(tuple(y.shape[2:]))
            return y
        return self._output(box, even)

    def _find_grid(self, box: Tensor, what: str) -> BoxGrid:
        """Returns the grid of a box, whose extents all ranks tell each other."""
        group, n = self._box_group, self._box_dims
        facts = torch.zeros(n + 3, dtype=torch.float64, device=box.device)
        facts[:n] = torch.tensor(box.shape[-n:])
        if box.numel():
            values = box.detach()
            facts[n:] = torch.stack([values.sum(dtype=torch.float64), values.amin().double(), values.amax().double()])
        every = all_gather(facts[None], group, 0, [1] * group.size, "boxes").tolist()
        sides = [tuple(map(int, row[:n])) for row in every]
        if what == "forward" and all(row == every[0] for row in every) and every[0][-2] < every[0][-1]:
            raise ValueError(f"every rank gave the same tensor {tuple(box.shape)}: give its own box, net.shard(whole)")
        counts = BoxGrid.even((group.size,) * n, group)
        assert counts is not None
        steps = [math.prod(counts.parts[dim + 1 :]) for dim in range(n)]
        extents = [sum(sides[at * steps[dim]][dim] for at in range(counts.parts[dim])) for dim in range(n)]
        grid = BoxGrid.even(extents, group)
        boxes = itertools.product(*map(itertools.pairwise, grid.edges if grid else ()))
        if grid is None or sides != [tuple(high - low for low, high in box) for box in boxes]:
            raise ValueError(
                f"{what}: tensors with extents {' and '.join(map(str, sorted(set(sides))))} on the ranks are not the "
                "boxes of one volume: give what net.shard(whole) or the network itself returned"
            )
        return grid

    def _where(self, trace: TracebackType | None) -> str:
        """Returns the name of the innermost submodule in a traceback."""
        names, found = {id(part): name for name, part in self.named_modules()}, ""
        while trace is not None:
            found = names.get(id(trace.tb_frame.f_locals.get("self")), "") or found
            trace = trace.tb_next
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _restore, (type(self).__bases__[1],), self.__dict__


def _eagerly(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function without ``torch.compile``, which cannot trace messages; importing its compiler takes seconds."""
    return torch.compiler.disable(function)(*args) if "torch._dynamo" in sys.modules else function(*args)


_eagerly._torchdynamo_disable = True  # type: ignore[attr-defined]  # the mark of torch.compiler.disable


def _restore(kind: type[nn.Module]) -> nn.Module:
    kind_on_boxes = _converted_class(kind)  # type: ignore[arg-type]
    return kind_on_boxes.__new__(kind_on_boxes)  # type: ignore[no-any-return]


@cache
def _converted_class(kind: type[nn.Module]) -> Any:
    return type(f"Converted{kind.__name__}", (Converted, kind), {"__module__": kind.__module__})


def _spatial_dims(module: nn.Module) -> int:
    """Returns the most dimensions of space that a convolution, norm or pooling layer has."""
    names = [type(part).__mro__ for part in module.modules()]
    found = [_SPATIAL[kind.__name__[-2:]] for kinds in names for kind in kinds if kind.__name__[-2:] in _SPATIAL]
    if not found:
        raise ValueError(f"{type(module).__name__} has no layer that tells its dimensions: give spatial_dims=2 or 3")
    return max(found)
