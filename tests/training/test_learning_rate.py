"""The learning rate of each step: the formulas of warm-up and schedules, and what the optimizer steps with."""

import math
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LRScheduler, PolynomialLR

from seqpar.optimization.schedules import learning_rate
from seqpar.runs.journal import read_metrics
from seqpar.settings.config import Config
from seqpar.training import trainer
from tests.support.training_runs import trained

LR, STEPS = 0.02, 40
FORMULAS = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "poly": lambda done: (1 - done) ** 0.9,
    "constant": lambda done: 1.0,
}


def rates(schedule: str, warmup: int = 0, lr: float = LR) -> list[float]:
    config = Config(lr=lr, schedule=schedule, warmup=warmup, epochs=8, iterations=STEPS // 8)
    return [learning_rate(config.schedule_options, step) for step in range(config.steps)]


@pytest.mark.parametrize("schedule", FORMULAS)
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_after_the_warm_up_each_step_has_the_schedules_rate(schedule: str, warmup: int) -> None:
    """In the warm-up's n steps it rises in n equal parts to the whole rate, from which the schedule begins."""
    first = warmup * STEPS // 8
    wanted = [LR * (step + 1) / first for step in range(first)]
    wanted += [LR * FORMULAS[schedule]((step - first) / (STEPS - first)) for step in range(first, STEPS)]
    assert rates(schedule, warmup) == pytest.approx(wanted, rel=1e-12)
    assert rates(schedule, warmup, 3 * LR) == pytest.approx([3 * rate for rate in wanted], rel=1e-12)


def test_a_cyclic_rate_is_a_triangle_from_a_quarter_as_torchs() -> None:
    config = Config(lr=LR, schedule="cyclic", cycle_epochs=2, epochs=8, iterations=5)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler = CyclicLR(optimizer, base_lr=LR / 4, max_lr=LR, step_size_up=5, mode="triangular", cycle_momentum=False)
    torchs = []
    for _ in range(config.steps):
        torchs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    ours = [learning_rate(config.schedule_options, step) for step in range(config.steps)]
    assert ours == pytest.approx(torchs, rel=1e-9) and min(ours) == LR / 4 and max(ours) == LR


def test_some_rates_by_hand() -> None:
    assert [rates("cosine")[step] for step in (0, 10, 20, 30)] == pytest.approx([0.02, 0.017071068, 0.01, 0.002928932])
    assert [rates("cosine", 2)[step] for step in (0, 4, 9, 10, 25)] == pytest.approx([0.002, 0.01, 0.02, 0.02, 0.01])
    assert [rates("poly")[step] for step in (0, 20, 39)] == pytest.approx([0.02, 0.010717735, 0.000723063])


@pytest.mark.parametrize("schedule", ["cosine", "poly"])
def test_the_schedules_are_torchs(schedule: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    makers = {
        "cosine": lambda: CosineAnnealingLR(optimizer, STEPS),
        "poly": lambda: PolynomialLR(optimizer, STEPS, 0.9),
    }
    scheduler: LRScheduler = makers[schedule]()
    torchs = []
    for _ in range(STEPS):
        torchs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates(schedule) == pytest.approx(torchs, rel=1e-9)


def test_the_optimizer_steps_with_the_rate_that_is_recorded(flags: list[str], tmp_path: Path) -> None:
    """By plain gradient descent: every weight moves by the rate times its gradient."""
    seen = tmp_path / "seen"

    def hook(rank: int) -> None:
        make = trainer.make_optimizer

        def watched(*of: object) -> torch.optim.Optimizer:
            optimizer = make(*of)  # type: ignore[arg-type]
            step = optimizer.step

            def measured() -> None:
                weights = [p for group in optimizer.param_groups for p in group["params"]]
                before = [p.detach().clone() for p in weights]
                step()
                slope = sum(float((p.grad * p.grad).sum()) for p in weights)
                moved = sum(float(((old - p.detach()) * p.grad).sum()) for old, p in zip(before, weights))
                with seen.open("a") as file:
                    file.write(f"{moved / slope}\n")

            optimizer.step = measured
            return optimizer

        trainer.make_optimizer = watched

    run = "--precision fp64 --optimizer sgd --betas 0 --clip 0 --lr 0.004 --warmup 1 --epochs 4 --schedule poly"
    trained(1, [*flags, *run.split(), "--val-every", "0", "--val-cases", "1"], tmp_path / "run", hook=hook)
    wanted = [0.002, 0.004, 0.004, *(0.004 * (1 - done / 6) ** 0.9 for done in range(1, 6))]
    assert [float(line) for line in seen.read_text().split()] == pytest.approx(wanted, rel=1e-9)
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["lr"] for row in rows] == pytest.approx(wanted, rel=1e-12)
