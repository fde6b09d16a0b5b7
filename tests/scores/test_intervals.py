"""The interval of a mean over cases, and of a difference of means, against tables and by its own definition."""

import math

import numpy as np
import pytest

from seqpar.scores.class_scores import caution_of_guesses, score_classes
from seqpar.scores.comparison import difference_of, interval_of_mean

TABLE = {2: 12.706, 3: 4.303, 5: 2.776, 10: 2.262, 30: 2.045}  # Student's t at 97.5 %, of n - 1 degrees of freedom


@pytest.mark.parametrize("count", TABLE)
def test_the_interval_is_that_of_students_table(count: int) -> None:
    values = np.random.default_rng(count).normal(10, 2, count).tolist()
    low, high = interval_of_mean(values) or (0, 0)
    reach = TABLE[count] * np.std(values, ddof=1) / math.sqrt(count)
    assert (low, high) == pytest.approx((np.mean(values) - reach, np.mean(values) + reach), rel=1e-3)


def test_it_stays_within_what_a_score_can_be_and_needs_two_cases() -> None:
    assert interval_of_mean([0.9, 1.0], low=0, high=1) == (pytest.approx(0.95 - 12.706 * 0.05, rel=1e-3), 1)
    assert interval_of_mean([0.5]) is None and interval_of_mean([]) is None


def test_it_holds_the_true_mean_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(0.0, 1.0, (4000, 4))
    is_inside = [low <= 0 <= high for low, high in (interval_of_mean(row.tolist()) or (1, 1) for row in draws)]
    assert 0.94 < np.mean(is_inside) < 0.96


def rows_of(dices: np.ndarray) -> list[dict[str, dict[str, float]]]:
    """Returns the scores of cases (rows) in classes a, b, c, ... (columns)."""
    return [{name: {"Dice": float(dice)} for name, dice in zip("abcd", row)} for row in dices]


def test_where_all_cases_have_all_classes_the_interval_is_students_of_their_differences() -> None:
    one, other = np.random.default_rng(1).uniform(size=(2, 8, 1))
    difference = difference_of(rows_of(one), rows_of(other))
    low, high = interval_of_mean((one - other).mean(1).tolist()) or (0, 0)
    assert difference and difference.describe_interval(".6f").startswith(f" (95 % confidence interval: {low:.6f} to ")
    assert difference.value == pytest.approx((low + high) / 2) and difference.freedom == pytest.approx(7)


@pytest.mark.parametrize("count", [5, 7, 10])
def test_an_interval_holds_the_true_difference_though_some_cases_lack_a_class(count: int) -> None:
    draw, is_outside = np.random.default_rng(count), list[bool]()
    for _ in range(1500):
        base = np.repeat(draw.beta(8, 2, (10, 4))[None], 2, 0) + draw.normal(0, 0.03, (2, 10, 4))
        base[:, :, 3] = draw.beta(0.8, 0.8, (2, 10))
        base[:, count:, 3] = math.nan
        difference = difference_of(*map(rows_of, base))
        assert difference and difference.rarest == (("d", count) if count < 10 else ("a", 10))
        is_outside.append("chance" not in difference.describe_interval())
    assert 0.03 < np.mean(is_outside) < 0.075


def test_a_class_that_few_cases_have_leaves_no_interval() -> None:
    """Each of its cases decides much of the difference, and one alone all that it adds."""
    dices = np.full((2, 6, 2), 0.8)
    dices[:, 1:, 1], dices[1, 0, 1] = math.nan, 0.3
    difference = difference_of(*map(rows_of, dices))
    assert difference and difference.value == pytest.approx(0.25)
    assert difference.describe_interval() == " (b is scored in only 1 case: too few to tell)"
    dices[0, 0, 1] = math.nan  # predicted by the second alone, where the truth has none
    difference = difference_of(*map(rows_of, dices))
    assert difference and difference.value == pytest.approx(0.25) and difference.rarest == ("b", 1)
    assert (
        difference_of(rows_of(dices[0]), rows_of(np.full((6, 2), math.nan))) is None and difference_of([], []) is None
    )


@pytest.mark.parametrize(("rank", "is_told"), [(1, False), (3, True), (12, True), (41, True)])
def test_the_rank_of_a_single_case_may_be_chance(rank: int, is_told: bool) -> None:
    """The bootstrap's interval never has other cases of a class that has one."""
    given, truth = np.linspace(0.9, 0.1, 41), [0] * 41
    truth[rank - 1] = 1
    scores = score_classes(truth, np.stack([1 - given, given], 1), ["normal", "bleed"])
    assert scores["scores"]["AUC"] == pytest.approx((41 - rank) / 40)
    told = "Guessing could reach these scores: the smallest class has 1 case, too few to tell."
    assert caution_of_guesses(scores) == told * is_told
