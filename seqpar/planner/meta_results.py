"""Results of operators on tensors without data; torch runs many of them through references in Python.

Elementwise ones are worked out here; what others return is asked once for each shape of their operands.
"""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
_IN_PLACE = {
    aten.add_.Tensor,
    aten.addcdiv_.default,
    aten.addcmul_.default,
    aten.div_.Tensor,
    aten.leaky_relu_.default,
    aten.lerp_.Scalar,
    aten.mul_.Tensor,
    aten.pow_.Scalar,
    aten.sub_.Tensor,
}
_INTO = {aten.add.out, aten.mul.out, aten.sub.out}  # a tensor that was made before
_NEW = {
    aten.add.Tensor,
    aten.div.Tensor,
    aten.leaky_relu.default,
    aten.mul.Tensor,
    aten.pow.Tensor_Scalar,
    aten.sqrt.default,
    aten.sub.Tensor,
}


def elementwise_result(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> Tensor | None:
    """Returns the result of an elementwise operator on tensors without data, of one type; None where torch has to say.

    It has the shape and the order in memory of the first operand that is as large as the result.

    - ``tensors``: those among ``args`` and ``kwargs``
    """
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not first.is_meta or not first.is_floating_point():
        return None
    if func in _IN_PLACE:
        return first
    if func in _INTO:
        out: Tensor = kwargs["out"]
        return out if out.shape == first.shape else None
    if func not in _NEW or any(not t.is_meta or t.dtype != first.dtype for t in tensors):
        return None
    largest = max(tensors, key=lambda t: (t.ndim, t.numel()))
    if not all(_fits(t.shape, largest.shape) for t in tensors):
        return None
    return torch.empty_like(largest)


def _fits(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Returns whether a tensor can be spread over a whole one without making it larger."""
    return all(side in (1, extent) for side, extent in zip(reversed(shape), reversed(whole)))


class MetaShape(NamedTuple):
    """A tensor without data: all that the results of an operator on it depend on."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "MetaShape":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self) -> Tensor:
        """Returns a new tensor without data."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device="meta")


class Plain(NamedTuple):
    """An argument that is no tensor; its type tells 1 from 1.0 and True."""

    kind: type
    value: Any


def known_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Returns new tensors like those that torch's operator returned for operands of these shapes; None where it has to
    be called: for data, for views, in place.

    - ``tensors``: those among ``args`` and ``kwargs``
    """
    if not tensors or not _makes_tensors(func) or not all(t.is_meta for t in tensors):
        return None
    try:
        shapes = _shapes_of_results(func, _described(tuple(args)), _described(tuple(kwargs.items())))
    except TypeError:  # an argument that cannot be looked up
        return None
    if isinstance(shapes, tuple) and not isinstance(shapes, MetaShape):
        return tuple(shape and shape.empty() for shape in shapes)
    return shapes and shapes.empty()


@cache
def _makes_tensors(func: Any) -> bool:
    """Returns whether an operator of torch's changes none of its operands and returns no view of them, as declared."""
    declared = (*func._schema.arguments, *func._schema.returns)
    return func.namespace == "aten" and all(part.alias_info is None for part in declared)


def _described(value: Any) -> Any:
    """Returns what stands for an argument where results are looked up; ``_argument`` is its inverse."""
    if isinstance(value, Tensor):
        return MetaShape.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return Plain(type(value), value)


def _argument(described: Any) -> Any:
    if isinstance(described, MetaShape):
        return described.empty()
    return described.value if isinstance(described, Plain) else [_argument(one) for one in described]


@lru_cache(maxsize=1 << 14)
def _shapes_of_results(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the shapes of an operator's results; None where they share a storage with others or are no tensors."""
    operands = _argument(args)
    named = dict(_argument(kwargs))
    result = func(*operands, **named)
    several = result if isinstance(result, tuple) else (result,)
    made = [x for x in several if x is not None]
    if not made or not all(isinstance(x, Tensor) and x.is_meta for x in made):
        return None
    storages = [x.untyped_storage() for x in made]
    ours = {storage._cdata for storage in storages}
    theirs = {x.untyped_storage()._cdata for x in [*operands, *named.values()] if isinstance(x, Tensor)}
    shapes = tuple(None if x is None else MetaShape.of(x) for x in several)
    whole = all(
        shape.empty().untyped_storage().nbytes() == s.nbytes() for shape, s in zip(map(MetaShape.of, made), storages)
    )
    if len(ours) < len(made) or ours & theirs or not whole:
        return None
    return shapes if isinstance(result, tuple) else shapes[0]
