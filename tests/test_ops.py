"""Each operation on boxes equals torch's own on the joined volume: output, input gradient, parameter gradients."""

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from seqpar.collectives import all_reduce
from seqpar.decoders import norms, ops, pooling
from seqpar.decoders.spread import Spread
from seqpar.mesh import Group, Mesh

WORLDS = [2, 3, 4, 8]
CASES = 150

Case = tuple[nn.Module, Spread, Tensor]  # the operation, how the volume is spread, the volume


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_edges(group: Group, dice: random.Random, widest: int = 4) -> tuple[tuple[int, ...], ...]:
    """Returns unequal cuts along one to three dimensions."""
    parts = [1, 1, 1]
    left = group.size
    while left > 1:
        prime = next(p for p in range(2, left + 1) if left % p == 0)
        parts[dice.randrange(3)] *= prime
        left //= prime
    widths = ([dice.randint(1, widest if n > 1 else widest + 2) for _ in range(n)] for n in parts)
    return tuple((0, *itertools.accumulate(row)) for row in widths)


def draw(dice: random.Random, low: int, high: int) -> tuple[int, int, int]:
    return dice.randint(low, high), dice.randint(low, high), dice.randint(low, high)


def conv(dice: random.Random) -> tuple[int, nn.Module]:
    groups = dice.choice([1, 1, 2])
    strides, dilations, kernels = draw(dice, 1, 3), draw(dice, 1, 2), draw(dice, 1, 4)
    padding: str | tuple[int, int, int] = draw(dice, 0, 3)
    if dice.random() < 0.2:
        strides, padding = (1, 1, 1), dice.choice(["same", "valid"])
    keep, bias = dice.random() < 0.5, dice.random() < 0.7
    options = {"stride": strides, "padding": padding, "dilation": dilations, "groups": groups, "bias": bias}
    return 2, ops.Conv3d(2, 2 * dice.randint(1, 2), kernels, **options, keep_window=keep)


def transposed(dice: random.Random) -> tuple[int, nn.Module]:
    strides, dilations, kernels = draw(dice, 1, 3), draw(dice, 1, 2), draw(dice, 1, 4)
    paddings = tuple(dice.randint(0, min(2, d * (k - 1))) for k, d in zip(kernels, dilations))
    extra = tuple(dice.randint(0, max(s, d) - 1) for s, d in zip(strides, dilations))
    keep, bias, groups = dice.random() < 0.5, dice.random() < 0.7, dice.choice([1, 1, 2])
    options = {"stride": strides, "padding": paddings, "dilation": dilations, "output_padding": extra}
    return 2, ops.ConvTranspose3d(2, 2, kernels, **options, groups=groups, bias=bias, keep_window=keep)


def max_pool(dice: random.Random) -> tuple[int, nn.Module]:
    kernels, dilations = draw(dice, 1, 4), draw(dice, 1, 2)
    padding = tuple(dice.randint(0, k // 2) if d == 1 else 0 for k, d in zip(kernels, dilations))
    return 2, pooling.MaxPool3d(kernels, draw(dice, 1, 3), padding, dilations, ceil_mode=dice.random() < 0.5)


def avg_pool(dice: random.Random) -> tuple[int, nn.Module]:
    kernels = draw(dice, 1, 4)
    padding = tuple(dice.randint(0, k // 2) for k in kernels)
    counted, override, ceil = dice.random() < 0.5, dice.choice([None, None, 3]), dice.random() < 0.5
    return 2, pooling.AvgPool3d(kernels, draw(dice, 1, 3), padding, ceil, counted, override)


def upsample(dice: random.Random) -> tuple[int, nn.Module]:
    factor = draw(dice, 1, 3) if dice.random() < 0.5 else dice.randint(1, 3)
    return 2, pooling.Upsample(scale_factor=factor, mode=dice.choice(["nearest", "nearest-exact", "trilinear"]))


def instance_norm(dice: random.Random) -> tuple[int, nn.Module]:
    affine, tracked = dice.random() < 0.5, dice.random() < 0.5
    return 3, norms.InstanceNorm3d(3, affine=affine, track_running_stats=tracked, momentum=0.3)


def batch_norm(dice: random.Random) -> tuple[int, nn.Module]:
    affine, tracked, momentum = dice.random() < 0.5, dice.random() < 0.5, dice.choice([0.1, 0.5, None])
    return 3, norms.BatchNorm3d(3, affine=affine, track_running_stats=tracked, momentum=momentum)


def group_norm(dice: random.Random) -> tuple[int, nn.Module]:
    return 6, norms.GroupNorm(dice.choice([1, 2, 3, 6]), 6, affine=dice.random() < 0.5)


def layer_norm(dice: random.Random) -> tuple[int, nn.Module]:
    return 3, norms.ChannelLayerNorm(3, bias=dice.random() < 0.5)


def global_mean(dice: random.Random) -> tuple[int, nn.Module]:
    return 3, pooling.GlobalMean()


MAKERS = [
    conv,
    transposed,
    max_pool,
    avg_pool,
    upsample,
    instance_norm,
    batch_norm,
    group_norm,
    layer_norm,
    global_mean,
]


def slices(spread: Spread | None) -> tuple[slice, ...]:
    return (..., *(slice(*side) for side in spread.box)) if spread else (...,)  # type: ignore[return-value]


def compare(module: nn.Module, spread: Spread, whole: Tensor) -> float:
    """Returns the largest relative gap to torch's own of output, gradients and running statistics."""
    group, before = spread.group, {key: value.clone() for key, value in module.state_dict().items()}
    whole = whole.requires_grad_()
    reference, _ = module(whole)
    running = {key: value.clone() for key, value in module.state_dict().items()}
    weights = list(module.parameters())
    is_whole = isinstance(module, pooling.GlobalMean)  # the output is: each rank's loss has a gradient of its own
    towards = [numbers(7 + q, *reference.shape) for q in range(group.size if is_whole else 1)]
    (dx, *dweights) = torch.autograd.grad(reference, [whole, *weights], sum(towards))
    module.load_state_dict(before)
    part = whole.detach()[slices(spread)].clone().requires_grad_()
    y, after = module(part, spread)
    mine = towards[0][slices(after)] if after else towards[group.index]
    (dpart, *dparts) = torch.autograd.grad(y, [part, *weights], mine)
    assert after is None or after.extents == reference.shape[2:], (module, spread.edges)
    gaps = [apart(y.detach(), reference.detach()[slices(after)]), apart(dpart, dx[slices(spread)])]
    gaps += [apart(all_reduce(mine, group), both) for mine, both in zip(dparts, dweights)]
    gaps += [apart(value.double(), running[key].double()) for key, value in module.state_dict().items()]
    return max(gaps)


def apart(a: Tensor, b: Tensor) -> float:
    """Returns max |a - b|, relative where the values are large."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(((a - b).abs() / b.abs().clamp(min=1)).max())


def check_random(mesh: Mesh, maker: Callable[[random.Random], tuple[int, nn.Module]], count: int) -> tuple[float, int]:
    dice, worst, done, cuts = random.Random(maker.__name__), 0.0, 0, set()
    while done < count:
        torch.manual_seed(done)
        channels, module = maker(dice)
        spread = Spread(random_edges(mesh.seq, dice), mesh.seq)
        whole = numbers(done, dice.randint(1, 2), channels, *spread.extents)
        try:
            gap = compare(module.double().train(), spread, whole)
        except (ValueError, RuntimeError) as error:
            assert "no output" in str(error) or "leaves nothing" in str(error) or _torch_refuses(module, whole), error
            continue
        assert gap < 1e-10, (gap, module, spread.edges, whole.shape)
        worst, done = max(worst, gap), done + 1
        cuts.add(sum(n > 1 for n in spread.parts))
    return worst, len(cuts)


def _torch_refuses(module: nn.Module, whole: Tensor) -> bool:
    try:
        module(whole)
    except (ValueError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
@pytest.mark.parametrize("world", WORLDS)
def test_on_boxes_equals_torchs_own_on_the_joined_volume(
    world: int, maker: Callable[[random.Random], tuple[int, nn.Module]], ranks: Callable[..., list]
) -> None:
    for _, kinds_of_cut in ranks(world, check_random, maker, CASES):
        assert kinds_of_cut == min(3, int(math.log2(world)))
