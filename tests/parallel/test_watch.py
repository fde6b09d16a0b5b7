"""A rank that stops, or does something else than the others, is named; one that is merely slow is not."""

import ast
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from seqpar.parallel import watchdog
from seqpar.parallel.collectives import all_gather, all_reduce, exchange_rows
from seqpar.parallel.consensus import broadcast_text, gather_texts, max_over_ranks
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.watchdog import RankPosition, Watch, blame_waiting_ranks, format_ranks, line_outside_parallel
from tests.house.test_floors import OWNERS, modules
from tests.support.ranks import RanksFailed, run_ranks, started_ranks

LIMIT_S = 6.0  # a tenth of it is the time that a rank may take to answer on a busy machine


def freeze() -> None:
    """Stops the whole process, its threads included."""
    os.kill(os.getpid(), signal.SIGSTOP)


def work_until_one_stops(mesh: Mesh, kind: str, stop: Callable[[], None]) -> None:
    group = mesh.seq
    watchdog._WAITING_IN_TORCH = ()  # our own waits are known without a look at torch's

    def step() -> None:
        if kind == "messages":
            all_gather(torch.ones(2), group, 0, [2] * group.size)
        else:
            all_reduce(torch.ones(2), group)

    step()
    mesh.set_timeout(LIMIT_S)
    step()
    if mesh.world.index == 2:
        stop()
    try:
        step()
    except RuntimeError as error:
        raise RuntimeError(f"FOUND {mesh.world.watch.finding} BY {str(error).splitlines()[0]}") from None


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Callable[[], list]]]:
    """All that lasts as long as a limit, side by side: it sleeps, and takes hardly any processor."""
    works: dict[str, tuple[Any, ...]] = {
        "messages": (work_until_one_stops, "messages", lambda: time.sleep(50)),
        "sums": (work_until_one_stops, "sums", lambda: time.sleep(50)),
        "frozen": (work_until_one_stops, "sums", freeze),
        "slow": (be_slow,),
    }
    with ExitStack() as stack:
        yield {name: stack.enter_context(started_ranks(3, *work, timeout=25)) for name, work in works.items()}


@pytest.mark.parametrize("kind", ["messages", "sums"])
def test_a_rank_that_stops_after_the_first_step_is_named_within_the_short_limit(kind: str, results: dict) -> None:
    """The start's limit is 60 s here, which gloo's messages would keep.

    A rank whose peer's time was up a moment before loses contact instead.
    """
    with pytest.raises(RanksFailed) as caught:
        results[kind]()
    text = str(caught.value)
    ends = "(Timed out|Connection closed by peer|Connection reset by peer|Broken pipe)"
    assert re.search(rf"FOUND .*\brank 2 \(.* stays at .*, and others have been waiting for 4 s.*{ends}", text), text


def test_a_process_that_is_frozen_is_named(results: dict) -> None:
    with pytest.raises(RanksFailed) as caught:
        results["frozen"]()
    assert re.search(r"FOUND .*\brank 2 \([^ ]* does not answer", str(caught.value))


def be_slow(mesh: Mesh) -> list[str]:
    heard: list[str] = []
    mesh.set_timeout(LIMIT_S, heard.append)
    for _ in range(2):
        if mesh.world.index == 2:
            time.sleep(0.3 * LIMIT_S)
        all_reduce(torch.ones(2), mesh.seq)
    time.sleep(0.9 * LIMIT_S)  # all of them: nobody waits for anybody
    all_reduce(torch.ones(2), mesh.seq)
    return heard


def test_slow_ranks_and_long_computations_are_not_taken_for_a_hang(results: dict) -> None:
    assert results["slow"]() == [[], [], []]


def test_a_rank_waits_as_long_as_a_block_of_waiting_is_open() -> None:
    watch = Watch()

    def waits() -> bool:
        return watch.whereabouts(sys._getframe()).waits

    assert not waits()
    with pytest.raises(RuntimeError), watch.waiting(False):
        with watch.waiting(False):
            assert waits()
        assert waits()
        raise RuntimeError
    assert not waits()


CROSSING = OWNERS["torch.distributed"] - {"seqpar.parallel.rendezvous"}
BLOCKING = {"all_reduce", "all_gather", "broadcast", "barrier", "wait", "_gather_single", "_scatter_single"}


def blocking_calls(node: ast.AST, inside: bool = False) -> Iterator[tuple[ast.Call, bool]]:
    """Returns calls of torch that block until others come, and whether they stand in a block of ``waiting``."""
    if isinstance(node, ast.With):
        inside |= any(".waiting(" in ast.unparse(item) for item in node.items)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        ours = name.startswith(("dist.", "_gather", "_scatter", "work.", "self.store."))
        at_once = any(keyword.arg == "async_op" for keyword in node.keywords)
        if ours and name.rpartition(".")[2] in BLOCKING and not at_once:
            yield node, inside
    for child in ast.iter_child_nodes(node):
        yield from blocking_calls(child, inside)


def test_every_call_that_blocks_until_others_come_is_marked_as_waiting() -> None:
    """But for the start's, which has limits of its own and ends before anybody watches."""
    files = [modules()[name] for name in (*CROSSING, "seqpar.parallel.watchdog")]
    calls = [call for file in files for call in blocking_calls(ast.parse(file.read_text()))]
    assert len(calls) >= 8
    assert not [ast.unparse(call) for call, inside in calls if not inside]


def frame_in(file: Path, module: str, above: Callable[[Callable], Any] | None = None) -> Any:
    """Returns a frame of code that lies in that file, called by ``above``."""
    scope: dict[str, Any] = {"__name__": module, "sys": sys}
    exec(
        compile("def call(act):\n    return act()\ndef frame():\n    return sys._getframe()", str(file), "exec"), scope
    )
    return scope["call"] if above is None else above(scope["frame"])


def test_the_place_that_is_named_is_the_line_that_called_what_crosses_ranks() -> None:
    """Whichever file of ours sends or waits: one that moves away from the watchdog would be named itself."""
    package = Path(watchdog.__file__).parent
    caller = frame_in(package / "vit" / "blocks.py", "seqpar.vit.blocks")
    own = frame_in(package / "vit" / "tokens.py", "seqpar.vit.tokens", caller)
    assert line_outside_parallel(own).startswith("tokens.py:4 (frame)")
    for module in CROSSING:
        inner = frame_in(modules()[module], module, caller)
        assert line_outside_parallel(inner) == "blocks.py:2 (call)", module
    assert line_outside_parallel(frame_in(Path("/lib/torch/nn.py"), "torch.nn", caller)) == "blocks.py:2 (call)"


def at(waits: bool, last: str = "sum of the seq group") -> RankPosition:
    return RankPosition(waits, "x.py:1 (f)", last)


JUDGEMENTS = {
    "one is silent": ({0: at(True), 1: at(True)}, r"^rank 2 \(c\) does not answer, .* ranks 0, 1 in sum"),
    "one is elsewhere": ({0: at(True), 1: at(False), 2: at(True)}, r"^rank 1 \(b\) stays at x.py:1 \(f\), "),
    "both": ({0: at(False), 1: at(True)}, r"^rank 2 .* and rank 0 \(a\) stays"),
    "all wait": (
        {0: at(True), 1: at(True), 2: at(True, "agreement")},
        r"each other .* \(ranks 0, 1 in sum .*check=True",
    ),
    "all compute": ({0: at(False), 1: at(False), 2: at(False)}, "^$"),
    "one computes, the rest is silent": ({0: at(False)}, "^$"),
}


def test_a_lost_message_is_explained_by_what_another_rank_has_raised() -> None:
    watch, words = Watch(1, store=torch.distributed.HashStore()), "Connection closed by peer [127.0.0.1]:1"

    def notes(text: str) -> str:
        with pytest.raises(RuntimeError, match=re.escape(text)) as caught, watch.waiting(False), watch.waiting(False):
            raise RuntimeError(text)
        return "; ".join(getattr(caught.value, "__notes__", []))

    watch.enter("halo", "seq group of ranks 0, 1")
    assert notes(words).startswith("rank 1 was in halo of the seq group of ranks 0, 1, and another rank has failed, ")
    assert notes(words).count("every rank must call the network") == 1
    assert notes("another error") == ""
    watch.store.set("why/seq group of ranks 0, 1", "rank 0 called the network in eval()")
    assert notes(words) == "rank 1 was in halo of the seq group of ranks 0, 1: rank 0 called the network in eval()"


@pytest.mark.parametrize("case", JUDGEMENTS)
def test_who_holds_up_whom(case: str) -> None:
    known, text = JUDGEMENTS[case]
    assert re.search(text, blame_waiting_ranks(known, ["a", "b", "c"], 3.0))


def test_many_ranks_are_named_shortly() -> None:
    assert format_ranks([3]) == "rank 3" and format_ranks([1, 0]) == "ranks 1, 0"
    assert format_ranks(range(1024)) == "ranks 0…1023" and "…" not in format_ranks([*range(9), 12])


def differ(mesh: Mesh, fault: str, check: bool) -> str:
    """Returns what this rank heard; rank 2 does something else than the others."""
    mesh.world.watch.check = check
    mesh.world.watch.limit_s = 4.0
    odd, group = mesh.world.index == 2, mesh.seq
    all_reduce(torch.ones(3), group)
    try:
        if fault == "sum's shape":
            all_reduce(torch.ones(4 if odd else 3), group)
        elif fault == "message's size":
            exchange_rows(torch.ones(9 if odd else 6, 5), group, *([[3] * 3] * 2 if odd else [[2] * 3] * 2))
        elif fault == "sum skipped":
            if not odd:
                all_reduce(torch.ones(3), group)
            max_over_ranks(0, group)
        elif fault == "message skipped":
            if not odd:
                all_gather(torch.ones(2), group, 0, [2] * 3)
            all_gather(torch.ones(7), group, 0, [7] * 3, kind="other")
        else:
            assert fault == "nothing"
            all_gather(torch.ones(2), group, 0, [2] * 3)
            max_over_ranks(0, group), broadcast_text("a", 1, group), gather_texts("b", group)
            exchange_rows(torch.ones(6, 2), group.part([0, 1, 2]), [2] * 3, [2] * 3)
    except RuntimeError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None
    return "nothing"


FAULTS = {
    "sum's shape": r"Mismatch: collective 2 of the seq group differs: ranks 0, 1: sum of 3 \S+; rank 2: sum of 4 ",
    "sum skipped": r"Mismatch: collective 2 of the seq group differs: ranks 0, 1: sum of 3 \S+; rank 2: agreement",
    "message's size": r"Mismatch: rank (2 expects .* of 15 .* rank [01] sends .* of 10|[01] expects .* rank 2 sends)",
    "message skipped": r"Mismatch: rank (2 expects other of 7.* rank [01] sends gather of 2|[01] expects .* rank 2 )",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_checked_collectives_name_the_rank_that_differs(fault: str) -> None:
    with pytest.raises(RanksFailed, match=FAULTS[fault]):
        run_ranks(3, differ, fault, True, timeout=30)


@pytest.mark.parametrize("fault", ["sum's shape", "message's size"])
def test_unchecked_ones_say_nothing_or_die(fault: str) -> None:
    """The control: gloo adds what does not fit, or ends the process that gets more than it expects."""
    try:
        outcome = str(run_ranks(3, differ, fault, False, timeout=2))
    except RanksFailed as error:
        outcome = str(error)
    assert "Mismatch" not in outcome and "rank 2 expects" not in outcome and "rank 2 sends" not in outcome


def test_checking_finds_nothing_where_nothing_differs(ranks: Callable[..., list]) -> None:
    assert ranks(3, differ, "nothing", True) == ["nothing"] * 3
