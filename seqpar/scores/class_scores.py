"""Scores of predicted classes: accuracy, sensitivity, specificity, area under the ROC curve, how sure they are.

Legend: n cases, k classes, d draws of the bootstrap, t tenths of probability.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.scores.comparison import FEW, TOO_FEW
from seqpar.text import quantity, rounded

TABLE = "predictions.csv"  # of classes, in predict's folder

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
DRAWS, LEVEL, SEED = 1000, 0.95, 0
ALL_ALIKE = "no interval: all bootstrap samples give the same value"  # of an AUC of 1, "1 to 1" would claim certainty
NUM_BINS = 10  # of a calibration curve
NEGATIVE = re.compile(
    r"no|none|n?0|cn|nc|hc|lgg|alive|survived|remission|unaffected|unmethylated|unmutated|intact|low|"
    r"(healthy|controls?|negative|benign|stable|low|no|non|not|without)([-_ ].*)?|normal([-_ ](?!pressure).*)?|"
    r"(.*[-_ ])?(wild[-_ ]?type|wt|free|negative|absent|intact|controls?|healthy|normal)|(.*[-_ ])?non(?!e|specific).*"
)


def positive_class(names: Sequence[str], asked: str | None = None) -> int:
    """Returns the number of the class that is looked for: the asked one, else the last that is not called healthy.

    Raises ``ValueError`` for a name that no class has.
    """
    if asked is not None and asked not in names:
        raise ValueError(f"--positive {asked}: no class has this name: use {' or '.join(names)}")
    others = [n for n, name in enumerate(names) if not NEGATIVE.fullmatch(name.strip().lower())]
    return list(names).index(asked) if asked is not None else (others or [len(names) - 1])[-1]


def confusion_of(truth: Ints, predicted: Ints, num_classes: int) -> Ints:
    """Returns how many cases of each class (rows) were given each class (columns)."""
    counts = np.bincount(truth * num_classes + predicted, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes)


def area_under_roc(is_class: NDArray[np.bool_], scores: Floats) -> float:
    """Returns the share of pairs, one case of the class and one of the others, in which the first scores higher.

    Equal scores count half. NaN if there are no such pairs.
    """
    return float(_areas(is_class, scores, np.ones((1, len(scores)), np.int64))[0])


def mean_area(truth: Ints, probabilities: Floats) -> float:
    """Returns the mean over classes of the area of each against all others; of two classes they are the same."""
    return float(_mean_areas(truth, probabilities, np.ones((1, len(truth)), np.int64))[0])


def _areas(is_class: NDArray[np.bool_], scores: Floats, times: Ints) -> Floats:
    """Returns the area in each draw: ``times`` (``d n``) says how often each case was drawn."""
    order = np.argsort(scores, kind="stable")
    _, begins = np.unique(scores[order], return_index=True)
    positives, negatives = (
        np.add.reduceat(times[:, order] * own[order], begins, axis=1) for own in (is_class, ~is_class)
    )  # of each score, the lowest first
    pairs = positives.sum(1) * negatives.sum(1)
    higher = (positives * (negatives.cumsum(1) - negatives / 2)).sum(1)
    return np.divide(higher, pairs, out=np.full(len(times), math.nan), where=pairs > 0)


def _mean_areas(truth: Ints, probabilities: Floats, times: Ints) -> Floats:
    areas = [_areas(truth == number, column, times) for number, column in enumerate(probabilities.T)]
    known = [area for area in areas if not np.isnan(area).any()]  # each draw has as many cases of each class
    return np.mean(known, axis=0) if known else np.full(len(times), math.nan)


def sensitivities(confusion: Ints) -> Floats:
    """Returns the share of each class's cases that were given it, NaN of a class without cases."""
    return _shares(np.diag(confusion), confusion.sum(1))


def specificities(confusion: Ints) -> Floats:
    """Returns the share of all other classes' cases that were not given each class."""
    others = confusion.sum() - confusion.sum(1)
    return _shares(others - (confusion.sum(0) - np.diag(confusion)), others)


def balanced_accuracy(confusion: Ints) -> float:
    """Returns the mean sensitivity of the classes that have cases."""
    return float(np.nanmean(sensitivities(confusion)))


def score_classes(truth: Sequence[int], probabilities: Floats, names: Sequence[str]) -> dict[str, Any]:
    """Returns all scores of cases, with their intervals, as JSON has them: NaN stands for what no case shows.

    - ``truth``: class numbers
    - ``probabilities``: ``n k``; a case is given the most likely class, the first of equals
    """
    labels = np.asarray(truth, np.int64)
    confusion = confusion_of(labels, probabilities.argmax(1), len(names))
    own = {"sensitivity": sensitivities(confusion), "specificity": specificities(confusion)}
    classes = {
        name: {
            "cases": int(confusion[number].sum()),
            **{kind: float(values[number]) for kind, values in own.items()},
            "AUC": area_under_roc(labels == number, probabilities[:, number]),
            "intervals": {
                kind: list(interval_of_share(float(values[number]), count) or ())
                for (kind, values), count in zip(own.items(), cases_behind(len(labels), int(confusion[number].sum())))
            },
        }
        for number, name in enumerate(names)
    }
    right = probabilities.argmax(1) == labels
    return {
        "cases": len(labels),
        "scores": {
            "accuracy": float(right.mean()),
            "balanced accuracy": balanced_accuracy(confusion),
            "AUC": mean_area(labels, probabilities),
        },
        "intervals": {
            "accuracy": list(interval_of_share(float(right.mean()), len(labels)) or ()),
            "balanced accuracy": interval_of_balanced(confusion),
            "AUC": bootstrap(labels, lambda times: _mean_areas(labels, probabilities, times)),
        },
        "classes": classes,
        "confusion": confusion.tolist(),
        "calibration_error": calibration_error(labels, probabilities),
    }


def bootstrap(truth: Ints, score: Callable[[Ints], Floats]) -> list[float]:
    """Returns the interval of a score over cases drawn anew, as many of each class as there are; always the same.

    ``score`` is given how often each case was drawn (``d n``) and returns the score of each draw.
    """
    rng = np.random.default_rng(SEED)
    rows = [np.flatnonzero(truth == number) for number in np.unique(truth)]
    times = np.zeros((DRAWS, len(truth)), np.int64)
    for draw in times:
        for own in rows:
            draw[own] = np.bincount(rng.integers(len(own), size=len(own)), minlength=len(own))
    drawn, tail = score(times), (1 - LEVEL) / 2
    return [float(value) for value in np.nanquantile(drawn, [tail, 1 - tail])] if np.isfinite(drawn).any() else []


def interval_of_balanced(confusion: Ints) -> list[float]:
    """Returns the interval of balanced accuracy: Wilson's of each class's sensitivity, their reaches added in squares.

    This is Newcombe's way for sums of independent shares (1998). A bootstrap takes a class whose cases are all right
    for certain, however few they are.
    """
    shares, counts = sensitivities(confusion), confusion.sum(1)
    ends = np.array([_wilson(share, count) for share, count in zip(shares.tolist(), counts.tolist()) if count])
    middle = shares[counts > 0]
    reach = np.sqrt(((ends - middle[:, None]) ** 2).sum(0)) / len(middle)
    return [float(middle.mean() - reach[0]), float(middle.mean() + reach[1])]


def cases_behind(cases: int, of_class: int) -> tuple[int, int]:
    """Returns how many cases the sensitivity and the specificity of a class are shares of."""
    return of_class, cases - of_class


def interval_of_share(share: float, count: int) -> tuple[float, float] | None:
    """Returns Wilson's interval of a share of independent cases; None if they are too few for one.

    It stays between 0 and 1, and has a width even where all cases are right.
    """
    return None if count < FEW else _wilson(share, count)


def _wilson(share: float, count: int) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    reach = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def compare_shares(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float, float]:
    """Returns the interval of a difference of two shares of the same cases, and its exact p value.

    The interval is Newcombe's for pairs (1998, method 10), the p value that of McNemar's exact test.

    - ``both``, …: how many cases count for both shares, for the first or the second alone, and for neither
    """
    count, pairs = both + only_first + only_second + neither, only_first + only_second
    first, second = (both + only_first) / count, (both + only_second) / count
    (low, high), (other_low, other_high) = (_wilson(share, count) for share in (first, second))
    root = math.sqrt((both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither))
    excess = both * neither - only_first * only_second
    correlation = (max(excess - count / 2, 0) if excess > 0 else excess) / root if root else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a**2 - 2 * correlation * a * b + b**2))

    below, above = reach(first - low, other_high - second), reach(high - first, second - other_low)
    tail = sum(math.comb(pairs, n) for n in range(min(only_first, only_second) + 1)) / 2**pairs
    return first - second - below, first - second + above, min(1.0, 2 * tail)


def describe_share(share: float, count: int) -> str:
    """Returns the interval of a share in words, "" if no case shows the share."""
    interval = interval_of_share(share, count)
    if not count:
        return ""
    return TOO_FEW if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"


def fewest_cases(content: Mapping[str, Any], score: str) -> int:
    """Returns how many cases a score of ``score_classes`` rests on: accuracy on all, others on the smallest class."""
    counts = [row["cases"] for row in content["classes"].values() if row["cases"]]
    return int(content["cases"] if score == "accuracy" else min(counts, default=0))


def baseline(summary: Mapping[str, Any]) -> str:
    """Returns what a constant answer reaches, next to which an accuracy is to be read."""
    name, row = max(summary["classes"].items(), key=lambda item: item[1]["cases"])
    return f"Always answering {name} would give an accuracy of {row['cases'] / max(1, summary['cases']):.3f}."


def about_scores(summary: Mapping[str, Any]) -> str:
    """Returns how intervals are computed, and what guessing and a constant answer reach."""
    present = sum(row["cases"] > 0 for row in summary["classes"].values())
    among = " among the classes that occur" * (present < len(summary["classes"]))
    of_each = " AUC: each class against the others, averaged over classes." * (len(summary["classes"]) > 2)
    return (
        "95 % intervals: accuracy, Wilson's; balanced accuracy, the classes' Wilson intervals, combined; AUC, by "
        f"bootstrap (1,000 draws, stratified by class). n: cases. Guessing{among} gives a balanced accuracy of "
        f"{1 / max(1, present):.3g} and an AUC of 0.5 on average. {baseline(summary)}{of_each}"
    )


def caution_of_absent(summary: Mapping[str, Any]) -> str:
    """Returns a sentence on the classes that no scored case has; "" if there is none, or a single class is there."""
    counts = {name: row["cases"] for name, row in summary["classes"].items()}
    absent = [name for name, count in counts.items() if not count]
    if not absent or len(absent) >= len(counts) - 1:
        return ""
    return (
        f"No case is of the class {' or '.join(absent)}: whether such cases are recognised is unknown, and balanced "
        "accuracy and AUC are means over the other classes."
    )


def caution_of_guesses(summary: Mapping[str, Any]) -> str:
    """Returns a sentence if a constant answer, chance or exchanged classes explain the scores; else ""."""
    present = [name for name, row in summary["classes"].items() if row["cases"]]
    if len(present) == 1:
        return (
            f"All cases are of the class {present[0]}: always giving that class would be right for each of them. The "
            "balanced accuracy is this class's sensitivity alone, and nothing shows how often others are taken for it."
        )
    low, high = summary["intervals"].get("AUC") or (1.0, 1.0)
    fewest, total = fewest_cases(summary, "AUC"), int(summary["cases"])
    by_chance = 1 / math.comb(total, fewest)  # that all are ranked rightly, of two classes
    if fewest < FEW and (low <= 0.5 or by_chance > 0.05 or _is_rank_of_chance(summary)):
        accurate = interval_of_share(summary["scores"]["accuracy"], total)
        largest = max(row["cases"] for row in summary["classes"].values())
        if len(present) > 2 and accurate and accurate[0] > largest / total:
            few = [name for name in present if summary["classes"][name]["cases"] < FEW]
            return (
                f"There are too few cases of {' and '.join(few)} to tell how often they are recognised, and balanced "
                "accuracy and AUC count each class alike. The accuracy is above that of a constant answer."
            )
        return f"Guessing could reach these scores: the smallest class has {quantity(fewest, 'case')}, {TOO_FEW}."
    within = f", also within its interval ({low:.3f} to {high:.3f})" * (low < high)
    if high < 0.5:
        return (
            f"The AUC is below 0.5{within}: the network ranks the cases the wrong way round, as when classes are "
            "exchanged in the labels of either data set."
        )
    if low <= 0.5:
        return f"Guessing could reach these scores: the interval of the AUC ({low:.3f} to {high:.3f}) includes 0.5."
    least, most = summary["intervals"].get("balanced accuracy") or (1.0, 1.0)
    guess = 1 / len(present)
    if low == high and (summary["scores"]["AUC"] or 0.0) < 1 and least <= guess:  # the area has no interval
        within = f"the interval of the balanced accuracy ({least:.3f} to {most:.3f}) is not above {guess:.3f}"
        return f"Guessing could reach these scores: {within}."
    return ""


def _is_rank_of_chance(summary: Mapping[str, Any]) -> bool:
    """Returns whether one ranking by chance in twenty has as high an AUC, by Mann and Whitney's spread: of very few
    cases of a class, the bootstrap's interval is too narrow.
    """
    total, area = summary["cases"], summary["scores"]["AUC"]
    counts = [row["cases"] for row in summary["classes"].values() if 0 < row["cases"] < total]
    spread = fmean(math.sqrt((total + 1) / (12 * n * (total - n))) for n in counts)
    return area is not None and area - 0.5 <= NormalDist().inv_cdf(0.95) * spread


def doubt_of_area(content: Mapping[str, Any], name: str) -> str:
    """Returns, in brackets, that the area of a class is that of few cases; "" if there are enough.

    - ``content``: of a summary, as ``score_classes`` gives it
    """
    positives = int(content["classes"][name]["cases"])
    fewest = min(positives, int(content["cases"]) - positives)
    return f" ({TOO_FEW})" if 0 < fewest < FEW else ""


def words_of_interval(interval: Sequence[float] | None, count: int) -> str:
    """Returns the interval of a score in words, "" if there is none; ``count``: of the cases that it rests on."""
    if count < FEW:
        return TOO_FEW
    if not interval:
        return ""
    low, high = interval
    return f"{low:.3f} to {high:.3f}" if low < high else ALL_ALIKE


def calibration(truth: Ints, probabilities: Floats) -> list[tuple[float, float, int]]:
    """Returns for each tenth of probability the mean one of the class given, the share that is right, and the cases."""
    return filled_tenths(count_tenths(probabilities.max(1), probabilities.argmax(1) == truth))


def calibration_error(truth: Ints, probabilities: Floats) -> float:
    """Returns the mean distance of probability and share that is right, over the tenths, by their cases."""
    return error_of_tenths(count_tenths(probabilities.max(1), probabilities.argmax(1) == truth))


def count_tenths(given: NDArray[Any], right: NDArray[Any]) -> Floats:
    """Returns for each tenth of probability ``t 3``: how many there are, the sum of them, and how many are right.

    Those of several cases add up, so that no more than one is in memory.

    - ``given``, ``right``: a probability each, of any shape, and whether what it is of is true, or how far
    """
    values, is_right = given.ravel().astype(np.float64), right.ravel()
    bins = np.clip((values * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
    return np.stack([np.bincount(bins, weights, NUM_BINS) for weights in (None, values, is_right)], 1)


def filled_tenths(tenths: Floats) -> list[tuple[float, float, int]]:
    """Returns of each tenth with anything in it the mean probability, the share that is right, and how many it has."""
    return [(float(given / count), float(right / count), int(count)) for count, given, right in tenths if count]


def error_of_tenths(tenths: Floats) -> float:
    """Returns the expected calibration error: the mean distance of probability and share that is right; NaN of none."""
    count = float(tenths[:, 0].sum())
    return float(np.abs(tenths[:, 1] - tenths[:, 2]).sum()) / count if count else math.nan


def format_calibration(
    tenths: Mapping[str, Floats], classes: Collection[str], which: str = "", shares: str = ""
) -> str:
    """Returns the calibration errors as a table in lines; ``which``, ``shares``: what is known of cases and truth."""
    width = max(len(name) for name in (*classes, "class"))
    lines = [f"calibration over the voxels of {f'the cases {which}' if which else 'all cases'}"]
    lines.append("(ECE: expected calibration error; from 0.1 and in the last three columns: without voxels below 0.1)")
    lines += [f"(share: {shares})"] * bool(shares)
    lines.append(
        f"{'class':{width}}  {'ECE':>6}  {'from 0.1':>8}  {'mean probability':>16}  {'share there':>11}  {'voxels':>9}"
    )
    for name, own in tenths.items():
        count, given, right = own[1:].sum(0)
        mean, share = (given / count, right / count) if count else (np.nan, np.nan)
        cells = (error_of_tenths(own), error_of_tenths(own[1:]), mean, share)
        texts = (f"{rounded(cell, 4):>{wide}}" for cell, wide in zip(cells, (6, 8, 16, 11)))
        lines.append("  ".join([f"{name:{width}}", *texts, f"{int(count):>9,}"]))
    lines += [f"{name:{width}}  no output of the network stands for it" for name in classes if name not in tenths]
    return "\n".join(lines)


def calibration_content(tenths: Mapping[str, Floats]) -> dict[str, Any]:
    """Returns what summary.json says of calibration, by class."""
    return {
        name: {
            "ECE": error_of_tenths(own),
            "ECE_from_0.1": error_of_tenths(own[1:]),
            "tenths": [
                {"voxels": int(count), "probability": float(given), "share": float(right)}
                for count, given, right in np.concatenate([own[:, :1], own[:, 1:] / np.maximum(own[:, :1], 1)], 1)
            ],
        }
        for name, own in tenths.items()
    }


def roc_points(is_class: NDArray[np.bool_], scores: Floats) -> tuple[list[float], list[float]]:
    """Returns the curve of a class: shares of other cases and of its own that score at least as each threshold."""
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # of each run of equal scores
    hits, false = (np.cumsum(part[order])[last] for part in (is_class, ~is_class))
    return [0.0, *(false / max(1, false[-1])).tolist()], [0.0, *(hits / max(1, hits[-1])).tolist()]


def roc_label(name: str, is_class: NDArray[np.bool_], scores: Floats) -> str:
    """Returns the name of a class with the area under its curve and both numbers of cases; says if they are few."""
    positives, few = int(is_class.sum()), ""
    if min(positives, len(is_class) - positives) < FEW:
        few = f", {TOO_FEW}"
    cases = f"{quantity(positives, 'case')}, {quantity(len(is_class) - positives, 'other')}"
    return f"{name}: AUC {area_under_roc(is_class, scores):.3f} ({cases}{few})"


def _shares(part: Ints, whole: Ints) -> Floats:
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)
