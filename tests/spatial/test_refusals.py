"""What operations on boxes refuse: when they are built, or on all ranks before any message."""

from collections.abc import Callable

import pytest
import torch

from seqpar.parallel.mesh import Group
from seqpar.spatial import convolution, norms, pooling
from seqpar.spatial.box_grid import BoxGrid


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: convolution.Conv3d(2, 2, 3, padding=1, padding_mode="circular"), "use 'zeros'"),
        (lambda: convolution.ConvTranspose3d(2, 2, 3, stride=2, output_padding=2), "smaller than stride or dilation"),
        (lambda: pooling.Upsample(scale_factor=2, mode="trilinear", align_corners=True), "use False"),
        (lambda: pooling.Upsample(size=8), "give scale_factor"),
        (lambda: pooling.Upsample(scale_factor=1.5), "must be integers"),
        (lambda: pooling.Upsample(scale_factor=2, mode="bicubic"), "use 'nearest' or 'trilinear'"),
        (lambda: pooling.MaxPool3d(2, return_indices=True), "remove it"),
        (lambda: pooling.MaxPool3d(2, padding=2), "at most half"),
        (lambda: pooling.AvgPool3d(2, padding=2), "at most half"),
        (lambda: BoxGrid(((0, 2, 2), (0, 4)), Group("seq", (0, 1))), "no box may be empty"),
        (lambda: BoxGrid(((0, 2, 4), (0, 4)), Group("seq", (0, 1, 2))), "make 2 boxes"),
    ],
)
def test_what_cannot_be_right_is_refused_when_built(make: Callable[[], object], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        make()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_without_output_is_refused_by_all_before_any_message(rank: int) -> None:
    """The group has no process group: a message would fail otherwise."""
    grid = BoxGrid(((0, 3, 4, 8), (0, 2), (0, 2)), Group("seq", (0, 1, 2), rank))
    x = torch.zeros(1, 2, *grid.sides)
    for module in (convolution.Conv3d(2, 2, 3, stride=4, padding=1), pooling.MaxPool3d(2), pooling.AvgPool3d(2)):
        with pytest.raises(ValueError, match="leaves a rank without output: use a smaller `seqpar`"):
            module(x, grid)
    with pytest.raises(ValueError, match="has no output for an extent of 2"):
        convolution.Conv3d(2, 2, 3)(x, grid)
    with pytest.raises(ValueError, match="one value per channel"):
        norms.InstanceNorm3d(2)(torch.zeros(1, 2, 1, 1, 1), BoxGrid(((0, 1),) * 3, Group("seq")))


def test_one_value_a_channel_is_refused_in_one_process_with_what_is_needed() -> None:
    x = torch.zeros(1, 2, 1, 1, 1)
    for norm in (norms.InstanceNorm3d(2), norms.BatchNorm3d(2)):
        with pytest.raises(ValueError, match="more than one value per channel: use a larger `tile` or `batch`"):
            norm(x)
    assert torch.equal(norm.eval()(x)[0], x), "running statistics norm any volume"
