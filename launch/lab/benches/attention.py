"""Attention over a sequence group: the time of each strategy and of peers, and how far memory rises.

Ranks are processes of this machine, one thread each. A time is forward and backward of one attention, from queries,
keys and values to their gradients; in rows that say ``projected``, from tokens to their gradients, projections
included, because ``gather-x`` cannot be timed without them. ``ratio`` is the median over turns of the time over that of
the strategy that ``auto`` chooses, with the smallest and the largest; projected rows are compared with the projected
one, others with the other; the cell is empty where ``auto``'s choice has no such row. ``cpu_ms`` is the first rank's
CPU time, messages included, which a busy machine disturbs little. Memory is the highest resident size of a rank minus
its size before; freed memory is returned at once there.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.benches.memory import resident_bytes
from lab.benches.other_libraries import attention_peers
from lab.benches.series import Row, Runs, Series, ratio, spread, stream_apart
from seqpar.attention.cost_model import CPU, Layer, fastest_strategy
from seqpar.attention.head_exchange import attend_by_head_exchange
from seqpar.attention.strategies import check_strategy
from seqpar.attention.token_gather import attend_to_gathered_tokens
from seqpar.cluster.devices import MIB
from seqpar.parallel.consensus import max_over_ranks
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.rendezvous import start

WIDTH, HEADS = 768, 12
PROJECTED = ", projected"
Act = Callable[[], object]  # forward and backward; returns the gradients
Make = Callable[[Mesh, Sequence[int]], Act]
TURN_S = {1024: 1.0, 4096: 10.0, 8192: 30.0}  # of all strategies and peers, by tokens
# freed memory goes back at once; DeepSpeed looks for no GPU
ENV = {"MALLOC_MMAP_THRESHOLD_": "65536"}, {"DS_ACCELERATOR": "cpu"}


def series(quick: bool = False, memory_tokens: int = 8192) -> list[Series]:
    """Returns a series of times per group and number of tokens, then one of memory on four ranks."""
    tokens, turns = ((1024,), 15) if quick else ((1024, 4096, 8192), 60)
    times = [_times(size, count, fewer_turns(turns, count)) for size in (2, 4) for count in tokens]
    return [*times, _growth(4, 4096 if quick else memory_tokens)]


def fewer_turns(turns: int, tokens: int) -> int:
    """Returns the turns of long sequences, whose times vary less and take long."""
    return max(min(turns, 5), round(turns * min(1.0, 1024 / tokens) ** 2))


def _times(ranks: int, tokens: int, turns: int) -> Series:
    what = f"forward and backward of one attention, {tokens} tokens on {ranks} ranks"
    measure, row = partial(_stream, "time", ranks, tokens), partial(time_row, ranks, tokens)
    return Series(what, tuple(makes(ranks)), turns, TURN_S.get(tokens, 30.0), measure, row)


def _growth(ranks: int, tokens: int) -> Series:
    def row(case: str, runs: Runs) -> Row:
        growth = statistics.median(run["growth"] for run in runs[case]) / MIB
        return {"ranks": ranks, "tokens": tokens, "strategy": case, "growth_mib": growth}

    what = f"growth of memory in forward and backward of one attention, {tokens} tokens on {ranks} ranks"
    return Series(what, tuple(makes(ranks)), 1, 60.0, partial(_stream, "memory", ranks, tokens), row)


def _stream(measure: str, ranks: int, tokens: int, turns: int) -> Generator[tuple[str, Any], None, None]:
    """Yields strategies and what they came to, as the ranks measure them."""
    settings = ENV[1] if measure == "time" else {**ENV[0], **ENV[1]}
    with closing(stream_apart("attention", [measure, str(turns), str(tokens)], ranks, 1, settings)) as lines:
        for line in lines:
            yield line.pop("case"), line


def time_row(ranks: int, tokens: int, case: str, runs: Runs) -> Row:
    """Returns a strategy's row; ratios are to what ``auto`` takes, in the same turns."""
    auto = runs[case][0]["auto"]
    base = f"{auto}{PROJECTED}" if case.endswith(PROJECTED) else auto
    values = {name: [run[name] for run in runs[case]] for name in ("ms", "cpu_ms")}
    bases = {name: [run[name] for run in runs.get(base, ())] for name in values}
    sent = runs[case][0]["sent"]
    return {
        "ranks": ranks,
        "tokens": tokens,
        "strategy": f"{case} (auto)" if case == base else case,
        "turns": len(runs[case]),
        "median_ms": statistics.median(values["ms"]),
        "ratio": _spread(values["ms"], bases["ms"]),
        "cpu_ms": statistics.median(values["cpu_ms"]),
        "cpu_ratio": _spread(values["cpu_ms"], bases["cpu_ms"]),
        "sent_mib": sent / MIB if sent else "",  # peers do not count theirs
    }


def _spread(times: Sequence[float], base: Sequence[float]) -> str:
    """Returns the median ratio over turns, with the smallest and the largest of several, "" without a base."""
    median, of_turns = ratio(times, base), spread(times, base)
    return f"{median:.3f}" + (f" ({of_turns})" if of_turns else "") if median else ""


def _exchanged(name: str, mesh: Mesh, sizes: Sequence[int]) -> Act:
    group = mesh.seq
    inner = check_strategy(name, group.size, HEADS, False).inner
    qkv = torch.randn(1, sizes[group.index], 3, HEADS, WIDTH // HEADS, requires_grad=True)
    weight = torch.randn(1, sizes[group.index], HEADS, WIDTH // HEADS)
    return lambda: torch.autograd.grad(attend_by_head_exchange(qkv, group, sizes, inner), qkv, weight)


def _tokens(mesh: Mesh, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    own = sizes[mesh.seq.index]
    x, matrix = torch.randn(1, own, WIDTH, requires_grad=True), torch.randn(3 * WIDTH, WIDTH) / WIDTH**0.5
    return x, matrix.requires_grad_(), torch.randn(1, own, HEADS, WIDTH // HEADS)


def _gathered(mesh: Mesh, sizes: Sequence[int]) -> Act:
    x, matrix, weight = _tokens(mesh, sizes)
    return lambda: torch.autograd.grad(
        attend_to_gathered_tokens(x, matrix, None, None, HEADS, mesh.seq, sizes), (x, matrix), weight
    )


def _projected(name: str, mesh: Mesh, sizes: Sequence[int]) -> Act:
    x, matrix, weight = _tokens(mesh, sizes)
    inner = check_strategy(name, mesh.seq.size, HEADS, False).inner

    def act() -> object:
        qkv = torch.nn.functional.linear(x, matrix).unflatten(2, (3, HEADS, -1))
        return torch.autograd.grad(attend_by_head_exchange(qkv, mesh.seq, sizes, inner), (x, matrix), weight)

    return act


def makes(size: int) -> dict[str, Make]:
    """Returns the strategies and peers to measure on ``size`` ranks."""
    names = ["gather-kv", "ulysses"] + (["hybrid:2"] if size % 2 == 0 and size > 2 else [])
    result: dict[str, Make] = {name: partial(_exchanged, name) for name in names}
    result |= {f"{name}{PROJECTED}": partial(_projected, name) for name in names[:2]}
    peers = attention_peers(HEADS, WIDTH // HEADS) if size > 1 else {}  # which need a process group
    return {**result, f"gather-x{PROJECTED}": _gathered, **peers}


def _shares(tokens: int, size: int) -> list[int]:
    return [tokens // size + (rank < tokens % size) for rank in range(size)]


def measure_times(mesh: Mesh, turns: int, tokens: int) -> Generator[dict[str, Any], None, None]:
    """Yields each strategy's times on this rank, turn after turn, with ``auto``'s choice and the bytes sent."""
    sizes = _shares(tokens, mesh.seq.size)
    acts = {name: make(mesh, sizes) for name, make in makes(mesh.seq.size).items()}
    auto = str(fastest_strategy(Layer(tuple(sizes), HEADS, WIDTH), CPU)[0])
    sent = {}
    for name, act in acts.items():
        mesh.seq.traffic.clear()
        act()
        sent[name] = mesh.seq.traffic["attention"]
    for _ in range(turns):
        for name, act in acts.items():
            max_over_ranks(0, mesh.seq)
            began, cpu_began = time.perf_counter(), time.process_time()
            act()
            cpu_ms = 1e3 * (time.process_time() - cpu_began)
            max_over_ranks(0, mesh.seq)  # done when the last rank is
            ms = 1e3 * (time.perf_counter() - began)
            yield {"case": name, "auto": auto, "sent": sent[name], "ms": ms, "cpu_ms": cpu_ms}


def measure_growth(mesh: Mesh, turns: int, tokens: int) -> Generator[dict[str, Any], None, None]:
    """Yields by how much each strategy raises the resident size of the rank where it grows most."""
    for _ in range(turns):
        for name, make in makes(mesh.seq.size).items():
            make(mesh, _shares(64 * mesh.seq.size, mesh.seq.size))()  # makes connections and threads
            act = make(mesh, _shares(tokens, mesh.seq.size))
            Path("/proc/self/clear_refs").write_text("5")  # resets the highest size
            before = resident_bytes("VmRSS")
            act()
            yield {"case": name, "growth": max_over_ranks(resident_bytes("VmHWM") - before, mesh.seq)}


def main(arguments: Sequence[str]) -> None:
    """Measures on the ranks that were started; the first one prints a line of JSON for each measurement."""
    measure, turns, tokens = arguments[0], *map(int, arguments[1:])
    with start(int(os.environ["WORLD_SIZE"]), device="cpu") as mesh:
        torch.manual_seed(mesh.seq.index)
        for line in (measure_times if measure == "time" else measure_growth)(mesh, turns, tokens):
            if mesh.is_first:
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
