"""Which of several folders is best, case by case, how sure a mean is, and what a low one means."""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.data.errors import DataError
from seqpar.data.formats.splits import patients_of
from seqpar.data.volumes import read_geometry
from seqpar.late_import import late
from seqpar.scores import lesions
from seqpar.scores.label_scores import (
    EXTRA_COLUMNS,
    FEW,
    READER_COLUMNS,
    TOO_FEW,
    Scores,
    mean_where_present,
    summarise,
    where_known,
    without_nan,
)
from seqpar.text import quantity, rounded

special = late("scipy.special")
HARDLY = 0.3  # of a Dice: most of what is below is wrong
LARGE = 1.5  # times as large as the truth: too much is predicted
MOSTLY = 0.75  # of a mean sensitivity: with a mean Dice below HARDLY, cases that are found are much too large


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


@dataclass(frozen=True)
class Difference:
    """How far the mean Dice of one prediction is above another's: means over the classes of their means over cases.

    - ``deviation``: the standard deviation of that, as estimated with ``freedom`` degrees of freedom
    - ``rarest``: the class that has a Dice in the fewest cases, and their number
    """

    value: float
    deviation: float
    freedom: float
    cases: int
    rarest: tuple[str, int]

    def describe_interval(self, form: str = "+.4f") -> str:
        """Returns the interval in words, and whether it may be chance; of few cases that they are few."""
        name, count = self.rarest
        if self.cases < FEW:
            return f" ({quantity(self.cases, 'case')}: {TOO_FEW})"
        if count < FEW:
            return f" ({name} is scored in only {quantity(count, 'case')}: {TOO_FEW})"
        reach = _quantile(self.freedom) * self.deviation
        low, high = max(-1.0, self.value - reach), min(1.0, self.value + reach)
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
    reach = _quantile(len(values) - 1, level) * stdev(values) / math.sqrt(len(values))
    middle = fmean(values)
    return max(low, middle - reach), min(high, middle + reach)


def _quantile(freedom: float, level: float = 0.95) -> float:
    """Returns how many standard deviations Student's interval reaches to either side."""
    return float(special.stdtrit(freedom, (1 + level) / 2))


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
        ranked = sorted(folders, key=lambda folder: -np.nan_to_num(_mean(folder, common)["Dice"], nan=-1.0))
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
    first, others = ([folder.cases[case] for case in cases] for folder in (best, second))
    difference = difference_of(first, others)
    if difference is None:
        return ["highest mean Dice: not known, as no class of these cases has a Dice in both of the first two"]
    if math.isclose(difference.value, 0.0, abs_tol=1e-9):
        return [f"no winner: {best.name} and {second.name} have the same mean Dice"]
    pairs = (pair for pair in zip(first, others) if any(map(has_dice, pair)))
    rows = [row for pair in pairs for each in pair for row in each.values()]
    alike = "each class counts alike, however few cases have it; " * any(math.isnan(row["Dice"]) for row in rows)
    over = f"over {quantity(difference.cases, 'case')} ({alike}other seeds may differ)"
    value = rounded(difference.value, 4) if difference.value >= 5e-5 else "less than 0.0001"
    line = f"highest mean Dice {over}: {best.name}, {value} above {second.name}"
    uneven = where_both(first, others, best.name)
    return [line + difference.describe_interval(), *[uneven] * bool(uneven)]


def has_dice(row: Scores) -> bool:
    """Returns whether any class of a case has a Dice."""
    return any(not math.isnan(own.get("Dice", math.nan)) for own in row.values())


def where_both(one: Sequence[Scores], other: Sequence[Scores], name: str) -> str:
    """Returns a sentence if two predictions have a Dice of some class in different cases, with how far their means are
    apart where both have one; else "".

    - ``one``, ``other``: of the same cases and classes; ``name``: of the first
    """
    pairs = [
        {kind: (own.get("Dice", math.nan), same[kind].get("Dice", math.nan)) for kind, own in row.items()}
        for row, same in zip(one, other)
    ]
    alone = sum(any(math.isnan(a) != math.isnan(b) for a, b in pair.values()) for pair in pairs)
    if not alone:
        return ""
    told = (
        f"These means are over different cases: in {quantity(alone, 'case')}, only one of the two has a Dice of some "
    )
    told += "class (0 if it was predicted where the truth has none)."
    none = {"Dice": math.nan}
    shared = [
        [
            {kind: none if math.isnan(a + b) else own[kind] for kind, (a, b) in each.items()}
            for own, each in zip(rows, pairs)
        ]
        for rows in (one, other)
    ]
    difference = difference_of(*shared)
    if difference is None:
        return told
    gap = difference.value
    how = f"{abs(gap):.3f} {'higher' if gap > 0 else 'lower'}" if abs(gap) >= 5e-4 else "the same as the other's"
    return f"{told} Where both have one, the mean Dice of {name} is {how}."


def difference_of(one: Sequence[Scores], other: Sequence[Scores]) -> Difference | None:
    """Returns how far the mean Dice of a prediction is above that of another of the same cases and classes.

    The deviation is that of the mean's linear approximation, in which a class that few cases have weighs more in each
    of them. Where all cases have all classes, the interval is Student's of the cases' differences. None if either has
    no class with a Dice.
    """
    names = list(one[0]) if one else []
    dices = [np.array([[row[name].get("Dice", math.nan) for name in names] for row in rows]) for rows in (one, other)]
    known = [~np.isnan(own) for own in dices]
    if not all(own.any() for own in known):
        return None
    (mean, parts), (other_mean, other_parts) = map(_mean_and_parts, dices)
    parts = parts - other_parts  # of the deviation, by case and class
    counts = np.array([own.sum(0) for own in known])
    fewest = np.where(counts > 0, counts, len(one) + 1).min(0)
    variances, cases = (parts**2).sum(0), int((known[0] | known[1]).any(1).sum())
    freedom = cases - 1.0
    if variances.any():  # Welch and Satterthwaite's
        freedom = min(freedom, variances.sum() ** 2 / (variances**2 / np.maximum(fewest - 1, 1)).sum())
    at = int(fewest.argmin())
    deviation = math.sqrt((parts.sum(1) ** 2).sum())
    return Difference(mean - other_mean, deviation, freedom, cases, (names[at], int(fewest[at])))


def _mean_and_parts(dices: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Returns the mean over classes (columns) of their means over cases, and what each value adds to its deviation."""
    known = ~np.isnan(dices)
    counts = known.sum(0)
    means = np.where(known, dices, 0.0).sum(0) / np.maximum(counts, 1)
    weights = np.sqrt(counts / np.maximum(counts - 1, 1)) / np.maximum(counts, 1) / (counts > 0).sum()
    return float(means[counts > 0].mean()), np.where(known, (dices - means) * weights, 0.0)


def what_is_hardly_learned(
    dice: float, cases: int, present: float, found: float = math.nan, where: str = "", predicted: float = math.nan,
    true: float = math.nan,
) -> str:  # fmt: skip
    """Returns what a low Dice means; "" of one that is not, and of none. It is low too if only cases without the class
    raise it, which BraTS counts as 1.

    - ``cases``: how many it is a mean over; ``present``: the mean over those whose truth has the class
    - ``found``: the mean sensitivity over these; NaN if it is not known
    - ``where``: the truth alone is known, in words: "in the readers' consensus"; "" everywhere
    - ``predicted``, ``true``: the number of predicted and of true voxels, or its mean; NaN if it is not known
    """
    if math.isnan(dice) or (dice if math.isnan(present) else min(dice, present)) >= HARDLY:
        return ""
    if predicted == 0:
        return "nothing of this class was predicted"
    if math.isnan(present) and where:
        return f"no case has this class {where}"
    if math.isnan(present):
        return "no case has this class, and what is predicted of it counts as false"
    if present < HARDLY and found >= MOSTLY:
        if cases == 1:
            return f"the prediction covers {100 * found:.0f} % of the truth, but is much too large"
        return f"on average, the prediction covers {100 * found:.0f} % of the truth, but is much too large"
    if present < HARDLY <= found:
        missed = ": cases are missed, or too much is predicted" if cases > 1 else ", and much that is false"
        if true and predicted > LARGE * true:
            missed += f" ({predicted / true:.1f} times as many voxels as are true)"
        return f"{'on average, ' * (cases > 1)}the prediction covers {100 * found:.0f} % of the truth{missed}"
    if present < HARDLY and predicted < true / 2:
        share = f"{100 * predicted / true:.0f} % as many voxels as are true"
        covers = (
            "" if math.isnan(found) else f", and {'on average, ' * (cases > 1)}{100 * found:.0f} % of the truth covered"
        )
        return f"too little is predicted: {share}{covers}"
    if present >= HARDLY:
        return f"{rounded(present, 3)} where the truth has this class; where it has none, predictions count as false"
    if dice and math.isnan(found):
        return "little of it overlaps the truth, or much too much is predicted"
    if not dice and math.isnan(predicted):  # whether any was is not known
        return "no voxel of the truth was found"
    if cases > 1:
        return f"the predictions {'hardly' if dice else 'do not'} overlap the truth"
    return f"the prediction {'hardly overlaps' if dice else 'does not overlap'} the truth"


def hardly_learned_lines(summary: Mapping[str, Any]) -> list[str]:
    """Returns a line on each class of a summary that has a low Dice, or a Dice of 0 for cases that lack it."""
    count, present = summary["num_cases"], summary["present"]
    told = dict[str, tuple[float, str]]()
    for name, row in summary["mean"].items():
        of_present, found = present[name]
        own = summary["num_values"][name]["Dice"]
        what = what_is_hardly_learned(
            row["Dice"], own, of_present, found, where_known(row), *(row.get(n, math.nan) for n in ("n_pred", "n_ref"))
        )
        zeros = summary["zeros_of_absent"][name]
        rest = row["Dice"] * own / (own - zeros) if own > zeros else math.nan
        if zeros and (not what or of_present < HARDLY):
            are, it = ("is", "it") if zeros == 1 else ("are", "these")
            why = "this class was predicted where the truth has none"
            absent = f"{zeros} of {own} values {are} 0, as {why}; {rounded(rest, 4)} without {it}"
            what = f"{what}; {absent}" if what else absent
        where = "where the truth has this class"
        if what and where not in what and rest - of_present > 5e-5:  # cases that both lack the class count as 1
            what += f"; {rounded(of_present, 4)} {where}"
        told[name] = row["Dice"], what
    kind = "mean Dice" if count > 1 else "Dice"
    return [f"{name}: {kind} {rounded(dice, 4)}: {what}" for name, (dice, what) in told.items() if what]


def what_is_low(dice: float, rows: Sequence[Mapping[str, float]], are_its: bool, count: int) -> str:
    """Returns what a low mean Dice of a class over ``count`` cases means; "" of one that is not.

    - ``rows``: the class's scores of each case; ``are_its``: the Dice is their mean, and not that of other weights
    """
    predicted, true = (without_nan(row.get(name, math.nan) for row in rows) for name in ("n_pred", "n_ref"))
    lacking = true.count(0)
    if not are_its and 0 < lacking < len(true):
        told = f"in {lacking} of {len(true)} cases the truth lacks this class: the Dice is 0 if any of it is predicted"
        return told * (dice < HARDLY)
    if not are_its or not rows:
        return what_is_hardly_learned(dice, count, math.nan if lacking else dice)
    of_class = [{"": dict(row)} for row in rows]
    present, found = (mean_where_present(of_class, "", metric) for metric in ("Dice", "Sensitivity"))
    where, count = next(filter(None, map(where_known, rows)), ""), len(without_nan(row["Dice"] for row in rows))
    sums = (sum(values) if values else math.nan for values in (predicted, true))  # of cases annotated for the class
    return what_is_hardly_learned(dice, count, present, found, where, *sums)


def remarks_on(
    summary: Mapping[str, Any], cases: Sequence[tuple[Any, Scores]], settings: Mapping[str, Any]
) -> list[str]:
    """Returns lines below a table of scores: on low ones, and on what they hide.

    - ``cases``: pairs of label maps, and their scores
    """
    asked = [scores for _, scores in cases], settings["nsd_tolerance"], settings["lesion_wise"]
    sides = list[float]()
    for pair, _ in cases:
        with suppress(DataError):
            sides += read_geometry(pair.prediction)[0].canonical_spacing
    return hardly_learned_lines(summary) + lesions.hidden_by_scale(*asked, sides)
