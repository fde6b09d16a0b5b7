"""Sliding windows on any number of ranks, against plain loops and MONAI's own."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from seqpar.data.preparation.prepared_case import TargetGrid
from seqpar.parallel.layout import SPLITS
from seqpar.parallel.mesh import Mesh
from seqpar.prediction.logits_to_labels import slabs_to_labels
from seqpar.prediction.sliding_window import sliding_window, whole_volume
from seqpar.prediction.window_grid import Sliding, WindowGrid, window_weights
from tests.support.marks import long_case
from tests.support.ranks import alone_mesh, relative
from tests.support.volumes import CLASSES, SHAPES, TILE, build, joined, volume


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


SLIDINGS = [Sliding(TILE), Sliding(TILE, 0.25, "constant", batch=3), Sliding(TILE, 0.7, batch=2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_sliding_is_the_plain_loop(alone, shape: tuple[int, ...]) -> None:
    net, image = build(alone), volume(*shape)
    for sliding in SLIDINGS:
        logits = joined(sliding_window([net], image, sliding, alone), alone)
        assert relative(logits, naive([net], image, sliding)) < 1e-12
    single, image = net.float(), image.float()
    logits = joined(sliding_window([single], image, Sliding(TILE), alone), alone)
    assert logits.dtype == torch.float32 and relative(logits, naive([single], image, Sliding(TILE))) < 1e-5


def test_mirrored_ensembles_are_the_plain_loop(alone) -> None:
    nets, image, sliding = [build(alone, seed=n) for n in range(2)], volume(11, 14, 9), Sliding(TILE, mirror=(0, 2))
    expected = naive(nets, image, sliding)
    assert relative(joined(sliding_window(nets, image, sliding, alone), alone), expected) < 1e-12
    plain = joined(sliding_window(nets, image, replace(sliding, mirror=()), alone), alone)
    assert relative(plain, expected) > 1e-3  # the control: flips do something


@pytest.mark.parametrize("shape", SHAPES)
def test_sliding_agrees_with_monai(alone, shape: tuple[int, ...]) -> None:
    inferers = pytest.importorskip("monai.inferers")
    bounds = {torch.float64: 1e-12} | ({torch.float32: 1e-5} if shape == SHAPES[0] else {})
    for dtype, bound in bounds.items():
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
        slabs = sliding_window([net], image.float(), sliding, mesh)
        labels.append(slabs_to_labels(slabs, shape, TargetGrid(shape), mesh))
    logits.append(slide(mesh, volume(11, 14, 9), Sliding(TILE, mirror=(1, 2)), nets=2))
    logits.append(slide(mesh, volume(11, 14, 9), Sliding(TILE, mirror=(0,)), "gather", "ordered"))
    return logits, labels


@pytest.fixture(scope="module")
def one_process() -> tuple[list[Tensor], list[Tensor]]:
    return compare(alone_mesh())


@pytest.mark.parametrize("world, seqpar", [(3, 1), long_case(4, 2)])
def test_sliding_is_the_same_on_any_number_of_ranks(ranks, one_process, world: int, seqpar: int) -> None:
    """To the last bit where the windows are cut alike, to rounding where not; groups without windows included."""
    single, labels = one_process
    logits, labels = one_process if seqpar == 1 else ranks(seqpar, compare, seqpar=seqpar)[0]
    assert all(relative(a, b) < 1e-12 for a, b in zip(logits, single))
    for rank in ranks(world, compare, seqpar=seqpar) if world > seqpar else []:
        assert all(torch.equal(a, b) for a, b in zip(rank[0], logits))
        assert all(torch.equal(a, b) for a, b in zip(rank[1], labels))


def exact(mesh: Mesh) -> list[Tensor]:
    image, sliding = volume(13, 14, 9), Sliding(TILE, mirror=(1,), batch=3)
    logits = [slide(mesh, image, sliding, *how) for how in itertools.product(("halo", "swap", "auto"), SPLITS)]
    return [*logits, joined(whole_volume([build(mesh, "halo", "ordered")], image, mesh, (1,)), mesh)]


def test_modes_that_share_the_decoding_say_the_same(ranks, alone) -> None:
    expected = exact(alone)
    for rank in ranks(4, exact, seqpar=2):
        assert all(relative(a, b) < 1e-12 for a, b in zip(rank, expected))


def boxes(mesh: Mesh) -> list[Tensor]:
    """Returns what is predicted where each rank predicts a box by itself: by split, plain and with mirrored windows."""
    image = volume(13, 14, 9)
    slidings = [Sliding(TILE, mirror=mirror, batch=2) for mirror in ((), (0, 1))]
    return [slide(mesh, image, sliding, "nogather", split) for sliding in slidings for split in SPLITS]


def test_boxes_find_their_place(ranks) -> None:
    """Groups of two give the same with one group and with two."""
    one, *_ = ranks(2, boxes, seqpar=2)
    for rank in ranks(4, boxes, seqpar=2):
        assert all(torch.equal(a, b) for a, b in zip(rank, one))
    (alone,) = ranks(1, boxes)
    assert len(one) == 4 and min(map(relative, one, alone)) > 1e-3  # parts alone see other borders


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


def test_windows_are_computed_in_the_precision_of_training(alone) -> None:
    net, image = build(alone).float(), volume(19, 13, 8).float()
    seen = list[torch.dtype]()
    hook = net.encoder.blocks[0].mlp.register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
    results = {}
    for precision in ("fp32", "bf16"):
        seen.clear()
        for kind, slabs in (
            ("sliding", sliding_window([net], image, Sliding(TILE), alone, precision=precision)),
            ("whole", whole_volume([net], image, alone, precision=precision)),
        ):
            results[precision, kind] = joined(slabs, alone)
            assert results[precision, kind].dtype == torch.float32
        assert set(seen) == {torch.bfloat16 if precision == "bf16" else torch.float32}
    hook.remove()
    for kind in ("sliding", "whole"):
        assert 0 < relative(results["bf16", kind], results["fp32", kind]) < 0.1
