"""Splits of cases that have one class each: every class on both sides, a subject's cases on one."""

from pathlib import Path

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.formats.splits import FOLDS, SEED
from seqpar.data.formats.volume_classes import Split, VolumeClasses


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
