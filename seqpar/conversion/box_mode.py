"""Runs a network's own ``forward`` on boxes: torch's functions are intercepted and act on the whole volume.

While a ``BoxMode`` is active, a tensor that it knows to be spread stands for the whole: ``x.shape`` is the volume's, a
convolution fetches halos, ``torch.cat`` aligns boxes. All other tensors are whole: equal on all ranks. A function that
takes a spread tensor and is not known to be exact is refused by name.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from seqpar.parallel.collectives import all_gather
from seqpar.parallel.mesh import Group
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.halos import fetch_rows


@dataclass(frozen=True)
class Spread:
    """How a tensor is spread: the grid of boxes, and which of the tensor's dimensions it cuts, in its order."""

    grid: BoxGrid
    dims: tuple[int, ...]

    def whole_shape(self, x: Tensor) -> list[int]:
        shape = list(x.size())
        for dim, extent in zip(self.dims, self.grid.extents):
            shape[dim] = extent
        return shape

    def is_volume(self, x: Tensor) -> bool:
        """Returns whether the dimensions are those of ``b c W D H``."""
        return self.dims == tuple(range(2, x.ndim))


Handler = Callable[..., Any]  # (mode, function, *its arguments)


class BoxMode(TorchFunctionMode):
    """Intercepts torch's functions for one call of a network; not to be used twice.

    Args:
        ``group``: the ranks that share the volume.
        ``num_dims``: the number of spatial dimensions.
        ``handlers``: how to compute functions of spread tensors, by name.
        ``whole_handlers``: how to compute some functions whose tensors are all whole, by name.
    """

    def __init__(
        self, group: Group, num_dims: int, handlers: dict[str, Handler], whole_handlers: dict[str, Handler]
    ) -> None:
        super().__init__()
        self.group, self.num_dims = group, num_dims
        self.handlers, self.whole_handlers = handlers, whole_handlers
        self._spread = WeakIdKeyDictionary()
        self._copies = dict[StorageWeakRef, tuple[TensorWeakRef, int]]()  # where torch has views: of what, its version
        self._draws_alike, self._with_grad = False, torch.is_grad_enabled()
        self._handling = 0  # how many handlers are under way

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {"dim" if key == "axis" else key: value for key, value in (kwargs or {}).items()}  # torch takes both
        name = name_of(func)
        tensors = list(tensors_in((*args, *kwargs.values())))
        copies = {x: at for x in tensors if (at := _memory_of(x)) in self._copies} if self._copies else {}
        if not copies:
            return self._computed(name, func, tensors, args, kwargs)
        for at in copies.values():
            source, version = self._copies[at]
            if (x := source()) is not None and _version_of(x) != version:
                raise self.refusal(name, f"takes what was a view of a tensor that has been written to since, {_COPY}")
        versions = [_version_of(x) for x in copies]
        result = self._computed(name, func, tensors, args, kwargs)
        writes = is_in_place(name) or kwargs.get("inplace")  # all that is known in inference mode
        if [_version_of(x) for x in copies] != versions or writes and tensors[0] in copies:
            raise self.refusal(name, f"writes to a view of another tensor, {_COPY}")
        return result

    def _computed(self, name: str, func: Callable[..., Any], tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        if any(x in self._spread for x in tensors):
            handler = self.handlers.get(name) or (pointwise if is_pointwise(name) else None)
            if handler is None:
                raise self.refusal(name, "is not known to be exact on boxes")
            if kwargs.get("out") is not None:
                raise self.refusal(name, "with out= writes into a tensor whose boxes are unknown")
            return self._handled(handler, func, args, kwargs)
        whole = self.whole_handlers.get(name)
        if whole is None or any(map(torch._C._functorch.is_batchedtensor, tensors)):  # vmap may hide a box in them
            return func(*args, **kwargs)
        return self._handled(whole, func, args, kwargs)

    def _handled(self, handler: Handler, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._handling += 1
        try:
            return handler(self, func, *args, **kwargs)
        finally:
            self._handling -= 1

    def refusal(self, name: str, why: str) -> ValueError:
        """Returns the error for a function that cannot be computed on boxes."""
        return ValueError(
            f"{name} {why}, so this network cannot be converted as it is: replace this call in its forward, or run "
            "that part of the network outside of the converted module"
        )

    def spread_of(self, x: Any) -> Spread | None:
        """Returns how ``x`` is spread; None if it is whole."""
        return self._spread.get(x) if isinstance(x, Tensor) else None

    def mark(self, y: Any, spread: Spread) -> Any:
        """Records that ``y``, or each tensor of it, is spread in this way, and returns it."""
        if isinstance(y, Tensor):
            sides = tuple(y.shape[dim] for dim in spread.dims)
            assert sides == spread.grid.sides, (sides, spread)
            self._spread[y] = spread
        elif isinstance(y, (tuple, list)):
            for each in y:
                self.mark(each, spread)
        return y

    def mark_volume(self, y: Tensor, grid: BoxGrid) -> Tensor:
        """Records that ``y``, ``b c W D H``, is spread over the boxes of ``grid``."""
        return self.mark(y, Spread(grid, tuple(range(2, y.ndim))))  # type: ignore[no-any-return]

    def mark_copy(self, y: Tensor, source: Tensor) -> Tensor:
        """Records that ``y`` is a copy where torch has a view of ``source``, so that neither may be written to."""
        if (at := _memory_of(y)) is not None:
            self._copies[at] = TensorWeakRef(source), _version_of(source)
        return y

    def volume(self, x: Tensor, name: str) -> BoxGrid:
        """Returns the grid of a volume ``b c W D H`` that ``name`` takes; refuses other orders of dimensions."""
        self._refuse_recomputation(name)
        spread = self.spread_of(x)
        if spread is None or not spread.is_volume(x):
            shape = tuple(x.shape) if spread is None else tuple(spread.whole_shape(x))
            raise self.refusal(name, f"of a tensor {shape} needs the order (batch, channels, *space)")
        return spread.grid

    def gathered(self, x: Tensor) -> Tensor:
        """Returns the whole of a spread tensor on every rank; the adjoint sums all ranks' gradients."""
        spread = self._spread[x]
        rows = [[(0, extent)] * parts for extent, parts in zip(spread.grid.extents, spread.grid.parts)]
        return fetch_rows(x, spread.grid, rows, spread.dims)

    def recut(self, x: Tensor, grid: BoxGrid) -> Tensor:
        """Returns a spread tensor over other boxes of the same volume."""
        spread = self._spread[x]
        if spread.grid.edges == grid.edges:
            return x
        rows = [list(itertools.pairwise(edges)) for edges in grid.edges]
        y = fetch_rows(x, spread.grid, rows, spread.dims)
        return self.mark(y, Spread(grid, spread.dims))  # type: ignore[no-any-return]

    def cut_volume(self, whole: Tensor) -> Tensor | None:
        """Returns this rank's box of a whole ``b c W D H``; None if that is too small to be cut."""
        if whole.ndim != self.num_dims + 2:
            return None
        grid = BoxGrid.even(whole.shape[2:], self.group)
        if grid is None:
            return None
        return self.mark_volume(cut(whole, grid, range(2, whole.ndim)), grid)

    def _refuse_recomputation(self, name: str) -> None:
        """Raises ValueError in code that backward runs again or replaces, when this mode is not active."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        frame, around = None, hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
        if self._with_grad and not torch.is_grad_enabled():
            frame = sys._getframe()
        while frame is not None and not around:
            around = frame.f_code.co_filename.endswith(("torch/utils/checkpoint.py", "torch/autograd/function.py"))
            frame = frame.f_back
        if around:
            raise self.refusal(name, "inside torch.utils.checkpoint or an autograd.Function runs again on bare boxes")

    def draw_alike(self, device: torch.device) -> None:
        """Gives all ranks the first rank's random state, once, so that they draw equal numbers from now on."""
        if not self._draws_alike:
            on_gpu = device.type == "cuda"
            state = torch.cuda.get_rng_state(device) if on_gpu else torch.get_rng_state()
            every = all_gather(state.to(device)[None], self.group, 0, [1] * self.group.size, "random state")
            torch.cuda.set_rng_state(every[0].cpu(), device) if on_gpu else torch.set_rng_state(every[0])
            self._draws_alike = True


_COPY = "which is a copy of rows on other ranks"


def _memory_of(x: Tensor) -> StorageWeakRef | None:
    """Returns what tells whether tensors share memory; None of tensors that have none of their own."""
    has_none = x.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(x)
    return None if has_none else StorageWeakRef(x.untyped_storage())


def _version_of(x: Tensor) -> int:
    """Returns how often a tensor or a view of it was written to; 0 in inference mode, which does not count."""
    return 0 if x.is_inference() else x._version


class BareBoxes(TorchDispatchMode):
    """Refuses operations on boxes that bypass a ``BoxMode``, as those of a scripted function or of ``torch.vmap`` do.

    It sees every operation, which takes time, so that a network computes under it only once in each of its modes.

    - ``refused``: the error, which a scripted function replaces by one of its own
    """

    def __init__(self, boxes: BoxMode) -> None:
        super().__init__()
        self._boxes = boxes
        self.refused: ValueError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._boxes._handling and any(x in self._boxes._spread for x in tensors_in((*args, *kwargs.values()))):
            name = str(func.overloadpacket).removeprefix("aten.")
            self.refused = self._boxes.refusal(
                name,
                "took a bare box, without the rest of the volume (in a torch.jit.script function, torch.vmap, "
                "as_subclass, or an extension in C++)",
            )
            raise self.refused
        return func(*args, **kwargs)


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yields the tensors among arguments, and those in lists and tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


_OPERATORS = {"rsub": "sub", "rdiv": "div", "rpow": "pow", "radd": "add", "rmul": "mul"}
_OPERATORS |= {
    "rmod": "remainder",
    "rtruediv": "div",
    "and": "logical_and",
    "or": "logical_or",
    "invert": "logical_not",
}
_ALIASES = {
    "subtract",
    "multiply",
    "negative",
    "absolute",
    "greater",
    "less",
    "greater_equal",
    "less_equal",
    "not_equal",
}
_ALSO_POINTWISE = {"clone", "contiguous", "detach", "type", "float", "double", "half", "bfloat16"}
_ALSO_POINTWISE |= {"hardswish", "logsigmoid", "softsign", "tanhshrink", "threshold", "requires_grad", "fill", "zero"}
_ALSO_POINTWISE |= {"relu6", "zeros_like", "ones_like", "full_like", "empty_like", "masked_fill", "cuda", "cpu", "copy"}


def name_of(func: Callable[..., Any]) -> str:
    """Returns the name of one of torch's functions, or of the attribute that it reads."""
    name: str = getattr(func, "__name__", "") or str(func)
    if name == "__get__":
        return f"Tensor.{getattr(getattr(func, '__self__', None), '__name__', '?')}"
    return name


@cache
def is_pointwise(name: str) -> bool:
    """Returns whether each output of the function depends on the inputs at the same place only, and on no chance."""
    bare = name.strip("_")
    bare = bare[1:] if name.startswith("__i") and name != "__invert__" else bare
    bare = _OPERATORS.get(bare, bare)
    if bare in _ALSO_POINTWISE or bare in _ALIASES:
        return True
    packet = getattr(torch.ops.aten, bare, None)
    if packet is None:
        return False
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def is_in_place(name: str) -> bool:
    """Returns whether the function writes to its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


def pointwise(boxes: BoxMode, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Computes a function of each place by itself: tensors are brought to the boxes of the first spread one."""
    positional, named, spread = aligned(boxes, name_of(func), args, kwargs)
    y = func(*positional, **named)
    if not isinstance(y, Tensor):
        raise boxes.refusal(name_of(func), "with these arguments is not known to be exact on boxes")
    return boxes.mark(y, Spread(spread.grid, tuple(dim + y.ndim for dim in spread.dims)))


def aligned(
    boxes: BoxMode, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any], Spread]:
    """Returns arguments whose tensors have the boxes of the first spread one, and its spread, counted from the end."""
    tensors = list(tensors_in((*args, *kwargs.values())))
    first = next(x for x in tensors if boxes.spread_of(x) is not None)
    spread = boxes._spread[first]
    like = Spread(spread.grid, tuple(dim - first.ndim for dim in spread.dims))
    if is_in_place(name) and tensors[0] is not first:
        raise boxes.refusal(name, "would write boxes into a tensor that is whole")

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _align(boxes, name, value, like)
        return type(value)(map(convert, value)) if type(value) in (list, tuple) else value

    return [convert(value) for value in args], {key: convert(value) for key, value in kwargs.items()}, like


def _align(boxes: BoxMode, name: str, x: Tensor, like: Spread) -> Tensor:
    """Returns ``x`` over the boxes of ``like``; a whole tensor may also be broadcast along its dimensions."""
    spread = boxes.spread_of(x)
    if spread is not None:
        same = tuple(dim - x.ndim for dim in spread.dims) == like.dims
        if same and any(a != b and 1 not in (a, b) for a, b in zip(spread.grid.extents, like.grid.extents)):
            raise ValueError(
                f"{name} of volumes with extents {like.grid.extents} and {spread.grid.extents}: the sizes differ, as "
                "they would in one process: give a tile whose sides are multiples of the network's strides"
            )
        if not same or spread.grid.extents != like.grid.extents:
            raise boxes.refusal(
                name,
                f"of volumes with extents {like.grid.extents} and {spread.grid.extents} in dimensions "
                f"{like.dims} and {tuple(dim - x.ndim for dim in spread.dims)} combines different places",
            )
        return boxes.recut(x, like.grid)
    there = [(dim, extent) for dim, extent in zip(like.dims, like.grid.extents) if x.ndim >= -dim]
    if any(x.shape[dim] not in (1, extent) for dim, extent in there):
        raise boxes.refusal(
            name, f"of a volume with extents {like.grid.extents} and a tensor {tuple(x.shape)} does not match"
        )
    return cut(x, like.grid, like.dims)


def cut(x: Tensor, grid: BoxGrid, dims: Sequence[int]) -> Tensor:
    """Returns this rank's box of a whole tensor, along those of ``dims`` that it has and is not broadcast along."""
    for dim, (low, high), extent in zip(dims, grid.box, grid.extents):
        if -x.ndim <= dim < x.ndim and x.shape[dim] == extent:
            x = x.narrow(dim, low, high - low)
    return x
