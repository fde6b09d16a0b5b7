"""The bench of pipes: its rows are what two ranks measured, beside what was foretold and what formulas say."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from lab.benches import pipe
from lab.benches.pipe_steps import Bench, counted_memory
from seqpar.parallel.mesh import Mesh

TINY = replace(pipe.NET, tile=(16, 16, 16), features=2, accumulate=4)


def measured(mesh: Mesh) -> dict:
    """Returns what a rank's bench measures: an accumulated step alone, else placements, torch's, and memory."""
    bench = Bench(TINY, mesh)
    if mesh.world.size == 1:
        return bench.timed("", 4, 1)
    ways = {way: bench.timed(way, 4, 1) for way in ("equal", "cuts", "gabra paper", pipe.TORCH)}
    memories = {one: counted_memory(bench, one[0], one[2]) for one in pipe.HELD[:3]}
    return {"ways": ways, "memories": memories}


@pytest.mark.started
def test_rows_compare_placements_with_one_process_and_with_equal_cuts(ranks: Callable[..., list]) -> None:
    (alone,) = ranks(1, measured)
    first, second = ranks(2, measured, pipe=2, timeout=90)
    assert [run["foretold"] for run in first["ways"].values()] == [run["foretold"] for run in second["ways"].values()]
    runs = {pipe.ONE: [alone], pipe.ALONE: [alone], **{way: [run] for way, run in first["ways"].items()}}
    rows = {case: pipe.way_row(case, 4, runs) for case in runs}
    assert len({tuple(row) for row in rows.values()}) == 1, "one table has one set of columns"
    assert rows["equal"]["to equal"] == rows["equal"]["foretold to equal"] == 1 and rows["cuts"]["to equal"] > 0
    others = 1.0, rows["gabra paper"]["foretold to equal"]
    assert rows["cuts"]["foretold to equal"] <= 1.05 * min(others), "exact in the slowest place, not in the whole step"
    assert rows["cuts"]["s foretold"] == rows[pipe.TORCH]["s foretold"] and rows[pipe.TORCH]["s a step"] > 0
    assert rows["cuts"]["(K-1)/(M+K-1)"] == 1 / 5 and 0 < rows["cuts"]["bubble foretold"] < 1
    assert rows["cuts"]["bubble"] == 1 - alone["seconds"] / (2 * first["ways"]["cuts"]["seconds"])
    assert rows["cuts"]["MB sent"] > 0 and rows[pipe.ONE]["cells"] == rows[pipe.ONE]["bubble"] == ""
    memories = first["memories"]
    gpipe, alternating, again = memories.values()
    fullest = {name: max(map(float, run["alive a place"].split())) for name, run in zip("gaf", memories.values())}
    assert fullest["f"] < fullest["g"] and fullest["a"] < fullest["g"], "1F1B and computing again hold less"
    assert gpipe["MiB by the formula"] == 2 * alternating["MiB by the formula"] > again["MiB by the formula"]
    planned = max(map(float, gpipe["planned a place"].split()))
    assert fullest["g"] == pytest.approx(planned, rel=0.35)


def test_a_job_travels_as_a_line() -> None:
    job = pipe.Job(TINY, ("cuts",), (1, 4), pipe.HELD[:2], repeats=1)
    assert pipe.Job.decode(json.dumps(asdict(job))) == job
    for quick, cases in ((True, [4, 2, 3]), (False, [9, 5, 5])):
        assert [len(series.cases) for series in pipe.series(quick)] == cases
