"""SweepOrder: what a sweep is asked for: its space, the settings of all runs, and the devices of each."""

import argparse
import importlib
import importlib.util
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from seqpar.cluster.devices import num_devices
from seqpar.data.errors import DataError
from seqpar.models.build import NETWORK_NAMES
from seqpar.planner.batch_size import settings_at_start
from seqpar.runs.run_folder import SWEEP_FILE
from seqpar.runs.sweep_folder import Point, Sweep, damaged_sweep_error, read_sweep, refresh_points
from seqpar.settings.command_line import parse, wants_gpu
from seqpar.settings.config import Config
from seqpar.settings.data_settings import ALL_FOLDS
from seqpar.settings.presets import PRESETS
from seqpar.settings.rules import FILES, from_anywhere
from seqpar.sweeps.planned_run import PlannedRun, config_of, has_begun
from seqpar.sweeps.space import OF_ONE_RUN, Range, Space, name_of_point
from seqpar.text import flag_name, install_hint, quantity

OPTUNA = "optuna"
ASHA = "asha"
STOPPERS = ("none", ASHA)
SEARCHES = ("random", OPTUNA)
ALL = "all"  # value of --devices-per-run
MAX_FAILURES = 2
MAY_CHANGE = ("stop_early", "max_failures")  # of a resumed sweep


@dataclass(frozen=True)
class SweepRequest:
    """What a sweep is asked for.

    - ``preset``, ``settings``: what all runs begin with, by the names of Config
    - ``devices_per_run``: ranks of a run, or "all"
    - ``samples``: draws from ranges; points in all where optuna suggests them
    - ``search``: who chooses points
    - ``stop_early``, ``max_failures``: what becomes of runs that fall behind, and of killed ones; may change on resume
    """

    space: Space
    preset: str
    settings: Mapping[str, Any]
    devices_per_run: str = "1"
    samples: int = 1
    search: str = SEARCHES[0]
    stop_early: str = STOPPERS[0]
    max_failures: int = MAX_FAILURES

    def began(self) -> dict[str, Any]:
        """Returns what sweep.json keeps of it."""
        ranges = {name: asdict(one) for name, one in self.space.ranges.items()}
        space = {**{name: list(values) for name, values in self.space.values.items()}, **ranges}
        own = {"preset": self.preset, "settings": dict(self.settings)}
        return {"space": space, **own, "devices_per_run": self.devices_per_run, "samples": self.samples,
                "search": self.search, **{name: getattr(self, name) for name in MAY_CHANGE}}  # fmt: skip

    @property
    def total(self) -> int:
        """How many points the sweep has in the end, where optuna suggests them; else 0: they are all there."""
        return self.samples if self.search == OPTUNA else 0

    @property
    def device(self) -> str:
        """The device of its runs, as --device has it."""
        return str(self.settings.get("device", "auto"))

    @property
    def on_gpu(self) -> bool:
        """Whether its runs are for GPUs of this machine."""
        return wants_gpu(["--device", self.device])

    def sweep(self) -> Sweep:
        """Returns the sweep before it begins; raises ValueError where two of its points would be one."""
        return Sweep(self.began()) if self.total else self.drawn()

    def drawn(self) -> Sweep:
        """Returns the sweep with points that are listed or drawn at random."""
        source = random.Random(int(self.settings.get("seed", 0)))
        drawn = self.space.points(self.samples, lambda one: draw(one, source))
        points = tuple(Point(name_of_point(settings), settings) for settings in drawn)
        names = [point.name for point in points]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"--space: two points are {name}: take other ends, or fewer --samples")
        return Sweep(self.began(), points)

    def known(self, sweep: Sweep) -> Sweep:
        """Returns the sweep, with a point of each kind where none has been suggested yet."""
        return sweep if sweep.points else self.drawn()

    def ranks(self, devices: int) -> int:
        """Returns the number of ranks of a run on ``devices`` devices."""
        return devices if self.devices_per_run == ALL else int(self.devices_per_run)

    def runs(self, sweep: Sweep, devices: int) -> list[PlannedRun]:
        """Returns the run of each point on ``devices`` devices; raises ValueError for one that cannot be."""
        return [self.run(point.name, point.settings, devices) for point in sweep.points]

    def run(self, name: str, settings: Mapping[str, Any], devices: int) -> PlannedRun:
        """Returns the run of a point; raises ValueError, with its name, where it cannot be."""
        every = {**self.settings, **settings}
        ranks = self.ranks(devices)
        if ranks > devices:
            raise ValueError(f"--devices-per-run {ranks}: there are {devices} devices: give at most {devices}")
        return PlannedRun(name, self.preset, every, ranks // self._group_ranks(name, every, ranks))

    def _group_ranks(self, name: str, every: Mapping[str, Any], ranks: int) -> int:
        """Returns how many ranks share the tiles of a run; raises ValueError where they do not divide its ``ranks``."""
        start = PRESETS[self.preset]()
        own = int(every.get("seqpar", start.seqpar)) * int(every.get("pipe", start.pipe))
        if own < 1:
            raise ValueError(f"{name}: --seqpar auto: a run's ranks are shared out before it begins: give a number")
        if ranks % own:
            raise ValueError(f"{name}: its tiles are shared by {own} ranks, which do not divide the {ranks} of a run: "
                             f"set --devices-per-run {own}")  # fmt: skip
        return own

    def configs(self, sweep: Sweep, acting: Collection[str] = ()) -> dict[str, Config]:
        """Returns the settings of each point's run, by its name; raises ValueError for one whose settings cannot be.

        - ``acting``: settings that have an effect whatever the others are
        """
        every = dict[str, Config]()
        for point in sweep.points:
            settings = {**self.settings, **point.settings}
            self._group_ranks(point.name, settings, 0 if self.devices_per_run == ALL else int(self.devices_per_run))
            try:
                every[point.name] = config_of(PlannedRun(point.name, self.preset, settings), acting)
            except ValueError as error:
                raise ValueError(f"point {point.name}: {error}") from None
        return every

    def validated_steps(self, configs: Mapping[str, Config], ranks: int) -> tuple[int, int]:
        """Returns the step of the earliest first validation, and of the latest last one, of runs on ``ranks`` ranks.

        - ``configs``: of all points so far; optuna may suggest any of the space, whose listed values are counted then
        """
        every = self.configs(replace(self, samples=1).drawn()) if self.total else configs
        begun = [settings_at_start(config, ranks // config.group_ranks) for config in every.values()]
        firsts = [min(config.val_every * config.iterations or config.steps, config.steps) for config in begun]
        return min(firsts), max(config.steps for config in begun)


def check_search(space: Space, samples: int, search: str) -> None:
    """Raises ValueError for an optuna that is not installed, and a number of draws or of its points that cannot be."""
    most = len(space.points()) if search == OPTUNA and not space.ranges else samples
    why = ""
    if samples < 1:
        why = "it must be at least 1"
    elif samples > 1 and not space.ranges and search != OPTUNA:
        why = "--space has no range to draw from: remove it"
    elif samples > most:
        why = f"--space has {quantity(most, 'point')}: give at most {most}"
    if why:
        raise ValueError(f"--samples {samples}: {why}")
    if search == OPTUNA and importlib.util.find_spec("optuna") is None:
        raise ValueError("--search optuna: it is not installed: pip install optuna, or remove it")


def check_devices(devices: int, device: str, on_gpu: bool) -> None:
    """Raises ValueError for GPUs that this machine lacks; cores can be shared.

    - ``device``: as --device has it
    """
    if device == "cuda" and not on_gpu:
        raise ValueError("--device cuda: this machine has no GPU: name a running cluster with --ray, or remove it")
    if on_gpu and devices > (count := num_devices(True)):
        raise ValueError(f"--devices {devices}: this machine has {quantity(count, 'GPU')}: give at most {count}")


def require_ray() -> None:
    """Raises ValueError where Ray Tune is not installed."""
    instead = f"{install_hint('tune')}; without it, train each point with train, and compare them with report RUN RUN"
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f"tune needs Ray Tune, which is not installed: {instead}")
    try:
        importlib.import_module("ray.tune")
    except ImportError as error:  # Ray without its extra
        raise ValueError(
            f"tune needs all of Ray Tune ({(str(error).splitlines() or ['it fails'])[0]}): {instead}"
        ) from None


def draw(one: Range, source: random.Random) -> float:
    """Returns a number of a range, drawn as Ray's ``uniform`` and ``loguniform`` do."""
    require_ray()
    from ray import tune

    domain = tune.loguniform(one.low, one.high) if one.kind == "log" else tune.uniform(one.low, one.high)
    return float(domain.sample(random_state=source.randrange(2**32)))


def typed_settings(
    rest: Sequence[str], space: Space, default_preset: str, others: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    """Returns the preset, and the settings of train on the command line; refuses what is a single run's or compared.

    - ``others``: flags of tune itself
    """
    preset, config, names = parse(rest, default_preset, NETWORK_NAMES, others)
    if own := sorted(names.intersection(OF_ONE_RUN) - {"preset"}):
        raise ValueError(f"--{flag_name(own[0])} belongs to a single run, and a sweep has several: remove it")
    if twice := sorted(names.intersection(space.names)):
        raise ValueError(f"--{flag_name(twice[0])} is what --space compares: leave one of both out")
    if config.fold == ALL_FOLDS:
        raise ValueError(f"--fold {ALL_FOLDS} is five runs: compare folds by --space fold=0,1,2,3,4")
    typed = {name: getattr(config, name) for name in sorted(names)}
    return preset, typed | {name: from_anywhere(name, typed[name]) for name in FILES if name in typed}


def check_same_sweep(before: Mapping[str, Any], now: Mapping[str, Any], out: str) -> None:
    """Refuses a resumed sweep by other settings than those that it began with."""
    for name in (before.keys() | now.keys()).difference(MAY_CHANGE):
        if _plain(before.get(name)) != _plain(now.get(name)):
            shown = f"{name.replace('_', '-')} {_plain(before.get(name))}, and now {_plain(now.get(name))}"
            raise ValueError(f"--resume --out {out}: the sweep there began with {shown}: give --resume --out alone, "
                             "or name another folder")  # fmt: skip


def has_begun_points(out: Path) -> bool:
    """Returns whether a point of the sweep in a folder has begun: before, the sweep may begin with other flags."""
    return any(has_begun(out / point.name) for point in read_sweep(out).points)


def override_by_flags(order: SweepRequest, options: argparse.Namespace) -> SweepRequest:
    """Returns the order with those of the options that a sweep may change as it goes on, where they are typed."""
    typed = {name: getattr(options, name) for name in MAY_CHANGE}
    return replace(order, **{name: value for name, value in typed.items() if value is not None})


def resume_sweep(before: Sweep, options: argparse.Namespace) -> tuple[SweepRequest, Sweep]:
    """Returns the order of a sweep that was begun, and the sweep as it stands."""
    order = override_by_flags(order_of(before.began, options.out), options)
    if not order.total:
        own, drawn = [dict(point.settings) for point in before.points], order.space.points(order.samples)
        if len(own) != len(drawn) or not (order.space.ranges or all(settings in own for settings in drawn)):
            raise DataError(
                options.out / SWEEP_FILE, f"has {quantity(len(own), 'point')}, and its space has "
                f"{'others' if len(own) == len(drawn) else len(drawn)}: restore it, or begin in another folder"
            )  # fmt: skip
    return order, refresh_points(options.out, replace(before, began=order.began()))


def order_of(began: Mapping[str, Any], out: Path) -> SweepRequest:
    """Returns the order that the sweep.json in ``out`` keeps; raises DataError where it is damaged."""
    try:
        ranges = {name: Range(**one) for name, one in began["space"].items() if isinstance(one, dict)}
        values = {name: tuple(map(_tupled, one)) for name, one in began["space"].items() if isinstance(one, list)}
        settings = {name: _tupled(value) for name, value in began["settings"].items()}
        per_run, samples, search = began["devices_per_run"], began["samples"], began["search"]
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged_sweep_error(out / SWEEP_FILE, error) from None
    more = {name: began[name] for name in MAY_CHANGE if name in began}
    return SweepRequest(Space(values, ranges), began["preset"], settings, per_run, samples, search, **more)


def tupled_points(sweep: Sweep) -> Sweep:
    """Returns a sweep that was read, its settings as Config has them."""
    points = (replace(p, settings={n: _tupled(v) for n, v in p.settings.items()}) for p in sweep.points)
    return replace(sweep, points=tuple(points))


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
