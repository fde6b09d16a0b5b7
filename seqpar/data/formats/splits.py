"""Splits of the cases: nnU-Net's five folds, the split 90:10, and splits that a data set brings along."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.files import read_json
from seqpar.data.formats.dataset import Split

FOLDS, SEED = 5, 12345  # nnU-Net's
_PREPROCESSED = "nnUNet_preprocessed"


class HasCases(Protocol):
    """What can be split: ids, and the splits that came with them."""

    @property
    def ids(self) -> tuple[str, ...]: ...
    @property
    def splits(self) -> tuple[Split, ...]: ...


def folds(dataset: HasCases) -> list[Split]:
    """Returns the splits that came with the data set, else the five folds of nnU-Net."""
    return list(dataset.splits) or five_folds(dataset.ids)


def split(dataset: HasCases, fold: int | str) -> Split:
    """Returns the ids to train on and to validate on: a fold's, "all" for both, or "90:10"."""
    ids = sorted(dataset.ids)
    if fold == "all":
        return tuple(ids), tuple(ids)
    if fold == "90:10":
        if len(ids) < 2:
            raise ValueError(f"fold 90:10 needs 2 cases, {len(ids)} came; use fold all")
        mixed = np.random.RandomState(SEED).permutation(len(ids))
        held = set(mixed[: max(1, round(len(ids) / 10))].tolist())
        return tuple(ids[n] for n in range(len(ids)) if n not in held), tuple(ids[n] for n in sorted(held))
    if not str(fold).isdigit():
        raise ValueError(f"fold is {fold!r}; a number, all or 90:10 is needed")
    every = folds(dataset)
    if int(fold) >= len(every):
        raise ValueError(f"fold is {fold}; there are folds 0 to {len(every) - 1}, all and 90:10")
    train, held_out = every[int(fold)]
    unknown = sorted({*train, *held_out} - set(ids))
    if unknown:
        raise ValueError(f"fold {fold} names case {unknown[0]}, which is not among the {len(ids)} usable cases")
    return train, held_out


def five_folds(ids: Sequence[str]) -> list[Split]:
    """Returns what scikit-learn's KFold(5, shuffle=True, random_state=12345) makes of the sorted ids."""
    ids = sorted(ids)
    if len(ids) < FOLDS:
        raise ValueError(f"{FOLDS} folds need {FOLDS} cases, {len(ids)} came; use fold all or 90:10")
    mixed = np.arange(len(ids))
    np.random.RandomState(SEED).shuffle(mixed)
    made = []
    for held in np.array_split(mixed, FOLDS):
        chosen = set(held.tolist())
        made.append((
            tuple(ids[n] for n in range(len(ids)) if n not in chosen),
            tuple(ids[n] for n in sorted(chosen)),
        ))  # fmt: skip
    return made


def read_splits(root: Path, ids: Sequence[str]) -> tuple[Split, ...]:
    """Returns the splits of splits_final.json (beside the data, or where nnU-Net puts it), or none."""
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
    for train, held in splits:
        if unknown := sorted({*train, *held} - set(ids)):
            raise DataError(path, f"names case {unknown[0]}, which is not among the usable ones; take it out")
        if both := sorted(set(train) & set(held)):
            raise DataError(path, f"has case {both[0]} in train and in val of one split; take it out of one")
        if not train or not held:
            raise DataError(path, "has a split without cases to train on or to validate on; fill it")
    return splits
