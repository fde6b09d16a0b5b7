"""Cells grouped into stages, stages assigned to places, and what crosses between them: arithmetic on numbers alone."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from seqpar.pipeline.cells import IMAGE, cells_needed

Takes = tuple[tuple[int, ...], ...]  # of each cell, the numbers of the cells whose outputs it takes


class Crossing(NamedTuple):
    """A value that one stage makes and another takes; its gradient goes the other way."""

    value: int
    source: int
    target: int


@dataclass(frozen=True)
class StageMap:
    """Which cells form a stage, and at which place of the pipe group each stage is.

    - ``takes``: the inputs of each cell
    - ``outputs``: the cells whose outputs the loss takes, in the last stage
    - ``cuts``: stage s has the cells ``cuts[s]`` to ``cuts[s + 1] - 1``
    - ``places``: of each stage; a place may have several stages
    """

    takes: Takes
    outputs: tuple[int, ...]
    cuts: tuple[int, ...]
    places: tuple[int, ...]

    def __post_init__(self) -> None:
        num_cells = len(self.takes)
        if len(self.cuts) < 2 or (self.cuts[0], self.cuts[-1]) != (0, num_cells) or not _ascends(self.cuts):
            inner = ",".join(map(str, self.cuts[1:-1]))
            raise ValueError(f"cuts {inner or 'none'}: {num_cells} cells need ascending cuts from 1 to {num_cells - 1}")
        if len(self.places) != self.num_stages or set(self.places) != set(range(self.num_places)):
            raise ValueError(
                f"places {self.places}: each of {self.num_stages} stages needs one, numbered from 0 without gaps"
            )

    @classmethod
    def of_cuts(cls, takes: Takes, outputs: Sequence[int], inner: Sequence[int]) -> "StageMap":
        """Returns one stage per place, cut before the cells ``inner``."""
        return cls(takes, tuple(outputs), (0, *inner, len(takes)), tuple(range(len(inner) + 1)))

    @classmethod
    def of_allocation(cls, takes: Takes, outputs: Sequence[int], allocation: Sequence[int]) -> "StageMap":
        """Returns the stages of cells at the places ``allocation``: consecutive cells at one place form a stage."""
        runs = [(place, len(list(cells))) for place, cells in itertools.groupby(allocation)]
        cuts = (0, *itertools.accumulate(length for _, length in runs))
        return cls(takes, tuple(outputs), cuts, tuple(place for place, _ in runs))

    @property
    def num_stages(self) -> int:
        return len(self.cuts) - 1

    @property
    def num_places(self) -> int:
        return max(self.places) + 1

    def cells(self, stage: int) -> range:
        """Returns the cells of a stage, including those that do not run."""
        return range(self.cuts[stage], self.cuts[stage + 1])

    def cells_at(self, place: int) -> list[int]:
        """Returns the cells of all stages of a place."""
        return [cell for stage in self.stages_at(place) for cell in self.cells(stage)]

    def stages_at(self, place: int) -> list[int]:
        """Returns the stages of a place."""
        return [stage for stage, at in enumerate(self.places) if at == place]

    @cached_property
    def place_of_cells(self) -> tuple[int, ...]:
        """The place of each cell."""
        return tuple(self.places[stage] for stage in self._stage_of_cells)

    def runs(self, stage: int) -> list[int]:
        """Returns the cells of a stage on which the loss depends."""
        return [cell for cell in self.cells(stage) if cell in self._needed]

    def takes_image(self, stage: int) -> bool:
        """Returns whether a cell of the stage takes the image."""
        return any(IMAGE in self.takes[cell] for cell in self.runs(stage))

    def enters(self, stage: int) -> list[Crossing]:
        """Returns what a stage takes from others, in the order of values."""
        return [crossing for crossing in self.crossings if crossing.target == stage]

    def leaves(self, stage: int) -> list[Crossing]:
        """Returns what others take from a stage, the latest stage first.

        Gradients are added in that order, which is the order in a single process.
        """
        return [crossing for crossing in reversed(self.crossings) if crossing.source == stage]

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """Everything that crosses between stages, even at one place, by the stage that takes it and then by value."""
        every = list[Crossing]()
        for stage in range(self.num_stages):
            taken = {value for cell in self.runs(stage) for value in self.takes[cell]}
            if stage == self.num_stages - 1:
                taken |= set(self.outputs)
            own = self.cells(stage)
            every += [
                Crossing(value, self._stage_of_cells[value], stage)
                for value in sorted(taken)
                if value != IMAGE and value not in own
            ]
        return tuple(every)

    @cached_property
    def messages(self) -> tuple[Crossing, ...]:
        """Everything that crosses between places."""
        return tuple(crossing for crossing in self.crossings if self.is_message(crossing))

    def is_message(self, crossing: Crossing) -> bool:
        """Returns whether a value goes to another place."""
        return self.places[crossing.source] != self.places[crossing.target]

    @cached_property
    def _stage_of_cells(self) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.num_stages) for _ in self.cells(stage))

    @cached_property
    def _needed(self) -> frozenset[int]:
        return frozenset(cells_needed(self.takes, self.outputs))


def _ascends(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))
