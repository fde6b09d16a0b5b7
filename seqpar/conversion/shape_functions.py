"""Torch's functions of shapes on boxes: sizes, views, reordered and joined dimensions, sums over space and channels."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.conversion.box_mode import BoxMode, Handler, Spread, aligned, name_of, pointwise
from seqpar.conversion.volume_functions import rows_of
from seqpar.parallel.collectives import all_sum
from seqpar.spatial.box_grid import BoxGrid

Function = Callable[..., Any]
_EXTENTS = (10007, 10009, 10037)  # primes, so that the dimensions of space are found again in an output's shape


def shape(boxes: BoxMode, func: Function, /, input: Tensor) -> torch.Size:
    spread = boxes.spread_of(input)
    assert spread is not None
    return torch.Size(spread.whole_shape(input))


def size(boxes: BoxMode, func: Function, /, input: Tensor, dim: int | None = None) -> Any:
    whole = shape(boxes, func, input)
    return whole if dim is None else whole[dim]


def length(boxes: BoxMode, func: Function, /, input: Tensor) -> int:
    return shape(boxes, func, input)[0]


def numel(boxes: BoxMode, func: Function, /, input: Tensor) -> int:
    return math.prod(shape(boxes, func, input))


def unchanged(boxes: BoxMode, func: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Computes what is the same for a box and for the whole, such as a dtype."""
    return func(*args, **kwargs)


def local(boxes: BoxMode, func: Function, /, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Computes a function of each place of space by itself, and finds the dimensions of space in its output."""
    spread = boxes.spread_of(input)
    name = name_of(func)
    if spread is None or any(boxes.spread_of(x) is not None for x in (*args, *kwargs.values())):
        raise boxes.refusal(name, "with several tensors is not known to be exact on boxes")
    sides = list(input.size())
    for dim, extent in zip(spread.dims, _EXTENTS):
        sides[dim] = extent
    shapes = func(torch.empty(sides, device="meta", dtype=input.dtype), *args, **kwargs)
    y = func(input, *args, **kwargs)
    pairs = [(y, shapes)] if isinstance(y, Tensor) else list(zip(y, shapes))
    for part, probe in pairs:
        found = [list(probe.shape).index(e) if e in probe.shape else -1 for e in _EXTENTS[: len(spread.dims)]]
        if -1 in found or part.ndim != probe.ndim:
            raise boxes.refusal(name, f"over space, of a tensor {tuple(spread.whole_shape(input))}, cannot be split")
        boxes.mark(part, Spread(spread.grid, tuple(found)))
    return y


def along(position: int, default: int | None = None) -> Handler:
    """Returns a handler of functions along one dimension, their argument ``dim``, which must not be one of space."""

    def compute(boxes: BoxMode, func: Function, /, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        spread, dim = boxes.spread_of(input), kwargs.get("dim", default)
        if len(args) > position:
            dim = args[position]
        if spread is None or not isinstance(dim, int) or dim % input.ndim in spread.dims:
            raise boxes.refusal(name_of(func), f"along dim={dim}, a dimension of space, needs all boxes")
        return local(boxes, func, input, *args, **kwargs)

    return compute


def last(count: Callable[..., int]) -> Handler:
    """Returns a handler of functions of the last dimensions, which must not be those of space.

    - ``count``: how many dimensions, from the function's second argument
    """

    def compute(boxes: BoxMode, func: Function, /, input: Tensor, second: Any, *args: Any, **kwargs: Any) -> Tensor:
        spread = boxes.spread_of(input)
        if spread is None or boxes.spread_of(second) is not None:
            raise boxes.refusal(name_of(func), "of two spread tensors is not known to be exact on boxes")
        if max(spread.dims) >= input.ndim - count(second):
            raise boxes.refusal(name_of(func), "over dimensions of space needs all boxes")
        return boxes.mark(func(input, second, *args, **kwargs), spread)  # type: ignore[no-any-return]

    return compute


def beside(boxes: BoxMode, func: Function, /, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Computes a function of each place whose other tensors are not of space, such as the slopes of a PReLU."""
    spread = boxes.spread_of(input)
    if spread is None:
        raise boxes.refusal(
            name_of(func), "of a spread tensor as its second argument is not known to be exact on boxes"
        )
    return boxes.mark(func(input, *args, **kwargs), spread)  # type: ignore[no-any-return]


def reduction(boxes: BoxMode, func: Function, /, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Computes a sum or mean over all of space, over other dimensions, or both."""
    spread = boxes.spread_of(input)
    assert spread is not None
    given = args[0] if args else kwargs.get("dim")
    dims = range(input.ndim) if given is None else [given] if isinstance(given, int) else given
    inside = [dim % input.ndim for dim in dims if dim % input.ndim in spread.dims]
    if not inside:
        return local(boxes, func, input, *args, **kwargs)
    if len(inside) < len(spread.dims):
        raise boxes.refusal(name_of(func), f"over dim={given}, a part of space, needs all boxes")
    y = func(input, *args, **kwargs)
    if name_of(func) == "mean":
        y = y * (math.prod(spread.grid.sides) / math.prod(spread.grid.extents))
    return all_sum(y, spread.grid.group, "statistics")


def cast(boxes: BoxMode, func: Function, /, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Computes a change of dtype or device, which may be another tensor's, whatever its shape."""
    y, spread = func(input, *args, **kwargs), boxes.spread_of(input)
    return y if spread is None else boxes.mark(y, spread)


def extremum(boxes: BoxMode, func: Function, /, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Computes the larger of two tensors, or the largest value along a dimension that is not one of space."""
    other = args[0] if args else kwargs.get("other")
    return (pointwise if isinstance(other, Tensor) else local)(boxes, func, input, *args, **kwargs)


def cat(boxes: BoxMode, func: Function, /, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    (parts,), _, like = aligned(boxes, name_of(func), [list(tensors)], {})
    ndim, stacks = parts[0].ndim, name_of(func) == "stack"
    at = dim % (ndim + stacks)
    dims = [d + ndim for d in like.dims]
    if at in dims and not stacks:
        raise boxes.refusal(name_of(func), f"along dim={dim}, a dimension of space, is not known to be exact on boxes")
    after = tuple(d + (stacks and d >= at) for d in dims)
    return boxes.mark(func(parts, dim), Spread(like.grid, after))  # type: ignore[no-any-return]


def getitem(boxes: BoxMode, func: Function, /, input: Tensor, index: Any) -> Tensor:
    spread = boxes.spread_of(input)
    items = list(index) if isinstance(index, tuple) else [index]
    if spread is None or not all(item is None or item is Ellipsis or isinstance(item, (int, slice)) for item in items):
        raise boxes.refusal("an index", "other than numbers and slices is not known to be exact on boxes")
    taken = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = next(i for i, item in enumerate(items) if item is Ellipsis)
    items[at : at + 1] = [slice(None)] * (input.ndim - taken)
    dim, sliced = 0, input
    for place, item in enumerate(items):
        if item is None:
            continue
        if dim in spread.dims and item != slice(None):
            if isinstance(item, int):
                raise boxes.refusal("an index", "of one place along a dimension of space is on one rank only")
            sliced, items[place] = rows_of(boxes, sliced, dim, item), slice(None)
        dim += 1
    is_small = boxes.spread_of(sliced) is None  # too small to be cut
    y = func(sliced, tuple(items)) if is_small else local(boxes, func, sliced, tuple(items))
    return y if sliced is input else boxes.mark_copy(y, input)


def expand(boxes: BoxMode, func: Function, /, input: Tensor, *sizes: Any) -> Tensor:
    spread = boxes.spread_of(input)
    assert spread is not None
    asked = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    dims = tuple(dim + len(asked) - input.ndim for dim in spread.dims)
    for dim, extent, side in zip(dims, spread.grid.extents, spread.grid.sides):
        if asked[dim] not in (-1, extent):
            raise boxes.refusal(name_of(func), f"to {tuple(asked)} changes a dimension of space")
        asked[dim] = side
    return boxes.mark(input.expand(asked), Spread(spread.grid, dims))  # type: ignore[no-any-return]


def expand_as(boxes: BoxMode, func: Function, /, input: Tensor, other: Tensor) -> Tensor:
    whole = boxes.spread_of(other)
    sizes = list(other.size()) if whole is None else whole.whole_shape(other)
    return input.expand(sizes) if boxes.spread_of(input) is None else expand(boxes, func, input, sizes)


def repeat(boxes: BoxMode, func: Function, /, input: Tensor, *sizes: Any) -> Tensor:
    spread = boxes.spread_of(input)
    assert spread is not None
    times = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    dims = tuple(dim + len(times) - input.ndim for dim in spread.dims)
    if any(times[dim] != 1 for dim in dims):
        raise boxes.refusal(name_of(func), f"of {tuple(times)} repeats space")
    return boxes.mark(func(input, times), Spread(spread.grid, dims))  # type: ignore[no-any-return]


def flatten(boxes: BoxMode, func: Function, /, input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    whole = list(shape(boxes, func, input))
    start, end = start_dim % input.ndim, end_dim % input.ndim
    return reshape(boxes, func, input, [*whole[:start], math.prod(whole[start : end + 1]), *whole[end + 1 :]])


def unflatten(boxes: BoxMode, func: Function, /, input: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    whole = list(shape(boxes, func, input))
    at = dim % input.ndim
    known = math.prod(size for size in sizes if size != -1)
    filled = [whole[at] // known if size == -1 else size for size in sizes]
    return reshape(boxes, func, input, [*whole[:at], *filled, *whole[at + 1 :]])


def reshape_as(boxes: BoxMode, func: Function, /, input: Tensor, other: Tensor) -> Tensor:
    spread = boxes.spread_of(other)
    sizes = list(other.size()) if spread is None else spread.whole_shape(other)
    return input.reshape(sizes) if boxes.spread_of(input) is None else reshape(boxes, func, input, sizes)


def reshape(boxes: BoxMode, func: Function, /, input: Tensor, *sizes: Any, **kwargs: Any) -> Tensor:
    """Reshapes whole dimensions next to those of space, cuts space into patches, or gathers it as a row of tokens."""
    given, spread = (*sizes, *kwargs.values()), boxes.spread_of(input)
    assert spread is not None
    if isinstance(dtype := given[0], torch.dtype):  # the same bytes as other numbers
        if dtype.itemsize != input.element_size():
            raise boxes.refusal(name_of(func), f"of {input.dtype} as {dtype} changes the last dimension")
        return boxes.mark(input.view(dtype), spread)  # type: ignore[no-any-return]
    asked = list(given[0] if len(given) == 1 and not isinstance(given[0], int) else given)
    old = spread.whole_shape(input)
    if -1 in asked:
        asked[asked.index(-1)] = math.prod(old) // -math.prod(asked)
    refusal = boxes.refusal(
        name_of(func), f"of {tuple(old)} to {tuple(asked)} joins dimensions of space with others, which boxes cannot"
    )
    edges, dims, source = list(spread.grid.edges), list(spread.dims), input
    for before, behind in _matching(old, asked):
        inside = [dim for dim in before if dim in spread.dims]
        there = [dim for dim in before if old[dim] != 1 or dim in inside]
        new = [dim for dim in behind if asked[dim] != 1] or list(behind[:1])
        if not inside:
            continue
        at = spread.dims.index(inside[0])
        if tuple(inside) == spread.dims and len(there) == len(inside) > 1 and len(new) == 1:
            return boxes.mark_copy(boxes.gathered(input).reshape(asked), input)  # tokens, b c n
        if len(inside) > 1 or not new or there[0] != inside[0] or len(there) > 1 < len(new):
            raise refusal
        dims[at] = new[0]
        if len(new) > 1:  # patches
            step = old[inside[0]] // asked[new[0]]
            edges[at] = tuple(round(edge / step) for edge in edges[at])
            if any(a >= b for a, b in zip(edges[at], edges[at][1:])):
                raise refusal
            rows = BoxGrid(
                (*spread.grid.edges[:at], tuple(e * step for e in edges[at]), *spread.grid.edges[at + 1 :]), boxes.group
            )
            input = boxes.recut(input, rows)
            spread = Spread(rows, spread.dims)
        else:
            step = asked[new[0]] // old[inside[0]]
            edges[at] = tuple(edge * step for edge in edges[at])
    after = Spread(BoxGrid(tuple(edges), boxes.group), tuple(dims))
    for dim, side in zip(after.dims, after.grid.sides):
        asked[dim] = side
    change = input.view if name_of(func).startswith("view") else input.reshape
    y: Tensor = boxes.mark(change(asked), after)
    return y if input is source else boxes.mark_copy(y, source)


def _matching(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yields the smallest runs of dimensions of two shapes that have equally many elements, from the front."""
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (left := math.prod(old[a:i])) != (right := math.prod(new[b:j])):
            if left < right:
                i += 1
            else:
                j += 1
        yield range(a, i), range(b, j)


_LOCAL = """
    permute transpose swapaxes swapdims movedim moveaxis unsqueeze squeeze unbind chunk split split_with_sizes
    tensor_split narrow select amax amin argmax argmin std var prod logsumexp norm topk adjoint Tensor.mT
"""
_SAME = """
    dim ndimension is_floating_point is_complex is_contiguous get_device element_size is_same_size register_hook
    retain_grad new_zeros new_ones new_empty new_full __repr__ __format__ __hash__ Tensor.dtype Tensor.device
    Tensor.ndim Tensor.layout Tensor.requires_grad Tensor.is_leaf Tensor.grad_fn Tensor.is_cuda Tensor.is_cpu
    Tensor.is_mps Tensor.is_xpu Tensor.is_meta Tensor.is_sparse Tensor.is_nested Tensor.is_quantized
"""
SHAPE_FUNCTIONS: dict[str, Handler] = {
    **dict.fromkeys(_LOCAL.split(), local),
    **dict.fromkeys(_SAME.split(), unchanged),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum"), along(0)),
    **dict.fromkeys(("sum", "mean"), reduction),
    **dict.fromkeys(("max", "min"), extremum),
    **dict.fromkeys(("to", "type_as"), cast),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), cat),
    **dict.fromkeys(("reshape", "view"), reshape),
    **dict.fromkeys(("reshape_as", "view_as"), reshape_as),
    **dict.fromkeys(("linear", "matmul", "__matmul__"), last(lambda weight: 1 if weight.ndim < 3 else weight.ndim)),
    **dict.fromkeys(("layer_norm", "rms_norm"), last(len)),
    **dict.fromkeys(("prelu", "Tensor.data"), beside),
    "normalize": along(1, 1),
    "glu": along(0, -1),
    "Tensor.shape": shape,
    "size": size,
    "__len__": length,
    "numel": numel,
    "nelement": numel,
    "__getitem__": getitem,
    "expand": expand,
    "expand_as": expand_as,
    "repeat": repeat,
    "flatten": flatten,
    "unflatten": unflatten,
}
