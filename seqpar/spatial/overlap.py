"""Overlaps convolutions with the halo exchange: first the whole window, then again the outputs that read halos.

The overlapped convolution thus has the same shape, and therefore the same kernel and bits, as one that waits. In
backward nothing is computed twice: the input's gradient, whose halos are sent, comes first, and the weights' gradient
is computed while they are in transit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from seqpar.parallel.mesh import Group
from seqpar.parallel.row_exchange import Interval
from seqpar.spatial.cpu_convolution import ConvOptions, convolve, gradients
from seqpar.spatial.halos import Halos
from seqpar.spatial.memory_format import match_memory_format

# Halo size from which overlap pays off: 40 us on a link of 25 GB/s, the time of three thin slabs' convolutions.
ENOUGH = 1 << 20
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
ALL = slice(None)


@dataclass(frozen=True)
class BoxConvolution:
    """One rank's convolution: the window that it fetches, its options, and the crop of the window's outputs."""

    halos: Halos
    options: ConvOptions
    keep_window: bool
    crop: Halos = Halos(Group("self"))


class HaloSlab(NamedTuple):
    """Outputs that read halos, and the part of the window that they read."""

    outputs: tuple[slice, ...]
    inputs: tuple[slice, ...]
    size: int  # outputs per channel


def overlap_pays_off(kind: str, bytes_to_come: int) -> bool:
    """Returns whether to overlap: for large halos on a GPU, where messages take little compute time.

    - ``kind``: the device type
    - ``bytes_to_come``: the size of the halos
    """
    return kind == "cuda" and bytes_to_come >= ENOUGH


def halo_dependent_slabs(
    known: Mapping[int, Interval], outputs: Sequence[int], spans: Sequence[int], strides: Sequence[int]
) -> list[HaloSlab]:
    """Returns slabs that together contain once each output that reads rows not yet known.

    - ``known``: rows of the window that need no message, by dimension of ``b c W D H``; all rows of other dimensions
    - ``outputs``: extents of the output
    - ``spans``: extents of the dilated kernel
    """
    left, slabs = [(0, extent) for extent in outputs], list[HaloSlab]()
    for dim, (low, high) in known.items():
        at = dim - 2
        first = min(-(-low // strides[at]), outputs[at])
        behind = max((high - spans[at]) // strides[at] + 1, first)
        for begin, end in ((0, first), (behind, outputs[at])):
            if end > begin:
                box = [*left[:at], (begin, end), *left[at + 1 :]]
                reads = [
                    slice(a * strides[d], (b - 1) * strides[d] + spans[d]) if d + 2 in known else ALL
                    for d, (a, b) in enumerate(box)
                ]
                size = math.prod(b - a for a, b in box)
                slabs.append(HaloSlab((ALL, ALL, *(slice(a, b) for a, b in box)), (ALL, ALL, *reads), size))
        left[at] = first, behind
    return [slab for slab in slabs if slab.size]


def convolve_during_exchange(
    how: BoxConvolution, x: Tensor, weight: Tensor, bias: Tensor | None, overlaps: bool
) -> tuple[Tensor, Tensor]:
    """Returns the window of ``x`` and its convolution, in the memory format of ``x``.

    - ``overlaps``: compute while the halos are in transit
    """
    options, slabs, early = how.options, list[HaloSlab](), list[Tensor]()

    def begin(window: Tensor) -> None:
        spans = [(kernel - 1) * dilation + 1 for kernel, dilation in zip(weight.shape[2:], options.dilation)]
        padded = [side + 2 * pad for side, pad in zip(window.shape[2:], options.padding)]
        outputs = [(side - span) // stride + 1 for side, span, stride in zip(padded, spans, options.stride)]
        slabs.extend(halo_dependent_slabs(how.halos.known_rows(), outputs, spans, options.stride))
        if 2 * sum(slab.size for slab in slabs) <= math.prod(outputs):  # else most of it would be computed twice
            early.append(match_memory_format(convolve(window, weight, bias, options), x))

    window = how.halos.open(x, begin if overlaps and not options.transposed else None)
    if not early:
        return window, match_memory_format(convolve(window, weight, bias, options), x)
    for slab in slabs:
        early[0][slab.outputs] = convolve(window[slab.inputs], weight, bias, options)
    return window, early[0]


def backward_during_exchange(
    how: BoxConvolution,
    grad: Tensor,
    kept: Tensor,
    weight: Tensor,
    biased: bool,
    needs: Sequence[bool],
    overlaps: bool,
) -> Gradients:
    """Returns the gradients of ``x``, weight and bias; None for those that ``needs`` does not ask for.

    - ``grad``: gradient of the window's outputs
    - ``kept``: the window, or ``x``, whose halos are then fetched again
    - ``overlaps``: compute while the halos are in transit
    """
    for_x, *others = needs
    if not overlaps:
        window = kept if how.keep_window else how.halos.open(kept)
        dx, dweight, dbias = gradients(grad, window, weight, biased, how.options, needs)
        return None if dx is None else how.halos.close(dx), dweight, dbias
    of_input, of_weights = list[Tensor | None](), list[Gradients]()

    def by_input(window: Tensor) -> None:  # uses only the window's shape
        of_input.append(gradients(grad, window, weight, biased, how.options, (for_x, False, False))[0])

    def by_weights(window: Tensor) -> None:
        of_weights.append(gradients(grad, window, weight, biased, how.options, (False, *others)))

    window = kept if how.keep_window else how.halos.open(kept, by_input)
    if not of_input:
        by_input(window)
    dx = of_input[0]
    if dx is not None:
        dx = how.halos.close(dx, partial(by_weights, window))
    if not of_weights:
        by_weights(window)
    _, dweight, dbias = of_weights[0]
    return dx, dweight, dbias
