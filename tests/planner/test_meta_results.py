"""Results without data are those of torch: shape, type and order in memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from seqpar.planner import memory_counter
from seqpar.planner.memory_counter import MemoryCounter, tensors_of
from seqpar.planner.meta_results import _IN_PLACE, _INTO, _NEW, elementwise_result, known_result
from seqpar.planner.step_counter import StepSetup, count_whole_step
from seqpar.settings.config import Config

aten = torch.ops.aten
WHOLE = torch.zeros(2, 3, 4, 5, 6, device="meta")
LAYOUTS = {
    "contiguous": WHOLE,
    "channels last": WHOLE.to(memory_format=torch.channels_last_3d),
    "turned": WHOLE.transpose(1, 3),
    "a part": torch.zeros(2, 3, 9, 5, 6, device="meta")[:, :, 2:6],
    "double": WHOLE.double(),
}


def operands(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs for two operands: alike, one a column, one contiguous."""
    column = x.new_zeros(1, x.shape[1], 1, 1, 1)
    return [(x, torch.zeros_like(x)), (x, column), (column, x), (x, x.contiguous()), (x, x.new_zeros(()))]


def arguments(func, x: Tensor) -> list[tuple]:
    if func in (aten.addcdiv_.default, aten.addcmul_.default):
        return [(x, x.clone(), x.clone())]
    if func is aten.lerp_.Scalar:
        return [(x, x.clone(), 0.5)]
    if func in (aten.leaky_relu.default, aten.leaky_relu_.default, aten.sqrt.default):
        return [(x,)]
    if func in (aten.pow.Tensor_Scalar, aten.pow_.Scalar):
        return [(x, 2)]
    return [*((a, b) for a, b in operands(x) if func in _NEW or a.shape == x.shape), (x, 2.0)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("func", sorted(_IN_PLACE | _INTO | _NEW, key=str), ids=str)
def test_a_result_is_as_torchs(func, layout: str) -> None:
    x = LAYOUTS[layout]
    for args in arguments(func, x):
        if func in _INTO and not isinstance(args[1], Tensor):
            continue
        how = {"out": torch.empty_like(x)} if func in _INTO else {}
        ours, torchs = elementwise_result(func, args, how, tensors_of((*args, *how.values()))), func(*args, **how)
        assert ours is not None
        assert (ours.shape, ours.stride(), ours.dtype) == (torchs.shape, torchs.stride(), torchs.dtype), args
        assert (ours is args[0]) == (func in _IN_PLACE) and (ours is how.get("out")) == (func in _INTO)


def test_torch_says_where_operands_differ_in_kind_or_spread_each_other() -> None:
    x, column, row = WHOLE[0, 0, 0], torch.zeros(5, 1, device="meta"), torch.zeros(1, 6, device="meta")
    whole_numbers, real = torch.zeros(5, 6, dtype=torch.int64, device="meta"), torch.zeros(5, 6)
    for a, b in ((column, row), (x, x.double()), (whole_numbers, whole_numbers), (real, real)):
        assert elementwise_result(aten.mul.Tensor, (a, b), {}, [a, b]) is None
        with MemoryCounter() as counter:
            assert (a * b).shape == (5, 6)
        assert counter.most == 5 * 6 * (a * b).element_size()


CONVOLUTION = (
    [1, 1, 1],
    [1, 1, 1],
    [1, 1, 1],
    False,
    [0, 0, 0],
    1,
)  # stride, padding, dilation, not transposed, groups
KNOWN = {
    "sum": lambda x: (aten.sum.dim_IntList, (x, [1], True), {}),
    "sum as double": lambda x: (aten.sum.dim_IntList, (x, [1]), {"dtype": torch.float64}),
    "compare": lambda x: (aten.gt.Scalar, (x, 0), {}),
    "join": lambda x: (aten.cat.default, ([x, x.clone()], 1), {}),
    "stack": lambda x: (aten.stack.default, ([x, x],), {}),
    "copy": lambda x: (aten.clone.default, (x,), {"memory_format": torch.contiguous_format}),
    "layer norm": lambda x: (aten.native_layer_norm.default, (x, [6], None, None, 1e-5), {}),
    "maximum": lambda x: (aten.max_pool3d_with_indices.default, (x, [2, 2, 2]), {}),
    "convolution": lambda x: (aten.convolution.default, (x, kernels(x), None, *CONVOLUTION), {}),
    "its gradients": lambda x: (
        aten.convolution_backward.default,
        (x.new_zeros(len(x), 7, *x.shape[2:]), x, kernels(x), None, *CONVOLUTION, [True, False, False]),
        {},
    ),
}


def kernels(x: Tensor) -> Tensor:
    return x.new_zeros(7, x.shape[1], 3, 3, 3)


def shapes(results: object) -> list[object]:
    every = results if isinstance(results, tuple) else (results,)
    return [x if x is None else (x.shape, x.stride(), x.dtype, x.untyped_storage().nbytes()) for x in every]


def storages(*values: object) -> set[int]:
    return {x.untyped_storage()._cdata for x in tensors_of(values)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KNOWN)
def test_a_result_that_is_known_is_as_torchs_and_new(name: str, layout: str) -> None:
    func, args, kwargs = KNOWN[name](LAYOUTS[layout])
    torchs = func(*args, **kwargs)
    first, second = (known_result(func, args, kwargs, tensors_of((*args, *kwargs.values()))) for _ in range(2))
    assert first is not None and shapes(first) == shapes(second) == shapes(torchs)
    assert not storages(first) & storages(second) and not storages((first, second)) & storages(args)


def test_views_data_and_what_is_changed_are_left_to_torch() -> None:
    x = WHOLE
    for func, args in (
        (aten._unsafe_view.default, (x, [2, 3, 120])),  # of which torch does not say that it is a view
        (aten.view.default, (x, [2, 3, 120])),
        (aten.detach.default, (x,)),
        (aten.add_.Tensor, (x, x)),
        (aten.sum.default, (torch.zeros(3),)),
        (aten.zeros.default, ([3],)),
    ):
        assert known_result(func, args, {}, tensors_of(args)) is None, func


def test_an_argument_is_known_by_its_type_too() -> None:
    whole = torch.zeros(3, dtype=torch.int64, device="meta")
    for number in (1, 1.0, True, 1):
        assert known_result(aten.mul.Scalar, (whole, number), {}, [whole]).dtype == (whole * number).dtype


@pytest.mark.parametrize("more", [{}, {"decoder": "unetr", "mode": "halo", "seqpar": 2, "grad_checkpoint": "full"}])
def test_a_step_takes_the_same_whether_results_are_known_or_not(
    more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"tile": (16, 16, 16), "patch": 4, "depth": 1, "embed_dim": 24, "heads": 2, "decoder_width": 4, "batch": 1}
    config = Config(**{**sizes, **more})
    count: Callable[[StepSetup], object] = count_whole_step.__wrapped__
    asked = 0

    def ask(*of: object) -> None:
        nonlocal asked
        asked += 1

    steps = [count(StepSetup(config)) for _ in range(2)]
    monkeypatch.setattr(memory_counter, "known_result", ask)
    steps.append(count(StepSetup(config)))
    assert steps[0] == steps[1] == steps[2] and asked > 100
