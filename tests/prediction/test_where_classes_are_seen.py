"""Where a class is seen lies where it is: in the region in which two groups of phantoms differ."""

from functools import cache

import numpy as np
import pytest
import torch

from seqpar.data.phantom.brain import CLASSES, class_of, make_dementia_case
from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.resattnet import ResAttNet
from seqpar.models.classifier import Evidence, VolumeClassifier
from seqpar.parallel.mesh import Group
from seqpar.tasks.classify.explanation import explain

SIZE, COUNT, STEPS, RATE = (32, 40, 32), 256, 200, 3e-3
CPU = torch.device("cpu")
Case = tuple[np.ndarray, np.ndarray, np.ndarray, int]  # standardised image c W D H, region, brain, class


@cache
def cases(seed: int, count: int) -> list[Case]:
    every = list[Case]()
    for index in range(count):
        case = make_dementia_case(seed, index, SIZE)
        brain = case.image[0] > 0
        body = case.image[0][brain]
        image = np.where(brain, (case.image - body.mean()) / body.std(), 0).astype(np.float32)
        every.append((image, case.label > 0, brain, CLASSES.index(class_of(seed, index))))
    return every


def fresh() -> VolumeClassifier:
    torch.manual_seed(0)
    network = ResAttNet(1, 2, (1, 1, 1, 1), 8)
    return VolumeClassifier(network, SIZE, (8, 8, 8), choose_mode("gather", Group("seq")))


def trained() -> VolumeClassifier:
    net, every, dice = fresh(), cases(0, COUNT), torch.Generator().manual_seed(1)
    images, classes = torch.stack([torch.from_numpy(case[0]) for case in every]), torch.tensor([c[3] for c in every])
    optimizer = torch.optim.AdamW(net.parameters(), RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for step in range(STEPS):
        chosen = torch.randperm(len(images), generator=dice)[:8]
        batch = images[chosen].flip(2) if step % 2 else images[chosen]
        torch.nn.functional.cross_entropy(net(net.layout.cut(batch, 0)).flatten(1), classes[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return net.eval()


def share_over_chance(seen: np.ndarray, region: np.ndarray, within: np.ndarray) -> float:
    """Returns the region's share of a map, divided by its share of the voxels; both only ``within`` a mask."""
    share = seen[region & within].sum() / max(seen[within].sum(), 1e-12)
    return float(share / ((region & within).sum() / within.sum()))


def masses(net: VolumeClassifier, way: str) -> tuple[float, float]:
    """Returns the mean mass over chance of demented cases that were not trained on: of the volume, of the brain."""
    pairs = []
    for image, region, brain, number in cases(1, 24):
        if number:
            seen, _ = explain([net], image, number, CPU, "fp32", way)
            assert seen.shape == SIZE
            pairs.append([share_over_chance(seen, region, within) for within in (np.ones(SIZE, bool), brain)])
    of_volume, of_brain = np.mean(pairs, 0)
    return float(of_volume), float(of_brain)


@pytest.mark.parametrize("stride", [4, 8])
def test_a_point_of_a_map_lies_where_convolutions_centre_it(stride: int) -> None:
    """On voxel ``stride * i``, whatever the tile's sides; the middle of a patch for a token."""
    tile, at = (stride * 5 + 3, stride * 4, stride * 3 + 1), (4, 1, 0)
    points = torch.zeros([-(-side // stride) for side in tile], dtype=torch.float64)
    points[at] = 1
    seen = Evidence(points, stride).on_voxels(tile)
    assert seen.shape == tile and seen.max() == 1
    assert (seen == 1).nonzero().tolist() == [[stride * i for i in at]]
    assert seen[stride * 4, stride, stride // 2] == 0.5
    points = torch.zeros(4, 4, 4)
    points[1, 2, 1] = 1
    seen = Evidence(points).on_voxels((4 * stride,) * 3)
    middle = torch.tensor([1, 2, 1]) * stride + (stride - 1) / 2
    assert torch.equal((seen == seen.max()).nonzero().double().mean(0), middle.double())


@pytest.mark.parametrize(("tile", "apart"), [((40, 48, 40), 4), ((64, 56, 48), 8)])
def test_one_bright_voxel_is_seen_where_it_is(tile: tuple[int, int, int], apart: int) -> None:
    """By a network whose kernels take their middle alone, of an image that is smaller than the tile, or larger."""
    network = ResAttNet(1, 2, (1, 1, 1, 1), 1)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() == 5:
                middle = weight.shape[2] // 2
                weight.zero_()[:, :, middle, middle, middle] = 1
            elif name.endswith("linear.weight"):
                weight.copy_(torch.tensor([[-1.0], [1.0]]))
    net = VolumeClassifier(network, tile, (8, 8, 8), choose_mode("gather", Group("seq"))).eval()
    for margin in (0, -4, 6):
        image = np.zeros((1, *(side + 2 * margin for side in tile)), np.float32)
        image[:, 32 + margin, 32 + margin, 32 + margin] = 1
        for way in net.ways:
            seen, step = explain([net], image, 1, CPU, "fp32", way)
            assert step == (apart,) * 3, "voxels from one point of the map to the next"
            assert np.argwhere(seen == seen.max()).tolist() == [[32 + margin] * 3], way


@pytest.mark.started
def test_demented_brains_are_told_by_the_region_that_shrinks() -> None:
    """By the map that --explain draws, three times as much of it as by chance, and more than of a map of the brain.

    Within the brain, which is the harder question, it is twice as much at least. Grad-CAM's means over the volume do
    worse than HiResCAM's slopes there: they show where the class is seen no better than chance.
    """
    net, every = trained(), cases(1, 24)
    with torch.no_grad():
        logits = net(net.layout.cut(torch.stack([torch.from_numpy(case[0]) for case in every]), 0)).flatten(1)
    assert (logits.argmax(1) == torch.tensor([case[3] for case in every])).double().mean() > 0.9
    of_volume, of_brain = masses(net, "")
    _, region, brain, _ = every[0]
    of_every_brain = share_over_chance(brain.astype(float), region, np.ones(SIZE, bool))
    assert of_volume > 8 > 7 > of_every_brain > 3, (of_volume, of_every_brain)
    assert of_brain > 2, of_brain
    assert masses(net, "hirescam") == (of_volume, of_brain), "the usual way"
    assert max(masses(fresh().eval(), "hirescam")[1], masses(net, "grad-cam")[1]) < of_brain, "the controls"
