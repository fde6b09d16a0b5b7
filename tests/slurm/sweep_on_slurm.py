"""A sweep over the nodes of a job on a real Slurm: Ray on each of them, told to leave early, and gone on with."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, lacking
from tests.slurm.desk import Desk, status

LACKING = lacking() or ("" if importlib.util.find_spec("ray") else "Ray is not installed (pip install -e '.[tune]')")
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
NODES = ["-t", "10", "-N2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", "launch/slurm/tune.sbatch"]
POINTS = ("lr-0.01", "lr-0.02", "lr-0.03")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("slurm")
    with Cluster(folder / "cluster", nodes=2) as cluster:
        yield Desk(cluster, folder)


def test_a_sweep_over_two_nodes_saves_before_the_end_of_its_job_and_the_same_line_goes_on(desk: Desk) -> None:
    out = desk.folder / "sweep"
    flags = [flag for name, flag in zip(["", *desk.flags], desk.flags) if "--lr" not in (name, flag)]
    long = ["--seqpar", "1", "--iterations", "240"]  # or the first of two ends before the signal reaches it
    line = [*NODES, "--space", "lr=0.01,0.02,0.03", *flags, *long, "--out", str(out)]
    job = desk.submit(*line)

    def together() -> bool:
        states = [status(out / name)["state"] for name in POINTS if (out / name / "metrics.jsonl").exists()]
        return states.count("running") == 2

    desk.cluster.wait(together, "a point trains on each node")
    desk.cluster.ask("scancel", "--batch", "-s", "USR1", job)
    desk.ended(job, 75)
    assert status(out)["state"] == "preempted"
    assert [status(out / name)["state"] for name in POINTS[:2]] == ["preempted"] * 2, desk.log(job)
    again = desk.submit(*line)
    desk.ended(again, 0)
    assert [status(out / name)["state"] for name in POINTS] == ["finished"] * 3
    assert len(json.loads((out / POINTS[0] / "config.json").read_text())["history"]) == 2
    assert "3 points to train\n" in desk.log(job) and "each on 1 core, 2 at a time on 2 cores\n" in desk.log(job)
    assert "3 of 3 points have ended" in desk.log(again)


def test_a_sweep_that_cannot_be_ends_its_job_with_its_own_code(desk: Desk, tmp_path: Path) -> None:
    job = desk.submit(*NODES, "--space", "lrr=1", "--out", str(tmp_path / "sweep"))
    desk.ended(job, 2)
    assert "train has no flag --lrr; nearest is lr" in desk.log(job)
