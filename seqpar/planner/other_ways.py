"""What fits once less memory is needed in the first of the ways that keep the numbers, printed as it is found."""

from collections.abc import Sequence
from dataclasses import replace

from seqpar.planner.answer import print_recommendation, print_rows
from seqpar.planner.fit import describe_shortage, smallest_that_fits, why_nothing_fits
from seqpar.planner.memory_saving import flags_of, memory_savings, search_with_savings
from seqpar.planner.needs import Plan, RunToPlan


def print_other_ways(run: RunToPlan, sizes: Sequence[int], rows: list[Plan], flags: set[str], preset: str) -> int:
    """Prints what fits once less memory is needed in the first of the ways that keep the numbers; returns 0.

    Raises where nothing fits in any of them.
    """
    tried = list(rows)
    possible = [p for p in rows if not p.why]
    if possible:
        print(f"\nas asked, {describe_shortage(min(possible, key=lambda p: p.total))}")
        print("what needs less and keeps the numbers is tried in turn:", flush=True)
        for way, price in memory_savings(run.config, flags):
            print(f"\n{flags_of(way)}  (adds: {price})", flush=True)
            other = replace(run, config=replace(run.config, **way))
            rows = print_rows(search_with_savings(other, sizes))
            if best := smallest_that_fits(sorted(rows, key=lambda p: p.config.seqpar)):
                print(f"\ntaken: {flags_of(way)}, which changes no number")
                print("\n".join(print_recommendation(other, best, rows, preset)))
                return 0
            tried += rows
    raise ValueError(why_nothing_fits(tried, exhausted=True))
