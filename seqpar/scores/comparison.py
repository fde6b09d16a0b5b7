"""Which of several folders is best, case by case, and how sure a mean is."""

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from numpy import nan_to_num

from seqpar.data.formats.splits import patients_of
from seqpar.late_import import late
from seqpar.scores.label_scores import (
    EXTRA_COLUMNS,
    FEW,
    READER_COLUMNS,
    TOO_FEW,
    Scores,
    summarise,
    without_nan,
)
from seqpar.text import quantity, rounded

special = late("scipy.special")


def add_fold(cases: dict[str, Any], fold: Mapping[str, Any]) -> None:
    """Adds the cases of a fold to those of others; raises ValueError for one that two folds have held out."""
    if twice := sorted(cases.keys() & fold.keys()):
        raise ValueError(
            f"--find-best: {twice[0]} was held out by two folds, which were trained on different splits: train them on "
            "one (splits_final.json), or predict the cases with each and name these predictions"
        )
    cases.update(fold)


def about_scans(cases: Collection[str], subjects: Mapping[str, str]) -> str:
    """Returns a sentence if some patients have several of the cases, as far as that is known; else "".

    - ``subjects``: of cases whose patient a table names; names tell the others'
    """
    patients = patients_of(cases) | {case: subjects[case] for case in cases if case in subjects}
    scans, count = len(patients), len({*patients.values()})
    if scans == count:
        return ""
    return (
        f"{scans} scans of {quantity(count, 'patient')}: any interval takes scans as independent, so it is too narrow."
    )


def describe_interval(interval: tuple[float, float] | None, count: int, form: str = "+.4f") -> str:
    """Returns an interval of a difference in words, and whether it may be chance; of few cases that they are few.

    - ``count``: of the cases
    """
    if interval is None or count < FEW:
        return f" ({quantity(count, 'case')}: {TOO_FEW})"
    low, high = interval
    chance = ", which may be chance" if low <= 0 <= high else ""
    return f" (95 % confidence interval: {low:{form}} to {high:{form}}){chance}"


def interval_of_mean(
    values: Sequence[float], level: float = 0.95, low: float = -math.inf, high: float = math.inf
) -> tuple[float, float] | None:
    """Returns Student's confidence interval of the mean of independent values, None of fewer than two.

    - ``low``, ``high``: the smallest and largest value that there can be
    """
    if len(values) < 2:
        return None
    reach = float(special.stdtrit(len(values) - 1, (1 + level) / 2)) * stdev(values) / math.sqrt(len(values))
    middle = fmean(values)
    return max(low, middle - reach), min(high, middle + reach)


COLUMNS = {"Dice": 4, "HD95": 2, "NSD": 4}  # and their decimal places


class Scored(NamedTuple):
    """A folder of predictions, or a run, and the scores of its cases."""

    name: str
    cases: Mapping[str, Scores]


def compare(folders: Sequence[Scored]) -> str:
    """Returns a table of the folders, and which of them has the highest mean Dice over the cases that all have.

    Folds of a cross-validation have no case in common: their cases are then summed up together, and none is best.
    """
    every = [case for folder in folders for case in folder.cases]
    common = [case for case in folders[0].cases if all(case in folder.cases for folder in folders)]
    if common:
        ranked = sorted(folders, key=lambda folder: -nan_to_num(_mean(folder, common)["Dice"], nan=-1.0))
        return "\n".join([*_table(ranked, common), *_verdict(ranked, common)])
    if len(set(every)) == len(every):
        pooled = summarise([scores for folder in folders for scores in folder.cases.values()])
        dice = rounded(pooled["foreground_mean"]["Dice"], 4)
        line = f"no case is in two of them: over all {len(every)} cases mean Dice {dice}{_by_class(folders, pooled)}"
    else:
        line = "no case is in all of them, so that none is called best"
    return "\n".join([*_table(folders, None), line])


MOST_CLASSES = 6  # in a line


def _by_class(folders: Sequence[Scored], pooled: Mapping[str, Any]) -> str:
    """Returns what a mean over all folders is of, as they have a Dice of different classes; "" if they do not.

    - ``pooled``: the summary of all cases
    """
    scored = [
        {name for row in folder.cases.values() for name, own in row.items() if not math.isnan(own["Dice"])}
        for folder in folders
    ]
    if all(classes == scored[0] for classes in scored) or len(set.union(*scored)) < 2:
        return ""
    counts = {name: own["Dice"] for name, own in pooled["num_values"].items() if own["Dice"]}
    rarest = sorted(counts, key=lambda name: counts[name])[:MOST_CLASSES]
    shown = [name for name in counts if name in rarest]
    each = [
        f"{name} {rounded(pooled['mean'][name]['Dice'], 4)} over {quantity(counts[name], 'case')}" for name in shown
    ]
    each += [f"{len(counts) - len(shown)} more"] * (len(counts) > len(shown))
    return f", in which each class counts alike ({', '.join(each)})"


def _mean(folder: Scored, cases: Sequence[str] | None) -> Mapping[str, float]:
    """Returns each metric's mean over the classes of their means over ``cases``, None for all of the folder."""
    rows = [folder.cases[case] for case in cases or folder.cases]
    means: Mapping[str, float] = summarise(rows)["foreground_mean"]
    return means


def _table(folders: Sequence[Scored], cases: Sequence[str] | None) -> list[str]:
    """Returns a line for each folder, with the columns that somebody asked for as well."""
    width, means = max(len(folder.name) for folder in folders), [_mean(folder, cases) for folder in folders]
    asked = [name for name in (*EXTRA_COLUMNS, READER_COLUMNS[0]) if all(name in own for own in means)]
    places = COLUMNS | {name: 2 if name.endswith("HD95") else 4 for name in asked}
    wide = {name: max(9, len(name) + 2) for name in places}
    lines = [f"{'':{width}}  cases" + "".join(f"{name:>{wide[name]}}" for name in places)]
    for folder, own in zip(folders, means):
        figures = "".join(f"{rounded(own[name], n):>{wide[name]}}" for name, n in places.items())
        lines.append(f"{folder.name:{width}}  {len(cases or folder.cases):5}{figures}")
    return lines


def _verdict(ranked: Sequence[Scored], cases: Sequence[str]) -> list[str]:
    """Returns how sure it is that the first of the folders is better than the second."""
    best, second = ranked[:2]
    cases = [case for case in cases if any(has_dice(folder.cases[case]) for folder in (best, second))]
    own, other = (values_of_cases([folder.cases[case] for case in cases]) for folder in (best, second))
    if not own or not other:
        return ["highest mean Dice: not known, as no class of these cases has a Dice in both of the first two"]
    differences = [a - b for a, b in zip(own, other)]
    difference = fmean(differences)
    if math.isclose(difference, 0.0, abs_tol=1e-9):
        return [f"no winner: {best.name} and {second.name} have the same mean Dice"]
    rows = [row for folder in (best, second) for case in cases for row in folder.cases[case].values()]
    alike = "each class counts alike, however few cases have it; " * any(math.isnan(row["Dice"]) for row in rows)
    over = f"over {quantity(len(cases), 'case')} ({alike}other seeds may differ)"
    line = f"highest mean Dice {over}: {best.name}, {difference:.4f} above {second.name}"
    sure = describe_interval(interval_of_mean(differences, low=-1.0, high=1.0), len(differences))
    first, others = ([folder.cases[case] for case in cases] for folder in (best, second))
    uneven = where_both(first, others, best.name)
    return [line + sure, *[uneven] * bool(uneven)]


def has_dice(row: Scores) -> bool:
    """Returns whether any class of a case has a Dice."""
    return any(not math.isnan(own.get("Dice", math.nan)) for own in row.values())


def where_both(one: Sequence[Scores], other: Sequence[Scores], name: str) -> str:
    """Returns a sentence if two predictions have a Dice of some class in different cases, with how far their means are
    apart where both have one; else "".

    - ``one``, ``other``: of the same cases and classes; ``name``: of the first
    """
    rows = [[{kind: own.get("Dice", math.nan) for kind, own in row.items()} for row in each] for each in (one, other)]
    pairs = [[(own[kind], same[kind]) for kind in own] for own, same in zip(*rows)]
    alone = sum(any(math.isnan(a) != math.isnan(b) for a, b in pair) for pair in pairs)
    if not alone:
        return ""
    told = (
        f"These means are over different cases: in {quantity(alone, 'case')}, only one of the two has a Dice of some "
    )
    told += "class (0 if it was predicted where the truth has none)."
    known = [[not math.isnan(a + b) for a, b in pair] for pair in pairs]
    both = [
        values_of_cases([
            {kind: {"Dice": dice if is_known else math.nan} for (kind, dice), is_known in zip(row.items(), which)}
            for row, which in zip(each, known)
        ])
        for each in rows
    ]  # fmt: skip
    if not all(both):
        return told
    gap = fmean(both[0]) - fmean(both[1])
    how = f"{abs(gap):.3f} {'higher' if gap > 0 else 'lower'}" if abs(gap) >= 5e-4 else "the same as the other's"
    return f"{told} Where both have one, the mean Dice of {name} is {how}."


def values_of_cases(rows: Sequence[Scores]) -> list[float]:
    """Returns a value per case whose mean is the mean Dice: that over the classes of their means over cases.

    Where all cases have all classes it is the mean Dice of the case's classes. A class that a case lacks leaves the
    case at the mean; a class that few cases have weighs more in each of them (the mean's linear approximation).
    Empty where no class has a Dice.
    """
    dices = {name: [row[name]["Dice"] for row in rows] for name in (rows[0] if rows else ())}
    means = {name: fmean(values) for name, each in dices.items() if (values := without_nan(each))}
    if not means:
        return []
    counts = {name: len(without_nan(dices[name])) for name in means}
    middle = fmean(means.values())

    def influence(name: str, dice: float) -> float:
        return 0.0 if math.isnan(dice) else (dice - means[name]) * len(rows) / counts[name]

    return [middle + fmean(influence(name, dices[name][at]) for name in means) for at in range(len(rows))]
