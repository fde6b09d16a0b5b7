"""What forward, loss and backward launch on a GPU: operators, counted without one and without data.

``before`` is what the same presets launched when samples were normed one by one, losses taken in short runs, and
constants made anew in each step.
"""

from dataclasses import replace
from functools import partial

from lab.benches.series import Row, Runs, Series, alternate
from seqpar.planner.launch_counter import Launches, count_launches
from seqpar.settings.presets import PRESETS

BEFORE = {
    "paper, batch 1": 998,
    "paper, batch 4": 1967,
    "paper, batch 8": 3437,
    "modern, batch 1": 2864,
    "modern, batch 4": 3240,
    "modern, batch 8": 3906,
}


def series(quick: bool = False) -> list[Series]:
    """Returns one series: both recipes, with one tile and with more."""
    cases = tuple(case for case in BEFORE if not quick or case.endswith(" 4"))

    def measure(case: str) -> Launches:
        name, _, batch = case.partition(", batch ")
        return count_launches(replace(PRESETS[name](), batch=int(batch)))[-1]

    def row(case: str, runs: Runs) -> Row:
        last: Launches = runs[case][-1]
        return {"step of": case, "launches": last.launches, "before": BEFORE[case], "fetches": last.fetches}

    return [Series("launches of a step", cases, 1, 10.0 * len(cases), partial(alternate, cases, measure), row)]
