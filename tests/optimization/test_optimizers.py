"""Optimizers and schedules are torch's: the same steps, defaults and states, saved, resumed and planned."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqpar.models.build import build_network
from seqpar.optimization.optimizers import OPTIMIZERS, OptimizerOptions, make_optimizer
from seqpar.optimization.schedules import learning_rate
from seqpar.parallel.mesh import Group
from seqpar.planner.step_counter import StepSetup, count_whole_step
from seqpar.settings.checks import check
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.settings.rules import settings_on_resume
from seqpar.weights import checkpoint
from seqpar.weights.checkpoint import Progress
from tests.support.training_runs import farthest, losses, tiny_data, trained

DECAY = 0.1
SMALL = Config(tile=(16, 16, 16), patch=4, depth=2, embed_dim=24, heads=3, decoder_width=8, batch=1)
FLAGS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {  # flags, and the same optimizer made by torch's own name
    "adam --betas 0.8 0.95": lambda g: torch.optim.Adam(g, 0.01, betas=(0.8, 0.95)),
    "adam --amsgrad": lambda g: torch.optim.Adam(g, 0.01, amsgrad=True),
    "adamw": lambda g: torch.optim.AdamW(g, 0.01),
    "adamw --amsgrad --betas 0.9 0.99": lambda g: torch.optim.AdamW(g, 0.01, betas=(0.9, 0.99), amsgrad=True),
    "sgd": lambda g: torch.optim.SGD(g, 0.01, momentum=0.9, nesterov=True),
    "sgd --betas 0.5": lambda g: torch.optim.SGD(g, 0.01, momentum=0.5, nesterov=True),
    "rmsprop": lambda g: torch.optim.RMSprop(g, 0.01),
    "rmsprop --betas 0.5 0.95": lambda g: torch.optim.RMSprop(g, 0.01, alpha=0.95, momentum=0.5),
    "adafactor": lambda g: torch.optim.Adafactor(g, 0.01),
}


def config_of(flags: str) -> Config:
    line = f"--optimizer {flags} --lr 0.01 --weight-decay {DECAY}"
    return parse(line.split(), "debug")[1]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(2, 4, 3), nn.Flatten(), nn.Linear(4, 6), nn.LayerNorm(6)).double()


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int = 0) -> dict[str, Tensor]:
    """Returns the weights after so many steps by gradients that do not depend on them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in module.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("flags", FLAGS)
def test_an_optimizer_takes_torchs_steps(flags: str) -> None:
    ours, theirs = net(), net()
    kernels = [p for p in theirs.parameters() if p.ndim > 1]
    others = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": kernels, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    taken, want = (
        steps(ours, make_optimizer(ours, config_of(flags).optimizer_options), 5),
        steps(theirs, FLAGS[flags](groups), 5),
    )
    assert all(torch.equal(taken[name], want[name]) for name in want)
    assert not any(torch.equal(want[name], p) for name, p in net().named_parameters())


def test_an_optimizers_own_numbers_are_torchs() -> None:
    """Of those that torch has a default for; its sgd has no momentum, and here it has Nesterov's, as nnU-Net."""
    torchs = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
        "adafactor": torch.optim.Adafactor,
    }
    for name, kind in torchs.items():
        own, theirs = (
            make_optimizer(net(), config_of(name).optimizer_options).defaults,
            kind(net().parameters(), lr=0.01).defaults,
        )
        assert own == theirs, name
    assert torchs.keys() | {"sgd"} == OPTIMIZERS.keys()


def test_a_presets_betas_are_its_optimizers() -> None:
    assert parse(["--preset", "modern"], "debug")[1].betas == (0.9, 0.98)
    assert parse(["--preset", "modern", "--optimizer", "adam"], "debug")[1].betas == (0.9, 0.98)
    for name, own in (("sgd", 0.9), ("rmsprop", 0.0)):
        config = parse(["--preset", "modern", "--optimizer", name], "debug")[1]
        assert make_optimizer(net(), config.optimizer_options).param_groups[0]["momentum"] == own
    old = Config.from_dict({"optimizer": "sgd", "betas": [0.9, 0.999]})  # of runs that had two numbers for it
    check(old, ["vit"])
    assert make_optimizer(net(), old.optimizer_options).param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize("flags", [flags for flags in FLAGS if flags.startswith(("rms", "ada"))])
def test_a_saved_optimizer_goes_on_to_the_same_bits(flags: str, tmp_path: Path) -> None:
    config, first, second = config_of(flags), net(), net()
    optimizer = make_optimizer(first, config.optimizer_options)
    steps(first, optimizer, 3)
    path = checkpoint.save(tmp_path, first, optimizer, Progress(3), Group("world"))
    loaded = make_optimizer(second, config.optimizer_options)
    checkpoint.load(path, second, loaded, 0)
    after, resumed = steps(first, optimizer, 2, seed=1), steps(second, loaded, 2, seed=1)
    assert all(torch.equal(after[name], resumed[name]) for name in after)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_fused_steps_are_the_same_and_go_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """As on a GPU; this processor has such kernels too."""
    kind, results = OPTIMIZERS[name], []
    for fused in (None, True):
        first, second = net(), net()
        options = OptimizerOptions(0.01, kind.betas, fused=fused)
        optimizer, loaded = (kind.make([{"params": list(n.parameters())}], options) for n in (first, second))
        steps(first, optimizer, 3)
        path = checkpoint.save(tmp_path / f"{name} {fused}", first, optimizer, Progress(3), Group("world"))
        checkpoint.load(path, second, loaded, 0)
        states = [own["step"] for own in loaded.state.values() if "step" in own]
        assert all(state.dtype == torch.float32 for state in states) and bool(states) == name.startswith("adam")
        after, resumed = steps(first, optimizer, 2, seed=1), steps(second, loaded, 2, seed=1)
        assert all(torch.equal(after[key], resumed[key]) for key in after)
        results.append(after)
    assert all(torch.allclose(results[0][key], results[1][key], rtol=1e-12, atol=0) for key in results[0])


def test_a_run_without_momentum_does_not_begin_one() -> None:
    saved = config_of("rmsprop")
    _, now, names = parse(["--betas", "0.9", "0.99", "--optimizer", "rmsprop"], "debug")
    with pytest.raises(ValueError, match="cannot add momentum to a run that began without"):
        settings_on_resume(saved, now, names)
    settings_on_resume(replace(saved, betas=(0.5, 0.99)), now, names)
    with pytest.raises(ValueError, match="--amsgrad cannot change"):
        settings_on_resume(config_of("adam"), *parse(["--amsgrad"], "debug")[1:])


@pytest.mark.parametrize("flags", ["adam --amsgrad", "rmsprop --betas 0.5 0.95", "adafactor"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_states_are_planned(flags: str, on_gpu: bool) -> None:
    name, *rest = flags.split()
    config = replace(SMALL, **{f: getattr(config_of(flags), f) for f in ("optimizer", "betas", "amsgrad")})
    module = build_network(config, 2, 3, Group("seq"))
    optimizer = make_optimizer(module, config.optimizer_options)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    states = sum(t.nbytes for own in optimizer.state.values() for t in own.values() if isinstance(t, Tensor))
    counted = count_whole_step(StepSetup(config, 0, 2, 3, on_gpu=on_gpu))
    assert counted.optimizer == states > 0, (name, rest)
    assert counted.peaks["update"] > 0


def rates(optimizer: torch.optim.Optimizer, schedule: Any, count: int) -> Iterator[float]:
    for _ in range(count):
        yield schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(("every", "factor"), [(1, 0.1), (2, 0.5), (3, 1.5)])
def test_step_decay_is_torchs(every: int, factor: float) -> None:
    line = f"--schedule step --decay-epochs {every} --decay-factor {factor} --epochs 7 --iterations 4 --lr 0.3"
    config = parse(line.split(), "debug")[1]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    want = list(rates(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, every * 4, factor), config.steps))
    assert [learning_rate(config.schedule_options, step) for step in range(config.steps)] == pytest.approx(
        want, rel=1e-12
    )
    assert len(set(want)) == -(-7 // every)
    warm = replace(config, warmup=2)
    assert learning_rate(warm.schedule_options, 7) == 0.3 and learning_rate(warm.schedule_options, 8) == 0.3
    assert [learning_rate(warm.schedule_options, step) for step in range(8, 28)] == pytest.approx(want[:20], rel=1e-12)


@pytest.mark.started
def test_runs_on_ranks_are_that_of_one_process(tmp_path: Path) -> None:
    flags = [*tiny_data(tmp_path), "--precision", "fp64", "--epochs", "1", "--iterations", "4"]
    for name, more in (("adafactor", ""), ("rmsprop", "--betas 0.9 0.99")):
        run = [*flags, "--optimizer", name, *more.split()]
        trained(1, run, tmp_path / name)
        sharded = ["--shard-weights"] if name == "rmsprop" else []
        trained(2, [*run, "--seqpar", "2", *sharded], tmp_path / f"{name} 2")
        assert farthest(losses(tmp_path / f"{name} 2"), losses(tmp_path / name)) < 1e-10
        assert losses(tmp_path / name)[-1] < losses(tmp_path / name)[0]
