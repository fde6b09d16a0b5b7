"""Flags, texts and errors of single ranks are known to all, the same on each."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from seqpar.data.errors import DataError
from seqpar.parallel.consensus import (
    broadcast_text,
    gather_texts,
    max_of_each_over_ranks,
    max_over_ranks,
    raise_on_all_ranks,
    run_on_rank0,
    run_on_rank0_before_mesh,
)
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.meeting import Meeting
from seqpar.parallel.mesh import Group, Mesh


def check_agree(mesh: Mesh) -> int:
    return max_over_ranks(7 if mesh.seq.index == 1 else 0, mesh.seq)


def test_a_flag_of_one_rank_is_known_to_all(ranks: Callable[..., list]) -> None:
    assert ranks(3, check_agree) == [7, 7, 7]


def check_words(mesh: Mesh) -> None:
    me, size = mesh.world.index, mesh.world.size
    assert max_of_each_over_ranks((me, -me, 7), mesh.world) == (size - 1, 0, 7)
    assert max_over_ranks(me, mesh.world) == size - 1
    for source in range(size):
        text = broadcast_text(f"rank {me}: größer" if me == source else "", source, mesh.world)
        assert text == f"rank {source}: größer"
    assert broadcast_text("", 0, mesh.world) == ""
    assert broadcast_text(str(me), mesh.seq.size - 1, mesh.seq) == str(mesh.seq.ranks[-1])


@pytest.mark.parametrize("world, seqpar", [(1, 1), (3, 3), (4, 2)])
def test_all_learn_the_largest_flags_and_one_ranks_text(world: int, seqpar: int, ranks: Callable[..., list]) -> None:
    ranks(world, check_words, seqpar=seqpar)


def check_texts(mesh: Mesh) -> list[str]:
    return gather_texts(["", "zwölf", "b" * 50][mesh.seq.index], mesh.seq)


def test_texts_of_any_length_reach_all_in_rank_order(ranks: Callable[..., list]) -> None:
    assert ranks(3, check_texts) == [["", "zwölf", "b" * 50]] * 3


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raised(error: Exception | None, group: Group, name_rank: bool = True) -> tuple[str, str, bool]:
    """Returns type and message of what is raised, and whether it is this rank's own error."""
    try:
        raise_on_all_ranks(error, group, name_rank)
    except Exception as problem:
        return type(problem).__name__, str(problem), problem is error
    return "nothing", "", False


def check_errors(mesh: Mesh) -> list[tuple[str, str, bool]]:
    me, group = mesh.seq.index, mesh.seq
    return [
        raised(None, group),
        raised(ValueError("no such setting") if me == 1 else None, group),
        raised(DataError("a.nii", "is damaged") if me == 1 else None, group),
        raised([None, KeyError("b"), ValueError("c")][me], group),  # the first rank that failed speaks for all
        raised(ValueError("where it was") if me == 2 else None, group, name_rank=False),
        raised(Unpicklable(1, 2) if me == 0 else None, group),
    ]


def test_what_fails_on_one_rank_is_raised_on_all_with_its_type_and_the_ranks_name(ranks: Callable[..., list]) -> None:
    first, second, third = ranks(3, check_errors)
    nothing = ("nothing", "", False)
    value, data = ("ValueError", "rank 1: no such setting", False), ("DataError", "rank 1: a.nii: is damaged", False)
    last, same = ("ValueError", "where it was", False), ("RuntimeError", "rank 0: Unpicklable: 1 and 2", False)
    assert first == [nothing, value, data, first[3], last, ("Unpicklable", "1 and 2", True)]
    assert second == [nothing, (*value[:1], "no such setting", True), ("DataError", "a.nii: is damaged", True),
                      ("KeyError", "'b'", True), last, same]  # fmt: skip
    assert third == [nothing, value, data, first[3], ("ValueError", "where it was", True), same]
    assert first[3] == ("KeyError", "'b'", False)


def test_a_rank_alone_raises_its_own_error_unchanged() -> None:
    assert raised(ValueError("mine"), Group("seq")) == ("ValueError", "mine", True)


def check_by_first(mesh: Mesh) -> tuple[object, str, str]:
    calls: list[int] = []

    def act() -> tuple[int, str]:
        calls.append(mesh.world.index)
        return 3, "ä"

    def fail() -> None:
        raise DataError("b.nii", "is not there")

    def fill_the_disk() -> None:
        raise OSError(28, "No space left on device")

    value = run_on_rank0(act, mesh.world)
    assert calls == ([0] if mesh.is_first else [])
    with pytest.raises(DataError, match="^b.nii: is not there$") as caught:
        run_on_rank0(fail, mesh.world)
    with pytest.raises(OSError, match="No space left"):  # whatever it is: none may wait for the first one
        run_on_rank0(fill_the_disk, mesh.world)
    with pytest.raises(TypeError, match="not JSON serializable"):
        run_on_rank0(object, mesh.world)
    return value, caught.value.path, caught.value.problem


@pytest.mark.parametrize("world", [1, 3])
def test_what_the_first_rank_does_or_meets_reaches_all(world: int, ranks: Callable[..., list]) -> None:
    assert ranks(world, check_by_first) == [([3, "ä"], "b.nii", "is not there")] * world


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def check_early(mesh: Mesh) -> list[object]:
    """Returns what ranks tell each other before there is a mesh; the first leaves last, as the store ends with it."""
    me, size = mesh.world.index, mesh.world.size
    port = int(run_on_rank0(free_port, mesh.world))
    meeting = Meeting(Launcher("test", me, size, me, size, port=port))
    told: list[object] = [meeting.gather("texts", ["", "zwölf", "c"][me])]
    asked: list[int] = []
    told.append(run_on_rank0_before_mesh(lambda: asked.append(me) or {"sides": [1, 2]}, meeting, "plan"))

    def refuse() -> None:
        raise DataError(Path("case.nii"), "is damaged")

    if me:
        time.sleep(0.2)  # the first must not be gone by now
    try:
        run_on_rank0_before_mesh(refuse, meeting, "data", 20.0)
    except DataError as error:
        told.append(str(error))
    return [*told, asked]


def test_ranks_agree_before_there_is_a_mesh(ranks: Callable[..., list]) -> None:
    for rank, (texts, plan, error, asked) in enumerate(ranks(3, check_early)):
        assert texts == ["", "zwölf", "c"] and plan == {"sides": [1, 2]} and error == "case.nii: is damaged"
        assert asked == [0] * (rank == 0), "the first alone looks"


def test_a_rank_that_says_nothing_is_named() -> None:
    meeting = Meeting(Launcher("test", 0, 2, port=int(free_port())))
    assert meeting.store() is not None, "meeting itself may take longer on a busy machine"
    with pytest.raises(TimeoutError, match="of 2 ranks, rank 1 did not respond within 0 s .texts"):
        meeting.gather("texts", "", 0.1)
    assert Meeting(Launcher("alone")).gather("texts", "a") == ["a"]
