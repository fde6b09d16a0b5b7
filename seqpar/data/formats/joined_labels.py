"""Joins several labels into one class, such as all parts of a tumour: ``--join-labels tumour=1,2,3``."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case, Dataset

Joins = tuple[tuple[str, tuple[int, ...]], ...]  # the name of each class, and the values in the files that it joins


def parse_joins(text: str) -> Joins:
    """Returns the joins of a text such as "tumour=1,2,3 organ=4,5"."""
    joins, taken = dict[str, tuple[int, ...]](), set[int]()
    for word in text.split():
        match = re.fullmatch(r"([^=\s]+)=(\d+(?:,\d+)*)", word)
        if not match:
            raise ValueError(f"--join-labels {text}: give a name and label values, as in tumour=1,2,3")
        values = tuple(int(value) for value in match[2].split(","))
        if match[1] in joins or taken & set(values) or len(set(values)) < len(values) or 0 in values:
            raise ValueError(f"--join-labels {text}: give each name and each value once, and no 0")
        joins[match[1]] = values
        taken |= set(values)
    return tuple(joins.items())


def join_labels(dataset: Dataset, joins: Joins) -> Dataset:
    """Returns the data set with labels joined; a joined class gets the first of its values.

    A region stays if it has none of the labels of each join, or all of them and others too. The rest are dropped: they
    equal a joined class, or can no longer be told apart.
    """
    if not joins or not dataset.labels:
        return dataset
    known = set(dataset.labels.values())
    for name, values in joins:
        if unknown := [value for value in values if value not in known]:
            raise DataError(dataset.root, f"has no label {unknown[0]}, which --join-labels {name} names; it declares "
                            f"{', '.join(f'{label} {value}' for label, value in dataset.labels.items())}")  # fmt: skip
    stands_for = {value: values[0] for _, values in joins for value in values}
    labels = _labels(dataset, joins, stands_for)
    regions = {name: _mapped(members, stands_for) for name, members in dataset.regions.items()}
    kept = [
        name
        for name, members in dataset.regions.items()
        if all(set(values) < set(members) or not set(values) & set(members) for _, values in joins)
    ]
    order = dict(zip(dataset.regions, dataset.regions_class_order))
    return replace(
        dataset,
        labels=labels,
        regions={name: regions[name] for name in kept},
        regions_class_order=tuple(stands_for.get(order[name], order[name]) for name in kept),
        cases=tuple(_annotated(case, joins, stands_for) for case in dataset.cases),
        joined={value: first for value, first in stands_for.items() if value != first},
    )


def _labels(dataset: Dataset, joins: Joins, stands_for: Mapping[int, int]) -> dict[str, int]:
    """Returns the labels; a joined class takes the place of the first of its labels."""
    name_of = {values[0]: name for name, values in joins}
    own = {name for name, value in dataset.labels.items() if value not in stands_for}
    if taken := own.intersection(name_of.values()):
        name = sorted(taken)[0]
        raise DataError(dataset.root, f"already has a label {name}; use another name in --join-labels")
    return {
        name_of[stands_for[value]] if value in stands_for else name: stands_for.get(value, value)
        for name, value in dataset.labels.items()
    }


def _mapped(values: Sequence[int], stands_for: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(stands_for.get(value, value) for value in values))


def _annotated(case: Case, joins: Joins, stands_for: Mapping[int, int]) -> Case:
    """Returns the case; a joined class counts as annotated if all its labels are."""
    if case.annotated is None:
        return case
    shown = [value for value in case.annotated if value not in stands_for]
    shown += [values[0] for _, values in joins if set(values) <= set(case.annotated)]
    return replace(case, annotated=tuple(shown))
