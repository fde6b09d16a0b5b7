"""Every way to be started is read right: the table of real Slurm contexts, torchrun, MPI, and none."""

import re

import pytest
import torch

from seqpar.parallel.launcher import Launcher, first_host, read_launcher, tasks_per_node
from seqpar.parallel.rendezvous import check_seqpar, join, pick_device, start

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "frontier[00012-00013]",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "frontier00013",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_a_slurm_step_counts_its_own_tasks() -> None:
    launcher = read_launcher(STEP)
    assert (launcher.by, launcher.rank, launcher.world, launcher.local_rank, launcher.local_world) == (
        "slurm",
        11,
        16,
        3,
        8,
    )
    assert launcher.num_nodes == 2 and launcher.address == "frontier00012" and not launcher.warning
    assert launcher.host == "frontier00013"


def test_a_small_step_in_a_large_job_has_its_own_size() -> None:
    small = STEP | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_STEP_TASKS_PER_NODE": "3"}
    small |= {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"}
    assert (read_launcher(small).world, read_launcher(small).local_world) == (3, 3)
    assert read_launcher(small).address == "127.0.0.1"  # on one node no name has to be known


# What a shell of the job sees that srun did not start: the whole job's numbers, as seen on a real Slurm.
SHELLS = {
    "batch, --ntasks-per-node": ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}, "-n 16"),
    "batch, -N 2 only": (
        {"SLURM_TASKS_PER_NODE": "56(x2)", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"},
        "2 nodes.*srun -n <ranks>",
    ),
    "salloc": ({"SLURM_NTASKS": "8", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, "-n 8"),
    "salloc on the login node": ({"SLURM_NTASKS": "8"}, "-n 8"),
    "batch, one task": ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1"}, ""),
    "batch, -N 1 only": ({"SLURM_TASKS_PER_NODE": "56", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1"}, ""),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_without_srun_runs_alone_and_says_so(shell: str) -> None:
    env, warning = SHELLS[shell]
    launcher = read_launcher({"SLURM_JOB_ID": "1", **env})
    assert launcher == Launcher("alone", warning=launcher.warning)
    assert re.search(warning, launcher.warning) if warning else not launcher.warning


def test_steps_and_jobs_that_run_together_meet_at_different_ports() -> None:
    together = [
        read_launcher(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(4700, 4800)
        for step in range(5)
    ]
    assert len(set(together)) == 500 and 15000 <= min(together) <= max(together) < 30000


def test_an_explicit_address_and_port_are_respected() -> None:
    launcher = read_launcher(STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "999"})
    assert (launcher.address, launcher.port) == ("10.0.0.1", 999)


def test_torchrun_wins_inside_a_slurm_step() -> None:
    launcher = read_launcher(STEP | TORCHRUN)
    assert (launcher.by, launcher.rank, launcher.world, launcher.local_rank, launcher.num_nodes) == (
        "torchrun",
        5,
        8,
        1,
        2,
    )
    assert (launcher.address, launcher.port) == ("node1", 1234)


def test_openmpi_and_pmi_are_read() -> None:
    ompi = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
    assert (read_launcher(ompi).by, read_launcher(ompi).rank, read_launcher(ompi).world) == ("openmpi", 2, 4)
    assert read_launcher({"PMI_SIZE": "4", "PMI_RANK": "3"}).rank == 3
    pals = {"PMI_SIZE": "8", "PMI_RANK": "6", "PALS_LOCAL_RANKID": "2", "PALS_LOCAL_SIZE": "4", "MASTER_ADDR": "n1"}
    hydra = {"PMI_SIZE": "8", "PMI_RANK": "6", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4", "MASTER_ADDR": "n1"}
    for env in (pals, hydra):
        launcher = read_launcher(env)
        assert (launcher.by, launcher.rank, launcher.local_rank, launcher.local_world, launcher.num_nodes) == (
            "pmi",
            6,
            2,
            4,
            2,
        )
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        read_launcher(ompi | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


def test_mpi_counts_its_ranks_inside_the_step_of_its_daemons() -> None:
    daemon = STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "MASTER_ADDR": "frontier00012"}
    for by, prefix in (("openmpi", "OMPI_COMM_WORLD_"), ("pmi", "PMI_")):
        launcher = read_launcher(daemon | {prefix + "SIZE": "4", prefix + "RANK": "2"})
        assert (launcher.by, launcher.rank, launcher.world) == (by, 2, 4)
    assert read_launcher(STEP | {"PMI_SIZE": "16", "PMI_RANK": "11"}).by == "slurm"  # srun --mpi=pmi2 sets both


def test_two_mpiruns_on_a_machine_meet_apart() -> None:
    rank = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID"):
        a, b = (read_launcher(rank | {"SLURM_JOB_ID": "7", name: f"prterun-n1-{job}@1"}) for job in (4711, 4712))
        assert a.port != b.port and a.job != b.job and {15000 <= launcher.port < 30000 for launcher in (a, b)} == {True}
        same = read_launcher(rank | {"OMPI_COMM_WORLD_RANK": "0", name: "prterun-n1-4711@1"})
        assert (same.port, same.job) == (a.port, a.job)
    assert read_launcher(STEP).job == "4711.0" != read_launcher(STEP | {"SLURM_STEP_ID": "1"}).job


@pytest.mark.parametrize(
    "env, names",
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"RANK": "1"}, "WORLD_SIZE is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "does not fit"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "not a number"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}, "MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no port"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "-1"}, "MASTER_PORT=-1 is no port"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0: it must be at least 1"),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, "does not fit PMI_SIZE"),
        ({k: v for k, v in STEP.items() if k != "SLURM_PROCID"}, "SLURM_PROCID"),
    ],
)
def test_half_an_environment_is_refused_with_the_missing_name(env: dict[str, str], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        read_launcher(env)


def test_host_lists_and_task_counts_are_read() -> None:
    assert first_host("a[1-3,7],b") == "a1" and first_host("node07") == "node07" and first_host("n[08]x,m") == "n08x"
    assert first_host("login1,login2") == "login1" and first_host("") == ""
    assert tasks_per_node("8(x2),4") == [8, 8, 4] and tasks_per_node("3") == [3]


def test_alone_needs_no_process_group() -> None:
    with start(1, env={}, device="cpu") as mesh:
        assert mesh.seq.size == mesh.data.size == mesh.world.size == 1 and mesh.seq.handle is None
        assert mesh.device == torch.device("cpu") and mesh.is_first


def test_a_group_size_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="seqpar=4 does not fit 6 started ranks.*1 or 2 or 3 or 6.*multiple of 4"):
        check_seqpar(4, 6)
    with pytest.raises(ValueError, match="seqpar=0"):
        check_seqpar(0, 2)
    with pytest.raises(ValueError, match="seqpar=2"):
        join(Launcher("alone"), None, 2, torch.device("cpu"))


def test_the_device_is_the_only_visible_one_or_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device(Launcher("slurm", 5, 8, 5, 8)) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert pick_device(Launcher("slurm", 13, 16, 5, 8)) == torch.device("cuda", 5)
    assert chosen == [torch.device("cuda", 0), torch.device("cuda", 5)]
    with pytest.raises(ValueError, match="local rank 9"):
        pick_device(Launcher("slurm", 9, 16, 9, 16))
    assert pick_device(Launcher("alone"), "cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device(Launcher("alone")) == torch.device("cpu")
    with pytest.raises(ValueError, match="no GPU is visible"):
        pick_device(Launcher("alone"), "cuda")
    with pytest.raises(ValueError, match="choose auto"):
        pick_device(Launcher("alone"), "tpu")
