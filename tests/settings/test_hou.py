"""``--preset hou`` is the training of Hou et al.: every figure that it states, or that its release has."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.data.formats.recognise import read_dataset
from seqpar.data.preparation.recipe import PrepareSettings, draft_recipe
from seqpar.data.sampling.augmentation_presets import RECIPES, Chance
from seqpar.decoders.unets.unet_blocks import VoxelDropout
from seqpar.losses import LossGroups
from seqpar.models.build import build_loss, build_network
from seqpar.optimization.optimizers import make_optimizer
from seqpar.optimization.schedules import learning_rate
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group, Mesh
from seqpar.planner.feasibility import check_feasible
from seqpar.settings.presets import hou
from seqpar.settings.rules import refuse_settings_without_effect
from seqpar.training.run_request import read_request
from tests.support.folders import nnunet
from tests.support.pages import page
from tests.support.ranks import relative


def test_the_figures_that_it_states() -> None:
    config = hou()
    assert (config.network, config.optimizer, config.lr, config.batch) == ("unet-hou", "adafactor", 3e-3, 16)
    assert (config.loss, config.loss_weights) == ("lesion-dice-ce", (0.45, 0.45, 0.1)), "0.9 Dice, half and half"
    assert (config.synthesis, config.synthesis_per, config.augment) == (0.5, "volume", "flips")
    assert RECIPES["flips"]().mirror == Chance(0.5) and config.precision == "bf16"
    assert (config.tile, config.foreground) == ((64, 64, 64), 0), "tiles are drawn anywhere"
    loops = config.epochs, config.iterations, config.decay_epochs * config.iterations
    assert loops == (1000, 500, 20_000), "loops of the release, steps of each, steps between two falls of the rate"
    assert (config.clip, config.fold) == (0, "0"), "what both leave open"
    assert config.val_every * config.iterations == 10 * 500, "its release validates every 500 steps"
    refuse_settings_without_effect(config, {"synthesis_per", "dropout", "loss_weights", "decay_epochs", "precision"})
    net = build_network(replace(config, features=2), 1, 3, Group("seq"), device="cpu")
    assert {m.rate for m in net.modules() if isinstance(m, VoxelDropout)} == {0.5}
    assert type(make_optimizer(net, config.optimizer_options)) is torch.optim.Adafactor
    rates = [learning_rate(config.schedule_options, step) for step in (0, 19_999, 20_000, 499_999)]
    assert config.steps == 500_000 and rates == pytest.approx([3e-3, 3e-3, 9e-4, 3e-3 * 0.3**24])


@pytest.mark.parametrize(("side", "batch", "first"), [(64, 16, 256), (128, 16, 128), (256, 16, 64), (512, 8, 32)])
def test_its_networks_have_the_widths_of_their_resolution_and_run_on_many_ranks(side: int, batch: int, first: int):
    config = replace(hou(), tile=(side,) * 3, batch=batch)
    net = build_network(config, 1, 3, Group("seq"), device="meta")
    style, features = net.unet.architecture.style, net.unet.architecture.features
    assert features == tuple(first << level for level in range(len(features))) and features[-1] == 1024
    assert set(net.unet.architecture.encoder) == {4} and (style.slope, style.eps, style.momentum) == (0.1, 1e-6, 0.1)
    for ranks in (2, 8, 16):
        check_feasible(replace(config, seqpar=ranks))


@pytest.mark.parametrize(("more", "groups", "tiles"), [("", 1, 16), ("", 2, 16), ("--tile 512 --global-batch 8", 2, 8)])
def test_its_batch_is_that_of_all_groups_together(more: str, groups: int, tiles: int) -> None:
    line = f"--preset hou --features 2 --device cpu --dry-run {more}"
    config = read_request(line.split(), Launcher("test", 0, groups)).config
    assert (config.batch * groups, config.accumulate) == (tiles, 1)


def test_its_intensities_are_those_of_its_release(tmp_path: Path) -> None:
    """Which divides them by 1024, adds a half, and cuts at 0 and 1."""
    (name,) = re.findall("`(clip .+?)`", page("explanation/presets-hou").read_text())
    (scheme,) = draft_recipe(read_dataset(nnunet(tmp_path, 1, (name,))), PrepareSettings()).intensities
    assert scheme is not None and (scheme.low, scheme.high, scheme.mean, scheme.std) == (-512, 512, -0.5 * 1024, 1024)


def test_its_baseline_has_the_same_levels_in_two_dimensions() -> None:
    config = replace(hou(), network="unet-hou-2d", tile=(512, 512, 5))
    net = build_network(config, 1, 3, Group("seq"), device="meta")
    design = net.unet.architecture
    assert design.features == (32, 64, 128, 256, 512, 1024) and set(design.encoder) == set(design.decoder) == {4}
    assert (set(design.kernels), design.first_kernel, set(design.strides[1:])) == ({(3, 3, 1)}, (3, 3, 5), {(2, 2, 1)})
    assert sum(isinstance(module, VoxelDropout) for module in net.modules()) == 4 * 11 - 1 + 5, "all but the first"
    for ranks in (2, 8, 16):
        check_feasible(replace(config, seqpar=ranks))


def by_hand(logits: Tensor, label: Tensor) -> Tensor:
    """Returns the release's loss, plus the 0.9 that make Dice losses positive."""
    probability = logits.softmax(1)[:, 2]
    truth = (label == 2).double()
    both, either = (probability * truth).flatten(1).sum(1), (probability + truth).flatten(1).sum(1)
    per_case, together = (-2 * both / (either + 0.1)).mean(), -2 * both.sum() / (either.sum() + 0.1)
    weight = 1.0 + (label == 1) * 7.0 + (label == 2) * 15.0
    ce = (F.cross_entropy(logits, label, reduction="none") * weight).mean()
    return 0.9 * (0.5 * per_case + 0.5 * together) + 0.1 * ce + 0.9


def example() -> tuple[Tensor, Tensor]:
    toss = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(4, 3, 6, 4, 4, generator=toss, dtype=torch.float64)
    label = torch.multinomial(torch.tensor([6.0, 3.0, 1.0]), 4 * 96, True, generator=toss).view(4, 6, 4, 4)
    label[3] = label[3].clamp(max=1)  # a case without a lesion
    return logits, label


def test_its_loss_is_the_releases() -> None:
    logits, label = example()
    leaf = logits.requires_grad_()
    loss = build_loss(hou())
    parts = loss.parts(leaf, label)
    assert list(parts.terms) == ["dice_per_case", "dice_global", "ce"]
    assert relative(parts.terms["dice_per_case"], parts.terms["dice_global"]) > 1e-3
    want = by_hand(leaf, label)
    assert relative(parts.total, want) < 1e-13
    slopes = [torch.autograd.grad(total, leaf)[0] for total in (parts.total, want)]
    assert relative(*slopes) < 1e-12
    shown = torch.ones(4, 3, dtype=torch.bool)
    assert relative(loss(leaf, label, annotated=shown), want) < 1e-13
    shown[3, 2] = False  # its lesion counts 0 in the mean over cases, and not at all in that of all at once
    assert relative(loss(leaf, label, annotated=shown), want) > 1e-3


def loss_of_parts(mesh: Mesh) -> tuple[float, float]:
    """Returns this rank's loss, and the whole batch's, of samples over data and voxels over seq."""
    logits, label = example()
    mine = slice(2 * mesh.data.index, 2 * mesh.data.index + 2)
    half = slice(3 * mesh.seq.index, 3 * mesh.seq.index + 3)
    groups = LossGroups(mesh.seq, (mesh.data,))
    own = build_loss(hou())(logits[mine, :, half], label[mine, half], groups)
    return own.item(), by_hand(logits, label).item()


def test_its_loss_on_four_ranks_is_the_batchs(ranks) -> None:
    every = ranks(4, loss_of_parts, seqpar=2)
    mean, want = sum(own for own, _ in every) / 4, every[0][1]
    assert mean == pytest.approx(want, rel=1e-12)


def test_regions_are_weighted_as_labels_are() -> None:
    logits, label = example()
    parts = build_loss(hou(), [(1, 2), (2,)]).parts(logits[:, :2], label)
    p, truth = logits[:, 1].sigmoid(), (label == 2).double()
    wanted = 1 - 2 * (p * truth).sum() / ((p + truth).sum() + 0.1)
    assert relative(parts.terms["dice_global"], wanted) < 1e-13
    target = torch.stack([label > 0, label == 2], 1).double()
    weight = (1.0 + (label == 1) * 7.0 + (label == 2) * 15.0)[:, None]
    each = F.binary_cross_entropy_with_logits(logits[:, :2], target, reduction="none")
    assert relative(parts.terms["ce"], (each * weight).mean()) < 1e-13
