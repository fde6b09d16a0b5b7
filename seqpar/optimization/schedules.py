"""Schedules of the learning rate by name: its share of the highest. A new one is a function and a line of SCHEDULES."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.optim import Optimizer


@dataclass(frozen=True)
class Moment:
    """Where a run is after its warm-up: ``step`` of ``steps``, and the steps and factor of a step decay.

    ``epoch_steps``: the steps of an epoch; ``cycle_steps``: those of a cycle.
    """

    step: int
    steps: int
    decay_steps: int = 0
    decay_factor: float = 0.1
    epoch_steps: int = 1
    cycle_steps: int = 1

    @property
    def done(self) -> float:
        """The share of the steps that is done."""
        return self.step / max(self.steps, 1)


def cosine(moment: Moment) -> float:
    """Returns half a cosine, from 1 down to 0 after the last step."""
    return 0.5 * (1 + math.cos(math.pi * moment.done))


def poly(moment: Moment) -> float:
    """Returns nnU-Net's polynomial of power 0.9, from 1 down to 0 after the last step."""
    return float((1 - moment.done) ** 0.9)


def poly_epochs(moment: Moment) -> float:
    """Returns the rate at the start of the epoch, as nnU-Net sets it."""
    return poly(replace(moment, step=moment.step // moment.epoch_steps * moment.epoch_steps))


def constant(moment: Moment) -> float:
    """Returns 1."""
    return 1.0


def step(moment: Moment) -> float:
    """Returns a power of the decay's factor, one more after each decay_steps (torch: StepLR)."""
    return moment.decay_factor ** (moment.step // moment.decay_steps)


def cyclic(moment: Moment) -> float:
    """Returns a triangle, from a quarter up to 1 in the middle of each cycle and back (Smith's "triangular")."""
    done = moment.step % moment.cycle_steps / moment.cycle_steps
    return 1 - 0.75 * abs(1 - 2 * done)


SCHEDULES: dict[str, Callable[[Moment], float]] = {
    "cosine": cosine,
    "poly": poly,
    "poly-epochs": poly_epochs,
    "constant": constant,
    "step": step,
    "cyclic": cyclic,
}


@dataclass(frozen=True)
class ScheduleOptions:
    """The learning rate of a run: ``lr``, its highest; ``name``, of SCHEDULES; all else in steps.

    ``warmup`` of the ``steps`` come before the schedule. For the others see ``Moment``.
    """

    lr: float
    name: str
    steps: int
    warmup: int = 0
    epoch_steps: int = 1
    decay_steps: int = 0
    decay_factor: float = 0.1
    cycle_steps: int = 1


def learning_rate(options: ScheduleOptions, step: int) -> float:
    """Returns the learning rate of a step: linear warm-up, then the schedule.

    It is a pure function of the step: there is no state to save.
    """
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    moment = Moment(
        step - options.warmup,
        options.steps - options.warmup,
        options.decay_steps,
        options.decay_factor,
        options.epoch_steps,
        options.cycle_steps,
    )
    return options.lr * SCHEDULES[options.name](moment)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Sets the rate of all of the optimizer's groups, each by its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
