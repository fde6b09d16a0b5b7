"""The doctor names ranks that hang, measures what the planner needs, and knows each trap by its signs."""

import json
import os
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from seqpar.cli import doctor
from seqpar.cluster import link_speed
from seqpar.cluster.convolution_speed import Shape, Timed, advise
from seqpar.cluster.examination import print_ranks
from seqpar.cluster.exit_codes import run
from seqpar.cluster.findings import find_problems
from seqpar.cluster.known_traps import TRAPS, Facts, find_traps, half_convolutions
from seqpar.cluster.link_speed import fit
from seqpar.cluster.rank_facts import RankFacts, _numbers, settings_in_force
from tests.support.training_runs import Launch, at

ROCM = Facts(on_gpu=True, rocm=True, num_gpus=1)
NODES = replace(ROCM, num_nodes=2, local_world=8, cores=7, host_cores=56, threads=7)
FINE = {"LOADEDMODULES": "rocm/7.1.1:rccl-net-plugin", "MIOPEN_USER_DB_PATH": "/tmp/x", "OMP_NUM_THREADS": "7"}
FINE |= {"GPU_MAX_HW_QUEUES": "8"}
NVIDIA = Facts(on_gpu=True, num_gpus=1, torch=(2, 10, 0), cudnn=91501)
SLINGSHOT = replace(NODES, slingshot=True)
NAMES = {"NCCL_SOCKET_IFNAME": "hsn0", "GLOO_SOCKET_IFNAME": "hsn0"}
# name → environment and facts with which it applies, what it says, and the same without the cause
SIGNS = {
    "_absent_srun": ({}, Facts(launch_warning="start with srun"), "error: start with srun", {}, Facts()),
    "_no_gpu": (
        {"SLURM_STEP_GPUS": "0"},
        Facts(),
        "error.*torch sees none",
        {"SLURM_STEP_GPUS": "0"},
        Facts(on_cpu=True),
    ),
    "_two_masks": (
        {**FINE, "ROCR_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3"},
        NODES,
        "warning.*Unset HIP_VISIBLE_DEVICES",
        {**FINE, "ROCR_VISIBLE_DEVICES": "3"},
        NODES,
    ),
    "_sockets": ({**FINE, "LOADEDMODULES": "rocm"}, NODES, "rccl-net-plugin", FINE, NODES),
    "_gdr": ({**FINE, "NCCL_NET_GDR_LEVEL": "PHB"}, NODES, "unset it", {**FINE, "NCCL_NET_GDR_LEVEL": "3"}, NODES),
    "_memhooks": (
        {**FINE, "FI_MR_CACHE_MONITOR": "memhooks"},
        NODES,
        "error.*kdreg2",
        {**FINE, "FI_MR_CACHE_MONITOR": "kdreg2"},
        NODES,
    ),
    "_expandable": (
        {**FINE, "PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"},
        NODES,
        "take it out",
        {**FINE, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        replace(NODES, rocm=False),
    ),
    "_interfaces": (FINE, SLINGSHOT, "GLOO_SOCKET_IFNAME=hsn0", {**FINE, **NAMES}, SLINGSHOT),
    "_threads": (FINE, replace(NODES, threads=56), "OMP_NUM_THREADS=7$", FINE, NODES),
    "_one_core": (FINE, replace(NODES, cores=1, threads=1), "srun -c", FINE, NODES),
    "_never_ends": (
        {**FINE, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
        NODES,
        "never ended",
        {**FINE, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
        NODES,
    ),
    "_channels_per_peer": ({**FINE, "NCCL_NCHANNELS_PER_PEER": "32"}, NODES, "gradients wrong", FINE, NODES),
    "half_convolutions": (
        {},
        replace(NVIDIA, torch=(2, 8, 0), cudnn=91002),
        "error: torch 2.8.0 with cuDNN 9.10 returns wrong numbers",
        {},
        NVIDIA,
    ),
    "_detail": ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, NVIDIA, "debug-collectives", {}, NVIDIA),
    "_hardware_queues": (
        {**FINE, "GPU_MAX_HW_QUEUES": "4"},
        NODES,
        "export GPU_MAX_HW_QUEUES=8",
        {**FINE, "GPU_MAX_HW_QUEUES": "2"},
        replace(NODES, local_world=1),
    ),
    "_lost_database": (
        {**FINE, "SLURM_JOB_ID": "1"},
        NODES,
        "MIOPEN_USER_DB_PATH=/tmp/x is lost with the job",
        {**FINE, "SLURM_JOB_ID": "1"},
        replace(NODES, has_run_folder=True),
    ),
    "_kernel_cache": ({k: v for k, v in FINE.items() if k[:6] != "MIOPEN"}, NODES, "each rank in /tmp", FINE, NODES),
    "_fork": ({**FINE, **NAMES}, replace(SLINGSHOT, kernel=(5, 3)), "CXI_FORK_SAFE", {**FINE, **NAMES}, SLINGSHOT),
}


def test_every_trap_has_its_signs():
    assert sorted(SIGNS) == sorted(check.__name__ for check in TRAPS)


@pytest.mark.parametrize("name", SIGNS)
def test_a_trap_is_told_with_its_remedy_where_it_applies_and_only_there(name):

    env, facts, text, other_env, other_facts = SIGNS[name]
    (trap,) = find_traps(env, facts)
    assert re.search(text, str(trap))
    assert find_traps(other_env, other_facts) == []


def test_two_masks_are_an_error_where_no_gpu_is_left():
    env = {**FINE, "ROCR_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"}
    traps = find_traps(env, replace(NODES, num_gpus=0))
    assert [trap.error for trap in traps] == [True, True] and "Unset CUDA_VISIBLE_DEVICES" in str(traps[1])


@pytest.mark.parametrize(
    "version, cudnn, says",
    [
        ("2.8.0+cu128", 90701, ""),
        ("2.8.0+cu128", 90800, "wrong numbers"),
        ("2.9.0", 91501, "17 times"),
        ("2.9.1+cu128", 91002, "cudnn-cu12>=9.15"),
        ("2.9.1", 91501, ""),
        ("2.10.0a0+git123", 91400, "cudnn-cu12>=9.15"),
        ("2.13.0", 91700, ""),
        ("2.13.0", 0, ""),
    ],
)
def test_pairs_of_torch_and_cudnn_that_are_wrong_or_slow_in_half_precision_are_known(version, cudnn, says):
    trap = half_convolutions({}, replace(NVIDIA, torch=_numbers(version), cudnn=cudnn))
    assert says in str(trap) if says else trap is None
    assert half_convolutions({}, replace(NVIDIA, torch=_numbers(version), cudnn=cudnn, rocm=True)) is None


def test_layout_and_search_of_miopen_are_advised_by_what_was_timed():
    shape = Shape(16, 16, 96)
    even, last, first = Timed(shape, 1.0, 1.1), Timed(shape, 2.0, 1.0), Timed(shape, 1.0, 2.0)
    flag, rate = "PYTORCH_MIOPEN_SUGGEST_NHWC", shape.operations / 1.0
    assert advise([even], True, rate, {}, False) == [] and advise([last], False, 1e3 * rate, {}, False) == []
    assert advise([last], True, rate, {}, False) == [f"export {flag}=1: 1e+03 ms instead of 2e+03 ms"]
    assert advise([last], True, rate, {}, True) == [] and advise([first], True, rate, {}, False) == []
    assert advise([first], True, rate, {}, True) == [f"export {flag}=0: 1e+03 ms instead of 2e+03 ms"]
    (naive,) = advise([even], True, 101 * rate, {}, True)
    assert naive.startswith("export MIOPEN_FIND_MODE=2: the convolution of 16 to 16 channels on 96x96x96 voxels")
    assert advise([even], True, 101 * rate, {"MIOPEN_FIND_MODE": "2"}, True) == []


def test_growing_segments_that_came_too_late_are_reported():
    env, on = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, replace(NVIDIA, expandable=True)
    assert find_traps(env, on) == [] and find_traps(env, NVIDIA) == []  # in force, and not known
    (trap,) = find_traps(env, replace(NVIDIA, expandable=False))
    assert "does not use them" in str(trap) and not trap.error
    assert find_traps({}, replace(NVIDIA, expandable=False)) == []


def test_the_doctor_reads_back_how_torch_uses_a_gpu(alone, monkeypatch, capsys):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {"allocator_settings": settings})
    settings = {"expandable_segments": False}
    assert settings_in_force(gpu) == {"expandable segments": "off"}
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setenv("PYTORCH_MIOPEN_SUGGEST_NHWC", "1")
    settings = {"expandable_segments": True}
    in_force = settings_in_force(gpu)
    assert in_force == {"expandable segments": "on", "MIOpen with channels last": "on"}
    assert settings_in_force(torch.device("cpu")) == {}
    print_ranks(alone, [replace(some_ranks()[0], in_force=in_force)])
    assert "torch 2.13, expandable segments on, MIOpen with channels last on" in capsys.readouterr().out


def some_ranks(**more) -> list[RankFacts]:
    one = RankFacts("a", 0, "cpu x", 2, {"float32": 1e9}, {"torch": "2.13"}, [], True)
    return [one, replace(one, host="a", local_rank=1), replace(one, host="b"), replace(one, host="b", **more)]


ROOM = {"out": "runs", "file": "runs/x", "free": 2**40, "bytes_per_s": 1e9, "fault": ""}
JUDGED = {
    "all well": (2, some_ranks(), [0.0] * 4, ROOM, ""),
    "crossing": (4, some_ranks(), [0.0] * 4, ROOM, "warning: sequence groups cross nodes (ranks 0, 1, 2, 3 over a, b)"),
    "folder": (2, some_ranks(), [0.0] * 4, {**ROOM, "fault": "--out x cannot be written"}, "error: --out x cannot"),
    "not shared": (2, some_ranks(seen=False), [0.0] * 4, ROOM, "error: --out runs is another folder for rank 3 on b"),
    "full": (2, some_ranks(), [0.0] * 4, {**ROOM, "free": 2**30}, "warning: --out runs has 1.0 GiB left"),
    "clocks": (2, some_ranks(), [0.0, 0.0, 0.1, -7.0], ROOM, "warning: clocks of rank 3 are up to 7.0 s off"),
    "slow": (
        2,
        some_ranks(flops_per_s={"float32": 4e8}),
        [0.0] * 4,
        ROOM,
        "warning: rank 3 on b computes at 0.40 of the usual",
    ),
    "versions": (
        2,
        some_ranks(versions={"torch": "2.8"}),
        [0.0] * 4,
        ROOM,
        "error: ranks differ in their torch (2.13 on",
    ),
    "one rank's trap": (2, some_ranks(traps=[[True, "bad"]]), [0.0] * 4, ROOM, "error: rank 3: bad"),
}


@pytest.mark.parametrize("case", JUDGED)
def test_what_stands_in_the_way_is_told(case):
    *facts, text = JUDGED[case]
    assert [str(finding)[: len(text)] for finding in find_problems(*facts)] == ([text] if text else [])


def test_latency_and_speed_are_those_of_the_line():
    points = [(4096, 1e-4), (2**18, 2e-4), (2**25, 1e-4 + 2**25 / 1e9)]
    link = fit(points)
    assert link["latency_s"] == 1e-4 and link["bytes_per_s"] == pytest.approx(1e9)
    assert fit([(8, 1e-3), (800, 1e-3)])["bytes_per_s"] == 8e5


def codes_of(world: int, arguments: str, out: Path, hook=None, **env: str) -> tuple[list[int], str]:
    with Launch(world, [*arguments.split(), "--device", "cpu"], out, hook, act=doctor.act, **env) as launch:
        return launch.wait(60), launch.said()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(link_speed, "SIZES", (2**12, 2**16))
    monkeypatch.setattr("seqpar.cluster.findings.ROOM_BYTES", 0)
    monkeypatch.setattr("seqpar.cluster.findings.SLOW_SHARE", 0.0)  # cores of a test machine are shared


def test_a_sound_job_ends_with_0_and_the_planners_figures(tmp_path, quick):
    codes, said = codes_of(4, f"--seqpar 2 --json {tmp_path}/links.json", tmp_path / "run")
    assert codes == [0] * 4, said
    assert "4 ranks on 1 node = data 2 x seq 2, started with RANK and WORLD_SIZE" in said and "GiB free" in said
    assert [line.split()[0] for line in said.splitlines() if " cpu " in line] == ["0", "1", "2", "3"]
    assert list((tmp_path / "run").iterdir()) == [], "its file is gone"
    links = json.loads((tmp_path / "links.json").read_text())
    assert links["world"] == 4 and links["seqpar"] == 2 and not links["seq_crosses_nodes"]
    assert links["matmul_flops_per_s"]["float32"] > 1e8 and links["memory_bytes"] > 2**26
    assert list(links["groups"]) == ["seq", "data", "world"]
    assert (
        "convolution of 8 to 8 channels on 24x24x24 voxels" in said
        and min(each["last_s"] for each in links["convolutions"]) > 0
    )
    for name, size in (("seq", 2), ("data", 2), ("world", 4)):
        group = links["groups"][name]
        assert group["size"] == size
        for kind, share in (("all_gather", size - 1), ("all_to_all", 1 - 1 / size), ("all_reduce", 2 - 2 / size)):
            assert group[kind]["latency_s"] > 0 and group[kind]["bytes_per_s"] > 0
            assert [sent for sent, _ in group[kind]["seconds"]] == [share * 2**12, share * 2**16]


def test_ranks_that_share_cores_have_the_latency_of_collectives_between_work(tmp_path, quick, monkeypatch):
    """A collective alone takes a quarter of that: nobody is late for it."""
    monkeypatch.setattr(link_speed, "_latency_between_work", lambda mesh, group, kind: 7.0)
    for cores, is_shared in ((1, True), (2, False)):
        monkeypatch.setattr(link_speed, "usable_cores", lambda: cores)
        codes, said = codes_of(2, f"--seqpar 2 --json {tmp_path}/{cores}.json", tmp_path / "run")
        assert codes == [0] * 2, said
        group = json.loads((tmp_path / f"{cores}.json").read_text())["groups"]["seq"]
        assert [group[kind]["latency_s"] == 7.0 for kind in link_speed.KINDS] == [is_shared] * 3


def test_the_links_of_a_pipe_are_measured(tmp_path, quick):
    codes, said = codes_of(2, f"--pipe 2 --json {tmp_path}/links.json", tmp_path / "run")
    assert codes == [0] * 2, said
    assert "2 ranks on 1 node = data 1 x pipe 2 x seq 1" in said and "pipe groups of 2: send" in said
    links = json.loads((tmp_path / "links.json").read_text())
    assert links["pipe"] == 2 and list(links["groups"]) == ["world", "pipe"]
    send = links["groups"]["pipe"]["send"]
    assert send["latency_s"] > 0 and [sent for sent, _ in send["seconds"]] == [2**12, 2**16]


def leave_late(after: float = 9) -> None:
    time.sleep(after)
    os._exit(7)


def test_a_rank_that_never_arrives_is_named(tmp_path):
    codes, said = codes_of(3, "--seqpar 3 --time-limit 5", tmp_path / "run", at(doctor, "start", 2, leave_late))
    assert codes == [1, 1, 1] and "of 3 ranks, rank 2 did not start within 5 s" in said
    assert "Traceback" not in said


def test_a_start_that_hangs_ends_soon_after_its_limit(tmp_path):
    codes, said = codes_of(1, "--time-limit 5", tmp_path / "run", at(doctor, "start", 0, leave_late))
    assert codes == [1] and re.search(r"error: rank 0 \(.*\) has not started within 5 s", said)


def test_a_rank_that_stops_inside_the_test_is_named_with_its_group(tmp_path, quick):
    hang = at(link_speed, "exchange_rows", 2, partial(leave_late, 15), call=2)  # busy ranks come there late
    codes, said = codes_of(4, "--seqpar 2 --time-limit 10", tmp_path / "run", hang)
    assert [code in (1, 7) for code in codes] == [True] * 4 and codes[3] == 1, said
    assert "error: rank 2 (" in said and "stays at link_speed.py" in said, said
    lost = said.count(" lost contact with its peers: ")  # of ranks that notice before they are told
    assert said.count("error:") == 1 + lost, said
    assert "rank 3 in all_to_all of the seq group of ranks 2, 3" in said


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, quick):
    (tmp_path / "file").write_text("")
    codes, said = codes_of(2, "--seqpar 2", tmp_path / "file")
    assert (
        codes == [1, 1]
        and "cannot be written (File exists)" in said
        and "1 error, 0 warnings: correct the error before the job starts" in said
    )


def test_wrong_usage_ends_with_2(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for arguments in (["--seqpar", "0"], ["--time-limit", "1"], ["--nonsense"], ["--json", "/no/folder/x"]):
        assert run(doctor.act, arguments) == 2
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert run(doctor.act, ["--seqpar", "8"]) == 2
    assert "srun -n 8" in capsys.readouterr().err
