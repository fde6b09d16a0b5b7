"""How sure a mean over cases is."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from seqpar.late_import import late

special = late("scipy.special")


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
