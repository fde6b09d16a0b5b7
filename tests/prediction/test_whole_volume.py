"""A whole pass is the same on any number of ranks, and agrees with sliding windows where one window is enough."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seqpar.parallel.mesh import Mesh
from seqpar.prediction.sliding_window import sliding_window, whole_volume
from seqpar.prediction.window_grid import Sliding
from tests.support.ranks import relative
from tests.support.volumes import SHAPES, TILE, build, joined, volume


class Echo(nn.Module):
    """Stands where a decoder does, and answers with the image: whatever is misplaced shows."""

    uses_image, num_features = True, 1

    def forward(self, features, image: Tensor, grid: object = None) -> tuple[Tensor, object]:
        return image, grid


def echo(mesh: Mesh, mode: str, split: str, mirror: tuple[int, ...]) -> list[float]:
    net = build(mesh, mode, split)
    net.decoder = Echo()
    apart = []
    for shape in ((13, 14, 9), *SHAPES[2:4]):  # several windows in each direction, and fewer voxels than a tile
        image = volume(*shape)
        for slabs in (
            sliding_window([net], image, Sliding(TILE, 0.4, mirror=mirror), mesh),
            whole_volume([net], image, mesh, mirror),
        ):
            apart.append(relative(joined(slabs, mesh), image))
    return apart


@pytest.mark.parametrize("mode, split", [("gather", "ordered"), ("nogather", "spatial")])
def test_what_a_network_says_of_a_voxel_lands_on_it(ranks, mode: str, split: str) -> None:
    for world, seqpar, mirror in ((1, 1, (0, 1, 2)), (4, 2, (0, 2)), (3, 3, (1,))):
        for rank in ranks(world, echo, mode, split, mirror, seqpar=seqpar):
            assert max(rank) < 1e-14


def whole(mesh: Mesh, split: str = "spatial") -> list[Tensor]:
    net = build(mesh, "gather", split)
    return [joined(whole_volume([net], volume(*shape), mesh), mesh) for shape in SHAPES]


@pytest.mark.parametrize("split", ["spatial", "ordered"])
def test_a_whole_pass_is_the_same_on_any_number_of_ranks(ranks, alone, split: str) -> None:
    expected = whole(alone, split)
    for world, seqpar in ((2, 2), (4, 4)):
        for rank in ranks(world, whole, split, seqpar=seqpar):
            assert all(relative(a, b) < 1e-10 for a, b in zip(rank, expected))


def test_a_whole_pass_is_sliding_where_one_window_covers_the_volume(alone) -> None:
    net = build(alone)
    for shape in (TILE, (7, 9, 8), (2, 11, 5), (1, 1, 1)):
        image = volume(*shape)
        passed = joined(whole_volume([net], image, alone), alone)
        assert relative(joined(sliding_window([net], image, Sliding(TILE), alone), alone), passed) < 1e-12
    image = volume(9, 12, 8)  # the control: more than one window
    passed = joined(whole_volume([net], image, alone), alone)
    assert relative(joined(sliding_window([net], image, Sliding(TILE), alone), alone), passed) > 1e-3


def test_a_whole_pass_needs_no_multiple_of_the_patch(alone) -> None:
    net, image = build(alone), volume(17, 23, 13)
    padded = nn.functional.pad(image, (1, 2, 0, 1, 1, 2))
    with torch.no_grad():
        expected = net(padded[None])[0, :, 1:18, :23, 1:14]
    assert torch.equal(joined(whole_volume([net], image, alone), alone), expected)


def test_mapped_arrays_are_read_as_they_lie(alone, tmp_path) -> None:
    net, image = build(alone), volume(19, 23, 13)
    np.save(tmp_path / "image.npy", image.numpy())
    mapped = np.load(tmp_path / "image.npy", mmap_mode="r")
    for give in (lambda x: sliding_window([net], x, Sliding(TILE), alone), lambda x: whole_volume([net], x, alone)):
        assert torch.equal(joined(give(mapped), alone), joined(give(image), alone))


def test_wrong_networks_are_refused(alone) -> None:
    image = volume(9, 9, 9)
    with pytest.raises(ValueError, match="eval"):
        sliding_window([build(alone).train()], image, Sliding(TILE), alone)
    with pytest.raises(ValueError, match="no network"):
        whole_volume([], image, alone)
    with pytest.raises(ValueError, match="multiple of patch"):
        sliding_window([build(alone)], image, Sliding((9, 8, 8)), alone)
