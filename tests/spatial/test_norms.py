"""Norms on boxes: statistics over all ranks, of one voxel a rank, over the data group too, the same bits everywhere."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Group, Mesh
from seqpar.spatial import cache_pieces, norm_function, norms
from seqpar.spatial.box_grid import BoxGrid
from tests.support.boxes import apart, box, check_cases, make_case, numbers
from tests.support.ranks import relative


def check_one_voxel(mesh: Mesh) -> tuple[int, int]:
    edges = (tuple(range(mesh.seq.size + 1)), (0, 1), (0, 1))
    whole = numbers(1, 2, 3, mesh.seq.size, 1, 1)
    module = norms.InstanceNorm3d(3, affine=True).double()
    return check_cases(mesh, [make_case(module, edges, whole, mesh.seq.size)])


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_instance_norm_of_one_voxel_on_each_rank(world: int, ranks: Callable[..., list]) -> None:
    assert ranks(world, check_one_voxel) == [(1, 1)] * world


def check_data_norm(mesh: Mesh, spread_out: bool) -> float:
    """Batch norm over two data ranks, with and without boxes, against one process with the whole batch."""
    whole, towards = numbers(1, 4, 3, 5, 2, 2).requires_grad_(), numbers(2, 4, 3, 5, 2, 2)
    alone, ours = norms.BatchNorm3d(3).double(), norms.BatchNorm3d(3, data=mesh.data).double()
    reference, _ = alone(whole)
    dx, *dweights = torch.autograd.grad(reference, [whole, *alone.parameters()], towards)
    grid = BoxGrid(((0, 2, 5), (0, 2), (0, 2)), mesh.seq) if spread_out else None
    where = (slice(2 * mesh.data.index, 2 * mesh.data.index + 2), *(box(grid) if grid else (...,)))
    part = whole.detach()[where].clone().requires_grad_()
    y, after = ours(part, grid)
    assert after is grid
    dpart, *dparts = torch.autograd.grad(y, [part, *ours.parameters()], towards[where])
    sums = [all_reduce(d, mesh.world if grid else mesh.data) for d in dparts]
    pairs = [(y.detach(), reference.detach()[where]), (dpart, dx[where]), *zip(sums, dweights)]
    pairs += [(mine.double(), other.double()) for mine, other in zip(ours.buffers(), alone.buffers())]
    return max(apart(*pair) for pair in pairs)


@pytest.mark.parametrize("spread_out", [True, False])
def test_batch_norm_over_the_data_group_too(spread_out: bool, ranks: Callable[..., list]) -> None:
    assert max(ranks(4 if spread_out else 2, check_data_norm, spread_out, seqpar=2 if spread_out else 1)) < 1e-12


def check_running(mesh: Mesh) -> list[Tensor]:
    module = norms.BatchNorm3d(3, momentum=None)
    grid = BoxGrid(((0, 1, 4, 6), (0, 3), (0, 3)), mesh.seq)
    for step in range(3):
        module(numbers(step, 2, 3, 6, 3, 3).float()[box(grid)], grid)
    module.eval()
    y, _ = module(torch.ones(1, 3, *grid.sides), grid)
    return [*module.buffers(), y[:, :, 0, 0, 0]]


def test_running_statistics_are_the_same_bits_on_all_ranks(ranks: Callable[..., list]) -> None:
    first, *others = ranks(3, check_running)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))


@pytest.mark.parametrize("make", [lambda: norms.InstanceNorm3d(2), lambda: norms.GroupNorm(1, 2)])
def test_statistics_stay_accurate_where_the_mean_is_large(make: Callable[[], nn.Module]) -> None:
    x = numbers(1, 1, 2, 8, 8, 8).float() + 3e3
    grid = BoxGrid(((0, 8), (0, 8), (0, 8)), Group("seq"))
    exact, _ = make().double()(x.double())
    ours, torchs = (relative(make()(x, s)[0].detach().double(), exact.detach()) for s in (grid, None))
    assert ours <= 2 * torchs + 1e-6 and ours < 1e-3


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("make", [lambda: norms.InstanceNorm3d(4, affine=True, track_running_stats=True),
                                  lambda: norms.InstanceNorm3d(4), lambda: norms.GroupNorm(2, 4),
                                  lambda: norms.BatchNorm3d(4, data=Group("data"))])  # fmt: skip
def test_norms_of_whole_samples_are_those_of_pieces(
    make: Callable[[], nn.Module], last: bool, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU takes them."""
    order = torch.channels_last_3d if last else torch.contiguous_format
    grid, results = BoxGrid(((0, 6), (0, 5), (0, 4)), Group("seq")), []
    monkeypatch.setattr(cache_pieces, "_GPU_AT_ONCE", samples * 4 * 6 * 5 * 4)
    for whole in (True, False):
        monkeypatch.setattr(cache_pieces, "fits_whole_samples", lambda x, whole=whole: whole)
        module, x = make().double(), numbers(1, 2, 4, 6, 5, 4).contiguous(memory_format=order).requires_grad_()
        with torch.no_grad():
            for number, p in enumerate(module.parameters()):
                p.copy_(numbers(number + 2, 4))
        y, _ = module(x, grid)
        grads = torch.autograd.grad((y * numbers(9, *y.shape)).sum(), [x, *module.parameters()])
        results.append([y.detach(), *grads, *(b.double() for b in module.buffers())])
        assert y.is_contiguous(memory_format=order) and grads[0].is_contiguous(memory_format=order)
    assert all(relative(mine, want) < 1e-12 for mine, want in zip(*results, strict=True))


@pytest.mark.parametrize("whole", [False, True], ids=["a CPU's pieces", "a GPU's samples"])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("make, torchs", [
    (lambda: norms.InstanceNorm3d(3, affine=True), lambda: nn.InstanceNorm3d(3, affine=True)),
    (lambda: norms.InstanceNorm3d(3), lambda: nn.InstanceNorm3d(3)),
    (lambda: norms.GroupNorm(1, 3), lambda: nn.GroupNorm(1, 3)),
    (lambda: norms.BatchNorm3d(3, data=Group("data")), lambda: nn.BatchNorm3d(3)),
])  # fmt: skip
@pytest.mark.parametrize("slope", [0.01, 0.0])
def test_a_leaky_relu_within_a_norm_is_one_behind_it(
    make: Callable[[], nn.Module],
    torchs: Callable[[], nn.Module],
    dtype: torch.dtype,
    bound: float,
    whole: bool,
    slope: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (cache_pieces, norm_function):
        monkeypatch.setattr(module, "fits_whole_samples", lambda x: whole)
    monkeypatch.setattr(cache_pieces, "_AT_ONCE", 64)  # several pieces a volume, and a rest
    monkeypatch.setattr(cache_pieces, "_LINE", 14)
    grid = BoxGrid(((0, 6), (0, 5), (0, 4)), Group("seq"))
    x, towards = numbers(1, 2, 3, 6, 5, 4).to(dtype), numbers(2, 2, 3, 6, 5, 4).to(dtype)
    ours, theirs = make().to(torch.promote_types(dtype, torch.float32)), torchs().double()
    for number, (p, q) in enumerate(zip(ours.parameters(), theirs.parameters())):
        with torch.no_grad():
            q.copy_(p.copy_(numbers(number + 3, 3)))
    wanted = x.double().requires_grad_()
    before = theirs(wanted)
    towards *= before.detach().abs() > 0.05  # nearer to the kink, rounding decides which side a value is on
    reference = nn.functional.leaky_relu(before, slope)
    want = [reference, *torch.autograd.grad((reference * towards.double()).sum(), [wanted, *theirs.parameters()])]
    for order in (torch.contiguous_format, torch.channels_last_3d):
        part = x.contiguous(memory_format=order).requires_grad_()
        y, after = ours(part, grid, slope)
        grads = torch.autograd.grad((y * towards).sum(), [part, *ours.parameters()])
        assert after is grid and y.dtype == dtype and y.is_contiguous(memory_format=order)
        assert all(relative(a.double(), b.detach()) < bound for a, b in zip([y.detach(), *grads], want, strict=True))


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("weighted", [False, True])
def test_small_whole_volumes_are_normed_by_torch_to_the_same_numbers(
    last: bool, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with running statistics, which torch's kernel does not return as such."""
    order = torch.channels_last_3d if last else torch.contiguous_format
    whole, towards = numbers(1, 3, 4, 5, 6, 7), numbers(2, 3, 4, 5, 6, 7)
    grid = BoxGrid(((0, 5), (0, 6), (0, 7)), Group("seq"))
    results = []
    for small in (norm_function._SMALL, 0):
        monkeypatch.setattr(norm_function, "_SMALL", small)
        module = norms.InstanceNorm3d(4, affine=weighted, track_running_stats=True).double()
        x = whole.contiguous(memory_format=order).requires_grad_()
        y, _ = module(x, grid, 0.01)
        names = {type(node[0]).__name__ for node in (y.grad_fn, *y.grad_fn.next_functions) if isinstance(node, tuple)}
        assert ("_SmallNormBackward" in names) == bool(small), names
        assert y.is_contiguous(memory_format=order)
        results.append([y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], towards), *module.buffers()])
    for mine, other in zip(*results):
        assert apart(mine.double(), other.double()) < 1e-12
