"""Torch's functions of space on boxes: convolutions, norms, pooling, resampling, padding, dropout.

Each handler takes the mode, the intercepted function, and that function's own arguments under torch's names. Whatever
leaves a rank without output is computed on the gathered volume, which is then small.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.conversion.box_mode import BoxMode, Handler, cut, name_of, tensors_in
from seqpar.parallel.collectives import gather
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.convolution import convolve_box, convolve_box_transposed
from seqpar.spatial.cpu_convolution import ConvOptions
from seqpar.spatial.halos import fetch_rows
from seqpar.spatial.moments import MomentGroups
from seqpar.spatial.norm_function import normalize
from seqpar.spatial.norms import update_running
from seqpar.spatial.pooling import (
    INTERPOLATING,
    avg_pool_box,
    each,
    global_mean,
    max_pool_box,
    refuse_wide_padding,
    upsample_box,
)
from seqpar.spatial.receptive_field import EmptyBoxError

Function = Callable[..., Any]


def _computed(
    boxes: BoxMode, x: Tensor, on_box: Callable[[], tuple[Tensor, BoxGrid]], on_whole: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns the output's box; or its whole, which every rank computes, if a box would be empty."""
    try:
        y, grid = on_box()
    except EmptyBoxError:  # raised before any message, on all ranks
        return on_whole(boxes.gathered(x))
    return boxes.mark_volume(y, grid)


def convolution(
    boxes: BoxMode,
    func: Function,
    /,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    name, kernel, n = name_of(func), tuple(weight.shape[2:]), weight.ndim - 2
    grid = boxes.volume(input, name)
    strides, dilations = each(stride, n), each(dilation, n)
    if isinstance(padding, str):
        both = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernel, dilations)]
        pads = [(total // 2, total - total // 2) for total in both]
    else:
        pads = [(p, p) for p in each(padding, n)]
    if max(*kernel, *strides) == 1 and not any(map(sum, pads)):
        return boxes.mark_volume(func(input, weight, bias, stride, padding, dilation, groups), grid)
    options = ConvOptions(strides, (0,) * n, dilations, False, (0,) * n, groups)
    what = f"{name} with kernel {kernel} and stride {strides}"
    return _computed(
        boxes,
        input,
        lambda: convolve_box(input, grid, weight, bias, options, pads, what),
        lambda whole: func(whole, weight, bias, stride, padding, dilation, groups),
    )


def transposed_convolution(
    boxes: BoxMode,
    func: Function,
    /,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    name, n = name_of(func), weight.ndim - 2
    grid = boxes.volume(input, name)
    strides = each(stride, n)
    options = ConvOptions(strides, each(padding, n), each(dilation, n), True, each(output_padding, n), groups)
    what = f"{name} with kernel {tuple(weight.shape[2:])} and stride {strides}"
    return _computed(
        boxes,
        input,
        lambda: convolve_box_transposed(input, grid, weight, bias, options, what),
        lambda whole: func(whole, weight, bias, stride, padding, output_padding, groups, dilation),
    )


def spreading(handler: Handler) -> Handler:
    """Returns a handler for whole volumes, which spreads those that are large enough: later work is then shared."""

    def compute(boxes: BoxMode, func: Function, /, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        box = boxes.cut_volume(input) if weight.ndim == boxes.num_dims + 2 else None
        if box is None:
            return func(input, weight, *args, **kwargs)  # type: ignore[no-any-return]
        return handler(boxes, func, box, weight, *args, **kwargs)  # type: ignore[no-any-return]

    return compute


def instance_norm(
    boxes: BoxMode,
    func: Function,
    /,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    grid = boxes.volume(input, name_of(func))
    if not use_input_stats:
        return boxes.mark_volume(func(input, running_mean, running_var, weight, bias, False, momentum, eps), grid)
    groups = MomentGroups(input.shape[1], False, (grid.group,))
    y, statistics = normalize(input, weight, bias, eps, groups)
    update_running(running_mean, running_var, momentum, statistics)
    return boxes.mark_volume(y, grid)


def batch_norm(
    boxes: BoxMode,
    func: Function,
    /,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    grid = boxes.volume(input, name_of(func))
    if not training:
        return boxes.mark_volume(func(input, running_mean, running_var, weight, bias, False, momentum, eps), grid)
    y, statistics = normalize(input, weight, bias, eps, MomentGroups(input.shape[1], True, (grid.group,)))
    update_running(running_mean, running_var, momentum, statistics)
    return boxes.mark_volume(y, grid)


def group_norm(
    boxes: BoxMode,
    func: Function,
    /,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    grid = boxes.volume(input, name_of(func))
    y, _ = normalize(input, weight, bias, eps, MomentGroups(num_groups, False, (grid.group,)))
    return boxes.mark_volume(y, grid)


def max_pool(
    boxes: BoxMode,
    func: Function,
    /,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    name = name_of(func)
    grid = boxes.volume(input, name)
    if return_indices:
        raise boxes.refusal(name, "with return_indices=True would number the voxels of a box")
    stride = stride or kernel_size
    refuse_wide_padding(kernel_size, padding, dilation, boxes.num_dims, name)
    sizes = kernel_size, stride, padding, dilation, ceil_mode
    what = f"{name} with kernel {kernel_size} and stride {stride}"
    return _computed(boxes, input, lambda: max_pool_box(input, grid, *sizes, what), lambda whole: func(whole, *sizes))


def avg_pool(
    boxes: BoxMode,
    func: Function,
    /,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    name = name_of(func)
    grid = boxes.volume(input, name)
    stride = stride or kernel_size
    refuse_wide_padding(kernel_size, padding, 1, boxes.num_dims, name)
    sizes = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    what = f"{name} with kernel {kernel_size} and stride {stride}"
    return _computed(boxes, input, lambda: avg_pool_box(input, grid, *sizes, what), lambda whole: func(whole, *sizes))


def adaptive_pool(
    boxes: BoxMode, func: Function, /, input: Tensor, output_size: Any, return_indices: bool = False
) -> Tensor:
    name = name_of(func)
    grid = boxes.volume(input, name)
    asked = zip(each(output_size, boxes.num_dims), grid.extents)
    outputs = [extent if size is None else size for size, extent in asked]
    averages = "avg" in name
    if max(outputs) == 1 and not return_indices:
        if averages:
            return global_mean(input, grid)
        largest = gather(func(input, output_size)[None], grid.group, 0, [1] * grid.group.size, kind="statistics")
        return largest.max(0).values
    if return_indices or any(extent % size for extent, size in zip(grid.extents, outputs)):
        raise boxes.refusal(name, f"of extents {grid.extents} to {tuple(outputs)} needs an output that divides them")
    kernel = tuple(extent // size for extent, size in zip(grid.extents, outputs))
    pool = (F.avg_pool2d, F.avg_pool3d) if averages else (F.max_pool2d, F.max_pool3d)
    return (avg_pool if averages else max_pool)(boxes, pool[boxes.num_dims - 2], input, kernel)


def interpolate(
    boxes: BoxMode,
    func: Function,
    /,
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    grid, n = boxes.volume(input, "interpolate"), boxes.num_dims
    if antialias or mode not in (*INTERPOLATING, "nearest", "nearest-exact"):
        raise boxes.refusal("interpolate", f"with mode={mode!r} and antialias={antialias} is not known on boxes")
    scales = None if scale_factor is None else [float(scale) for scale in each(scale_factor, n)]
    sizes = each(size, n) if scales is None else [math.floor(e * s) for e, s in zip(grid.extents, scales)]
    factors = [new // old for new, old in zip(sizes, grid.extents)]
    even = all(new == factor * old > 0 for new, factor, old in zip(sizes, factors, grid.extents))
    if even and not align_corners and scales in (None, factors):
        return boxes.mark_volume(*upsample_box(input, grid, factors, mode))
    how = {"align_corners": align_corners, "recompute_scale_factor": recompute_scale_factor}

    def on_box() -> tuple[Tensor, BoxGrid]:
        y, after = input, grid
        for dim in range(n):
            to = {"size": sizes[dim]} if scales is None else {"scale_factor": scales[dim]}
            along = "linear" if mode in INTERPOLATING else mode
            places = _places(grid.extents[dim], lambda row: F.interpolate(row, **to, mode=along, **how))  # type: ignore[arg-type]  # noqa: B023
            y, after = _rows_at(y, after, dim, places)
        return y, after

    return _computed(
        boxes, input, on_box, lambda whole: func(whole, size, scale_factor, mode, **how, antialias=antialias)
    )


def pad(
    boxes: BoxMode,
    func: Function,
    /,
    input: Tensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    amounts = {input.ndim - 1 - at: (pad[2 * at], pad[2 * at + 1]) for at in range(len(pad) // 2)}
    if not any(any(both) for dim, both in amounts.items() if dim >= input.ndim - boxes.num_dims):
        spread = boxes.spread_of(input)
        if spread is not None and not any(any(amounts.get(dim, (0,))) for dim in spread.dims):
            return boxes.mark(func(input, pad, mode, value), spread)  # type: ignore[no-any-return]
    grid = boxes.volume(input, f"pad with mode={mode!r}")
    channels = [n for dim in reversed(range(2)) for n in amounts.get(dim, (0, 0))]

    def on_box() -> tuple[Tensor, BoxGrid]:
        y, after = input, grid
        for dim in range(boxes.num_dims):
            before, behind = amounts.get(dim + 2, (0, 0))
            moved = before, behind
            if mode == "constant":  # cropping moves rows, and padding is this rank's own
                moved = min(before, 0), min(behind, 0)
            if any(moved):
                places = _places(grid.extents[dim], lambda row: F.pad(row, moved, mode))  # noqa: B023
                inner = (min(max(edge + moved[0], 0), len(places)) for edge in after.edges[dim][1:-1])
                y, after = _rows_at(y, after, dim, places, (0, *inner, len(places)))
            if mode == "constant":
                y, after = _padded(y, after, dim, (max(before, 0), max(behind, 0)), value)
        return (F.pad(y, [0, 0] * boxes.num_dims + channels, mode, value) if any(channels) else y), after

    return _computed(boxes, input, on_box, lambda whole: func(whole, pad, mode, value))


def _padded(
    x: Tensor, grid: BoxGrid, dim: int, amounts: tuple[int, int], value: float | None
) -> tuple[Tensor, BoxGrid]:
    """Pads the first and the last box along one dimension with a constant."""
    before, behind = amounts
    old, place = grid.edges[dim], grid.place[dim]
    own = (before if place == 0 else 0, behind if place == len(old) - 2 else 0)
    edges = (0, *(edge + before for edge in old[1:-1]), old[-1] + before + behind)
    y = F.pad(x, [*[0, 0] * (x.ndim - 3 - dim), *own], value=value) if any(own) else x
    return y, BoxGrid((*grid.edges[:dim], edges, *grid.edges[dim + 1 :]), grid.group)


def rows_of(boxes: BoxMode, input: Tensor, dim: int, slices: slice) -> Tensor:
    """Returns the rows of a volume that a slice of one of its dimensions keeps."""
    grid = boxes.volume(input, "a slice")
    places = torch.arange(grid.extents[dim - 2], dtype=torch.float64)[slices]
    return _computed(
        boxes,
        input,
        lambda: _rows_at(input, grid, dim - 2, places),
        lambda whole: whole[(*[slice(None)] * dim, slices)],
    )


def _places(extent: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns from which place along a dimension each row of a function's output comes: torch's own, from numbers."""
    return function(torch.arange(extent, dtype=torch.float64)[None, None])[0, 0]


def _rows_at(
    x: Tensor, grid: BoxGrid, dim: int, places: Tensor, edges: Sequence[int] | None = None
) -> tuple[Tensor, BoxGrid]:
    """Returns the rows at ``places`` of the whole volume along ``dim``, interpolated linearly between its rows.

    - ``edges``: where the output is cut; None: in proportion
    """
    if edges is None:
        edges = [round(edge * len(places) / grid.extents[dim]) for edge in grid.edges[dim]]
    own = list(itertools.pairwise(edges))
    if any(a >= b for a, b in own):
        raise EmptyBoxError(f"{len(places)} rows cannot be cut at {edges}")
    low = places.floor().long()
    high = low + (places > low)
    asked = [(int(low[a:b].min()), int(high[a:b].max()) + 1) for a, b in own]
    every = [asked if d == dim else list(itertools.pairwise(along)) for d, along in enumerate(grid.edges)]
    window, (a, b), first = fetch_rows(x, grid, every), own[grid.place[dim]], asked[grid.place[dim]][0]
    y = window.index_select(dim + 2, (low[a:b] - first).to(x.device))
    if not torch.equal(low, high):
        above = window.index_select(dim + 2, (high[a:b] - first).to(x.device))
        weights = (places - low)[a:b].to(x.device, x.dtype)
        y = torch.lerp(y, above, weights.view(-1, *[1] * (x.ndim - dim - 3)))
    return y, BoxGrid((*grid.edges[:dim], tuple(edges), *grid.edges[dim + 1 :]), grid.group)


def dropout(
    boxes: BoxMode, func: Function, /, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Drops what one process would drop: each rank draws for the whole volume, as bits, and takes its box."""
    spread = boxes.spread_of(input)
    assert spread is not None
    if not training or p == 0:
        return boxes.mark(func(input, p, training, inplace), spread)  # type: ignore[no-any-return]
    boxes.draw_alike(input.device)
    if name_of(func) == "dropout":
        kept = torch.empty(spread.whole_shape(input), dtype=torch.bool, device=input.device).bernoulli_(1 - p)
        noise = cut(kept, spread.grid, spread.dims).to(input.dtype).div_(1 - p) if p < 1 else torch.zeros_like(input)
    else:
        boxes.volume(input, name_of(func))
        ones = torch.ones(*input.shape[:2], *[1] * boxes.num_dims, dtype=input.dtype, device=input.device)
        noise = torch.feature_dropout(ones, p, True)
    return boxes.mark(input.mul_(noise) if inplace else input * noise, spread)  # type: ignore[no-any-return]


def drawing(boxes: BoxMode, func: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Computes a function of chance whose tensors are whole: all ranks draw the same numbers."""
    devices = [x.device for x in tensors_in(args)] or [torch.device(kwargs.get("device") or "cpu")]
    boxes.draw_alike(devices[0])
    return func(*args, **kwargs)


def drawing_attention(boxes: BoxMode, func: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Computes attention of whole tokens: if it drops weights, all ranks drop the same ones."""
    place = 4 if name_of(func) == "scaled_dot_product_attention" else 10
    share = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
    compute = partial(drawing, boxes, func) if share and kwargs.get("training", True) else func
    return compute(*args, **kwargs)


def alone(handler: Handler) -> Handler:
    """Returns a handler of functions of one volume, whose weights and other tensors must be whole."""

    def compute(boxes: BoxMode, func: Function, /, *args: Any, **kwargs: Any) -> Any:
        if sum(boxes.spread_of(x) is not None for x in (*args, *kwargs.values())) > 1:
            raise boxes.refusal(name_of(func), "with a spread tensor as its weight is not known to be exact on boxes")
        return handler(boxes, func, *args, **kwargs)

    return compute


_SPACES = ("2d", "3d")
_OF_A_VOLUME: dict[str, Handler] = {
    **{f"conv{d}": convolution for d in _SPACES},
    **{f"conv_transpose{d}": transposed_convolution for d in _SPACES},
    **{f"max_pool{d}": max_pool for d in _SPACES},
    **{f"avg_pool{d}": avg_pool for d in _SPACES},
    **{f"adaptive_{kind}_pool{d}": adaptive_pool for d in _SPACES for kind in ("avg", "max")},
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"), dropout),
    "instance_norm": instance_norm,
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "interpolate": interpolate,
    "pad": pad,
}
VOLUME_FUNCTIONS = {name: alone(handler) for name, handler in _OF_A_VOLUME.items()}
_CHANCE = """
    dropout dropout1d dropout2d dropout3d feature_dropout bernoulli bernoulli_ rand randn rand_like randn_like randint
    randint_like randperm normal normal_ uniform_ multinomial alpha_dropout feature_alpha_dropout rrelu gumbel_softmax
    exponential_ random_ geometric_ cauchy_ log_normal_ poisson binomial _standard_gamma _sample_dirichlet
"""
WHOLE_FUNCTIONS: dict[str, Handler] = {
    **{f"conv{d}": spreading(convolution) for d in _SPACES},
    **{f"conv_transpose{d}": spreading(transposed_convolution) for d in _SPACES},
    **dict.fromkeys(_CHANCE.split(), drawing),
    **dict.fromkeys(("scaled_dot_product_attention", "multi_head_attention_forward"), drawing_attention),
}
