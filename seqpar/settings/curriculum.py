"""A curriculum: one network trained on small tiles first and on larger ones later, in one run (as LAMP is trained)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

EXAMPLE = "64:4800,128:1200,whole:300"
_SIDES = r"\d+(?:x\d+x\d+)?"
_ENTRY = re.compile(
    rf"(?:(?P<whole>whole)(?:=(?P<size>{_SIDES}))?|(?P<tile>{_SIDES})):(?P<epochs>\d+)"
    r"(?::(?P<batch>\d+)(?:x(?P<micros>\d+))?)?"
)


@dataclass(frozen=True)
class LessonSpec:
    """A lesson as the flag spells it.

    ``tile`` is () for a whole volume whose size is not known yet, ``batch`` 0 where memory shall say it, ``micros`` (of
    a step) 0 where ``--accumulate`` does.
    """

    tile: tuple[int, ...]
    epochs: int
    batch: int = 0
    is_whole: bool = False
    micros: int = 0


def parse_curriculum(text: str) -> tuple[LessonSpec, ...]:
    """Returns the lessons of a text such as "64:4800,128x128x64:1200:2x4,whole:300": tile, epochs, batch."""
    return tuple(_parse_entry(entry.strip(), text) for entry in text.split(",")) if text else ()


def _parse_entry(entry: str, text: str) -> LessonSpec:
    match = _ENTRY.fullmatch(entry)
    if not match:
        raise ValueError(
            f"--curriculum {text}: {entry or 'nothing'} is no lesson; needed is TILE:EPOCHS or TILE:EPOCHS:BATCH, with "
            "one side, three (128x128x64) or whole as TILE, and tiles or tiles x micro-batches (4x4) as BATCH, such as "
            f"{EXAMPLE}"
        )
    sides = tuple(int(side) for side in (match["tile"] or match["size"] or "").split("x") if side)
    epochs, batch, micros = int(match["epochs"]), int(match["batch"] or 0), int(match["micros"] or 0)
    if epochs < 1 or (match["batch"] and batch < 1) or (match["micros"] and micros < 1) or not all(sides):
        raise ValueError(f"--curriculum {text}: {entry} has a 0; sides, epochs and batch must be at least 1")
    for what, numbers, most in (
        ("sides", sides, 65_536),
        ("epochs", (epochs,), 10**9),
        ("batch", (batch, micros), 10**6),
    ):
        if max(numbers, default=0) > most:  # as the flags of each have it
            raise ValueError(f"--curriculum {text}: {entry} has the {what} {max(numbers)}; it must be at most {most}")
    return LessonSpec(sides * 3 if len(sides) == 1 else sides, epochs, batch, bool(match["whole"]), micros)


def format_curriculum(entries: Sequence[LessonSpec]) -> str:
    """Returns lessons as ``parse_curriculum`` reads them."""
    return ",".join(map(_spell_entry, entries))


def _spell_entry(entry: LessonSpec) -> str:
    tile = "=".join(filter(None, ["whole" * entry.is_whole, "x".join(map(str, entry.tile))]))
    batch = "x".join(str(number) for number in (entry.batch, entry.micros) if number)
    return ":".join(filter(None, [tile, str(entry.epochs), batch]))


def in_micro_batches(text: str, most: int) -> str:
    """Returns lessons that deal each batch out to as many micro-batches as it divides by, up to ``most``."""

    def dealt(entry: LessonSpec) -> LessonSpec:
        micros = max(number for number in range(1, most + 1) if entry.batch % number == 0)
        return replace(entry, batch=entry.batch // micros, micros=micros) if entry.batch else entry

    return format_curriculum([dealt(entry) for entry in parse_curriculum(text)])


def is_same(typed: str, filled: str) -> bool:
    """Returns whether a curriculum as it was typed is one whose tiles and batches have been filled in since."""
    pairs = list(zip_longest(parse_curriculum(typed), parse_curriculum(filled)))
    return all(
        asked is not None
        and own is not None
        and (asked.epochs, asked.is_whole) == (own.epochs, own.is_whole)
        and asked.tile in ((), own.tile)
        and asked.batch in (0, own.batch)
        and asked.micros in (0, own.micros)
        for asked, own in pairs
    )


def ends_with_whole_volumes(text: str) -> bool:
    """Returns whether the last lesson of a curriculum takes whole volumes."""
    return bool(text) and parse_curriculum(text)[-1].is_whole
