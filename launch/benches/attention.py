"""Attention over a sequence group: time of each strategy against peers in one run, and how far memory rises.

Ranks are processes of this machine, one thread each. Times are forward and backward of one attention, from what a
strategy starts with to the gradients there: the projected queries, keys and values; rows that say ``projected``
begin and end with the tokens and hold the projections too, as ``gather-x`` cannot do without. Strategies run in
turns; a ratio is the median over turns of a time to that of the strategy which ``auto`` takes, with the least and
the most of them: of ``projected`` rows to its ``projected`` one, of others to its other, none where it has no such.
``cpu_ms`` is what the first rank worked, messages too: a busy machine disturbs it little. Memory is the highest
resident size of a rank less what it held before, inputs and their gradients' weights among it, where freed memory goes
back at once.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqpar.attention.cost_model import CPU, Layer, choose
from seqpar.attention.head_exchange import exchange_heads
from seqpar.attention.strategies import check_strategy
from seqpar.attention.token_gather import gather_x
from seqpar.consensus import agree
from seqpar.launch.benches.memory import resident_bytes
from seqpar.launch.benches.peers import peers
from seqpar.launch.hardware.devices import MIB
from seqpar.mesh import Mesh
from seqpar.rendezvous import start

WIDTH, HEADS = 768, 12
PROJECTED = ", projected"
Act = Callable[[], object]  # forward and backward, returning the gradients
Make = Callable[[Mesh, Sequence[int]], Act]
Rows = list[dict[str, Any]]


def rows(
    tokens: Sequence[int] = (1024, 4096, 8192),
    groups: Sequence[int] = (2, 4),
    turns: int = 60,
    memory_tokens: int = 8192,
    memory_group: int = 4,
) -> Rows:
    """Returns a row per strategy, peer and size: median ms, the median ratio to auto's, MiB sent; then memory."""
    result: Rows = []
    for size in groups:
        result += _on_ranks(size, ["time", str(turns), *map(str, tokens)], {})
    if memory_tokens:
        result += _on_ranks(memory_group, ["memory", str(memory_tokens)], {"MALLOC_MMAP_THRESHOLD_": "65536"})
    return result


def _on_ranks(size: int, arguments: Sequence[str], env: dict[str, str]) -> Rows:
    """Returns the rows of one run on ``size`` new processes; the allocator reads its settings when one starts."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "rows.json")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command = [sys.executable, *torchrun, "-m", "seqpar.launch.benches.attention", str(answer), *arguments]
        ours = {**os.environ, **env, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        subprocess.run(command, env=ours, check=True)
        result: Rows = json.loads(answer.read_text())
        return result


def _exchanged(name: str, mesh: Mesh, sizes: Sequence[int]) -> Act:
    group = mesh.seq
    inner = check_strategy(name, group.size, HEADS, False).inner
    qkv = torch.randn(1, sizes[group.index], 3, HEADS, WIDTH // HEADS, requires_grad=True)
    weight = torch.randn(1, sizes[group.index], HEADS, WIDTH // HEADS)
    return lambda: torch.autograd.grad(exchange_heads(qkv, group, sizes, inner), qkv, weight)


def _tokens(mesh: Mesh, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    here = sizes[mesh.seq.index]
    x, matrix = torch.randn(1, here, WIDTH, requires_grad=True), torch.randn(3 * WIDTH, WIDTH) / WIDTH**0.5
    return x, matrix.requires_grad_(), torch.randn(1, here, HEADS, WIDTH // HEADS)


def _gathered(mesh: Mesh, sizes: Sequence[int]) -> Act:
    x, matrix, weight = _tokens(mesh, sizes)
    return lambda: torch.autograd.grad(gather_x(x, matrix, None, None, HEADS, mesh.seq, sizes), (x, matrix), weight)


def _projected(name: str, mesh: Mesh, sizes: Sequence[int]) -> Act:
    x, matrix, weight = _tokens(mesh, sizes)
    inner = check_strategy(name, mesh.seq.size, HEADS, False).inner

    def act() -> object:
        qkv = torch.nn.functional.linear(x, matrix).unflatten(2, (3, HEADS, -1))
        return torch.autograd.grad(exchange_heads(qkv, mesh.seq, sizes, inner), (x, matrix), weight)

    return act


def _makes(size: int) -> dict[str, Make]:
    """Returns what is measured on ``size`` ranks."""
    names = ["gather-kv", "ulysses"] + (["hybrid:2"] if size % 2 == 0 and size > 2 else [])
    result: dict[str, Make] = {name: partial(_exchanged, name) for name in names}
    result |= {f"{name}{PROJECTED}": partial(_projected, name) for name in names[:2]}
    return {**result, f"gather-x{PROJECTED}": _gathered, **peers(HEADS, WIDTH // HEADS)}


def _shares(tokens: int, size: int) -> list[int]:
    return [tokens // size + (rank < tokens % size) for rank in range(size)]


def _times(mesh: Mesh, turns: int, tokens: int) -> Rows:
    sizes = _shares(tokens, mesh.seq.size)
    acts = {name: make(mesh, sizes) for name, make in _makes(mesh.seq.size).items()}
    moved = {}
    for name, act in acts.items():
        mesh.seq.traffic.clear()
        act()
        moved[name] = mesh.seq.traffic["attention"] / MIB or None  # peers do not count theirs
    spent: dict[str, list[float]] = {name: [] for name in acts}
    worked: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(turns):
        for name, act in acts.items():
            agree(0, mesh.seq)
            began, work = time.perf_counter(), time.process_time()
            act()
            worked[name].append(1e3 * (time.process_time() - work))
            agree(0, mesh.seq)  # done when the last rank is
            spent[name].append(1e3 * (time.perf_counter() - began))
    auto = str(choose(Layer(tuple(sizes), HEADS, WIDTH), CPU)[0])
    bases = {name: f"{auto}{PROJECTED}" if name.endswith(PROJECTED) else auto for name in acts}
    return [
        {
            "measure": "time",
            "ranks": mesh.seq.size,
            "tokens": tokens,
            "strategy": f"{name} (auto)" if name == bases[name] else name,
            "turns": turns,
            "median_ms": statistics.median(times),
            "ratio": _ratio(times, spent.get(bases[name])),
            "cpu_ms": statistics.median(worked[name]),
            "cpu_ratio": _ratio(worked[name], worked.get(bases[name])),
            "sent_mib": moved[name],
        }
        for name, times in spent.items()
    ]


def _fewer(turns: int, tokens: int) -> int:
    """Returns the turns of long sequences, whose times vary less and take long."""
    return max(min(turns, 5), round(turns * min(1.0, 1024 / tokens) ** 2))


def _ratio(times: Sequence[float], base: Sequence[float] | None) -> str:
    """Returns how long one took to the other, "" where auto's does not begin and end with the same."""
    if base is None:
        return ""
    ratios = [t / b for t, b in zip(times, base)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _growth(mesh: Mesh, tokens: int) -> Rows:
    result = []
    for name, make in _makes(mesh.seq.size).items():
        make(mesh, _shares(64 * mesh.seq.size, mesh.seq.size))()  # connections and threads are there
        act = make(mesh, _shares(tokens, mesh.seq.size))
        Path("/proc/self/clear_refs").write_text("5")  # the highest size begins anew
        before = resident_bytes("VmRSS")
        act()
        peak = agree(resident_bytes("VmHWM") - before, mesh.seq)
        result.append(
            {
                "measure": "memory",
                "ranks": mesh.seq.size,
                "tokens": tokens,
                "strategy": name,
                "growth_mib": peak / MIB,
            }
        )
    return result


def main(arguments: Sequence[str]) -> None:
    """Measures on the ranks that torchrun started, and writes the first one's rows."""
    answer, measure, *numbers = arguments
    with start(int(os.environ["WORLD_SIZE"]), device="cpu") as mesh:
        torch.manual_seed(mesh.seq.index)
        if measure == "time":
            turns, *tokens = map(int, numbers)
            result = [row for count in tokens for row in _times(mesh, _fewer(turns, count), count)]
        else:
            result = _growth(mesh, int(numbers[0]))
        if mesh.is_first:
            Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
