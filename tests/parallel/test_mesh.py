"""The groups are data x seq with seq innermost; seeds and weights are equal; crossing a node is said loudly."""

import random
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from seqpar.parallel.collectives import equal_weights
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.meeting import _meet
from seqpar.parallel.mesh import Mesh, seed
from seqpar.parallel.rendezvous import _warn_of_crossing, init_mesh, start


def describe(mesh: Mesh) -> tuple[tuple[int, ...], int, tuple[int, ...], int]:
    return mesh.seq.ranks, mesh.seq.index, mesh.data.ranks, mesh.data.index


def test_sequence_groups_are_consecutive_ranks(ranks: Callable[..., list]) -> None:
    groups = ranks(6, describe, seqpar=2)
    assert [f[0] for f in groups] == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]
    assert [f[1] for f in groups] == [0, 1] * 3 and [f[3] for f in groups] == [0, 0, 1, 1, 2, 2]
    assert [f[2] for f in groups] == [(0, 2, 4), (1, 3, 5)] * 3


def draw(mesh: Mesh, number: int) -> tuple[float, float, float]:
    seed(number)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seeds_are_equal_on_all_ranks_and_differ_by_number(ranks: Callable[..., list]) -> None:
    first, other = ranks(2, draw, 5), ranks(2, draw, 6)
    assert first[0] == first[1] and first[0] != other[0]


def share_weights(mesh: Mesh) -> list[torch.Tensor]:
    torch.manual_seed(mesh.world.index)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    net[1].running_mean.fill_(mesh.world.index)
    equal_weights(net, mesh.world)
    return list(net.state_dict().values())


def test_all_ranks_get_the_first_ones_weights(ranks: Callable[..., list]) -> None:
    weights = ranks(3, share_weights, seqpar=1)
    torch.manual_seed(0)
    assert torch.equal(weights[0][0], nn.Linear(3, 2).weight)
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other))


def test_a_mesh_checks_collectives_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqpar.parallel.rendezvous.start", lambda *_, **options: options["check"])
    assert [init_mesh(), init_mesh(check=True)] == [False, True]


def test_a_meeting_that_cannot_be_is_told_at_once() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    with pytest.raises(ConnectionError, match="cannot resolve no.such.host.invalid.*MASTER_ADDR="):
        start(env=env | {"MASTER_ADDR": "no.such.host.invalid"}, device="cpu")
    with pytest.raises(ConnectionError, match="rank 0 did not answer at 127.0.0.1:1 within 1 s.*refused"):
        start(env=env | {"MASTER_ADDR": "127.0.0.1"}, device="cpu", timeout_s=1.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ConnectionError, match="another job may use this port.*set another MASTER_PORT"):
            start(env=env | {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, device="cpu", timeout_s=2.0)


def test_a_rank_does_not_join_another_job_that_listens_at_its_port() -> None:
    other = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    launcher = Launcher("openmpi", 1, 2, 1, 2, port=other.port, job="b")
    ours, theirs = _meet(launcher, 5), _meet(replace(launcher, job="a"), 5)
    theirs.set("host/0", "")
    assert not ours.check(["host/0"]) and theirs.check(["host/0"])


def test_all_steps_of_a_start_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float] = []
    now = iter([0.0, 6.0])

    def missing(launcher: Launcher, store: object, own: object, timeout_s: float) -> None:
        timeouts.append(timeout_s)
        raise TimeoutError

    monkeypatch.setattr("seqpar.parallel.rendezvous.time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr("seqpar.parallel.meeting._meet", lambda *of: object())
    monkeypatch.setattr("seqpar.parallel.rendezvous.roll_call", missing)
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(TimeoutError):
        start(env=env, device="cpu", timeout_s=10.0)
    assert timeouts == [4.0]


def test_a_group_that_crosses_nodes_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    _warn_of_crossing(["a", "a", "b", "b"], 2)
    assert capsys.readouterr().err == ""
    _warn_of_crossing(["a", "a", "a", "b", "b", "b"], 2)
    said = capsys.readouterr().err
    assert "ranks 2…3 spans nodes a, b" in said and said.count("warning") == 1


SCRIPT = """

import os, sys, torch
from seqpar.parallel.rendezvous import start
from seqpar.parallel.collectives import all_sum
with start(seqpar=2, device="cpu", timeout_s=60) as mesh:
    number = int(all_sum(torch.tensor([float(mesh.world.index)]), mesh.seq))
    open(f"{OUT}/{mesh.world.index}", "w").write(f"{mesh.launcher.by} {mesh.seq.index} {number}")
if sys.platform == "linux":
    threads = [open(f"/proc/self/task/{number}/comm").read() for number in os.listdir("/proc/self/task")]
    assert not any("gloo" in name for name in threads), threads
"""


@pytest.mark.started
def test_torchrun_starts_and_ends_in_order_without_a_thread_left_behind(tmp_path: object) -> None:
    script = f"{tmp_path}/job.py"
    with open(script, "w") as file:
        file.write(f"OUT = {str(tmp_path)!r}\n{SCRIPT}")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [open(f"{tmp_path}/{rank}").read() for rank in (0, 1)] == ["torchrun 0 1", "torchrun 1 1"]
