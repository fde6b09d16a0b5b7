"""The interval of a mean over cases, against tables and by its own definition."""

import math

import numpy as np
import pytest

from seqpar.scores.comparison import interval_of_mean

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
