"""Ranks agree where to leave: all at one place, whatever their pace; a dead one is no reason to hang."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from seqpar.cluster import stop_agreement
from seqpar.cluster.stop_agreement import StopAgreement
from seqpar.parallel.mesh import Mesh

PLACES = 400  # more than a slow machine passes before all have agreed


def check_pace(mesh: Mesh, wishers: tuple[int, ...], seed: int) -> tuple[int, str]:
    """Returns at which place this rank left, and why."""
    rank, dice = mesh.world.index, random.Random(f"{seed} {mesh.world.index}")
    wants = {w: random.Random(f"{seed} {w} wish").uniform(0, 0.4) for w in wishers}
    began = time.monotonic()
    agreement = StopAgreement(
        lambda: "TERM" if time.monotonic() - began > wants.get(rank, 1e9) else "", rank, mesh.world.size, mesh.store
    )
    for place in range(1, PLACES + 1):
        time.sleep(dice.choice([0, 0.01, 0.05]))
        if agreement.should_leave():
            assert agreement.should_leave(), "and at every later one"
            return place, agreement.reason
    agreement.finish()
    time.sleep(0.5)  # as the end of a run: others may still ask
    return PLACES + 1, agreement.reason


@pytest.mark.parametrize("wishers", [(0,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_all_leave_at_one_place(wishers: tuple[int, ...], seed: int, ranks: Callable[..., list]) -> None:
    places = ranks(3, check_pace, wishers, seed)
    assert len({place for place, _ in places}) == 1, places
    assert places[0][0] <= PLACES
    assert {why for _, why in places} <= {f"TERM on rank {rank}" for rank in wishers}


def test_without_a_wish_nobody_leaves(ranks: Callable[..., list]) -> None:
    assert ranks(2, check_calm) == [False, False]


def check_calm(mesh: Mesh) -> bool:
    agreement = StopAgreement(lambda: "", mesh.world.index, 2, mesh.store)
    left = any(agreement.should_leave() for _ in range(PLACES))
    time.sleep(0.5)
    left = left or agreement.should_leave()
    assert "seqpar-agreement" in [thread.name for thread in threading.enumerate()]
    agreement.close()
    assert threading.enumerate() == [threading.main_thread()], "a thread that asks while Python ends aborts the process"
    return left


def check_ended(mesh: Mesh) -> bool:
    """Returns whether a rank leaves at the last place, when another has passed that one before it was asked."""
    through, late = mesh.world.index == 1, threading.Event()
    agreement = StopAgreement(lambda: "TERM" if late.is_set() else "", mesh.world.index, 2, mesh.store)
    if not through:
        mesh.store.wait(["passed"])
        late.set()
    left = agreement.should_leave()
    agreement.finish()
    if through:
        mesh.store.set("passed", "")
    mesh.store.wait(["target"])  # its thread has answered
    return left


def test_who_is_through_keeps_nobody(ranks: Callable[..., list]) -> None:
    assert ranks(2, check_ended) == [False, False]


def test_a_rank_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    """Its process is gone, and with it the thread that would answer. Nor is a disk that does not answer."""
    said = tmp_path / "said"

    def write(why: str) -> None:
        said.write_text(why)
        time.sleep(100)

    pid = os.fork()
    if not pid:
        signal.alarm(20)
        stop_agreement.WAIT_S = stop_agreement.LEAST_S = 0.5
        store = dist.FileStore(str(tmp_path / "store"), 2)
        StopAgreement(lambda: "TERM", 0, 2, store, write, patience_s=0.5).should_leave()
        os._exit(0)
    _, code = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(code) == 75
    assert said.read_text() == "TERM on rank 0: rank 1 did not answer within 0.5 s, so this one leaves without saving"


class Gone:
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset")


def test_a_wish_after_the_store_is_gone_is_granted() -> None:
    """The thread has met the loss before there is a wish."""
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        wish = threading.Event()
        agreement = StopAgreement(lambda: "TERM" if wish.is_set() else "", 0, 2, Gone())
        time.sleep(0.3)
        wish.set()
        agreement.should_leave()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75


class Strange:
    def check(self, keys: list[str]) -> bool:
        raise KeyError("a mistake of ours")


def full(why: str) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("store", [Gone(), Strange()])
def test_what_goes_wrong_on_the_way_out_keeps_no_process(store: object) -> None:
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        StopAgreement(lambda: "TERM", 0, 2, store, full).should_leave()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75


def test_alone_the_wish_is_the_decision() -> None:
    wishes = iter(["", "", "TERM", ""])
    agreement = StopAgreement(lambda: next(wishes))
    assert [agreement.should_leave() for _ in range(4)] == [False, False, True, True]
    assert agreement.reason == "TERM"
