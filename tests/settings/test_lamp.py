"""``--preset lamp`` is LAMP's training: every figure that it states, in the config and in what the config makes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from seqpar.cli import plan
from seqpar.cluster.exit_codes import USAGE, run
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.formats.splits import five_folds
from seqpar.data.preparation.recipe import PrepareSettings, draft_recipe
from seqpar.models.build import build_loss, build_network
from seqpar.optimization.optimizers import make_optimizer
from seqpar.optimization.schedules import learning_rate
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group
from seqpar.planner.feasibility import check_feasible
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.settings.lessons import lessons_of
from seqpar.settings.presets import lamp
from seqpar.settings.rules import refuse_settings_without_effect
from seqpar.training.run_request import read_request
from tests.support.folders import nnunet
from tests.support.pages import page, shown_commands

PASSES = {64: (4800, 16), 128: (1200, 4), "whole": (300, 1)}  # epochs and batch in the paper
CASES = 261
WEIGHTS = (2.22, 1.31, 1.99, 1.13, 1.93, 1.93, 1.0, 1.0, 1.90, 1.98)  # of the release's ten outputs


def net_of(config: Config, device: str = "meta"):
    return build_network(config, 1, 10, Group("seq"), device=device)


def test_the_figures_that_it_states() -> None:
    config = lamp()
    assert (config.network, config.optimizer, config.lr, config.schedule) == (
        "unet-lamp", "rmsprop", 1e-3, "constant",
    )  # fmt: skip
    assert (config.loss, config.loss_weights, config.dice_background) == ("dice-focal", (1.0, 0.5), True)
    assert (config.grad_checkpoint, config.augment, config.val_every) == ("full", "lamp", 10)
    assert (config.clip, config.weight_decay, config.warmup, config.precision) == (0, 0, 0, "fp32")
    assert config.optimizer_options.betas in ((), (0.0, 0.99)), "RMSProp as torch's, without momentum"
    refuse_settings_without_effect(config, {"features", "grad_checkpoint"})
    small = replace(config, features=2)
    assert type(make_optimizer(net_of(small), small.optimizer_options)) is torch.optim.RMSprop
    assert {learning_rate(config.schedule_options, step) for step in (0, config.steps - 1)} == {1e-3}


def test_its_lessons_are_the_papers_passes_over_its_cases() -> None:
    lessons = lessons_of(lamp())
    assert [lesson.config.batch for lesson in lessons] == [batch for _, batch in PASSES.values()]
    assert [lesson.config.tile for lesson in lessons[:2]] == [(64,) * 3, (128,) * 3]
    for lesson, (epochs, batch) in zip(lessons, PASSES.values()):
        assert len(lesson.steps) * batch == epochs * CASES
    assert [lesson.foreground for lesson in lessons] == [1, 1, 0], "small tiles show an organ"
    assert lamp().steps == sum(len(lesson.steps) for lesson in lessons)
    released = ",".join(f"{tile}:{epochs}:{batch}" for tile, (epochs, batch) in PASSES.items())
    assert f"`--curriculum {released}` makes the release's steps" in page("explanation/presets-lamp").read_text()
    steps = [len(lesson.steps) for lesson in lessons_of(replace(lamp(), curriculum=released))]
    assert steps == [epochs * CASES for epochs, _ in PASSES.values()] and steps[0] == 1_252_800


def test_over_a_pipe_its_lessons_have_micro_batches_for_every_place() -> None:
    """As typed; with as many tiles a step. What the command line says of a step stays."""

    def pairs(more: str) -> list[tuple[int, int]]:
        line = f"--preset lamp --features 2 --device cpu --dry-run {more}"
        request = read_request(line.split(), Launcher("test", 0, 4))
        return [(lesson.config.batch, lesson.config.accumulate) for lesson in request.lessons]

    assert pairs("") == pairs("--pipe 2 --accumulate 1") == [(16, 1), (4, 1), (1, 1)]
    assert pairs("--pipe 2") == [(4, 4), (1, 4), (1, 1)]
    assert pairs("--pipe 4") == [(2, 8), (1, 4), (1, 1)]
    assert pairs("--pipe 2 --curriculum 32:1:8,whole:1:1") == [(8, 1), (1, 1)]


@pytest.mark.parametrize(("features", "millions"), [(0, 22.9), (32, 22.9), (64, 91.6), (128, 214.3)])
def test_its_networks_run_on_two_to_eight_ranks(features: int, millions: float) -> None:
    config = replace(lamp(), features=features) if features else lamp()
    assert sum(p.numel() for p in net_of(config).parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
    for ranks in (2, 4, 8):
        for lesson in lessons_of(replace(config, curriculum="64:1:16,128:1:4,whole=352x256x288:1:1", seqpar=ranks)):
            check_feasible(lesson.config)


def test_its_norms_are_torchs_own() -> None:
    usual = torch.nn.BatchNorm3d(1)
    norms = [module for module in net_of(replace(lamp(), features=2)).modules() if hasattr(module, "momentum")]
    assert norms and {(norm.momentum, norm.eps) for norm in norms} == {(usual.momentum, usual.eps)}


def test_its_livers_are_a_command_with_the_papers_figures() -> None:
    (line,) = shown_commands(page("explanation/presets-lamp"), "--augment lamp-liver")
    config = parse(line.split()[2:], "lamp")[1]
    assert (config.spacing, config.iterations, config.fold, config.augment) == ("1,1,1", 104, "0", "lamp-liver")
    lessons = lessons_of(config)
    assert [lesson.config.tile for lesson in lessons] == [(64,) * 3, (128,) * 3, (192,) * 3]
    assert [lesson.config.batch for lesson in lessons] == [16, 4, 1]
    for lesson in lessons:
        check_feasible(lesson.config)
    train, held_out = five_folds([f"liver_{n}" for n in range(131)])[0]
    assert (len(train), len(held_out)) == (104, 27)


def test_its_livers_are_clipped_to_the_papers_range(tmp_path: Path) -> None:
    (name,) = re.findall("`(clip .+?)`", page("explanation/presets-lamp").read_text())
    (scheme,) = draft_recipe(read_dataset(nnunet(tmp_path, 1, (name,))), PrepareSettings()).intensities
    assert scheme is not None and (scheme.low, scheme.high) == (-21, 89)
    assert [(value - scheme.mean) / scheme.std for value in (-21, 89)] == [0, 1]


def test_its_loss_is_that_of_its_release() -> None:
    """The mean over samples and outputs of Dice losses times weights, and half of that of focal losses."""
    (line,) = re.findall(r"`--class-weights (.+?)`", page("explanation/presets-lamp").read_text())
    assert tuple(map(float, line.split())) == WEIGHTS
    toss = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 10, 4, 4, 4, generator=toss, dtype=torch.float64)
    label = torch.randint(10, (2, 4, 4, 4), generator=toss)
    p, truth = logits.softmax(1).flatten(2), F.one_hot(label, 10).movedim(-1, 1).double().flatten(2)
    dice = 1 - (2 * (p * truth).sum(2) + 1e-5) / (p.sum(2) + truth.sum(2) + 1e-5)
    focal = (-((1 - p) ** 2) * p.log() * truth).mean(2)
    want = ((dice + 0.5 * focal) * torch.tensor(WEIGHTS, dtype=torch.float64)).mean()
    loss = build_loss(replace(lamp(), class_weights=WEIGHTS))
    assert loss(logits, label).item() == pytest.approx(want.item(), rel=1e-12)


def test_organs_that_a_case_does_not_show_learn_nothing() -> None:
    loss_of_run = build_loss(replace(lamp(), class_weights=WEIGHTS))
    logits = torch.randn(2, 10, 8, 8, 8, dtype=torch.float64, requires_grad=True)
    label, shown = torch.randint(10, (2, 8, 8, 8)), torch.ones(2, 10, dtype=torch.bool)
    shown[1, 4] = shown[1, 0] = False  # an organ, and with it the background
    parts = loss_of_run.parts(logits, label, None, shown)
    assert set(parts.terms) == {"dice", "focal"}
    assert torch.allclose(parts.total, parts.terms["dice"] + 0.5 * parts.terms["focal"], rtol=1e-12)
    parts.total.backward()
    assert logits.grad is not None and float(logits.grad[1, 4].abs().max()) == 0 < float(logits.grad[0, 4].abs().max())


def test_the_planner_plans_its_network_for_a_tile(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--preset", "lamp", "--features", "2", "--tile", "32", "--batch", "2", "--seqpar", "1", "--device", "a100"]
    line += ["--grad-checkpoint", "none"]
    assert run(plan.act, line) == 0
    assert "--preset lamp" in capsys.readouterr().out
    assert run(plan.act, ["--preset", "lamp", "--curriculum", "32:1:1"]) == USAGE
    assert parse(["--preset", "lamp", "--curriculum", "32:2:1"], "debug")[1].epochs == 2
