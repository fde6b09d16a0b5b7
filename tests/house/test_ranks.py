"""The fixture itself: a rank that raises, dies or never arrives fails the test at once, by name."""

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from seqpar.parallel.collectives import all_sum
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group, Mesh
from seqpar.parallel.rendezvous import first_collective
from seqpar.parallel.roll_call import RankLocation, roll_call
from tests.support.ranks import RanksFailed, run_ranks


def raise_on_one(mesh: Mesh) -> None:
    if mesh.seq.index == 1:
        raise RuntimeError("this one is broken")
    all_sum(torch.ones(1), mesh.seq)


def stay_away(mesh: Mesh) -> None:
    if mesh.seq.index == 2:
        time.sleep(60)
    all_sum(torch.ones(1), mesh.seq)


def die(mesh: Mesh) -> None:
    if mesh.seq.index == 0:
        os._exit(9)
    all_sum(torch.ones(1), mesh.seq)


def failure_of(work: Callable[[Mesh], None], timeout: float) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, work, timeout=timeout)
    return str(caught.value), time.monotonic() - began


def test_a_rank_that_raises_fails_the_test_at_once_with_its_name_and_traceback() -> None:
    message, seconds = failure_of(raise_on_one, timeout=60)
    assert "rank" in message and seconds < 20
    assert "this one is broken" in message or "Connection" in message  # a peer may notice first


def test_a_rank_that_never_arrives_is_killed_and_named() -> None:
    message, seconds = failure_of(stay_away, timeout=3)
    assert "did not end in time" in message and "2" in message and seconds < 20


def test_a_rank_that_dies_is_named() -> None:
    message, seconds = failure_of(die, timeout=60)
    assert "rank" in message and seconds < 20


def test_missing_ranks_are_named_at_the_start(tmp_path: object) -> None:
    store = dist.FileStore(f"{tmp_path}/store", 3)
    with pytest.raises(TimeoutError, match="ranks 1, 2 did not start within 1 s"):
        roll_call(Launcher("test", 0, 3, 0, 3), store, RankLocation("a"), 1.0)


def silent_group(mesh: Mesh, folder: str) -> str:
    store = dist.FileStore(f"{folder}/store", 2)
    if mesh.seq.index == 1:
        time.sleep(2)
        return ""
    try:
        first_collective(Group("seq", (4, 5), 0, mesh.seq.handle), store, torch.device("cpu"), 1.0)
    except TimeoutError as error:
        return str(error)
    return "it did not notice"


def test_a_group_that_hangs_is_named_with_the_absent_rank(ranks: Callable[..., list], tmp_path: object) -> None:
    message, _ = ranks(2, silent_group, str(tmp_path))
    assert "over the seq group of ranks 4, 5 did not finish" in message and "rank 5 never came" in message


class FailingWork:
    def wait(self, limit: object) -> None:
        raise RuntimeError("NCCL error: unhandled system error\nLast error:\nno route to node 7")


def test_a_first_sum_that_fails_is_not_taken_for_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *of, **how: FailingWork())
    store = dist.FileStore(f"{tmp_path}/store", 1)
    with pytest.raises(ConnectionError, match=r"over the seq group of rank 0 failed after 0.0 s: NCCL.*no route"):
        first_collective(Group("seq", (0,), 0), store, torch.device("cpu"), 500.0)
