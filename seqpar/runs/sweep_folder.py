"""The folder of a sweep, whose points are runs of their own, as ``tune`` leaves it.

OUT/NAME            run folders, as train writes them; NAME tells the settings
OUT/sweep.json      the space, the flags of all runs, and how each point stands
OUT/sweep.csv       the points as a table; OUT/sweep.png: drawn
OUT/logs/NAME.txt   what the ranks of a point printed
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError, unwritable
from seqpar.data.files import read_json, write_json
from seqpar.runs.journal import read_metrics
from seqpar.runs.metrics_tail import ERRORS, SCORES, basis_of, best_validation, measure_of, score_of
from seqpar.runs.run_folder import SWEEP_FILE, read_config, read_status
from seqpar.runs.run_status import list_changes
from seqpar.scores.comparison import FEW, TOO_FEW
from seqpar.settings.config import SETTINGS, Config
from seqpar.settings.presets import PRESETS
from seqpar.text import flag_name, quantity
from seqpar.weights.facts import cases_that_differ

VERSION = 1


@dataclass(frozen=True)
class Point:
    """A point of a sweep: the name of its run folder, its settings, and how its run stands.

    - ``state``: of its status.json; "open" before it begins, "stopped" where the sweep ended it early
    - ``score``, ``at``: the best score of its validations and the step of it; NaN before the first
    - ``loss``: of the last step
    - ``seconds``: of all recorded steps and validations
    - ``cases``: on which the best score was measured; 0: not known
    - ``measured_on``: a digest of those cases as they were prepared, and what an error depends on; "": not known
    """

    name: str
    settings: Mapping[str, Any]
    state: str = "open"
    step: int = 0
    steps: int = 0
    score: float = math.nan
    at: int = 0
    loss: float = math.nan
    seconds: float = 0.0
    code: int = 0
    why: str = ""
    cases: int = 0
    measured_on: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the point needs no further training."""
        return self.state in ("finished", "stopped")


@dataclass(frozen=True)
class Sweep:
    """What sweep.json holds.

    - ``began``: by what the sweep was begun: space, preset, flags, devices; a resumed one has to be the same
    """

    began: Mapping[str, Any]
    points: tuple[Point, ...] = field(default=())

    @property
    def best(self) -> Point | None:
        """The point with the highest score, of equal ones that with the lower loss; None before any has one."""
        return next(iter(self.ranked), None)

    @property
    def marked(self) -> Point | None:
        """The best point, which pictures mark; None if its cases are too few to tell that it is the best."""
        return None if self.best and 0 < self.best.cases < FEW else self.best

    @property
    def ranked(self) -> list[Point]:
        """The points that have a score, the best first."""
        known = [point for point in self.points if not math.isnan(point.score)]
        return sorted(known, key=lambda point: (-point.score, point.loss))

    @property
    def failures(self) -> list[str]:
        """A line on each point that failed or was killed."""
        how = {"failed": "failed", "killed": "was killed"}
        ended = [point for point in self.points if point.state in how]
        return [f"{point.name} {how[point.state]}, code {point.code}: {point.why}" for point in ended]

    @property
    def score_name(self) -> str:
        """What the points are compared by, which is higher for a better point."""
        return f"1 / (1 + {SCORES[self.task]})" if self.task in ERRORS else SCORES[self.task]

    @property
    def task(self) -> str:
        preset = PRESETS[self.began["preset"]]() if "preset" in self.began else Config()
        return str(self.began.get("settings", {}).get("task", preset.task))

    def describe_best(self, best: Point) -> str:
        """Returns which point reached most, in words: its score or the error behind it, and on how many cases."""
        most = "lowest" if self.task in ERRORS else "highest"
        text = f"{most} {SCORES[self.task]}: {best.name}, {measure_of(self.task, best.score):.3f} after step {best.at}"
        if same := [point.name for point in self.ranked if point.score == best.score and point.name != best.name]:
            text += f" ({list_some(same, ', ')} scored the same)"
        if not best.cases:
            return text
        few = f": {TOO_FEW} which setting is best" if best.cases < FEW else ""
        has_all = {**self.began.get("settings", {}), **best.settings}.get("fold") == "all"
        cases = (
            f"{quantity(best.cases, 'case')} that it trains on" if has_all else quantity(best.cases, "held-out case")
        )
        return f"{text}, on {cases}{few}"

    def varied(self) -> list[str]:
        """Returns the settings in which points differ, by their names in Config."""
        names = dict.fromkeys(name for point in self.points for name in point.settings)
        return [name for name in names if len({str(point.settings.get(name)) for point in self.points}) > 1]

    def main_effects(self) -> dict[str, dict[str, list[tuple[float, str]]]]:
        """Returns, for each setting in which points differ and each of its values, the score and name of its points."""
        effects: dict[str, dict[str, list[tuple[float, str]]]] = {}
        for name in self.varied():
            of_values = effects.setdefault(name, {})
            for point in self.points:
                if not math.isnan(point.score) and name in point.settings:
                    of_values.setdefault(format_value(point.settings[name]), []).append((point.score, point.name))
        return {name: of_values for name, of_values in effects.items() if of_values}


def format_value(value: Any) -> str:
    """Returns a setting's value in short: of a cube one side, of a switch yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (tuple, list)):
        return "x".join(map(format_value, value[:1] if len(set(value)) == 1 else value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def holds_sweep(out: str | Path) -> bool:
    """Returns whether a folder is that of a sweep."""
    return (Path(out) / SWEEP_FILE).is_file()


def read_sweep(out: str | Path) -> Sweep:
    """Returns the content of sweep.json; raises DataError where it is damaged."""
    path = Path(out) / SWEEP_FILE
    content = read_json(path)
    try:
        if (version := content.get("version", VERSION)) != VERSION:
            raise TypeError(f"but of version {version}")
        rows: list[dict[str, Any]] = [
            {name: math.nan if value is None else value for name, value in row.items()} for row in content["points"]
        ]
        return Sweep(content["began"], tuple(map(_point, rows)))
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged_sweep_error(path, error) from None


def _point(row: Mapping[str, Any]) -> Point:
    """Returns a point as it was read; raises TypeError for values of other types, and names that are no folder's."""
    point = Point(**row)
    for own in fields(point):
        value, usual = getattr(point, own.name), {} if own.name == "settings" else own.default
        kinds = (int, float) if isinstance(usual, float) else str if own.name == "name" else type(usual)
        if not isinstance(value, kinds):
            raise TypeError(f"{own.name} of a point is {value!r}")
    if point.name in ("", "..") or point.name != Path(point.name).name:  # runs would be outside
        raise TypeError(f"a point has the name {point.name!r}")
    return point


def damaged_sweep_error(path: Path, error: Exception) -> DataError:
    """Returns the error of a sweep.json that lacks something, or has something else in its place."""
    return DataError(path, f"is no sweep of this version ({error}); restore it, or begin in another folder")


def write_sweep(out: Path, sweep: Sweep) -> None:
    """Writes sweep.json, whole or not at all; makes the folder."""
    best = sweep.best
    rows = [{name: _finite(value) for name, value in asdict(point).items()} for point in sweep.points]
    content = {"version": VERSION, "best": best.name if best else None, "began": dict(sweep.began), "points": rows}
    make_folder(out)
    try:
        write_json(out / SWEEP_FILE, content)
    except OSError as error:
        raise unwritable(f"--out {out}", error) from None


def make_folder(out: Path) -> None:
    """Makes the folder of a sweep, unless it is there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(f"--out {out}", error) from None


def _whole(value: Any) -> int:
    """Returns a number of status.json; 0 for what is none, as in a damaged file."""
    return value if isinstance(value, int) else 0


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refresh_points(out: Path, sweep: Sweep, stopped: Sequence[str] = (), ended: str = "") -> Sweep:
    """Returns the sweep with each point as its run folder has it now.

    - ``stopped``: names of points that the sweep ended early
    - ``ended``: the state of points whose status says that they run, where none does any more: "killed", or
      "preempted" where a signal reached a training before it could act on it
    """
    points = (_look_up(out / point.name, point, stopped) for point in sweep.points)
    return replace(sweep, points=tuple(as_ended(point, ended) if ended else point for point in points))


def odd_points(out: Path, sweep: Sweep) -> list[str]:
    """Returns a sentence on each point whose folder holds the run of another, or one that was trained on by hand with
    settings that are not those of the point.
    """
    return [f"{point.name} {told}" for point in sweep.points if (told := _why_odd(out / point.name))]


def _why_odd(run: Path) -> str:
    mixed = f"the row of {run.name} shows its scores next to the settings of {run.name}"
    with suppress(OSError, LookupError, TypeError, ValueError, AttributeError):
        first, *later = read_config(run)["history"]
        line = first["command"]
        if (began := Path(line[line.index("--out") + 1]).name) != run.name:
            return f"holds the run that began as {began}: {mixed}. Rename the folders back."
        changes = dict[str, list[Any]]()
        for name, (was, now) in (pair for start in later for pair in start["changed"].items()):
            changes[name] = [changes.get(name, [was])[0], now]
        changes = {
            name: pair for name, pair in changes.items() if pair[0] != pair[1] and counts_for_scores(name, *pair)
        }
        if changes:
            again = "To compare fairly, move this run away and resume the sweep, which then trains the point again."
            return f"was trained on with other settings ({list_changes(changes)}): {mixed}. {again}"
    return ""


def validated_on(out: Path, sweep: Sweep) -> dict[str, int]:
    """Returns a number for each point, by its name, that is the same for points whose best scores were measured on the
    same cases with the same labels, and with the same share hidden. Points for which that is not known have none.
    """
    found, numbers = list[tuple[Point, Mapping[str, Any]]](), dict[str, int]()
    for point in sweep.points:
        described: Mapping[str, Any] = {}
        with suppress(OSError, LookupError, TypeError, ValueError):
            described = dict(read_config(out / point.name)["dataset"])
        same = next((n for n, first in enumerate(found, 1) if _scored_alike(sweep.task, (point, described), first)), 0)
        if point.measured_on and not math.isnan(point.score) and (same or described):
            found += [(point, described)] * (not same)
            numbers[point.name] = same or len(found)
    return numbers


def _scored_alike(task: str, one: tuple[Point, Mapping[str, Any]], other: tuple[Point, Mapping[str, Any]]) -> bool:
    """Returns whether two points were scored on the same cases with the same labels, however these were prepared.

    - ``one``, ``other``: each with what it records of its data
    """
    (point, own), (first, theirs) = one, other
    recipes = [described.get("recipe") or {} for described in (own, theirs)]
    joined, cuts = ([recipe.get(name) or [] for recipe in recipes] for name in ("joined", "crop_to"))
    if own and theirs and joined[0] != joined[1]:  # other classes
        return False
    is_cut = any(recipe.get("cut_labels") for recipe in recipes)
    if own and theirs and cuts[0] != cuts[1] and is_cut:  # other parts of labels
        return False
    if errors_on_other_scales(task, (point, first)):
        return False
    if point.measured_on.partition(" ")[0] == first.measured_on.partition(" ")[0]:
        return True
    if own.get("recipe") == theirs.get("recipe"):
        return False
    held_out, known = (sorted(described.get("held_out", ())) for described in (own, theirs))
    return held_out == known and point.cases == first.cases and not {*held_out} & {*cases_that_differ(own, theirs)}


# settings on which the error of a pretraining depends: which voxels are hidden, and its unit
OF_ERROR = ("mask_ratio", "normalised_targets", "tile", "patch", "spacing", "normalise", "crop_to")
MOST_NAMED = 4  # in a list


def errors_on_other_scales(task: str, points: Sequence[Point]) -> list[str]:
    """Returns the flags that give errors of pretrainings other hidden voxels or other units; none for other tasks."""
    known = [
        {name: str(value) for name, value in point.settings.items()}
        | dict(one.split("=") for one in point.measured_on.split()[1:])
        for point in points
    ]
    values = {name: {own[name] for own in known if name in own} for name in OF_ERROR * (task in ERRORS)}
    return [f"--{flag_name(name)}" for name, own in values.items() if len(own) > 1]


def how_mixed(task: str, points: Sequence[Point]) -> str:
    """Returns how points whose scores cannot be compared were validated, in words."""
    if flags := errors_on_other_scales(task, points):
        return f"were validated with different {' and '.join(flags)}"
    return f"were validated on different cases{' or labels' * (task not in ERRORS)}"


def describe_mixed(sweep: Sweep, numbers: Mapping[str, int]) -> str:
    """Returns which points' scores cannot be compared, in words; "" if all can be, as far as is known.

    - ``numbers``: as ``validated_on`` returns them
    """
    of_each = dict[int, list[str]]()
    for name, number in numbers.items():
        of_each.setdefault(number, []).append(name)
    if len(of_each) < 2:
        return ""
    listed = [f"({number}) {list_some(names, ', ')}" for number, names in of_each.items()]
    how = how_mixed(sweep.task, [point for point in sweep.points if point.name in numbers])
    told = f"points {how}, so their order says little about which setting is best"
    return f"{told}: {list_some(listed, '; ')}"


def list_some(words: Sequence[str], between: str) -> str:
    """Returns the first of some words, and how many more there are."""
    more = [f"and {len(words) - MOST_NAMED} more"] * (len(words) > MOST_NAMED)
    return between.join([*words[:MOST_NAMED], *more])


# what changes no score by itself; the batch of a rank changes with the number of ranks, which keeps the tiles of a step
_HARMLESS = ("workers", "device", "cache", "tensorboard", "tracker", "neurological", "batch", "accumulate")
_SECTIONS = ("run folder", "time limits and checks", "memory and device", "tile and ranks")


def counts_for_scores(name: str, was: Any, now: Any) -> bool:
    """Returns whether a change of a setting may change the scores of a run."""
    if name == "data":  # which may have moved
        return Path(str(was)).name != Path(str(now)).name
    return name not in _HARMLESS and SETTINGS[name].section not in _SECTIONS


def as_ended(point: Point, state: str) -> Point:
    """Returns a point, with another state if its status says that it runs."""
    if point.state != "running":
        return point
    why = f"its training was killed, after step {point.step}" if state == "killed" else ""
    return replace(point, state=state, code=1 if why else 0, why=why)


def _look_up(run: Path, point: Point, stopped: Sequence[str]) -> Point:
    status = read_status(run)
    if not status:
        return point
    state = str(status.get("state", "open"))
    if state != "finished" and (point.state == "stopped" or point.name in stopped):
        state = "stopped"
    try:
        rows = read_metrics(run / "metrics.jsonl")
    except OSError:
        rows = []
    train, held_out = ([row for row in rows if row["kind"] == kind] for kind in ("train", "val"))
    best = best_validation(held_out)
    return replace(
        point,
        state=state,
        step=max((row["step"] + 1 for row in train), default=0),
        steps=_whole(status.get("steps")),
        score=score_of(best) if best else math.nan,
        at=best["step"] if best else 0,
        loss=float(train[-1]["loss"]) if train else math.nan,
        seconds=sum(row.get("seconds", 0.0) for row in (*train, *held_out)),
        code=_whole(status.get("code")),
        why="" if state == "stopped" else str(status.get("why", "")),
        cases=int(best.get("cases", 0)) if best else 0,
        measured_on=_scale_of(basis_of(held_out)) if best else "",
    )


def _scale_of(basis: str) -> str:
    """Returns of what a validation was measured on the digest of its cases, and settings that an error depends on."""
    cases, _, settings = basis.partition(" ")
    return " ".join([cases, *(one for one in settings.split() if one.partition("=")[0] in OF_ERROR)])
