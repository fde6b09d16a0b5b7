"""VolumeClasses: the class of each case of a data set, and whose subject it is of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TABLE = "labels.csv"  # beside the images
Split = tuple[tuple[str, ...], tuple[str, ...]]  # ids to train on, ids to validate on


@dataclass(frozen=True)
class VolumeClasses:
    """The classes of volumes.

    - ``names``: in the order of their numbers
    - ``numbers``: the class of each case
    - ``subjects``: of cases that are not their own; a subject's cases are never on both sides of a split
    - ``splits``: those that the data set defines; empty if they are computed
    - ``folds``: the numbers of these splits, where the data set gives cases those of their folds
    - ``tests``: cases that it keeps aside for tests, which have no part in any split
    """

    names: tuple[str, ...]
    numbers: Mapping[str, int]
    subjects: Mapping[str, str] = field(default_factory=dict)
    splits: tuple[Split, ...] = ()
    tests: tuple[str, ...] = ()
    folds: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns what ``from_json`` reads."""
        return {
            "names": list(self.names),
            "numbers": dict(sorted(self.numbers.items())),
            "subjects": dict(sorted(self.subjects.items())),
            "splits": [[list(part) for part in split] for split in self.splits],
            "tests": list(self.tests),
            "folds": list(self.folds),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "VolumeClasses":
        """Returns the classes that ``to_json`` described."""
        splits = tuple((tuple(train), tuple(held_out)) for train, held_out in value["splits"])
        own = tuple(value["names"]), dict(value["numbers"]), dict(value["subjects"])
        return VolumeClasses(*own, splits, tuple(value.get("tests", ())), tuple(value.get("folds", ())))

    def subject_of(self, case: str) -> str:
        """Returns a case's subject, by default itself."""
        return self.subjects.get(case, case)

    def counts(self, cases: Sequence[str]) -> list[int]:
        """Returns how many of the cases each class has."""
        numbers = [self.numbers[case] for case in cases]
        return [numbers.count(number) for number in range(len(self.names))]
