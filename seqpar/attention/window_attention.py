"""Window attention: each token attends to its window, which may extend into the boxes of other ranks.

Legend: b batch, n tokens, a heads, f features per head, w d h tokens per axis; ``/s`` is this rank's box of them, ``+``
the box with all windows that touch it. p windows of one shape along each axis, q this rank's queries of such a window,
k its keys.

Windows are cubes of the token grid, starting at its first token; shifted ones start half a window later, so that tokens
separated by a border in one block share a window in the next. Windows at the grid's ends are smaller. A rank fetches
the keys and values of its windows from other boxes, as a convolution fetches its halo, and computes its own queries
only. Work, memory and messages grow linearly with the number of tokens.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.attention.kernels import State, kernel_for
from seqpar.attention.partition import Rotary
from seqpar.parallel.halo_exchange import halo_exchange_adjoint, start_halo_exchange
from seqpar.parallel.layout import Bounds, Layout
from seqpar.parallel.mesh import Group
from seqpar.parallel.row_exchange import Interval
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.halos import Halos
from seqpar.spatial.receptive_field import ReceptiveField

KIND = "windows"


@dataclass(frozen=True)
class WindowRow:
    """Consecutive windows of one shape along an axis: this rank's queries in them, and their keys.

    - ``queries``: where the queries start in the box
    - ``keys``: where the keys start in the box extended by its windows
    - ``count``: number of windows
    - ``query_side``, ``key_side``: extent of each window's queries and keys
    """

    queries: int
    keys: int
    count: int
    query_side: int
    key_side: int


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows that touch a rank's box of tokens, and the exchange that fetches their keys and values.

    - ``order``: for the box's tokens in raster order, their positions among this rank's tokens; ``back`` is the inverse
    - ``sides``: extents of the box
    - ``runs``: the rows of windows along each axis
    """

    group: Group
    halos: Halos
    order: Tensor
    back: Tensor
    sides: tuple[int, ...]
    runs: tuple[tuple[WindowRow, ...], ...]

    @classmethod
    def of(cls, layout: Layout, group: Group, side: int, is_shifted: bool, device: torch.device) -> "Windows":
        """Returns the windows of ``side`` tokens per axis, cached by the layout per device."""
        key = "windows", group.index, side, is_shifted, device
        return layout.once(key, lambda: cls._make(layout, group, side, is_shifted, device))

    @classmethod
    def _make(cls, layout: Layout, group: Group, side: int, is_shifted: bool, device: torch.device) -> "Windows":
        grid = BoxGrid(layout.voxel_cuts(), group)
        borders = [window_borders(extent, side, is_shifted) for extent in layout.grid]
        reaches = [_reach(edges, cut) for edges, cut in zip(grid.edges, borders)]
        runs = tuple(_runs(box, cut) for box, cut in zip(grid.box, borders))
        order = layout.token_ids(group.index, device).argsort()
        return cls(group, Halos.of(grid, reaches), order, order.argsort(), grid.sides, runs)

    def blocks(self) -> list[tuple[WindowRow, ...]]:
        """Returns the blocks of windows of one shape, each as one row of windows per axis."""
        return list(itertools.product(*self.runs))


def window_borders(extent: int, side: int, is_shifted: bool) -> Bounds:
    """Returns where windows cut an axis; an axis no longer than a window is not cut."""
    if extent <= side:
        return 0, extent
    return 0, *range(side // 2 if is_shifted else side, extent, side), extent


def _reach(edges: Bounds, borders: Bounds) -> ReceptiveField:
    """Returns what each rank needs along an axis: all windows that touch its interval."""
    needed = tuple(_around(interval, borders) for interval in itertools.pairwise(edges))
    return ReceptiveField(edges, needed, len(edges) == 2)


def _around(interval: Interval, borders: Bounds) -> Interval:
    low, high = interval
    return max(at for at in borders if at <= low), min(at for at in borders if at >= high)


def _runs(interval: Interval, borders: Bounds) -> tuple[WindowRow, ...]:
    """Returns the windows that touch a rank's interval, consecutive ones of the same shape combined."""
    first, runs = _around(interval, borders)[0], list[WindowRow]()
    for low, high in itertools.pairwise(borders):
        begin, end = max(low, interval[0]), min(high, interval[1])
        if begin >= end:
            continue
        shape, last = (end - begin, high - low), runs[-1] if runs else None
        if last is not None and shape == (last.query_side, last.key_side):
            runs[-1] = WindowRow(last.queries, last.keys, last.count + 1, *shape)
        else:
            runs.append(WindowRow(begin - interval[0], low - first, 1, *shape))
    return tuple(runs)


def attend_in_windows(qkv: Tensor, windows: Windows, rotary: Rotary | None = None, keep_kv: bool = False) -> Tensor:
    """Returns softmax(q Kᵀ/√f) V, ``b n/s a f``, over the keys and values of each token's window.

    *forward:* a halo exchange along each axis fetches the keys and values of windows that extend into other boxes.
    *backward:* the same exchange again (unless ``keep_kv``); their gradients are sent back and added.

    - ``qkv``: this rank's queries, keys and values ``b n/s 3 a f``
    - ``rotary``: rotary positions of this rank's tokens; ``qkv`` is then rotated in place, so nothing else may use it
    - ``keep_kv``: keep the fetched keys and values until backward
    """
    return _WindowAttention.apply(qkv, windows, rotary, keep_kv)  # type: ignore[no-any-return]


class _WindowAttention(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, windows: Windows, rotary: Rotary | None, keep_kv: bool) -> Tensor:
        if rotary is not None:
            rotary.rotate_(rearrange(qkv[:, :, :2], "b n m a f -> m b a n f"))
        q, pair = _in_box(qkv, windows)
        pair = _open(pair, windows)
        out, states, kernels = torch.empty_like(q), list[State](), []
        for runs in windows.blocks():
            queries, keys, values = _block(q, pair, runs)
            kernels.append(kernel_for(qkv, qkv.shape[-1], keys.shape[2]))
            attended, state = kernels[-1].forward(queries, keys, values)
            _part_of(out, runs, of_keys=False).copy_(_as_grid(attended, runs, of_keys=False))
            states.append(state)
        result = out.flatten(1, len(windows.sides)).index_select(1, windows.back)
        ctx.options = windows, rotary, kernels, [len(state) for state in states], keep_kv
        ctx.save_for_backward(qkv, result, *([pair] if keep_kv else []), *(t for state in states for t in state))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        windows, rotary, kernels, counts, keep_kv = ctx.options
        qkv, result, *saved = ctx.saved_tensors
        assert grad.shape == result.shape, (grad.shape, result.shape)
        q, pair = _in_box(qkv, windows)
        pair = saved.pop(0) if keep_kv else _open(pair, windows)
        out, grad_out = (t.index_select(1, windows.order).unflatten(1, windows.sides) for t in (result, grad))
        dq, dpair, states = torch.empty_like(q), torch.empty_like(pair), iter(saved)
        for runs, kernel, count in zip(windows.blocks(), kernels, counts):
            state = tuple(next(states) for _ in range(count))
            queries, keys, values = _block(q, pair, runs)
            outer, inner = (_as_rows(_part_of(t, runs, of_keys=False), runs, of_keys=False) for t in (grad_out, out))
            gradients = kernel.backward(outer, queries, keys, values, inner, state)
            _part_of(dq, runs, of_keys=False).copy_(_as_grid(gradients[0], runs, of_keys=False))
            for number, each in enumerate(gradients[1:]):
                _part_of(dpair, runs, of_keys=True)[..., number, :, :].copy_(_as_grid(each, runs, of_keys=True))
        dpair = halo_exchange_adjoint(dpair[:, None], windows.group, windows.halos.plans, KIND)[:, 0]
        together = torch.cat([dq.unsqueeze(-3), dpair], -3)  # b w/s d/s h/s 3 a f
        dqkv = together.flatten(1, len(windows.sides)).index_select(1, windows.back)
        if rotary is not None:
            rotary.rotate_(rearrange(dqkv[:, :, :2], "b n m a f -> m b a n f"), back=True)
        return dqkv, None, None, None


def _in_box(qkv: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """Returns the box's queries ``b w/s d/s h/s a f``, and its keys and values ``b w/s d/s h/s 2 a f``."""
    box = qkv.index_select(1, windows.order).unflatten(1, windows.sides)
    return box[..., 0, :, :], box[..., 1:, :, :]


def _open(pair: Tensor, windows: Windows) -> Tensor:
    """Returns the keys and values ``b w+ d+ h+ 2 a f`` of all windows that touch the box."""
    return start_halo_exchange(pair[:, None], windows.group, windows.halos.plans, KIND)[:, 0]


def _part_of(grid: Tensor, runs: Sequence[WindowRow], of_keys: bool) -> Tensor:
    """Returns a view of the part of a grid ``b w d h ...`` that belongs to a block of windows."""
    for at, run in enumerate(runs):
        begin, side = (run.keys, run.key_side) if of_keys else (run.queries, run.query_side)
        grid = grid.narrow(1 + at, begin, run.count * side)
    return grid


def _as_rows(part: Tensor, runs: Sequence[WindowRow], of_keys: bool) -> Tensor:
    """Splits a part ``b w d h a f`` into windows ``(b p) a m f``, where m is the tokens of a window."""
    count = len(runs)
    for at in reversed(range(count)):
        side = runs[at].key_side if of_keys else runs[at].query_side
        part = part.unflatten(1 + at, (runs[at].count, side))
    order = [*range(1, 2 * count, 2), 1 + 2 * count, *range(2, 1 + 2 * count, 2), 2 + 2 * count]
    windows = part.permute(0, *order)  # b p p p a w d h f
    return windows.flatten(2 + count, 1 + 2 * count).flatten(0, count)


def _as_grid(rows: Tensor, runs: Sequence[WindowRow], of_keys: bool) -> Tensor:
    """Joins windows ``(b p) a m f`` to a part ``b w d h a f``; the inverse of ``_as_rows``."""
    count, counts = len(runs), [run.count for run in runs]
    sides = [run.key_side if of_keys else run.query_side for run in runs]
    x = rows.unflatten(2, sides).unflatten(0, (-1, *counts))  # b p p p a w d h f
    order = [dim for at in range(count) for dim in (1 + at, 2 + count + at)]
    x = x.permute(0, *order, 1 + count, 2 + 2 * count)
    for at in range(count):
        x = x.flatten(1 + at, 2 + at)
    return x


def _block(q: Tensor, pair: Tensor, runs: Sequence[WindowRow]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the queries ``(b p) a q f`` and the keys and values ``(b p) a k f`` of a block of windows."""
    keys, values = _part_of(pair, runs, of_keys=True).unbind(-3)
    queries = _as_rows(_part_of(q, runs, of_keys=False), runs, of_keys=False)
    return queries, _as_rows(keys, runs, of_keys=True), _as_rows(values, runs, of_keys=True)


def refuse_window(window: int, split: str) -> None:
    """Raises ValueError for an invalid window size, or for a split whose parts need not be boxes."""
    if window < 0 or window == 1:
        raise ValueError(f"window={window}: give its side in tokens, at least 2, or 0 for no windows")
    if window and split != "spatial":
        raise ValueError(f"window={window} with split={split!r}: windows need boxes: use split='spatial'")
