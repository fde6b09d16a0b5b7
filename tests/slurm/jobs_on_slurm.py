"""The shipped job scripts on a real Slurm: jobs start, are cut short in every way, go on, and end alike."""

import os
import signal
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, lacking
from tests.slurm.desk import FRONTIER, Desk, status, weights
from tests.support.pages import CLUSTER, readme_commands

LACKING = lacking()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("slurm")
    with Cluster(folder / "cluster", nodes=3) as cluster:
        yield Desk(cluster, folder)


@pytest.fixture(scope="module")
def undisturbed(desk: Desk) -> Path:
    """A finished run of four ranks on two nodes, its environment unpacked from a file on each node."""
    packed, nvme, run = (desk.folder / name for name in ("env.tar.gz", "nvme", "undisturbed"))
    python = desk.folder / "python"
    python.write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(python, "bin/python")
        tar.add(desk.stub("conda-unpack", ""), "bin/conda-unpack")
    nvme.mkdir()
    env = {"SEQPAR_ENV": "/nowhere", "SEQPAR_ENV_TAR": str(packed), "SEQPAR_NVME": str(nvme), "SEQPAR_UNPACK": "gzip"}
    job = desk.frontier(*desk.flags, "--out", str(run), SBATCH_CONSTRAINT="nvme", **env)
    desk.ended(job, 0)
    (run / "log.txt").write_text(desk.log(job))
    return run


def test_four_ranks_on_two_nodes_train(desk: Desk, undisturbed: Path) -> None:
    log = (undisturbed / "log.txt").read_text()
    assert "4 ranks = data 2 x seq 2, started by slurm" in log and "\r" not in log
    assert status(undisturbed)["state"] == "finished"
    assert "on frontier[00001-00002]" in (undisturbed / "jobs.txt").read_text()


def test_frontiers_modules_are_loaded_in_order_and_the_environment_reaches_the_nodes(
    desk: Desk, undisturbed: Path
) -> None:
    """These three programs are stand-ins: what is shown is how they are called."""
    called = (desk.folder / "stubs.txt").read_text().splitlines()
    modules = [line.split()[-1] for line in called if line.startswith("module load")]
    assert modules.index("rocm/7.1.1") < modules.index("rccl-net-plugin")
    packed, nvme = desk.folder / "env.tar.gz", desk.folder / "nvme/seqpar-env"
    assert f"sbcast -pf {packed} {nvme}.tar.gz" in called
    assert called.count("conda-unpack ") == 2  # once a node
    assert (nvme / "bin/python").exists()


def test_usr1_saves_and_a_requeued_job_ends_with_the_same_weights(desk: Desk, undisturbed: Path) -> None:
    run = desk.folder / "requeued"
    job = desk.frontier(*desk.flags, "--out", str(run))
    desk.hold_at(run, job, 5)
    desk.cluster.ask("scancel", "-s", "USR1", job)
    desk.release(job)
    desk.ended(job, 75)
    assert status(run)["state"] == "preempted" and "SIGUSR1" in status(run)["why"]
    desk.cluster.ask("scontrol", "requeue", job)
    desk.at_once(job)
    desk.cluster.wait(lambda: status(run)["state"] == "finished", "the requeued job finishes")
    desk.ended(job, 0)
    assert "resumed at step" in desk.log(job) and "preset debug" in desk.log(job), "one log, appended to"
    assert weights(run) == weights(undisturbed)


def test_a_chain_outlives_the_time_limit_a_cancel_a_killed_rank_and_a_lost_node(desk: Desk, undisturbed: Path) -> None:
    run, cluster = desk.folder / "chained", desk.cluster
    saving = ["--checkpoint-minutes", "0.001"]
    jobs = desk.chain(7, "-N2", FRONTIER, *desk.flags, *saving, "--out", str(run))
    first, second, third, fourth, last, *spare = jobs

    desk.hold_at(run, first, 4)  # Slurm's own signal, as the script asks for it, also lets the held rank go on
    hours, minutes, _ = cluster.job(first)["RunTime"].split(":")
    cluster.ask("scontrol", "update", f"JobId={first}", f"TimeLimit={60 * int(hours) + int(minutes) + 2}")
    desk.ended(first, 75)
    assert status(run)["state"] == "preempted" and "SIGUSR1" in status(run)["why"]

    desk.hold_at(run, second, 10)
    cluster.ask("scancel", second)
    cluster.wait(lambda: status(run)["state"] == "preempted", "a cancelled job saves")
    assert "SIGTERM" in status(run)["why"]

    ranks = desk.hold_at(run, third, 18)
    os.kill(ranks[1][0], signal.SIGSTOP)  # and this one could not even notice
    os.kill(ranks[3][0], signal.SIGKILL)
    cluster.wait(lambda: not cluster.ranks(third), "the others end, the stopped one too", patience=60)
    assert cluster.wait_for_job(third) != "0:0"

    ranks = desk.hold_at(run, fourth, 28)
    lost = ranks[3][1]
    assert lost != ranks[0][1], "ranks 0 and 3 are on two nodes"
    cluster.cut_power(lost, fourth)
    desk.ended(last, 0)
    assert lost not in cluster.job(last)["NodeList"]
    cluster.mend(lost)

    assert status(run)["state"] == "finished" and weights(run) == weights(undisturbed)
    assert [cluster.job(job)["JobState"] for job in spare] == ["CANCELLED"] * 2
    lines = (run / "jobs.txt").read_text().splitlines()
    nothing, *saved = [line.split()[0] for line in lines if " job " in line]
    assert nothing == "nothing" and len(saved) == 4 and saved == sorted(set(saved)), "each job went on from a later one"
    log = (run / "jobs.out").read_text()
    assert all(f"resumed at step {int(name.removeprefix('step-'))} " in log for name in saved)


def test_a_chain_ends_with_an_error_that_would_come_again(desk: Desk) -> None:
    chains = {}
    for code, wrong in {2: ["--depth", "0"], 3: ["--data", "/nowhere"], 5: ["--lr", "1e30"]}.items():
        run = desk.folder / f"ends-with-{code}"
        jobs = desk.chain(3, *desk.shared(), *desk.flags, *wrong, "--out", str(run))
        chains[code] = run, jobs
    for code, (run, jobs) in chains.items():
        desk.ended(jobs[0], code)
        assert {desk.cluster.wait_for_job(job) for job in jobs[1:]} == {"0:0"}
        assert (run / "jobs.txt").read_text().count(" job ") == 1, (run / "jobs.out").read_text()


def test_two_jobs_on_one_node_do_not_meet(desk: Desk) -> None:
    runs = [desk.folder / "left", desk.folder / "right"]
    left = desk.submit(*desk.shared(), *desk.flags, "--iterations", "12", "--out", str(runs[0]))
    desk.hold_at(runs[0], left, 2, world=2)
    right = desk.submit(*desk.shared(), *desk.flags, "--iterations", "4", "--out", str(runs[1]))
    desk.ended(right, 0)  # it came and went while the other one was there
    desk.release(left)
    desk.ended(left, 0)
    assert desk.cluster.job(left)["NodeList"] == desk.cluster.job(right)["NodeList"]
    assert [status(run)["state"] for run in runs] == ["finished"] * 2


def test_a_batch_shell_without_srun_trains_alone_and_says_so(desk: Desk) -> None:
    run = desk.folder / "alone"
    flags = [*desk.flags, "--seqpar", "1", "--iterations", "2", "--out", str(run)]
    job = desk.submit("-n4", "-N2", "--wrap", f"{sys.executable} launch/train.py {' '.join(flags)}")
    desk.ended(job, 0)
    assert "without srun" in desk.log(job) and "srun -n 4" in desk.log(job)
    assert "; 1 rank, started alone" in desk.log(job)


def test_two_ranks_predict_the_same_files_as_one_process(desk: Desk, undisturbed: Path) -> None:
    images, one, two = (desk.folder / name for name in ("Dataset001_Tiny/imagesTr", "one", "two"))
    job = desk.submit(*desk.shared(), "predict", str(undisturbed), "-i", str(images), "-o", str(two))
    desk.alone("predict", str(undisturbed), "-i", str(images), "-o", str(one))
    desk.ended(job, 0)
    assert "2 ranks = data 1 x seq 2" in desk.log(job)
    names = sorted(path.name for path in one.glob("*.nii.gz"))
    assert len(names) == 5
    assert [(one / name).read_bytes() for name in names] == [(two / name).read_bytes() for name in names]


def test_a_job_that_is_too_long_is_rejected_before_it_waits(desk: Desk) -> None:
    test_only = ["sbatch", "--test-only", "-N2"]
    desk.cluster.ask(*test_only, FRONTIER)
    with pytest.raises(AssertionError, match="[Tt]ime limit"):
        desk.cluster.ask(*test_only, "-t", "03:00:00", FRONTIER)


@pytest.mark.parametrize("command", readme_commands(*CLUSTER))
def test_readmes_lines_hand_in_runs_that_finish(desk: Desk, command: str) -> None:
    """As they stand, but for the data, sizes that a test can wait for, and a second job of the chain."""
    program, *rest = command.split()
    run = desk.folder / f"readme-{Path(program).stem}"
    arguments = [{"DATA": desk.flags[-3], "8": "2", "runs/first": str(run)}.get(word, word) for word in rest]
    arguments += desk.flags
    jobs = [desk.submit("-N2", *arguments)] if program == "sbatch" else desk.chain(2, "-N2", *arguments)
    for job in jobs:
        desk.ended(job, 0)
    assert status(run)["state"] == "finished"
