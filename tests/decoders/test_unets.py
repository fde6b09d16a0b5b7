"""The named U-Nets: parameters as published, functions as written down, and what they refuse."""

import itertools
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.decoders.resattnet import ResAttNet
from seqpar.decoders.unets import Architecture, Style, UNet, distmis, hou, lamp, mednext, nnunet
from seqpar.decoders.unets.nnunet import network, of_plan, topology
from seqpar.decoders.unets.published import SQUEEZE
from seqpar.decoders.unets.unet_blocks import init_weights
from seqpar.pipeline.cells import IMAGE, Cell, CellNet
from tests.support.boxes import numbers
from tests.support.ranks import relative
from tests.support.unets import make


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def with_statistics(net: nn.Module) -> int:
    return count(net) + sum(b.numel() for b in net.buffers() if b.is_floating_point())


def hou_count(widths: list[int], channels: int, outputs: int, dims: int = 3) -> int:
    """Returns the parameters of four convolutions a level, transposed ones, batch norms and a last convolution."""
    total = outputs * (widths[0] + 1)
    for before, width in itertools.pairwise([channels, *widths]):
        total += 3**dims * width * (before + 3 * width) + 8 * width
    for width, below in itertools.pairwise(widths):
        total += 2**dims * below * width + 3**dims * width * (2 * width + 3 * width) + 8 * width
    return total


COUNTS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "nnunet-plain, 6 stages": (lambda: nnunet(1, 3), 31_196_399),
    "nnunet-resenc, 6 stages": (lambda: nnunet(1, 3, residual=True), 102_350_575),
    "lamp 32": (lambda: lamp(1, 10), 22_906_650),
    "lamp 64": (lambda: lamp(1, 10, 64), 91_604_522),
    "lamp 128": (lambda: lamp(1, 10, 128), 214_284_906),
    "distmis text": (lambda: distmis(4, 1, variant="text"), 351_809),
    **{
        f"mednext {size} {kernel}": (lambda size=size, kernel=kernel: mednext(1, 3, size, kernel), parameters)
        for (size, kernel), parameters in {  # of the package's own, without a parameter that it does not use
            ("s", 3): 5_550_947,
            ("b", 3): 10_526_339,
            ("m", 3): 17_548_995,
            ("l", 3): 61_779_299,
            ("s", 5): 5_980_579,
            ("b", 5): 10_955_971,
            ("m", 5): 18_260_867,
            ("l", 5): 62_992_931,
        }.items()
    },  # fmt: skip
    **{
        f"hou {side}": (lambda side=side: hou(1, 3, side), hou_count(widths, 1, 3))
        for side, widths in (
            (64, [256, 512, 1024]),
            (128, [128, 256, 512, 1024]),
            (256, [64, 128, 256, 512, 1024]),
            (512, [32, 64, 128, 256, 512, 1024]),
        )
    },
    "hou 512 x 512 x 5": (  # whose five slices are channels
        lambda: hou(1, 3, 512, dims=2),
        hou_count([32, 64, 128, 256, 512, 1024], 5, 3, dims=2),
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_as_many_as_published(name: str) -> None:
    build, wanted = COUNTS[name]
    with torch.device("meta"):
        assert count(build()) == wanted


def test_distmis_has_its_parameters_with_the_moving_statistics_of_its_last_axis() -> None:
    assert with_statistics(distmis(in_channels=4, num_outputs=1, length=152, variant="code")) == 406_793
    assert with_statistics(distmis(4, 1, 160)) != 406_793
    lengths = [m.num_features for m in distmis(4, 1).modules() if isinstance(m, nn.BatchNorm3d)]
    assert sorted(set(lengths)) == [19, 38, 76, 152]
    groups = [m.num_groups for m in distmis(4, 1, norm="group").modules() if isinstance(m, nn.GroupNorm)]
    assert groups == [19] * 14
    text = [m.num_groups for m in distmis(4, 1, variant="text", norm="group").modules() if isinstance(m, nn.GroupNorm)]
    assert text == [8] * 14, "groups of channels"


def test_squeeze_excite_is_what_the_second_lamp_has_more() -> None:
    with torch.device("meta"):
        plain, squeezed = lamp(1, 10), lamp(1, 10, squeeze=SQUEEZE)
    widths = [32, 64, 128, 256, 512, 256, 128, 64, 32]
    assert count(squeezed) - count(plain) == sum(2 * w * (w // 16) + w + w // 16 for w in widths)


def distmis_reference(state: dict[str, Tensor], x: Tensor, in_groups: bool = False) -> Tensor:
    """Returns DistMIS's function in training, written with torch's functions alone.

    - ``in_groups``: with the group norm of its release, whose groups are runs of positions along the last axis
    """
    groups = x.shape[-1] // 8  # 19 of 152

    def conv(x: Tensor, name: str) -> Tensor:
        y = F.conv3d(x, state[f"{name}.conv.weight"], state[f"{name}.conv.bias"], padding=1)
        if in_groups:
            runs = y.unflatten(-1, (groups, -1))
            mean, var = runs.mean((1, 2, 3, 5), True), runs.var((1, 2, 3, 5), correction=0, keepdim=True)
            y = ((runs - mean) / (var + 1e-3).sqrt()).flatten(-2)
        else:
            mean, var = y.mean((0, 1, 2, 3)), y.var((0, 1, 2, 3), correction=0)
            y = (y - mean) / (var + 1e-3).sqrt()
        return F.relu(y * state[f"{name}.norm.norm.weight"] + state[f"{name}.norm.norm.bias"])

    skips = []
    for level in range(4):
        x = conv(conv(F.max_pool3d(x, 2) if level else x, f"cells.encoder{level}_0"), f"cells.encoder{level}_1")
        skips.append(x)
    for level in (2, 1, 0):
        up = (state[f"cells.up{level}.conv.{kind}"] for kind in ("weight", "bias"))
        x = F.conv_transpose3d(x, *up, stride=2, padding=1, output_padding=1)
        x = conv(conv(torch.cat([x, skips[level]], 1), f"cells.decoder{level}_0"), f"cells.decoder{level}_1")
    return F.conv3d(x, state["cells.classes0.weight"], state["cells.classes0.bias"], padding=1)


def lamp_reference(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """Returns LAMP's function in training, written with torch's functions alone."""

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = state[f"{name}.conv.weight"]
        x = F.conv3d(x, weight, state.get(f"{name}.conv.bias"), stride, weight.shape[-1] // 2)
        if f"{name}.norm.weight" not in state:
            return x
        x = F.batch_norm(x, None, None, state[f"{name}.norm.weight"], state[f"{name}.norm.bias"], True)
        return F.leaky_relu(x, 0.01)

    def up(x: Tensor, name: str) -> Tensor:
        return F.conv_transpose3d(x, state[f"{name}.conv.weight"], state[f"{name}.conv.bias"], 2)

    skips = [conv(x, "cells.encoder0_0", 2)]
    for stage in range(1, 5):
        skips.append(conv(conv(skips[-1], f"cells.encoder{stage}_0", 2), f"cells.encoder{stage}_1"))
    x = skips[-1]
    for level in (3, 2, 1, 0):
        x = conv(torch.cat([up(x, f"cells.up{level}"), skips[level]], 1), f"cells.merge{level}")
        x = conv(conv(x, f"cells.decoder{level}_0"), f"cells.decoder{level}_1")
    x = F.leaky_relu(up(x, "cells.tail"), 0.01)
    return F.conv3d(x, state["cells.classes0.weight"], state["cells.classes0.bias"], padding=1)


def hou_of_slices(state: dict[str, Tensor], slices: Tensor, levels: int) -> Tensor:
    """Returns the function of Hou's two-dimensional network: logits of the slice between four others, its channels."""

    def conv(x: Tensor, name: str) -> Tensor:
        weight = state[f"{name}.conv.weight"]
        weight = weight.movedim(-1, 2).flatten(1, 2) if weight.shape[-1] == 5 else weight[..., 0]
        y = F.conv2d(x, weight, padding=1)
        norm = [state[f"{name}.norm.{kind}"] for kind in ("running_mean", "running_var", "weight", "bias")]
        return F.leaky_relu(F.batch_norm(y, *norm, eps=1e-6), 0.1)

    x, skips = slices, []
    for level in range(levels):
        x = F.max_pool2d(x, 2) if level else x
        for number in range(4):
            x = conv(x, f"cells.encoder{level}_{number}")
        skips.append(x)
    for level in reversed(range(levels - 1)):
        x = torch.cat([F.conv_transpose2d(x, state[f"cells.up{level}.conv.weight"][..., 0], stride=2), skips[level]], 1)
        for number in range(4):
            x = conv(x, f"cells.decoder{level}_{number}")
    return F.conv2d(x, state["cells.classes0.weight"][..., 0], state["cells.classes0.bias"])


def test_hous_baseline_sees_five_slices_as_channels_and_each_slice_by_itself() -> None:
    net = make("hou 2d").eval()
    for buffer in net.buffers():
        if buffer.is_floating_point():
            buffer += numbers(7, *buffer.shape).abs()
    state = {key: value.detach() for key, value in net.state_dict().items()}
    image = numbers(3, 2, 2, 16, 8, 7)
    with torch.no_grad():
        logits, slab = net(image), net(image[..., 1:6])
        for at in (2, 3, 4):
            channels = image[..., at - 2 : at + 3].movedim(-1, 2).flatten(1, 2)
            assert relative(logits[..., at], hou_of_slices(state, channels, 3)) < 1e-12
        assert relative(slab[..., 2], logits[..., 3]) < 1e-12, "the middle slice of five knows all that it needs"
        assert relative(slab[..., 0], logits[..., 1]) > 1e-3


@pytest.mark.parametrize(
    ("name", "reference", "extents"),
    [
        ("distmis", distmis_reference, (16, 8, 16)),
        ("distmis groups", partial(distmis_reference, in_groups=True), (16, 8, 16)),
        ("lamp", lamp_reference, (64, 32, 32)),
    ],
)
def test_published_networks_are_the_function_that_was_published(
    name: str, reference: Callable[..., Tensor], extents: tuple[int, ...]
) -> None:
    net = make(name)
    state = {key: value.detach() for key, value in net.state_dict().items()}
    image = numbers(3, 2, 2, *extents)
    with torch.no_grad():
        assert relative(net(image), reference(state, image)) < 1e-12


@pytest.mark.parametrize(
    ("build", "slope"),
    [
        (lambda: hou(1, 3, features=8), 0.1),
        (lambda: lamp(1, 10, features=8), 0.01),
        (lambda: ResAttNet(1, 2, features=8), 0.0),
    ],
    ids=["hou", "lamp", "resattnet"],
)
def test_kernels_begin_as_hes_for_their_activation_and_biases_at_0(
    build: Callable[[], nn.Module], slope: float
) -> None:
    torch.manual_seed(0)
    for module in build().modules():
        if isinstance(module, (nn.Conv3d, nn.ConvTranspose3d)):
            wanted = (2 / (1 + slope**2) / module.weight[0].numel()) ** 0.5
            spread = 5 * wanted / (2 * module.weight.numel()) ** 0.5
            assert abs(float(module.weight.detach().std()) - wanted) < spread
            assert module.bias is None or not module.bias.any()


@pytest.mark.parametrize(
    ("tile", "spacing", "strides", "kernels"),
    [
        ((128, 128, 128), (1, 1, 1), [(1, 1, 1), *[(2, 2, 2)] * 5], [(3, 3, 3)] * 6),
        ((32, 32, 32), (1, 1, 1), [(1, 1, 1), *[(2, 2, 2)] * 3], [(3, 3, 3)] * 4),
        (
            (20, 320, 256),
            (3.6, 0.62, 0.62),  # of prostates, a plan that is often shown
            [(1, 1, 1), (1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2), (1, 2, 2)],
            [(1, 3, 3), (1, 3, 3), *[(3, 3, 3)] * 5],
        ),
        ((16, 8, 7), (1, 1, 1), [(1, 1, 1), (2, 2, 1)], [(3, 3, 3)] * 2),
        ((12, 7, 7), (1, 1, 1), [(1, 1, 1), (2, 1, 1)], [(3, 3, 3)] * 2),
    ],
)
def test_stages_are_as_nnunet_plans_them(tile: tuple, spacing: tuple, strides: list, kernels: list) -> None:
    assert topology(tile, spacing) == (tuple(kernels), tuple(strides))


def test_a_tile_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(ValueError, match="tile=8 or more"):
        topology((11, 7, 7))


PLAN: dict[str, Any] = {
    "n_stages": 3,
    "features_per_stage": [4, 8, 8],
    "conv_op": "torch.nn.modules.conv.Conv3d",
    "kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
    "n_conv_per_stage": [2, 2, 2],
    "n_conv_per_stage_decoder": [2, 1],
    "conv_bias": True,
    "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
    "norm_op_kwargs": {"eps": 1e-05, "affine": True},
    "dropout_op": None,
    "nonlin": "torch.nn.LeakyReLU",
    "nonlin_kwargs": {"inplace": True},
}


def test_a_plan_says_what_network_it_is() -> None:
    plain = of_plan("dynamic_network_architectures.architectures.unet.PlainConvUNet", PLAN, 1, 3)
    assert (plain.features, plain.kernels[0], plain.strides[1]) == ((4, 8, 8), (1, 3, 3), (1, 2, 2))
    assert (plain.encoder, plain.decoder, plain.heads, plain.stem) == ((2, 2, 2), (2, 1), 2, 0)
    blocks = {name: value for name, value in PLAN.items() if name != "n_conv_per_stage"} | {
        "n_blocks_per_stage": [1, 3, 4]
    }
    residual = of_plan("ResidualEncoderUNet", {**blocks, "bottleneck_channels": 2}, 1, 3)  # which BasicBlockD ignores
    assert (residual.encoder, residual.block, residual.narrow, residual.stem) == ((1, 3, 4), "residual", (), 4)
    narrow = of_plan("ResidualEncoderUNet", {**blocks, "bottleneck_channels": 2, "block": "residual.BottleneckD"}, 1, 3)
    assert (narrow.block, narrow.narrow) == ("bottleneck", (2, 2, 2))
    assert UNet(plain)(torch.randn(1, 1, 8, 8, 8)).shape == (1, 3, 8, 8, 8)


@pytest.mark.parametrize(
    ("name", "more", "advice"),
    [
        ("ResidualUNet", {}, "only PlainConvUNet and ResidualEncoderUNet are"),
        ("PlainConvUNet", {"dropout_op": "torch.nn.Dropout3d"}, "has dropout_op"),
        ("PlainConvUNet", {"nonlin_first": True}, "PlainConvUNet has nonlin_first True, which is not"),
        ("PlainConvUNet", {"n_blocks_per_stage": [1, 3, 4]}, "has n_blocks_per_stage"),
        ("ResidualEncoderUNet", {}, "has n_conv_per_stage"),
        (
            "ResidualEncoderUNet",
            {"n_conv_per_stage": 0, "block": "residual.BottleneckD"},
            "without bottleneck_channels",
        ),
        ("ResidualEncoderUNet", {"n_conv_per_stage": 0, "block": "own.Block"}, "use BasicBlockD or BottleneckD"),
        ("ResidualEncoderUNet", {"n_conv_per_stage": 0, "squeeze_excitation": True}, "has squeeze_excitation"),
        ("PlainConvUNet", {"nonlin_kwargs": {"new": 1}}, "LeakyReLU has new 1"),
        ("PlainConvUNet", {"conv_op": "torch.nn.Conv2d"}, "conv_op torch.nn.Conv2d, .*: use Conv3d"),
        ("PlainConvUNet", {"norm_op": "torch.nn.GroupNorm"}, "InstanceNorm3d, BatchNorm3d"),
        ("PlainConvUNet", {"nonlin": "torch.nn.ReLU"}, "activation ReLU"),
        ("PlainConvUNet", {"norm_op_kwargs": {"affine": False}}, "affine"),
    ],
)
def test_what_a_plan_asks_for_and_is_not_built_is_refused_by_name(name: str, more: dict, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        of_plan(name, {**PLAN, **more}, 1, 3)


def test_deep_supervision_returns_levels_in_training_and_freezes_the_coarsest_head() -> None:
    net = nnunet(1, 3, 32, features=2, deep_supervision=True)
    image = torch.randn(2, 1, 32, 32, 32)
    levels = net.train()(image)
    assert [tuple(x.shape[2:]) for x in levels] == [(32, 32, 32), (16, 16, 16)]
    assert net.output_scales == ((1, 1, 1), (2, 2, 2))
    frozen = {name for name, p in net.named_parameters() if not p.requires_grad}
    assert frozen == {"cells.classes2.weight", "cells.classes2.bias"}
    sum(x.sum() for x in levels).backward()
    assert not [name for name, p in net.named_parameters() if (p.grad is None) != (name in frozen)]
    with torch.no_grad():
        assert torch.equal(net.eval()(image), net.train()(image)[0])


def test_residual_blocks_begin_as_their_shortcut() -> None:
    last = [m.convs[-1].norm for m in nnunet(1, 2, 16, features=2, residual=True).modules() if hasattr(m, "project")]
    assert len(last) == 1 + 3 + 4 and all(not norm.weight.any() for norm in last)
    plain = network(make("residual").architecture)
    assert plain.cells["stem"].norm.weight.all()


def test_cells_that_no_output_needs_do_not_run_and_values_go_when_they_are_used() -> None:
    alive: list[int] = []

    class Counting(nn.Module):
        def forward(self, x: Tensor, grid: None, *others: tuple) -> tuple:
            alive.append(prod(x.shape))
            return x + 1 + sum(other for other, _ in others), grid

    cells = [("a", (IMAGE,)), ("b", (0,)), ("unused", (1,)), ("c", (1, 0))]
    net = CellNet([Cell(name, Counting(), takes) for name, takes in cells], [3])
    ((x, _),) = net.run(torch.zeros(2))
    assert x.tolist() == [4.0, 4.0] and len(alive) == 3
    assert net.needed([1]) == [0, 1] and net.needed([2]) == [0, 1, 2]


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "a cycle of options": (lambda: Architecture.of(1, 2, (4, 8), block="dense"), "plain, residual, bottleneck"),
    "one stage": (lambda: Architecture.of(1, 2, (4,)), "at least 2"),
    "lengths": (lambda: Architecture.of(1, 2, (4, 8), encoder=(1, 2, 3)), "2 stages need 2"),
    "even kernels": (lambda: Architecture.of(1, 2, (4, 8), 2), "odd"),
    "no tail": (lambda: Architecture.of(1, 2, (4, 8), strides=(2, 2)), "needs a tail"),
    "heads": (lambda: Architecture.of(1, 2, (4, 8), heads=2), "2 stages can have 1 to 1"),
    "a number": (lambda: UNet(3), r"architecture=3: give .*Architecture.of\(1, 3,"),  # type: ignore[arg-type]
    "supervised": (lambda: UNet(Architecture.of(1, 2, (4, 8, 8)), 2), "supervise 1 to 1 levels"),
    "norm": (lambda: Style("layer"), "instance, batch"),
    "length": (lambda: Style("instance", length=8), "only batch and group norm take the last axis, not 'instance'"),
    "resolution": (lambda: hou(1, 2, 100), "64, 128, 256, 512"),
    "variant": (lambda: distmis(1, 2, variant="paper"), "'code' or 'text'"),
    "distmis's length": (lambda: distmis(1, 1, 155), "multiple of 8"),
    "another length": (lambda: distmis(1, 1, 16)(torch.zeros(1, 1, 8, 8, 24)), r"tile=\(8, 8, 16\)"),
    "off the stride": (lambda: nnunet(1, 2, 16, features=2)(torch.zeros(1, 1, 16, 12, 18)), r"tile=\(16, 12, 16\)"),
    "one point": (lambda: nnunet(1, 2, 16, features=2)(torch.zeros(1, 1, 4, 4, 4)), "larger `tile` than 4 4 4"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_with_what_can(name: str) -> None:
    act, advice = BAD[name]
    with pytest.raises(ValueError, match=advice):
        act()


@pytest.mark.parametrize(("activation", "gain"), [("leaky_relu", 1.0), ("relu", 2.0)])
def test_kernels_begin_as_hes_for_the_slope_of_leaky_relu(activation: str, gain: float) -> None:
    """The variance is gain / fan-in: 2 / (1 + slope²) for leaky ReLU, here of a slope of 1."""
    convolution = torch.nn.Conv3d(64, 64, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        init_weights(convolution, Style(activation=activation, slope=1.0))
    assert float(convolution.weight.detach().var()) * 64 * 27 == pytest.approx(gain, rel=0.02)
