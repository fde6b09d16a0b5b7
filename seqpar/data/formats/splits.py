"""Splits into training and validation cases: nnU-Net's five folds, percentages, or the data set's own.

Scans of a patient stay on one side, as far as names of cases tell them. Cases with one class each are split by subject,
with each class on both sides.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.files import read_json
from seqpar.data.formats.dataset import Split, VolumeClasses
from seqpar.text import quantity

FOLDS, SEED = 5, 12345  # nnU-Net's
OTHER_FOLDS = "other values are 90:10, 70:15:15, all and all5"
_PREPROCESSED = "nnUNet_preprocessed"


class HasCases(Protocol):
    """Anything that can be split: it has case ids and the splits that the data set defines, if any."""

    @property
    def ids(self) -> tuple[str, ...]: ...
    @property
    def splits(self) -> tuple[Split, ...]: ...


# BIDS's subject, and what comes before the number of a scan in BraTS since 2023
_PATIENT = re.compile(r"(sub-[A-Za-z0-9]+)(?:_.*)?|(BraTS-[A-Za-z]+(?:-[A-Za-z]+)?-\d{4,5})-\d{1,3}")
_SCAN = re.compile(r"(.*\d)-\d{3}")
_MOST_SCANS = 4  # of a patient, on average: "2021-001" is no scan of a patient 2021


def patients_of(ids: Iterable[str]) -> dict[str, str]:
    """Returns the patient of each case, as far as names tell it; else the case itself is one.

    They tell it in ``sub-01_ses-1`` and ``BraTS-GLI-00005-000``, and in other names with three digits after an id, as
    in ``p12-000``, if all of the others have them, of a few scans per patient.
    """
    known = {case: _PATIENT.fullmatch(case) for case in ids}
    patients = {case: match[1] or match[2] for case, match in known.items() if match}
    others = [case for case in known if case not in patients]
    numbered = [match[1] for case in others if (match := _SCAN.fullmatch(case))]
    count = len(set(numbered))
    if len(numbered) == len(others) <= _MOST_SCANS * count and count > 1:
        patients |= dict(zip(others, numbered))
    return {case: patients.get(case, case) for case in known}


def data_faults(described: Mapping[str, Any]) -> str:
    """Returns sentences if a run trains on other scans of patients that it holds out, or on the same scans, if labels
    may be cut off, and if one scan has two classes; else "".

    - ``described``: its data, as config.json has them: a table may name the patients, else names of cases tell them
    """
    train, held_out = (set(map(str, described[part])) for part in ("train", "held_out"))
    every, subjects = train | held_out, (described.get("volume_classes") or {}).get("subjects", {})
    patients = patients_of(every) | {case: patient for case, patient in subjects.items() if case in every}
    trained = {patients[case] for case in train}
    same, told = scans_on_both_sides({**described, "test": ()}), list[str]()
    divided = [case for case in held_out - train - same.keys() if patients[case] in trained]
    if same:
        which = "is the same scan as a training case" if len(same) == 1 else "are the same scans as training cases"
        case, there = next(iter(same.items()))
        told.append(f"{which}, such as {case}, there {there}: scores in validation are too good.")
    if divided:
        which = "is another scan of a patient" if len(divided) == 1 else "are other scans of patients"
        told.append(f"{which} whom the run was trained on: scores in validation are too good.")
    counts = [len(own) for own in (same, divided) if own]
    sentences = [f"{n} of {quantity(len(held_out), 'held-out case')} {one}" for n, one in zip(counts, told)]
    return " ".join([*sentences, *_cut_off(described), *_contradiction(described)])


def _cut_off(described: Mapping[str, Any]) -> list[str]:
    """Returns a sentence if volumes were cut though that may lose labels."""
    recipe = described.get("recipe") or {}
    if not (recipe.get("cut_labels") and recipe.get("crop_to")):
        return []
    sides = " ".join(map(str, recipe["crop_to"]))
    return [f"--crop-to {sides} with --force may have cut off labels: scores in curves count only what is left."]


def _contradiction(described: Mapping[str, Any]) -> list[str]:
    """Returns a sentence if cases with the same voxels have different classes."""
    classes, scans = described.get("volume_classes") or {}, described.get("voxels", {})
    numbers, by_scan = classes.get("numbers", {}), dict[str, list[str]]()
    for case in sorted(filter(scans.get, numbers)):
        by_scan.setdefault(scans[case], []).append(case)
    others = [cases for cases in by_scan.values() if len({numbers[case] for case in cases}) > 1]
    if not others:
        return []
    one = next(case for case in others[0] if numbers[case] != numbers[others[0][0]])
    told = [f"{case} as {classes['names'][numbers[case]]}" for case in (others[0][0], one)]
    few = "The same image has" if len(others) == 1 else f"{len(others)} images have"
    return [f"{few} different classes under different names, such as {' and '.join(told)}: at most one can be right."]


def scans_on_both_sides(described: Mapping[str, Any]) -> dict[str, str]:
    """Returns the training case with the same voxels of each case that is held out or kept for tests, if there is one.

    - ``described``: the data of a run, as config.json has them
    """
    scans, train = described.get("voxels", {}), set(described["train"])
    trained = {scans[case]: case for case in sorted(train, reverse=True) if scans.get(case)}
    others = sorted({*described["held_out"], *described.get("test", ())} - train)
    return {case: trained[scans[case]] for case in others if scans.get(case) in trained}


def _rows(ids: Sequence[str], by_patient: bool) -> list[list[str]]:
    """Returns what a split does not divide: the scans of each patient, in the order of their first ones."""
    patients, rows = patients_of(ids) if by_patient else {}, dict[str, list[str]]()
    for case in sorted(ids):
        rows.setdefault(patients.get(case, case), []).append(case)
    return list(rows.values())


def _cases(rows: Sequence[Sequence[str]], chosen: Iterable[int]) -> tuple[str, ...]:
    return tuple(sorted(case for number in chosen for case in rows[number]))


def _units(rows: Sequence[Sequence[str]]) -> str:
    return "patients" if any(len(row) > 1 for row in rows) else "cases"


def folds(dataset: HasCases, by_patient: bool = True) -> list[Split]:
    """Returns the data set's own splits, or nnU-Net's five folds if it has none."""
    return list(dataset.splits) or five_folds(dataset.ids, by_patient)


def tested_ids(dataset: HasCases, fold: int | str, by_patient: bool = True) -> tuple[str, ...]:
    """Returns the ids of the test cases, which only percentages such as "70:15:15" set aside."""
    shares = parse_percentages(str(fold))
    return _by_shares(_rows(dataset.ids, by_patient), shares, str(fold))[2] if shares else ()


def parse_percentages(fold: str) -> tuple[int, ...]:
    """Returns the percentages for training, validation and test in a text such as "70:15:15"; () for other texts."""
    match = re.fullmatch(r"(\d+):(\d+):(\d+)", fold)
    if not match:
        return ()
    shares = tuple(int(share) for share in match.groups())
    if sum(shares) != 100 or 0 in shares:
        raise ValueError(f"fold is {fold}; three positive percentages with the sum 100 are needed, such as 70:15:15")
    return shares


def _by_shares(rows: Sequence[Sequence[str]], shares: Sequence[int], fold: str) -> tuple[tuple[str, ...], ...]:
    """Returns the sorted ids of each part; patients are shuffled by nnU-Net's seed."""
    mixed = np.random.RandomState(SEED).permutation(len(rows)).tolist()
    held_out, test = (max(1, round(len(rows) * share / 100)) for share in shares[1:])
    rest = len(rows) - held_out - test
    if rest < 1:
        which = f"{len(rows)} {_units(rows)}"
        raise ValueError(f"fold {fold} leaves none of {which} to train on; use fold all, or other percentages")
    parts = mixed[:rest], mixed[rest : rest + held_out], mixed[rest + held_out :]
    return tuple(_cases(rows, part) for part in parts)


def sample_cases(ids: Sequence[str], count: int, class_of: Callable[[str], int] = lambda case: 0) -> tuple[str, ...]:
    """Returns ``count`` cases, drawn by nnU-Net's seed from each class in turn; all of them for 0."""
    if count > len(ids):
        raise ValueError(f"--train-cases {count}: the fold has {len(ids)} cases to train on; use at most {len(ids)}")
    rows, drawn = Counter[int](), list[tuple[int, int, str]]()
    for at in np.random.RandomState(SEED).permutation(len(ids)):
        number = class_of(ids[at])
        drawn.append((rows[number], number, ids[at]))
        rows[number] += 1
    chosen = {case for _, _, case in sorted(drawn)[: count or len(ids)]}
    return tuple(case for case in ids if case in chosen)


def split(dataset: HasCases, fold: int | str, by_patient: bool = True) -> Split:
    """Returns the ids to train on and to validate on.

    fold: a fold number, "all" (every case in both), "90:10", or three percentages such as "70:15:15".
    by_patient: keep all scans of a patient on one side.
    """
    ids, rows = sorted(dataset.ids), _rows(dataset.ids, by_patient)
    if shares := parse_percentages(str(fold)):
        train, held_out, _ = _by_shares(rows, shares, str(fold))
        return train, held_out
    if fold == "all":
        return tuple(ids), tuple(ids)
    if fold == "90:10":
        if len(rows) < 2:
            raise ValueError(f"fold 90:10 needs at least 2 {_units(rows)} and got {len(rows)}; use fold all")
        mixed = np.random.RandomState(SEED).permutation(len(rows))
        chosen = set(mixed[: max(1, round(len(rows) / 10))].tolist())
        return _cases(rows, set(range(len(rows))) - chosen), _cases(rows, chosen)
    if not str(fold).isdigit():
        raise ValueError(f"fold is {fold!r}; it must be a number, all, 90:10 or 70:15:15")
    all_folds = folds(dataset, by_patient)
    if int(fold) >= len(all_folds):
        raise ValueError(f"--fold {fold}: the folds are 0 to {len(all_folds) - 1}; {OTHER_FOLDS}")
    train, held_out = all_folds[int(fold)]
    unknown = sorted({*train, *held_out} - set(ids))
    if unknown:
        raise ValueError(f"fold {fold} names case {unknown[0]}, which is not among the {len(ids)} usable cases")
    return train, held_out


def five_folds(ids: Sequence[str], by_patient: bool = True) -> list[Split]:
    """Returns the same folds of the sorted ids as scikit-learn's KFold(5, shuffle=True, random_state=12345).

    They are folds of patients where names tell that some have several scans; nnU-Net's would divide these.
    """
    rows = _rows(ids, by_patient)
    if len(rows) < FOLDS:
        needed = f"{FOLDS} folds need at least {FOLDS} {_units(rows)}, and there are {len(rows)}"
        raise ValueError(f"{needed}: use --fold all or --fold 90:10")
    mixed = np.arange(len(rows))
    np.random.RandomState(SEED).shuffle(mixed)
    every = set(range(len(rows)))
    held_out = [set(part.tolist()) for part in np.array_split(mixed, FOLDS)]
    return [(_cases(rows, every - chosen), _cases(rows, chosen)) for chosen in held_out]


def read_splits(root: Path, ids: Sequence[str]) -> tuple[Split, ...]:
    """Returns the splits in splits_final.json, next to the data or in nnUNet_preprocessed; () if there is none."""
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
        raise DataError(path, "is not a list of splits with train and val; repair it or remove it") from error
    for train, held_out in splits:
        if unknown := sorted({*train, *held_out} - set(ids)):
            raise DataError(path, f"names case {unknown[0]}, which is not among the usable ones; remove it")
        for part, cases in (("train", train), ("val", held_out)):
            if len(set(cases)) < len(cases):
                twice = next(case for case in cases if cases.count(case) > 1)
                raise DataError(path, f"lists case {twice} several times in {part} of one split; keep it once")
        if both := sorted(set(train) & set(held_out)):
            raise DataError(path, f"has case {both[0]} in train and in val of one split; remove it from one of them")
        if not train or not held_out:
            raise DataError(path, "has a split with no cases to train on or none to validate on; fill it")
    return splits


def split_classes(classes: VolumeClasses, fold: str, by_patient: bool = True) -> Split:
    """Returns the cases to train on and to hold out.

    - ``fold``: a fold number (the data set's own, or 0 to 4), "90:10", or "all" (every case in both)
    - ``by_patient``: names tell the patients of cases, unless a table does
    """
    if fold == "all":
        ids = tuple(sorted(classes.numbers))
        return ids, ids
    if fold == "90:10":
        return class_folds(classes, 10, by_patient)[0]
    splits = numbered_splits(classes, by_patient)
    if int(fold) not in splits:
        numbers = list(splits)
        in_turn = numbers == list(range(numbers[0], numbers[-1] + 1))
        listed = f"{numbers[0]} to {numbers[-1]}" if in_turn else ", ".join(map(str, numbers))
        raise ValueError(f"--fold {fold}: the folds are {listed}, all and 90:10")
    return splits[int(fold)]


def numbered_splits(classes: VolumeClasses, by_patient: bool = True) -> dict[int, Split]:
    """Returns the splits by fold number: the data set's own, numbered from 0 unless it numbers them, or else five.

    If the data set gives each case a fold number, that fold holds the case out.
    """
    splits = classes.splits or class_folds(classes, FOLDS, by_patient)
    return dict(zip(classes.folds or range(len(splits)), splits))


def class_folds(classes: VolumeClasses, count: int, by_patient: bool = True) -> list[Split]:
    """Returns ``count`` folds, over which the subjects of each class are spread evenly, shuffled by nnU-Net's seed.

    With fewer subjects than folds, each subject is a fold.
    """
    cases_of, patients = dict[str, list[str]](), dict[str, str]()
    if by_patient and not classes.subjects:
        patients = patients_of(classes.numbers)
    for case in sorted(classes.numbers):
        cases_of.setdefault(patients.get(case, classes.subject_of(case)), []).append(case)
    rng, rows = np.random.RandomState(SEED), list[list[str]]()
    for number in range(len(classes.names)):  # a subject belongs to the class of its first case
        subjects = [name for name, cases in sorted(cases_of.items()) if classes.numbers[cases[0]] == number]
        rows += [cases_of[subjects[at]] for at in rng.permutation(len(subjects))]
    every, folds = sorted(classes.numbers), list[Split]()
    for first in range(min(count, len(rows))):
        held_out = {case for row in rows[first::count] for case in row}
        folds.append((tuple(case for case in every if case not in held_out), tuple(sorted(held_out))))
    return folds


def check_classes(classes: VolumeClasses, path: Path) -> VolumeClasses:
    """Returns the classes; raises DataError if there is only one class, or if a split divides a subject."""
    counts = zip(classes.names, classes.counts(tuple(classes.numbers)))
    present = [name for name, count in counts if count]
    if not classes.numbers:
        raise DataError(path, "keeps every case for tests; give some the split train, some val, or remove the splits")
    if len(present) < 2:
        raise DataError(path, f"gives all cases the class {present[0]}; at least two classes are needed")
    aside = [(tuple(classes.numbers), classes.tests)] if classes.tests else []
    for train, held_out in (*classes.splits, *aside):
        if not train or not held_out:
            raise DataError(path, "has a split without cases to train on or to hold out; fill it, or remove the splits")
        both = {classes.subject_of(case) for case in train} & {classes.subject_of(case) for case in held_out}
        if both:
            raise DataError(path, f"has subject {min(both)} on both sides of a split; put all its cases on one")
    return classes
