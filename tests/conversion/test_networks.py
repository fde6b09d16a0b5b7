"""Networks of others, converted, equal one process: outputs, gradients, running statistics, on 1 to 8 ranks."""

from collections.abc import Callable

import pytest
from monai.networks import nets as monai
from torch import nn

from seqpar.parallel.mesh import Mesh
from tests.support.converted import Answers, answers, gaps

MONAI: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "UNet": (lambda: monai.UNet(3, 1, 3, (4, 8, 16), (2, 2), num_res_units=1), (1, 1, 32, 16, 24)),
    "BasicUNet": (lambda: monai.BasicUNet(3, 1, 3, features=(4, 4, 8, 8, 16, 4)), (1, 1, 35, 33, 16)),
    "BasicUNet, interpolating": (
        lambda: monai.BasicUNet(3, 1, 3, features=(4, 4, 8, 8, 16, 4), upsample="nontrainable"),
        (1, 1, 34, 32, 16),
    ),
    "BasicUNet, pixel shuffle": (
        lambda: monai.BasicUNet(3, 1, 3, features=(4, 4, 8, 8, 16, 4), upsample="pixelshuffle"),
        (1, 1, 32, 32, 16),
    ),
    "DynUNet": (
        lambda: monai.DynUNet(3, 1, 3, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 16]),
        (2, 1, 16, 24, 16),
    ),
    "SegResNet": (lambda: monai.SegResNet(3, 8, 1, 3, blocks_down=(1, 1, 1), blocks_up=(1, 1)), (1, 1, 24, 16, 8)),
    "AttentionUnet": (lambda: monai.AttentionUnet(3, 1, 3, (4, 8, 16), (2, 2)), (1, 1, 16, 16, 8)),
    "VNet": (lambda: monai.VNet(3, 1, 3), (1, 1, 32, 16, 16)),
    "UNETR": (
        lambda: monai.UNETR(2, 3, (32, 32, 32), feature_size=4, hidden_size=24, mlp_dim=48, num_heads=4),
        (1, 2, 32, 32, 32),
    ),
}


def check(mesh: Mesh, want: Answers) -> dict[str, float]:
    return gaps(mesh, want)


@pytest.mark.parametrize("name", MONAI)
def test_monais_networks_equal_one_process(name: str, ranks: Callable[..., list]) -> None:
    want = answers(*MONAI[name])
    for world in (1, 2, 3, 4, 8):
        for found in ranks(world, check, want, timeout=240):
            assert max(found.values()) < 1e-12, (world, found)
