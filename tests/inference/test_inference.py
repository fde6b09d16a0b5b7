"""Sliding windows and whole passes over volumes, on any number of ranks, against plain loops and MONAI's own."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seqpar.decoders.modes.choose import choose_mode
from seqpar.decoders.plain import PlainDecoder
from seqpar.launch.inference.logits_to_labels import slabs_to_labels, to_labels
from seqpar.launch.inference.sliding_window import join_rows, sliding_window, whole_volume
from seqpar.launch.inference.windows import Sliding, WindowGrid, window_starts, window_weights
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.layout import SPLITS
from seqpar.mesh import Mesh
from seqpar.vit.encoder import SeqParViT
from tests.support.ranks import relative

CLASSES, CHANNELS, TILE = 3, 2, (8, 12, 8)


def build(mesh: Mesh, mode: str = "gather", split: str = "spatial", seed: int = 0) -> SegmentationNet:
    torch.manual_seed(seed)
    encoder = SeqParViT(CHANNELS, TILE, 4, embed_dim=12, depth=1, num_heads=2, group=mesh.seq, split=split)
    decoder = PlainDecoder(12, CLASSES, encoder.layout.patch, width=4)
    return SegmentationNet(encoder, decoder, choose_mode(mode, mesh.seq)).double().eval()


def volume(*shape: int) -> Tensor:
    return torch.randn(CHANNELS, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def joined(slabs, mesh: Mesh) -> Tensor:
    return torch.cat([join_rows(slab.logits, slab.bounds, mesh, 1) for slab in slabs], 1)


def slide(mesh: Mesh, image: Tensor, sliding: Sliding, *how, nets: int = 1, dtype=torch.float64) -> Tensor:
    ensemble = [build(mesh, *how, seed=seed).to(dtype) for seed in range(nets)]
    return joined(sliding_window(ensemble, image, sliding, mesh), mesh)


def naive(nets, image: Tensor, sliding: Sliding) -> Tensor:
    """A sliding window written down as one would explain it: on a padded volume, everything whole."""
    pads = [max(tile - side, 0) for side, tile in zip(image.shape[1:], sliding.tile)]
    padded = nn.functional.pad(image, [n for pad in reversed(pads) for n in (pad // 2, pad - pad // 2)])
    starts = []
    for side, tile in zip(padded.shape[1:], sliding.tile):
        at = list(range(0, side - tile + 1, int(tile * (1 - sliding.overlap))))
        starts.append(at if at[-1] == side - tile else [*at, side - tile])
    flips = [f for n in range(len(sliding.mirror) + 1) for f in itertools.combinations(sliding.mirror, n)]
    total, count = 0, torch.zeros(padded.shape[1:], dtype=image.dtype)
    weight = window_weights(sliding.tile, sliding.weights).to(image.dtype)
    for corner in itertools.product(*starts):
        here = tuple(slice(at, at + side) for at, side in zip(corner, sliding.tile))
        answers = []
        for net, flip in itertools.product(nets, flips):
            turn = [2 + direction for direction in flip]
            with torch.no_grad():
                answers.append(net(padded[(slice(None), *here)][None].flip(turn)).flip(turn)[0])
        if not isinstance(total, Tensor):
            total = torch.zeros(len(answers[0]), *padded.shape[1:], dtype=image.dtype)
        total[(slice(None), *here)] += weight * torch.stack(answers).mean(0)
        count[here] += weight
    inner = tuple(slice(pad // 2, pad // 2 + side) for pad, side in zip(pads, image.shape[1:]))
    return (total / count)[(slice(None), *inner)]


SHAPES = [(8, 12, 8), (19, 23, 13), (9, 5, 20), (2, 30, 7), (1, 13, 11), (40, 2, 9)]
SLIDINGS = [Sliding(TILE), Sliding(TILE, 0.25, "constant", batch=3), Sliding(TILE, 0.7, batch=2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_sliding_is_the_plain_loop(alone, shape: tuple[int, ...]) -> None:
    net, image = build(alone), volume(*shape)
    for sliding in SLIDINGS:
        found = joined(sliding_window([net], image, sliding, alone), alone)
        assert relative(found, naive([net], image, sliding)) < 1e-12
    single, image = net.float(), image.float()
    found = joined(sliding_window([single], image, Sliding(TILE), alone), alone)
    assert found.dtype == torch.float32 and relative(found, naive([single], image, Sliding(TILE))) < 1e-5


def test_mirrored_ensembles_are_the_plain_loop(alone) -> None:
    nets, image, sliding = [build(alone, seed=n) for n in range(2)], volume(11, 14, 9), Sliding(TILE, mirror=(0, 2))
    expected = naive(nets, image, sliding)
    assert relative(joined(sliding_window(nets, image, sliding, alone), alone), expected) < 1e-12
    plain = joined(sliding_window(nets, image, replace(sliding, mirror=()), alone), alone)
    assert relative(plain, expected) > 1e-3  # the control: flips do something


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.6, 0.99])
def test_windows_and_weights_are_those_of_monai(overlap: float) -> None:
    utils = pytest.importorskip("monai.data.utils")
    from monai.inferers.utils import _get_scan_interval

    for side, tile in itertools.product(range(1, 40, 3), (1, 2, 7, 16)):
        if side >= tile:
            stride = _get_scan_interval((side,), (tile,), 1, (overlap,))
            theirs = [at[0].start for at in utils.dense_patch_slices((side,), (tile,), stride)]
            assert list(window_starts(side, tile, overlap)) == theirs
    for kind in ("gaussian", "constant"):
        theirs = utils.compute_importance_map((5, 24, 16), kind, 0.125)
        assert torch.equal(window_weights((5, 24, 16), kind), theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_sliding_agrees_with_monai(alone, shape: tuple[int, ...]) -> None:
    inferers = pytest.importorskip("monai.inferers")
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        net, image = build(alone).to(dtype), volume(*shape).to(dtype)
        for sliding in SLIDINGS:
            mode, overlap = sliding.weights, sliding.overlap
            with torch.no_grad():
                theirs = inferers.sliding_window_inference(image[None], TILE, 2, net, overlap, mode)[0]
            ours = joined(sliding_window([net], image, sliding, alone), alone)
            assert relative(ours, torch.as_tensor(theirs)) < bound


def compare(mesh: Mesh) -> tuple[list[Tensor], list[Tensor]]:
    logits, labels = [], []
    for shape, sliding in itertools.product([(13, 14, 9), (2, 9, 9)], SLIDINGS[:2]):
        image = volume(*shape)
        logits.append(slide(mesh, image, sliding))
        net = build(mesh).float()
        labels.append(slabs_to_labels(sliding_window([net], image.float(), sliding, mesh), shape, shape, mesh))
    logits.append(slide(mesh, volume(11, 14, 9), Sliding(TILE, mirror=(1, 2)), nets=2))
    logits.append(slide(mesh, volume(11, 14, 9), Sliding(TILE, mirror=(0,)), "gather", "ordered"))
    return logits, labels


@pytest.mark.parametrize("world, seqpar", [(2, 1), (4, 1), (4, 2), (4, 4)])
def test_sliding_is_the_same_on_any_number_of_ranks(ranks, alone, world: int, seqpar: int) -> None:
    """To the last bit where the windows are cut alike, to rounding where not; groups without windows included."""
    single, labels = compare(alone)
    logits, labels = (single, labels) if seqpar == 1 else ranks(seqpar, compare, seqpar=seqpar)[0]
    assert all(relative(a, b) < 1e-12 for a, b in zip(logits, single))
    for rank in ranks(world, compare, seqpar=seqpar) if world > seqpar else []:
        assert all(torch.equal(a, b) for a, b in zip(rank[0], logits))
        assert all(torch.equal(a, b) for a, b in zip(rank[1], labels))


def exact(mesh: Mesh) -> list[Tensor]:
    image, sliding = volume(13, 14, 9), Sliding(TILE, mirror=(1,), batch=3)
    found = [slide(mesh, image, sliding, *how) for how in itertools.product(("halo", "swap", "auto"), SPLITS)]
    return [*found, joined(whole_volume([build(mesh, "halo", "ordered")], image, mesh, (1,)), mesh)]


def test_modes_that_share_the_decoding_say_the_same(ranks, alone) -> None:
    expected = exact(alone)
    for rank in ranks(4, exact, seqpar=2):
        assert all(relative(a, b) < 1e-12 for a, b in zip(rank, expected))


def boxes(mesh: Mesh, mode: str, split: str, mirror: tuple[int, ...]) -> Tensor:
    return slide(mesh, volume(13, 14, 9), Sliding(TILE, mirror=mirror, batch=2), mode, split)


@pytest.mark.parametrize("mirror", [(), (0, 1)])
@pytest.mark.parametrize("split", ["spatial", "ordered"])
def test_boxes_find_their_place(ranks, split: str, mirror: tuple[int, ...]) -> None:
    """Where each rank predicts a box by itself, groups of two give the same with one group and with two."""
    one, *_ = ranks(2, boxes, "nogather", split, mirror, seqpar=2)
    for rank in ranks(4, boxes, "nogather", split, mirror, seqpar=2):
        assert torch.equal(rank, one)
    assert relative(one, ranks(1, boxes, "nogather", split, mirror)[0]) > 1e-3  # parts alone see other borders


class Echo(nn.Module):
    """Stands where a decoder does, and answers with the image: whatever is misplaced shows."""

    uses_image, num_features = True, 1

    def forward(self, features, image: Tensor, grid: object = None) -> tuple[Tensor, object]:
        return image, grid


def echo(mesh: Mesh, mode: str, split: str, mirror: tuple[int, ...]) -> list[float]:
    net = build(mesh, mode, split)
    net.decoder = Echo()
    apart = []
    for shape in SHAPES[1:4]:
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


def test_memory_is_that_of_the_rows_under_a_window() -> None:
    """Each row has one owner, rows come in order, and those that lie open are fewer than two tiles hold."""
    shapes = [(50, 9, 9), (5, 9, 9), (64, 30, 8)]
    for shape, overlap, num_ranks in itertools.product(shapes, (0.0, 0.5, 0.7), (1, 3, 16)):
        window_grid = WindowGrid.of(shape, Sliding(TILE, overlap), num_ranks)
        rows = [row for bounds in window_grid.bounds for row in range(bounds[0], bounds[-1])]
        assert rows == list(range(shape[0])) and all(len(bounds) == num_ranks + 1 for bounds in window_grid.bounds)
        opened: set[int] = set()
        for window in range(len(window_grid.corners)):
            for rank in range(num_ranks):
                opened |= {slab for slab, _ in window_grid.pieces(window, tuple((0, side) for side in TILE), rank)}
            assert min(opened) >= window_grid.num_complete(window)  # what is finished is not touched again
            opened -= set(range(window_grid.num_complete(window + 1)))
            held = sum(window_grid.bounds[slab][-1] - window_grid.bounds[slab][0] for slab in opened)
            assert held < 2 * TILE[0]
        assert not opened and window_grid.num_complete(len(window_grid.corners)) == len(window_grid.bounds)


def traffic(mesh: Mesh) -> int:
    slide(mesh, volume(19, 23, 13), Sliding(TILE))
    return mesh.world.traffic["windows"]


def test_nothing_travels_twice(ranks) -> None:
    """A gathered window is on all ranks of its group: one group sends nothing, two send each foreign row once."""
    assert [*ranks(4, traffic, seqpar=4)] == [0, 0, 0, 0]
    spread = sum(ranks(4, traffic, seqpar=1))
    paired = sum(ranks(4, traffic, seqpar=2))
    whole_windows = len(WindowGrid.of((19, 23, 13), Sliding(TILE)).corners) * CLASSES * math.prod(TILE) * 8
    assert 0 < paired < spread < whole_windows


def test_labels_are_the_largest_or_the_regions_in_their_order() -> None:
    logits = torch.tensor([[0.1, 2.0, -1.0, 1.0], [0.3, -1.0, -1.0, 1.0]]).reshape(2, 1, 2, 2)
    assert to_labels(logits).flatten().tolist() == [1, 0, 0, 0]
    assert to_labels(logits, (2, 1)).flatten().tolist() == [1, 2, 0, 1]
    assert to_labels(logits, (1, 2)).flatten().tolist() == [2, 1, 0, 2]
    with pytest.raises(ValueError, match="regions_class_order"):
        to_labels(logits, (1, 2, 3))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"overlap": 1.0}, "--overlap 1.0"),
        ({"overlap": -0.1}, "--overlap"),
        ({"weights": "flat"}, "gaussian or constant"),
        ({"batch": 0}, "--window-batch 0"),
        ({"mirror": (0, 0)}, "mirror .0, 0"),
        ({"mirror": (3,)}, "mirror .3"),
    ],
)
def test_wrong_settings_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sliding(**{"tile": TILE, **change})


def test_wrong_networks_are_refused(alone) -> None:
    image = volume(9, 9, 9)
    with pytest.raises(ValueError, match="eval"):
        sliding_window([build(alone).train()], image, Sliding(TILE), alone)
    with pytest.raises(ValueError, match="no network"):
        whole_volume([], image, alone)
    with pytest.raises(ValueError, match="multiple of patch"):
        sliding_window([build(alone)], image, Sliding((9, 8, 8)), alone)
