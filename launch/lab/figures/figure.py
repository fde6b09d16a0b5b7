"""Figure: a list of runs, what of them is drawn, and the verdicts that are computed from their points."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.figures.equal_parameters import match_parameters
from seqpar.planner.batch_size import PAPER_BATCH
from seqpar.report.curves import QUANTITIES, Bars, Curve, Diagram, over_steps, read_curve
from seqpar.runs.run_folder import read_config
from seqpar.settings.config import Config
from seqpar.settings.presets import PRESETS
from seqpar.settings.rules import setting_applies, why_without_effect
from seqpar.sweeps.planned_run import PlannedRun
from seqpar.text import flag_name

EPOCHS = "EPOCHS"  # in an arm's curriculum: as many as the run of another arm has
LESSON = ("tile", "epochs", "batch")  # what a curriculum's lessons say
# Within which curves coincide, by arithmetic: rounding grows tenfold in some five steps (figure 9: from 2e-16 at step 8
# to 1e-8 at step 48), and a voxel whose classes are as likely may change sides.
TOLERANCES = {"fp64": 1e-5, "fp32": 1e-2, "bf16": 1e-1}


@dataclass(frozen=True)
class Published:
    """The paper with which a figure's runs are compared.

    - ``name``: in notes
    - ``preset``: its training, with which runs at ``--scale paper`` begin
    - ``settings``: what it states of the figure besides
    - ``left_open``: what it does not state
    """

    name: str
    preset: str
    settings: Mapping[str, Any]
    left_open: tuple[str, ...]


PAPER = Published(
    "paper",
    "paper",
    {"batch": PAPER_BATCH},
    ("epochs", "train_cases", "positions", "warmup", "clip", "batch_dice", "foreground_shift"),
)


@dataclass(frozen=True)
class Scale:
    """How large the runs of all figures are: a preset, the settings that differ from it, and sequence groups.

    - ``of_phantoms``: settings where no data are named
    """

    preset: str
    settings: Mapping[str, Any]
    groups: int = 1
    of_phantoms: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FigureCurve:
    """One curve of a figure: its label, and the settings that are compared with those of the other curves.

    - ``at``: settings of single scales
    - ``scales``: those at which it is drawn; none: at all
    - ``matched``: a number of channels, set so that the network has as many parameters as the figure's ``size_of``
    - ``after``: another training, from whose weights this one starts
    """

    label: str
    settings: Mapping[str, Any]
    at: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    matched: str = ""
    after: "FigureCurve | None" = None
    scales: tuple[str, ...] = ()


@dataclass(frozen=True)
class Results:
    """The finished runs of a figure.

    - ``runs``: a folder for each seed of each arm, by the arm's label
    - ``reach``: a Dice, the time to which is asked for
    - ``before``: likewise, of the trainings from whose weights an arm's started
    """

    runs: Mapping[str, Sequence[Path]]
    reach: float = 0.8
    before: Mapping[str, Sequence[Path]] = field(default_factory=dict)

    def curves(self, quantity: str, *labels: str) -> list[Curve]:
        """Returns a quantity of the arms of these labels, of all without one."""
        return [read_curve(label, self.runs[label], quantity) for label in labels or self.runs]

    def config(self, label: str = "") -> Config:
        """Returns the settings of an arm's first run, of the first arm by default."""
        run = self.runs[label or next(iter(self.runs))][0]
        return Config.from_dict(read_config(run)["config"])

    def parameters(self, label: str) -> int:
        """Returns how many parameters the network of an arm has."""
        counts: dict[str, int] = read_config(self.runs[label][0])["layout"]["parameters"]
        return sum(counts.values())

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.config().precision]


def losses_and_dice(results: Results) -> list[Diagram]:
    """Returns the paper's three diagrams: training loss, validation loss and Dice over steps."""
    return [over_steps(name, "step", results.curves(name)) for name in QUANTITIES]


@dataclass(frozen=True)
class Figure:
    """A figure.

    - ``shows``: a line on what a reader sees in it
    - ``arms``: what it compares, in their order
    - ``judge``: returns the verdicts on finished runs
    - ``settings``: of all its runs, by scale; the command line may set others
    - ``draw``: returns what is drawn of finished runs
    - ``size_of``: the arm whose number of parameters others match
    - ``of_phantoms``: settings of all its runs, by scale, where no data are named
    - ``data``: makes the data set of a scale, where no data are named and the built-in phantoms will not do
    - ``published``: the paper with which its runs are compared
    """

    number: int
    title: str
    shows: str
    arms: tuple[FigureCurve, ...]
    judge: Callable[[Results], list[str]]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    draw: Callable[[Results], Sequence[Diagram | Bars]] = losses_and_dice
    size_of: str = ""
    of_phantoms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data: Callable[[str], Path] | None = None
    published: Published = PAPER

    def with_data(self, order: "FigureRequest") -> "FigureRequest":
        """Returns a request with the figure's own data set, which it makes, unless one is named."""
        if self.data is None or order.typed.get("data"):
            return order
        return replace(order, typed={**order.typed, "data": str(self.data(order.scale))})

    def compared(self) -> set[str]:
        """Returns the settings in which the arms differ."""
        every = [arm.settings for arm in self.arms] + [own for arm in self.arms for own in arm.at.values()]
        return {name for settings in every for name in settings} | {arm.matched for arm in self.arms if arm.matched}


@dataclass(frozen=True)
class FigureRequest:
    """What a person asks of all figures: scale, settings of the command line, seeds, groups."""

    scale: str
    typed: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1
    groups: int = 0


def runs_of(figure: Figure, order: FigureRequest, scales: Mapping[str, Scale]) -> dict[str, list[PlannedRun]]:
    """Returns the runs of a figure, one for each seed, by the label of their arm.

    Figures that compare the same run name it alike, so that it is made once.
    """
    for name in sorted(order.typed.keys() & figure.compared()):
        raise ValueError(f"--{flag_name(name)} is what figure {figure.number} compares: remove it")
    scale = scales[order.scale]
    if scale.preset == PAPER.preset:
        scale = replace(scale, preset=figure.published.preset)
    start = replace(PRESETS[scale.preset](), **scale.settings)
    arms = [arm for arm in figure.arms if order.scale in (arm.scales or scales)]
    every = {arm.label: _settings(figure, arm, order, scale, start) for arm in arms}
    for arm in arms:
        if arm.matched:
            config, other = (replace(start, **every[label]) for label in (arm.label, figure.size_of))
            every[arm.label] |= {arm.matched: match_parameters(config, arm.matched, other)}
    result = dict[str, list[PlannedRun]]()
    for arm in arms:
        before = _of_seeds(_settings(figure, arm.after, order, scale, start), order, scale, start) if arm.after else ()
        result[arm.label] = _of_seeds(every[arm.label], order, scale, start, before)
    return result


def every_run(runs: Mapping[str, Sequence[PlannedRun]]) -> list[PlannedRun]:
    """Returns all runs of a figure, those of the first seed first, and each after the one whose weights it takes."""
    every = [run for of_seed in zip(*runs.values()) for run in of_seed]
    return list({one.name: one for run in every for one in (run.before, run) if one}.values())


def _of_seeds(
    settings: Mapping[str, Any], order: FigureRequest, scale: Scale, start: Config, before: Sequence[PlannedRun] = ()
) -> list[PlannedRun]:
    """Returns the runs of these settings, one for each seed; ``before``: those whose weights they take."""
    own = {name: value for name, value in settings.items() if name != "seed" and value != getattr(start, name)}
    named = [f"{flag_name(name)}-{_spelled(own[name])}" for name in sorted(own.keys() - order.typed.keys())]
    network = replace(start, **own)
    of_lessons = LESSON if network.curriculum else ()
    beside = {name: value for name, value in scale.settings.items() if name not in of_lessons}
    flags = {name: value for name, value in {**beside, **own}.items() if _acts(network, name)}
    runs, first = list[PlannedRun](), int(order.typed.get("seed", 0))
    for number, seed in enumerate(range(first, first + order.seeds)):
        earlier = before[number] if before else None
        name = "_".join([*named, *(["after", earlier.name] if earlier else [f"seed-{seed}"])])
        runs.append(PlannedRun(name, scale.preset, {**flags, "seed": seed}, order.groups or scale.groups, earlier))
    return runs


def _settings(figure: Figure, arm: FigureCurve, order: FigureRequest, scale: Scale, start: Config) -> dict[str, Any]:
    """Returns the settings of an arm besides those that all figures share: those that act on its network."""
    built_in = {} if order.typed.get("data") else {**scale.of_phantoms, **figure.of_phantoms.get(order.scale, {})}
    common = {**figure.settings.get(order.scale, {}), **built_in}
    settings = {**common, **order.typed, **arm.settings, **arm.at.get(order.scale, {})}
    if curriculum := settings.get("curriculum"):
        settings["curriculum"] = curriculum.replace(EPOCHS, str(settings.pop("epochs", start.epochs)))
    network = replace(start, **settings)
    return {name: value for name, value in settings.items() if _acts(network, name)}


def _acts(config: Config, name: str) -> bool:
    """Returns whether a setting acts on the training of a config."""
    in_windows = bool(config.window) and name == "attention"  # whose keys come from neighbours
    return setting_applies(config, name) and not in_windows


def _spelled(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).replace(":", ".")


NOTED_SETTINGS = (
    "data", "phantoms", "network", "tile", "patch", "decoder", "depth", "embed_dim", "heads", "decoder_width",
    "features", "dropout", "batch", "train_cases", "positions", "epochs", "iterations", "optimizer", "lr", "schedule",
    "warmup", "clip", "precision", "loss", "dice", "batch_dice", "fold", "foreground", "foreground_shift", "augment",
    "synthesis",
)  # fmt: skip
_ALWAYS = ("data", "phantoms", "epochs")  # told even if they are the preset's


def scaling(config: Config, published: Published) -> str:
    """Returns in which settings a run is not a paper's, as "tile 32 (paper: 96), epochs 6, …"."""
    theirs, differing = replace(PRESETS[published.preset](), **published.settings), []
    for name in NOTED_SETTINGS:
        ours, stated = _value(config, name), _value(theirs, name)
        acts = not why_without_effect(config, name) and name != ("phantoms" if config.data else "data")
        if acts and (ours != stated or name in _ALWAYS):
            is_stated = ours != stated and name not in ("data", "phantoms", *published.left_open)
            is_stated &= not why_without_effect(theirs, name)
            of_paper = f" ({published.name}: {_short(stated)})" if is_stated else ""
            differing.append(f"{flag_name(name)} {_short(ours)}{of_paper}")
    return ", ".join(differing)


def _value(config: Config, name: str) -> Any:
    """Returns a setting; the batch is that of all sequence groups where ``--global-batch`` sets it."""
    return config.global_batch or config.batch if name == "batch" else getattr(config, name)


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    sides = value if isinstance(value, tuple) else (value,)
    texts = [f"{side:g}" if isinstance(side, float) else str(side) for side in sides]
    return "x".join(texts if len(set(texts)) > 1 else texts[:1])
