"""Messages between ranks of one host, through memory that they share."""

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.parallel import messages, shared_memory
from seqpar.parallel.collectives import all_reduce, broadcast_tensors, equal_weights, gather_rows
from seqpar.parallel.consensus import gather_texts, max_of_each_over_ranks
from seqpar.parallel.mesh import Group, Mesh
from seqpar.parallel.messages import post
from tests.support.ranks import run_ranks, started_ranks

CPU = torch.device("cpu")
SMALL, LARGE = 3, 40_000  # numbers; a large message does not fit into the socket's own


def numbered(number: int, count: int) -> Tensor:
    return torch.full((count,), float(number))


def sends_before_it_reads(mesh: Mesh) -> list[float]:
    """Both ranks send 300 messages of each size before either of them reads one."""
    other = 1 - mesh.seq.index
    sizes = [SMALL, LARGE] * 300
    into = [torch.empty(size) for size in sizes]
    pending = [post({other: numbered(n, size)}, {other: into[n]}, mesh.seq, "test") for n, size in enumerate(sizes)]
    for one in reversed(pending):
        one.wait()
    return [float(x.mean()) for x in into]


def test_messages_are_matched_as_they_were_posted_however_many_wait() -> None:
    assert run_ranks(2, sends_before_it_reads) == [[float(n) for n in range(600)]] * 2


def through_two_groups(mesh: Mesh) -> list[float]:
    other, into = 1 - mesh.pipe.index, [torch.empty(SMALL) for _ in range(2)]
    groups = [mesh.pipe, mesh.tile]
    assert mesh.pipe.link != mesh.tile.link
    for group in groups if mesh.pipe.index else groups[::-1]:
        post({other: numbered(groups.index(group), SMALL)}, {}, group, "test").wait()
    for group, x in zip(groups, into):
        post({}, {other: x}, group, "test").wait()
    return [float(x.mean()) for x in into]


def test_messages_of_another_group_may_overtake() -> None:
    assert run_ranks(2, through_two_groups, pipe=2) == [[0.0, 1.0]] * 2


def resident_shared() -> int:
    """Returns the bytes of shared memory that count as this process's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem"))
    return int(line.split()[1]) << 10


def memory_after_many_sizes(mesh: Mesh) -> tuple[int, int, int]:
    """Sends messages of 9 to 3,000 KiB, two of them at a time, and sums that are as large."""
    before, other = resident_shared(), (mesh.seq.index + 1) % mesh.seq.size
    for kib in (9, 3000, 700, 300, 1500, 2900, 260, 1025, 513, 2049) * 2:
        x = torch.randn(kib << 8, generator=torch.Generator().manual_seed(kib))
        into = [torch.empty_like(x) for _ in range(2)]
        previous = (mesh.seq.index - 1) % mesh.seq.size
        pending = [post({other: x}, {previous: y}, mesh.seq, "test") for y in into]
        for one in reversed(pending):
            one.wait()
        assert all(torch.equal(x, y) for y in into), kib
        assert torch.allclose(all_reduce(x, mesh.seq), 3 * x)
    assert mesh.seq.link is not None
    memory = mesh.seq.link.memory._memory
    held = 512 * os.fstat(memory.blocks.file).st_blocks
    return memory.num_blocks, held, resident_shared() - before


def test_blocks_serve_all_sizes_and_few_of_them_are_resident() -> None:
    most = 4 * 12  # blocks: two messages of 3,000 KiB, twice where the other rank is late
    for num_blocks, held, resident in run_ranks(3, memory_after_many_sizes):
        assert num_blocks <= most and held <= (most << 18) + (1 << 16)
        assert resident <= 3 * ((shared_memory._NUM_MAPPED << 18) + (1 << 16)) < held


def sends_of_every_size(mesh: Mesh) -> None:
    """Each rank sends two messages to both others, one of which reads late, and another in the other order."""
    torch.manual_seed(mesh.seq.index)
    block, inline = shared_memory._BLOCK, shared_memory.INLINE
    for size in (1, inline, inline + 1, block - 1, block, block + 1, 4 * block, shared_memory.LARGEST):
        own = [torch.randint(256, (size,), dtype=torch.uint8) for _ in range(2)]
        into = [{q: torch.empty(size, dtype=torch.uint8) for q in mesh.seq.peers} for _ in own]
        sent = [post(dict.fromkeys(mesh.seq.peers, x), y, mesh.seq, "test") for x, y in zip(own, into)]
        for one in sent if mesh.seq.index else reversed(sent):
            time.sleep(0.02 * mesh.seq.index)
            one.wait()
        for x, y in zip(own, into):
            rows = gather_rows(x, mesh.seq)
            assert all(torch.equal(y[q], rows[q]) for q in y), size


def test_messages_of_every_size_reach_several_readers() -> None:
    run_ranks(3, sends_of_every_size)


def sends_what_is_empty(mesh: Mesh) -> list[tuple[int, ...]]:
    net = torch.nn.Linear(2, 2)
    net.register_buffer("none", torch.empty(0))
    equal_weights(net, mesh.seq)
    received = broadcast_tensors([torch.empty(0, 3)], mesh.seq, CPU)
    assert broadcast_tensors([], mesh.seq, CPU) == []
    return [tuple(x.shape) for x in (*received, all_reduce(torch.empty(0, 2), mesh.seq))]


def test_empty_tensors_are_sent_too() -> None:
    assert run_ranks(2, sends_what_is_empty) == [[(0, 3), (0, 2)]] * 2


UNWRITABLE = (
    "shared memory for messages to other ranks cannot be written (File too large): set SEQPAR_SHARED_MEMORY=0 on all "
    "ranks"
)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def sends_more_than_a_file_may_hold(mesh: Mesh) -> list[str]:
    said, x = list[str](), torch.zeros(1 << 19)
    if mesh.seq.index == 0:
        with files_of_at_most(1 << 20):
            for _ in range(2):
                try:
                    post({1: x}, {}, mesh.seq, "test").wait()
                except RuntimeError as error:
                    said.append(str(error))
        assert mesh.seq.link is not None
        assert mesh.seq.link.memory._memory.num_blocks == x.nbytes // shared_memory._BLOCK, "blocks are not lost"
    return said


def test_memory_that_cannot_be_written_is_named_and_no_block_is_lost() -> None:
    assert run_ranks(2, sends_more_than_a_file_may_hold)[0] == [UNWRITABLE] * 2
    with files_of_at_most(1 << 20), pytest.raises(RuntimeError) as error:
        shared_memory._Memory(2)
    assert str(error.value) == UNWRITABLE


def sends_until_it_is_full(mesh: Mesh) -> str:
    if mesh.seq.index == 0:
        try:
            for _ in range(17):
                post({1: torch.zeros(LARGE)}, {}, mesh.seq, "test").wait()
        except RuntimeError as error:
            return str(error)
    return ""


def test_messages_that_nobody_receives_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_NUM_BLOCKS", 16)
    said = run_ranks(2, sends_until_it_is_full)[0]
    assert said.startswith(
        "messages that other ranks have not received fill all 16 blocks of shared memory: set SEQPAR"
    )


def test_processes_whose_messages_differ_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    own = shared_memory._own_address()
    monkeypatch.setattr(shared_memory, "_FORMAT", shared_memory._FORMAT + 1)
    other = shared_memory._own_address()
    assert own is not None and other is not None and own.place != other.place


def sums(mesh: Mesh) -> list[Tensor]:
    torch.manual_seed(mesh.seq.index)
    kinds = [(torch.float64, 5), (torch.float32, 3_000_001), (torch.bfloat16, 20_000), (torch.int64, 3_001)]
    own = [(torch.randn(size) * 9).to(dtype) for dtype, size in kinds]
    return [*own, *(all_reduce(x, mesh.seq) for x in own), torch.stack(gather_rows(own[0], mesh.seq))]


def test_sums_are_in_rank_order_and_the_same_on_every_rank() -> None:
    results = run_ranks(3, sums)
    for place in range(4):
        rows = [result[place] for result in results]
        wide = [row.float() if row.dtype == torch.bfloat16 else row for row in rows]
        expected = (wide[0] + wide[1] + wide[2]).to(rows[0].dtype)
        for result in results:
            assert torch.equal(result[4 + place], expected)
    assert torch.equal(results[1][-1], torch.stack([result[0] for result in results]))


def of_both_kinds(mesh: Mesh) -> tuple[bool, list[float]]:
    into = [torch.empty(size) for size in (SMALL, LARGE)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "LARGEST", 1_000)
        for x in into:
            post({1 - mesh.seq.index: numbered(7, x.numel())}, {1 - mesh.seq.index: x}, mesh.seq, "test").wait()
    return mesh.seq.link is not None, [float(x.mean()) for x in into]


def test_what_is_too_large_goes_through_gloo_and_everything_if_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(2, of_both_kinds) == [(True, [7.0, 7.0])] * 2
    monkeypatch.setenv(shared_memory.SWITCH, "0")
    assert run_ranks(2, of_both_kinds) == [(False, [7.0, 7.0])] * 2


def expects_one(group: Group, size: int = SMALL, limit_s: float | None = None) -> str:
    began = time.monotonic()
    try:
        if limit_s is None:
            post({}, {1: torch.empty(size)}, group, "test").wait()
        else:
            (work,) = messages.start_messages([], [(1, torch.empty(size))], group)
            work.wait(timedelta(seconds=limit_s))
    except RuntimeError as error:
        assert time.monotonic() - began < 10
        return str(error)
    return "nothing"


def in_the_lurch(mesh: Mesh, how: str) -> str:
    if mesh.seq.index == 0:
        return expects_one(mesh.seq, limit_s=0.1 if how == "late" else None)
    if how == "late":
        time.sleep(0.5)
    elif how == "size":
        post({0: numbered(1, SMALL + 1)}, {}, mesh.seq, "test").wait()
    elif how == "gone":
        if os.fork() == 0:  # its child lives on, as a loader's worker may
            time.sleep(20)
        os._exit(1)
    return ""


@pytest.mark.parametrize(
    "how, said",
    [("late", "Timed out waiting for rank 1"), ("size", "rank 1 sent 16 bytes where 12 were expected, so the ranks")],
)
def test_a_message_that_is_late_or_of_another_size_is_named(how: str, said: str) -> None:
    assert said in run_ranks(2, in_the_lurch, how)[0]


def writes_what_it_hears(mesh: Mesh, folder: Path) -> None:
    (folder / "unfinished").write_text(in_the_lurch(mesh, "gone"))
    (folder / "unfinished").rename(folder / "said")
    time.sleep(60)  # until it is killed: gloo's own end waits for its peer


def test_a_rank_that_dies_is_noticed_at_once_though_its_child_lives(tmp_path: Path) -> None:
    with started_ranks(2, writes_what_it_hears, tmp_path):
        until = time.monotonic() + 10
        while not (tmp_path / "said").exists() and time.monotonic() < until:
            time.sleep(0.02)
    assert (tmp_path / "said").read_text() == "Connection closed by peer: rank 1"


def hears_all(mesh: Mesh) -> list[Any]:
    firsts = broadcast_tensors([numbered(mesh.seq.index, SMALL), torch.ones(2, 2).T * mesh.seq.index], mesh.seq, CPU)
    net = torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        net.weight.fill_(mesh.seq.index + 4)
    equal_weights(net, mesh.seq)
    texts = gather_texts("x" * mesh.seq.index, mesh.seq)
    most = max_of_each_over_ranks((mesh.seq.index, -mesh.seq.index), mesh.seq)
    summed = all_reduce(torch.arange(5_000.0) * mesh.seq.index, mesh.seq)
    return [[float(x.sum()) for x in firsts], float(net.weight.mean()), texts, most, summed.tolist()]


@pytest.mark.parametrize("memory", ["0", "1"])
def test_what_all_ranks_agree_on_is_the_same_through_memory_and_gloo(memory: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(shared_memory.SWITCH, memory)
    expected = [[0.0, 0.0], 4.0, ["", "x", "xx"], (2, 0), [3.0 * n for n in range(5_000)]]
    assert run_ranks(3, hears_all) == [expected] * 3


def test_a_stranger_is_not_let_in() -> None:
    first, second = (shared_memory.SharedMemory(rank) for rank in range(2))
    assert first.address is not None and second.address is not None
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(f"\0{first.address.name}")
    stranger.send(b'{"rank": 1, "secret": "guessed"}')
    if (child := os.fork()) == 0:
        second.connect([first.address, second.address], 10)
        second.start({0: numbered(5, SMALL)}, {}, 0)
        os._exit(0)
    first.connect([first.address, second.address], 10)
    x = torch.empty(SMALL)
    first.start({}, {1: x}, 0).wait()
    os.waitpid(child, 0)
    assert x.tolist() == [5.0] * SMALL and stranger.recv(1) == b""
    first.close()
