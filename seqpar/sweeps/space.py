"""Space: the settings that a sweep compares, as ``--space lr=1e-4,1e-3 amsgrad=no,yes`` or a JSON file names them.

Keys are flags of train. Values of a key are separated by commas, the numbers of one value by colons; ``log:1e-4:1e-2``
and ``uniform:0:0.5`` are ranges to draw from.
"""

import dataclasses
import difflib
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from seqpar.data.errors import DataError
from seqpar.data.files import read_json
from seqpar.runs.sweep_folder import format_value
from seqpar.settings.config import Config
from seqpar.settings.data_settings import ALL_FOLDS
from seqpar.settings.rules import FILES, from_anywhere
from seqpar.text import flag_name

RANGES = ("log", "uniform")
OF_ONE_RUN = ("out", "resume", "again", "take_over", "dry_run", "time_limit", "preset")  # a sweep sets these itself
SWITCHES = {"yes": True, "no": False, "on": True, "off": False, "true": True, "false": False}
LONGEST_NAME = 120  # letters of a run folder's name; a longer one is cut, and ends in a digest
TRIES = 50  # for a point that is not there yet
DIGITS = 4  # of a number that is drawn, so that the name of its run tells it whole


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high`` to draw from; ``kind``: evenly ("uniform"), or evenly in their logarithm."""

    kind: str
    low: float
    high: float


@dataclass(frozen=True)
class Space:
    """Values to compare by setting, and ranges to draw from, by the names of Config."""

    values: Mapping[str, tuple[Any, ...]]
    ranges: Mapping[str, Range]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.values, *self.ranges)

    def points(self, samples: int = 1, draw: Callable[[Range], float] | None = None) -> list[dict[str, Any]]:
        """Returns the settings of each point: the product of all values, each with ``samples`` draws from the ranges.

        - ``draw``: draws a number; numbers that make a point which is there already are drawn again, some times
        """
        points, names = list[dict[str, Any]](), set[str]()
        for chosen in itertools.product(*self.values.values()):
            fixed = dict(zip(self.values, chosen))
            for _ in range(samples if self.ranges else 1):
                point = fixed
                for _ in range(TRIES):
                    drawn = {name: rounded(draw(one)) for name, one in self.ranges.items()} if draw else {}
                    point = {**fixed, **drawn}
                    if not drawn or name_of_point(point) not in names:
                        break
                names.add(name_of_point(point))
                points.append(point)
        return points


def parse_space(words: Sequence[str]) -> Space:
    """Returns the space of a command line: words ``key=values``, or the path of one JSON file."""
    if len(words) == 1 and "=" not in words[0]:
        return _from_file(Path(words[0]))
    values, ranges = dict[str, tuple[Any, ...]](), dict[str, Range]()
    for word in words:
        key, is_there, text = word.partition("=")
        if not is_there or not text:
            raise ValueError(f"--space {word}: give a flag of train and its values, as in lr=1e-4,1e-3")
        name = _name_of(key, {*values, *ranges})
        kind, colon, _ = text.partition(":")
        if colon and kind in RANGES:
            ranges[name] = _range(name, text.split(":"))
        else:
            values[name] = _different(name, [_value(name, part) for part in text.split(",")])
    return Space(values, ranges)


def _from_file(path: Path) -> Space:
    """Returns the space of a JSON file: a list of values by flag, or ``{"log": [1e-4, 1e-2]}``."""
    if not path.exists():
        raise ValueError(f"--space {path}: there is no such file, and it is no flag=values, as in lr=1e-4,1e-3")
    content = read_json(path)
    if not isinstance(content, dict) or not content:
        raise DataError(path, 'is no space: give lists of values by flag, as {"lr": [1e-4, 1e-3]}')
    values, ranges = dict[str, tuple[Any, ...]](), dict[str, Range]()
    for key, entry in content.items():
        name = _name_of(str(key), {*values, *ranges})
        if isinstance(entry, dict) and len(entry) == 1 and next(iter(entry)) in RANGES:
            ((kind, ends),) = entry.items()
            ranges[name] = _range(name, [kind, *map(str, ends if isinstance(ends, list) else [ends])])
        elif isinstance(entry, list) and entry and None not in entry:
            values[name] = _different(name, [_value(name, _spelled(one)) for one in entry])
        else:
            raise DataError(path, f'{key} is {entry!r}: give a list of values, or {{"log": [1e-4, 1e-2]}}')
    return Space(values, ranges)


def _spelled(value: Any) -> str:
    """Returns a JSON value as the command line has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ":".join(map(str, value)) if isinstance(value, list) else str(value)


def _name_of(key: str, taken: set[str]) -> str:
    """Returns the setting that a key names; refuses one that there is not, or that a sweep sets itself."""
    known = [f.name for f in dataclasses.fields(Config)]
    name = key.removeprefix("--").replace("-", "_")
    if name in OF_ONE_RUN:
        raise ValueError(f"--space {key}: each run of a sweep has its own --{flag_name(name)}: remove it")
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        nearest = f"; nearest is {flag_name(near[0])}" if near else ""
        raise ValueError(f"--space {key}: train has no flag --{flag_name(name)}{nearest} (train --help all lists all)")
    if name in taken:
        raise ValueError(f"--space {key}: it is there twice: give all its values once")
    return name


def _value(name: str, text: str) -> Any:
    """Returns a value of a setting from its word."""
    kind = get_type_hints(Config)[name]
    if name in FILES:
        return from_anywhere(name, text)
    if name == "fold" and text == ALL_FOLDS:
        raise ValueError(f"--space fold={ALL_FOLDS} is five runs: compare folds by --space fold=0,1,2,3,4")
    if name == "spacing":
        return text.replace(":", ",")
    try:
        if kind is bool:
            return SWITCHES[text.lower()]
        if kind in (tuple[int, ...], tuple[float, ...]):
            one = int if kind == tuple[int, ...] else float
            numbers = tuple(one(part) for part in text.split(":"))
            return numbers * 3 if name in ("tile", "patch") and len(numbers) == 1 else numbers
        return kind(text)
    except (ValueError, KeyError):
        needed = {bool: "yes or no", int: "a whole number", float: "a number"}.get(kind, "numbers, as in 0.9:0.99")
        raise ValueError(f"--space {flag_name(name)}={text}: {needed} is needed") from None


def _range(name: str, parts: Sequence[str]) -> Range:
    """Returns the range of "log", "1e-4", "1e-2"."""
    typed = f"--space {flag_name(name)}={':'.join(parts)}"
    if get_type_hints(Config)[name] is not float:
        raise ValueError(f"{typed}: numbers are drawn for settings that are any number, such as lr; list its values")
    try:
        low, high = (float(part) for part in parts[1:])
    except ValueError:
        raise ValueError(f"{typed}: give two ends, as in {parts[0]}:1e-4:1e-2") from None
    if not -math.inf < low < high < math.inf or (parts[0] == "log" and low <= 0):
        above = ", above 0" if parts[0] == "log" else ""
        raise ValueError(f"{typed}: the first end must lie below the second{above}")
    return Range(parts[0], low, high)


def _different(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"--space {flag_name(name)}: {format_value(value)} is there twice: leave one out")
    return tuple(values)


def rounded(number: float) -> float:
    """Returns a number with so few digits that a name tells it whole."""
    return float(f"{number:.{DIGITS}g}")


def name_of_point(settings: Mapping[str, Any]) -> str:
    """Returns the name of a point's run folder, which tells its settings, of paths the last part."""
    text = "_".join(f"{flag_name(name)}-{format_value(value)}" for name, value in settings.items()) or "only"
    shown = {name: Path(value).name if name in FILES else format_value(value) for name, value in settings.items()}
    name = "_".join(f"{flag_name(name)}-{value}" for name, value in shown.items()) or "only"
    name = "".join(sign if sign.isalnum() or sign in "-_.+@" else "-" for sign in name)
    if len(name) <= LONGEST_NAME and name == text:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
