"""The networks of nnU-Net's plans, its presets ResEnc M, L and XL too, have as many parameters as the package's."""

import itertools
from math import prod
from typing import Any

import pytest
import torch

from seqpar.decoders.unets.nnunet import network, of_plan, topology

HALF, CUBE, FLAT = [2, 2, 2], [3, 3, 3], [1, 3, 3]
BLOCKS = [1, 3, 4, 6, 6, 6, 6]
# of the plans: patch, spacing, strides, kernels
CUBES = (128, 128, 128), (1, 1, 1), [[1, 1, 1], *[HALF] * 5], [CUBE] * 6
LARGE_CUBES = (192, 256, 256), (1, 1, 1), [[1, 1, 1], *[HALF] * 5, [1, 2, 2]], [CUBE] * 7
SLICES = (  # of prostates
    (20, 320, 256), (3.6, 0.62, 0.62), [[1, 1, 1], [1, 2, 2], [1, 2, 2], HALF, HALF, [1, 2, 2], [1, 2, 2]],
    [FLAT, FLAT, *[CUBE] * 5],
)  # fmt: skip
PLANS: dict[str, tuple[str, tuple, int]] = {  # what nnUNetPlannerResEncM, L and XL plan by 8, 24 and 40 GB
    "ResEnc M": ("ResidualEncoderUNet", CUBES, 102_350_575),
    "ResEnc L, far slices": ("ResidualEncoderUNet", SLICES, 140_403_314),
    "ResEnc XL, 7 stages": ("ResidualEncoderUNet", LARGE_CUBES, 141_481_138),
    "plain": ("PlainConvUNet", CUBES, 31_196_399),
    "plain, far slices": ("PlainConvUNet", SLICES, 44_578_482),
}


def arguments(name: str, strides: list[list[int]], kernels: list[list[int]]) -> dict[str, Any]:
    """Returns arch_kwargs as nnU-Net's planners write them."""
    stages, residual = len(strides), name == "ResidualEncoderUNet"
    return {
        "n_stages": stages,
        "features_per_stage": [min(320, 32 * 2**stage) for stage in range(stages)],
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": kernels,
        "strides": strides,
        "n_blocks_per_stage" if residual else "n_conv_per_stage": BLOCKS[:stages] if residual else [2] * stages,
        "n_conv_per_stage_decoder": [1 if residual else 2] * (stages - 1),
        "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }


def parameters(plan: dict[str, Any], channels: int, outputs: int) -> int:
    """Returns the parameters of a plan's network, added up layer by layer."""
    features, kernels, strides = (plan[name] for name in ("features_per_stage", "kernel_sizes", "strides"))

    def conv(before: int, after: int, kernel: list[int]) -> int:
        return prod(kernel) * before * after + 3 * after  # a bias, and a norm's weight and bias

    total, before = 0, channels
    if "n_blocks_per_stage" in plan:
        total, before = conv(channels, features[0], kernels[0]), features[0]
        for width, kernel, count in zip(features, kernels, plan["n_blocks_per_stage"]):
            total += conv(before, width, kernel) + (2 * count - 1) * conv(width, width, kernel)
            total += before * width + 2 * width if before != width else 0  # the shortcut, without bias
            before = width
    else:
        for width, kernel, count in zip(features, kernels, plan["n_conv_per_stage"]):
            total += conv(before, width, kernel) + (count - 1) * conv(width, width, kernel)
            before = width
    ways_up = zip(itertools.pairwise(features), kernels, strides[1:], reversed(plan["n_conv_per_stage_decoder"]))
    for (width, below), kernel, stride, count in ways_up:
        total += prod(stride) * below * width + width
        total += conv(2 * width, width, kernel) + (count - 1) * conv(width, width, kernel)
        total += outputs * (width + 1)
    return total


@pytest.mark.parametrize("name", PLANS)
def test_a_plans_network_has_its_parameters(name: str) -> None:
    network_class, (patch, spacing, strides, kernels), published = PLANS[name]
    plan = arguments(network_class, strides, kernels)
    architecture = of_plan(f"dynamic_network_architectures.architectures.unet.{network_class}", plan, 1, 3)
    architecture.refuse_extents(patch)
    with torch.device("meta"):
        net = network(architecture)
    assert sum(p.numel() for p in net.parameters()) == published == parameters(plan, 1, 3)
    assert topology(patch, spacing) == (tuple(map(tuple, kernels)), tuple(map(tuple, strides)))
    assert architecture.encoder == tuple(plan.get("n_blocks_per_stage", plan.get("n_conv_per_stage")))
