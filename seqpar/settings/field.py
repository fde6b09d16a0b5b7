"""How a setting is declared: its default, bounds, choices and help; when it acts; whether it may change on resume."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TASKS = ("segment", "classify", "pretrain")
VOXELS = ("segment",)  # the task that labels voxels
SUPERVISED = ("segment", "classify")


@dataclass(frozen=True)
class Bounds:
    """The numbers that a setting may have: ``allows`` tests one, ``text`` says what is needed."""

    allows: Callable[[float], bool]
    text: str


MOST, MOST_OF_COUNTS, A_YEAR_S = 1e30, 10**9, 365 * 24 * 3600  # float32 holds MOST, and what a step makes of it
AT_LEAST_1 = Bounds(lambda value: 1 <= value <= MOST_OF_COUNTS, f"it must be at least 1 and at most {MOST_OF_COUNTS}")
NOT_NEGATIVE = Bounds(lambda value: 0 <= value <= MOST, f"it must be in [0, {MOST:g}]")
ABOVE_0 = Bounds(lambda value: 0 < value <= MOST, f"it must be above 0 and at most {MOST:g}")
SECONDS = Bounds(lambda value: 0 < value <= A_YEAR_S, f"it must be above 0 and at most {A_YEAR_S}, a year")
ABOVE_0_TO_1 = Bounds(lambda value: 0 < value <= 1, "it must be above 0 and at most 1")
BELOW_1 = Bounds(lambda value: 0 <= value < 1, "it must be in [0, 1)")
SEED = Bounds(lambda value: 0 <= value < 2**63, "it must be in [0, 2^63)")  # what torch takes
INSIDE_0_1 = Bounds(lambda value: 0 < value < 1, "it must be between 0 and 1")
GAMMA = Bounds(lambda value: value == 0 or 1 <= value < math.inf, "it must be 0, or at least 1; 2 is usual")


def whole_bounds(least: int, most: int) -> Bounds:
    """Returns the bounds of a number beyond which counting alone would not end, or overflow."""
    return Bounds(lambda value: least <= value <= most, f"it must be in [{least}, {most}]")


CHANNELS = whole_bounds(1, 65536)
CHANNELS_OR_0 = whole_bounds(0, 65536)
PROCESSES = whole_bounds(0, 256)  # more would only fill the machine
AT_LEAST_A_PROCESS = whole_bounds(1, 256)
TILES = whole_bounds(0, 1_000_000)


def share_bounds(usual: float) -> Bounds:
    """Returns the bounds of a share; ``usual``: a common choice, for the message."""
    return Bounds(lambda value: 0 <= value <= 1, f"it must be in [0, 1]; {usual} is usual")


class Networks(NamedTuple):
    """The networks on which a setting acts: ``includes`` asks a config, ``text`` names them."""

    includes: Callable[[Any], bool]
    text: str


class Circumstances(NamedTuple):
    """What a run meets: ranks that share a tile, a GPU, what its data declare; None: not known yet."""

    seqpar: int | None = None
    has_gpu: bool | None = None
    declares_regions: bool | None = None
    learns_regions: bool | None = None


@dataclass(frozen=True)
class Declaration:
    """What ``setting`` declares of a setting.

    - ``help``: its line in --help, under the heading ``section``
    - ``choices``, ``bounds``: its values
    - ``metavar``: what stands for its value in --help; only switches and ``choices`` need none
    - ``common``: whether plain ``--help`` shows it; ``--help all`` shows every setting
    - ``tasks``, ``networks``: for which it applies
    - ``acts_when``: whether it acts on a config of these; ``why`` not, with {names} of settings to fill in
    - ``idle_here``: why it does nothing in some circumstances, "" where it acts; a note, not an error
    - ``fixed``: why it cannot change when a run resumes; "" where it can
    - ``gives_way``: whether a preset's value is dropped, asked with the preset's settings and the run's
    """

    help: str
    section: str
    choices: tuple[str, ...] = ()
    bounds: Bounds | None = None
    metavar: str = ""
    common: bool = False
    tasks: tuple[str, ...] = TASKS
    networks: Networks | None = None
    acts_when: Callable[[Any], bool] | None = None
    why: str | Callable[[Any], str] = ""
    idle_here: Callable[[Any, Circumstances], str] | None = None
    fixed: str = ""
    gives_way: Callable[[Any, Any], bool] | None = None


def setting(default: Any, help: str, section: str, choices: Sequence[str] = (), **more: Any) -> Any:
    """Returns a field of Config; for the arguments see ``Declaration``."""
    return field(default=default, metadata={"setting": Declaration(help, section, tuple(choices), **more)})
