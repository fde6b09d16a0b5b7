"""What operations on boxes send and keep for backward: counted."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Group, Mesh
from seqpar.spatial import convolution, norms, pooling
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.receptive_field import sliding_reach
from tests.support.boxes import box, numbers
from tests.support.ranks import relative

HALOS = [  # with how many voxels before and behind a box, where boxes begin at multiples of the stride
    (convolution.Conv3d(2, 3, 3, padding=1, bias=False), 1, 1),
    (convolution.Conv3d(2, 3, 3, padding=1, stride=2, bias=False), 1, 0),
    (convolution.Conv3d(2, 3, 7, padding=3, stride=2, bias=False), 3, 2),
    (convolution.Conv3d(2, 3, 3, padding=2, dilation=2, bias=False), 2, 2),
    (convolution.Conv3d(2, 3, 1, bias=False), 0, 0),
    (convolution.Conv3d(2, 3, 2, stride=2, bias=False), 0, 0),
    (convolution.ConvTranspose3d(2, 3, 2, stride=2, bias=False), 0, 0),
    (convolution.ConvTranspose3d(2, 3, 3, stride=2, padding=1, bias=False), 0, 1),
    (convolution.ConvTranspose3d(2, 3, 4, stride=2, padding=1, bias=False), 1, 1),
    (pooling.MaxPool3d(3, 2, 1), 1, 0),
    (pooling.Upsample(scale_factor=2, mode="trilinear"), 1, 1),
    (pooling.Upsample(scale_factor=2), 0, 0),
]


def check_bytes(mesh: Mesh, edges: tuple[tuple[int, ...], ...]) -> list[tuple[int, int, int]]:
    """Returns for each of HALOS what all ranks received forward and backward, and the formula."""
    grid, results = BoxGrid(edges, mesh.seq), []
    for module, low, high in HALOS:
        x = numbers(1, 2, 2, *grid.sides).requires_grad_()
        mesh.seq.traffic.clear()
        y, _ = module.double()(x, grid)
        forward = mesh.seq.traffic["window"]
        y.sum().backward()
        grown, received = 1, 0
        for at, count, side in zip(grid.place, grid.parts, grid.sides):
            halo = low * (at > 0) + high * (at < count - 1)
            received, grown = received * side + grown * halo, grown * (side + halo)
        counts = torch.tensor([forward, mesh.seq.traffic["window"] - forward, received * 2 * 2 * 8])
        results.append(tuple(all_reduce(counts, mesh.seq).tolist()))
    return results


@pytest.mark.parametrize(
    "edges",
    [
        ((0, 4, 12), (0, 4), (0, 6)),
        ((0, 4), (0, 4, 8, 16), (0, 2)),
        ((0, 4, 10), (0, 6), (0, 4, 12)),
        ((0, 8, 12), (0, 4, 10), (0, 6, 10)),
    ],
)
def test_halos_move_the_bytes_of_the_formula(edges: tuple[tuple[int, ...], ...], ranks: Callable[..., list]) -> None:
    """Along each dimension the slabs before and behind, of boxes that the earlier dimensions have widened."""
    world = math.prod(len(e) - 1 for e in edges)
    for (forward, backward, formula), (module, low, high) in zip(ranks(world, check_bytes, edges)[0], HALOS):
        assert forward == backward == formula, module
        assert (formula > 0) == (low + high > 0)


def kept_bytes(module: nn.Module, x: Tensor, grid: BoxGrid | None) -> int:
    """Returns the bytes of distinct storages that are held for backward, parameters and buffers excluded."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        if saved.untyped_storage().data_ptr() not in own:
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        y, _ = module(x.requires_grad_(), grid)
    assert y.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "module",
    [
        norms.InstanceNorm3d(4, affine=True),
        norms.InstanceNorm3d(4),
        norms.BatchNorm3d(4),
        norms.GroupNorm(2, 4),
        norms.ChannelLayerNorm(4),
        convolution.Conv3d(4, 4, 3, padding=1),
        convolution.Conv3d(4, 4, 3, padding=1, keep_window=False),
        convolution.ConvTranspose3d(4, 4, 2, 2),
        pooling.MaxPool3d(2),
        pooling.Upsample(scale_factor=2, mode="trilinear"),
    ],
    ids=str,
)
def test_a_group_of_one_keeps_no_more_than_torch_itself(module: nn.Module, dtype: torch.dtype) -> None:
    module, x = copy.deepcopy(module).to(dtype), numbers(1, 2, 4, 6, 4, 4).to(dtype)
    grid = BoxGrid(((0, 6), (0, 4), (0, 4)), Group("seq"))
    ours, torchs = kept_bytes(module, x, grid), kept_bytes(module, x, None)
    assert ours <= torchs and (torchs >= x.numel() * x.element_size() or isinstance(module, nn.Upsample))


def check_kept(mesh: Mesh) -> list[tuple[int, int]]:
    """Returns the bytes kept with and without windows, and what the backward sends."""
    grid, results = BoxGrid(((0, 3, 8), (0, 4), (0, 4)), mesh.seq), []
    for keep in (True, False):
        module = convolution.Conv3d(2, 2, 3, padding=1, keep_window=keep).double()
        x = numbers(1, 1, 2, *grid.sides)
        kept = kept_bytes(module, x, grid)
        y, _ = module(x.requires_grad_(), grid)
        mesh.seq.traffic.clear()
        y.sum().backward()
        results.append((kept, mesh.seq.traffic["window"]))
    return results


def test_a_convolution_keeps_its_window_or_fetches_it_again(ranks: Callable[..., list]) -> None:
    voxel, slab = 2 * 8, 2 * 4 * 4 * 8
    for side, results in zip((3, 5), ranks(2, check_kept)):
        kept, fetched = results
        assert kept == ((side + 2) * 16 * voxel, slab)  # the window with its halo and padding; the gradient's halo
        assert fetched == (side * 16 * voxel, 2 * slab)  # the box; its halo again, and the gradient's


class Copies(TorchDispatchMode):
    """Counts the copies of tensors of at least so many values."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket.__name__ in ("copy_", "clone", "_to_copy", "cat"):
            self.count += args[0].numel() >= self.size
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("last", [False, True])
def test_a_convolution_copies_its_box_once_each_way(last: bool) -> None:
    order = torch.channels_last_3d if last else torch.contiguous_format
    grid = BoxGrid(((0, 8, 16),) * 3, Group("seq", tuple(range(8)), 3))  # halos along each direction
    module = convolution.Conv3d(2, 2, 3, padding=1, bias=False).to("meta")
    x = torch.empty(1, 2, 8, 8, 8, device="meta").contiguous(memory_format=order).requires_grad_()
    with Copies(x.numel()) as copies:
        window = convolution.Halos.of(grid, [sliding_reach(e, 3, 1, (1, 1), "it") for e in grid.edges]).open(x.detach())
    assert copies.count == 1 and window.shape[2:] == (10, 10, 10) and window.is_contiguous(memory_format=order)
    with Copies(x.numel()) as copies:
        y, _ = module(x, grid)
    assert copies.count <= 1 + last  # torch's own result comes in another order on tensors without data
    with Copies(x.numel()) as copies:
        (dx,) = torch.autograd.grad(y, x, torch.empty_like(y))
    assert copies.count == 1 and dx.shape == x.shape


def check_autocast(mesh: Mesh) -> tuple[float, int, list[torch.dtype]]:
    grid = BoxGrid(((0, 3, 8), (0, 4), (0, 4)), mesh.seq)
    whole, norm = numbers(1, 1, 2, 8, 4, 4).float(), norms.InstanceNorm3d(2)
    module = convolution.Conv3d(2, 2, 3, padding=1)
    torch.default_generator.manual_seed(1)
    module.reset_parameters()
    part = whole[box(grid)].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = norm(*module(part, grid))
        reference, _ = norm(module(whole)[0])
    sent = mesh.seq.traffic["window"]
    y.float().square().sum().backward()
    assert part.grad is not None and module.weight.grad is not None
    gap = relative(y.detach().float(), reference.detach().float()[box(grid)])
    return gap, sent, [y.dtype, reference.dtype, part.grad.dtype, module.weight.grad.dtype]


def test_under_autocast_halos_travel_in_the_lower_precision(ranks: Callable[..., list]) -> None:
    half, full = torch.bfloat16, torch.float32
    for gap, sent, dtypes in ranks(2, check_autocast):
        assert gap < 3e-2 and sent == 2 * 4 * 4 * 2 and dtypes == [half, half, full, full]
