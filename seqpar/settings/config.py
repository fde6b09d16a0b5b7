"""Config: every setting of a run, to and from JSON, and the plain options that follow from it."""

import dataclasses
import json
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from seqpar.losses.terms import LossOptions
from seqpar.optimization.optimizers import OptimizerOptions
from seqpar.optimization.schedules import ScheduleOptions
from seqpar.settings.data_settings import DataSettings
from seqpar.settings.field import Declaration
from seqpar.settings.loss_settings import LossSettings
from seqpar.settings.network_settings import NetworkSettings, PretrainingSettings
from seqpar.settings.optimizer_settings import OptimizerSettings
from seqpar.settings.parallel_settings import ParallelSettings
from seqpar.settings.run_settings import RunSettings


@dataclass(frozen=True)
class Config(
    RunSettings, LossSettings, OptimizerSettings, PretrainingSettings, NetworkSettings, ParallelSettings, DataSettings
):
    """Every setting of a training run; what a run does follows from it, the data and the ranks.

    Sections come in the order of --help: dataclasses take the fields of their bases from the last to the first.
    """

    def __post_init__(self) -> None:
        if isinstance(self.patch, int):  # of a cube, as scripts and the configs of earlier runs have it
            object.__setattr__(self, "patch", (self.patch,) * 3)

    @property
    def steps(self) -> int:
        return self.epochs * self.iterations

    @property
    def loss_options(self) -> LossOptions:
        """What the terms of the loss take."""
        return LossOptions(
            self.dice == "squared", self.dice_background, self.batch_dice, self.focal_gamma, self.dice_smooth
        )

    @property
    def optimizer_options(self) -> OptimizerOptions:
        """What the optimizer is made of."""
        blocks = (self.depths,) if isinstance(self.depths, int) else self.depths
        return OptimizerOptions(
            self.lr,
            self.betas,
            self.amsgrad,
            self.optimizer,
            self.weight_decay,
            self.decay_all,
            self.layer_decay,
            blocks,
        )

    @property
    def schedule_options(self) -> ScheduleOptions:
        """What the learning rate of each step follows from."""
        return ScheduleOptions(
            self.lr,
            self.schedule,
            self.steps,
            self.warmup * self.iterations,
            self.iterations,
            self.decay_epochs * self.iterations,
            self.decay_factor,
            self.cycle_epochs * self.iterations,
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        """Returns the config of a saved run from its JSON values; refuses unknown names."""
        if unknown := sorted(values.keys() - SETTINGS.keys()):
            raise ValueError(f"config.json: unknown settings {', '.join(unknown)}")
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        usual, hints = cls(), get_type_hints(cls)
        for name, value in plain.items():
            kind = type(getattr(usual, name))
            also = {"patch": int, float: int}  # a cube's side; whole numbers
            is_kind = isinstance(value, (kind, also.get(name) or also.get(kind, kind)))
            is_kind = is_kind and isinstance(value, bool) == (kind is bool)  # which Python counts as whole numbers
            numbers: tuple[type, ...] = (int,) if hints[name] == tuple[int, ...] else (int, float)
            parts = value if isinstance(value, tuple) else ()
            if not is_kind or not all(isinstance(part, numbers) and not isinstance(part, bool) for part in parts):
                raise ValueError(
                    f"config.json: {name} is {value!r}, and a value such as {getattr(usual, name)!r} is needed"
                )
        return replace(usual, **plain)


SETTINGS: dict[str, Declaration] = {f.name: f.metadata["setting"] for f in dataclasses.fields(Config)}
