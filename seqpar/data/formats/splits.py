"""Training and validation cases: five folds, shares, the file's own; for classes, stratified by subject."""

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.files import read_json
from seqpar.data.formats.dataset import Split, VolumeClasses

FOLDS, SEED = 5, 12345  # nnU-Net's
_PREPROCESSED = "nnUNet_preprocessed"


class HasCases(Protocol):
    """What can be split: case ids, and the splits defined in the data set, if any."""

    @property
    def ids(self) -> tuple[str, ...]: ...
    @property
    def splits(self) -> tuple[Split, ...]: ...


def folds(dataset: HasCases) -> list[Split]:
    """Returns the data set's own splits, or nnU-Net's five folds if it has none."""
    return list(dataset.splits) or five_folds(dataset.ids)


def tested_ids(dataset: HasCases, fold: int | str) -> tuple[str, ...]:
    """Returns the ids that neither train nor validate, which only shares such as "70:15:15" have."""
    shares = parse_percentages(str(fold))
    return _by_shares(sorted(dataset.ids), shares, str(fold))[2] if shares else ()


def parse_percentages(fold: str) -> tuple[int, ...]:
    """Returns the percentages to train, to validate and to test on of a text such as "70:15:15", () of others."""
    match = re.fullmatch(r"(\d+):(\d+):(\d+)", fold)
    if not match:
        return ()
    shares = tuple(int(share) for share in match.groups())
    if sum(shares) != 100 or 0 in shares:
        raise ValueError(f"fold is {fold}; three shares above 0 that make 100 are needed, such as 70:15:15")
    return shares


def _by_shares(ids: Sequence[str], shares: Sequence[int], fold: str) -> tuple[tuple[str, ...], ...]:
    """Returns the sorted ids of each part; cases are mixed by nnU-Net's seed."""
    mixed = np.random.RandomState(SEED).permutation(len(ids)).tolist()
    held_out, test = (max(1, round(len(ids) * share / 100)) for share in shares[1:])
    rest = len(ids) - held_out - test
    if rest < 1:
        raise ValueError(f"fold {fold} leaves none of {len(ids)} cases to train on; use fold all, or other shares")
    parts = mixed[:rest], mixed[rest : rest + held_out], mixed[rest + held_out :]
    return tuple(tuple(ids[n] for n in sorted(part)) for part in parts)


def sample_cases(ids: Sequence[str], count: int, class_of: Callable[[str], int] = lambda case: 0) -> tuple[str, ...]:
    """Returns so many cases, drawn by nnU-Net's seed, from each class in turn; all for 0."""
    if count > len(ids):
        raise ValueError(f"--train-cases {count}: the fold has {len(ids)} to train on: use at most {len(ids)}")
    rows, drawn = Counter[int](), list[tuple[int, int, str]]()
    for at in np.random.RandomState(SEED).permutation(len(ids)):
        number = class_of(ids[at])
        drawn.append((rows[number], number, ids[at]))
        rows[number] += 1
    chosen = {case for _, _, case in sorted(drawn)[: count or len(ids)]}
    return tuple(case for case in ids if case in chosen)


def split(dataset: HasCases, fold: int | str) -> Split:
    """Returns the ids to train on and to validate on.

    fold: the number of a fold, "all" (every case in both), "90:10", or three shares, as 70:15:15.
    """
    ids = sorted(dataset.ids)
    if shares := parse_percentages(str(fold)):
        train, held_out, _ = _by_shares(ids, shares, str(fold))
        return train, held_out
    if fold == "all":
        return tuple(ids), tuple(ids)
    if fold == "90:10":
        if len(ids) < 2:
            raise ValueError(f"fold 90:10 needs 2 cases, {len(ids)} came; use fold all")
        mixed = np.random.RandomState(SEED).permutation(len(ids))
        chosen = set(mixed[: max(1, round(len(ids) / 10))].tolist())
        return tuple(ids[n] for n in range(len(ids)) if n not in chosen), tuple(ids[n] for n in sorted(chosen))
    if not str(fold).isdigit():
        raise ValueError(f"fold is {fold!r}; a number, all, 90:10 or 70:15:15 is needed")
    all_folds = folds(dataset)
    if int(fold) >= len(all_folds):
        raise ValueError(f"--fold {fold}: there are folds 0 to {len(all_folds) - 1}, all and 90:10")
    train, held_out = all_folds[int(fold)]
    unknown = sorted({*train, *held_out} - set(ids))
    if unknown:
        raise ValueError(f"fold {fold} names case {unknown[0]}, which is not among the {len(ids)} usable cases")
    return train, held_out


def five_folds(ids: Sequence[str]) -> list[Split]:
    """Returns the same folds of the sorted ids as scikit-learn's KFold(5, shuffle=True, random_state=12345)."""
    ids = sorted(ids)
    if len(ids) < FOLDS:
        raise ValueError(f"{FOLDS} folds need {FOLDS} cases, {len(ids)} came; use fold all or 90:10")
    mixed = np.arange(len(ids))
    np.random.RandomState(SEED).shuffle(mixed)
    splits = []
    for held_out in np.array_split(mixed, FOLDS):
        chosen = set(held_out.tolist())
        splits.append((
            tuple(ids[n] for n in range(len(ids)) if n not in chosen),
            tuple(ids[n] for n in sorted(chosen)),
        ))  # fmt: skip
    return splits


def read_splits(root: Path, ids: Sequence[str]) -> tuple[Split, ...]:
    """Returns the splits in splits_final.json, beside the data or in nnUNet_preprocessed; empty without such a file."""
    places = [root / "splits_final.json"]
    if _PREPROCESSED in os.environ:
        places.append(Path(os.environ[_PREPROCESSED], root.name, "splits_final.json"))
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return ()
    content = read_json(path)
    try:
        splits = tuple((tuple(map(str, one["train"])), tuple(map(str, one["val"]))) for one in content)
    except (TypeError, KeyError) as error:
        raise DataError(path, "is no list of splits with train and val; repair it or remove it") from error
    for train, held_out in splits:
        if unknown := sorted({*train, *held_out} - set(ids)):
            raise DataError(path, f"names case {unknown[0]}, which is not among the usable ones; take it out")
        if both := sorted(set(train) & set(held_out)):
            raise DataError(path, f"has case {both[0]} in train and in val of one split; take it out of one")
        if not train or not held_out:
            raise DataError(path, "has a split without cases to train on or to validate on; fill it")
    return splits


def split_classes(classes: VolumeClasses, fold: str) -> Split:
    """Returns the cases to train on and to hold out.

    - ``fold``: the number of a fold, as the data set gives it or of five, "90:10", or "all" (every case in both)
    """
    if fold == "all":
        ids = tuple(sorted(classes.numbers))
        return ids, ids
    if fold == "90:10":
        return class_folds(classes, 10)[0]
    splits = numbered_splits(classes)
    if int(fold) not in splits:
        numbers = list(splits)
        in_turn = numbers == list(range(numbers[0], numbers[-1] + 1))
        listed = f"{numbers[0]} to {numbers[-1]}" if in_turn else ", ".join(map(str, numbers))
        raise ValueError(f"--fold {fold}: there are folds {listed}, all and 90:10")
    return splits[int(fold)]


def numbered_splits(classes: VolumeClasses) -> dict[int, Split]:
    """Returns the splits by the numbers of their folds: the data set's own, counted from 0 where it has none, or five.

    Where it gives cases the numbers of folds, a number's cases are held out.
    """
    splits = classes.splits or class_folds(classes, FOLDS)
    return dict(zip(classes.folds or range(len(splits)), splits))


def class_folds(classes: VolumeClasses, count: int) -> list[Split]:
    """Returns so many folds in which each class has its share of subjects, drawn by nnU-Net's seed.

    Where there are fewer subjects than folds, each is a fold of its own.
    """
    cases_of = dict[str, list[str]]()
    for case in sorted(classes.numbers):
        cases_of.setdefault(classes.subject_of(case), []).append(case)
    rng, rows = np.random.RandomState(SEED), list[list[str]]()
    for number in range(len(classes.names)):  # a subject counts to the class of its first case
        subjects = [name for name, cases in sorted(cases_of.items()) if classes.numbers[cases[0]] == number]
        rows += [cases_of[subjects[at]] for at in rng.permutation(len(subjects))]
    every, folds = sorted(classes.numbers), list[Split]()
    for first in range(min(count, len(rows))):
        held_out = {case for row in rows[first::count] for case in row}
        folds.append((tuple(case for case in every if case not in held_out), tuple(sorted(held_out))))
    return folds


def check_classes(classes: VolumeClasses, path: Path) -> VolumeClasses:
    """Returns the classes; raises DataError where there is nothing to tell apart, or a split divides a subject."""
    counts = zip(classes.names, classes.counts(tuple(classes.numbers)))
    present = [name for name, count in counts if count]
    if not classes.numbers:
        raise DataError(path, "keeps every case for tests; give some the split train and some val, or leave splits out")
    if len(present) < 2:
        raise DataError(path, f"gives all cases the class {present[0]}; two classes are needed")
    aside = [(tuple(classes.numbers), classes.tests)] if classes.tests else []
    for train, held_out in (*classes.splits, *aside):
        if not train or not held_out:
            raise DataError(path, "has a split without cases to train on or to hold out; fill it, or leave splits out")
        both = {classes.subject_of(case) for case in train} & {classes.subject_of(case) for case in held_out}
        if both:
            raise DataError(path, f"has subject {min(both)} on both sides of a split; put all its cases on one")
    return classes
