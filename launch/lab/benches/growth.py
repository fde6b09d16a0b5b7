"""How time and memory of a rank grow: with tokens, with ranks at constant tokens a rank, and with both to 512 ranks.

- ``tokens``: forward and backward of an encoder on one rank
- ``ranks``: forward and backward of one attention by each strategy and by other libraries
- ``both``: a training step of a whole volume, planned

``TFLOP``, ``sent``, ``held`` (saved for backward) and ``peak`` (the most alive) are counted on the first rank, whose
group sends nothing: any machine gives the same. Weights and their gradients are left out. ``s`` is the clock, one
thread a rank, where each rank has a core. A planned step has all that its fullest rank needs as ``peak``, and as ``s``
what the planner's model of device and links says. ``limited by``: what takes most of its time, or why it cannot run.
"""

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lab.benches import attention, rank
from lab.benches.attention import PROJECTED, WIDTH
from lab.benches.series import Row, Series, measure_apart, stream_apart
from seqpar.cluster.devices import ATTENTION, CONVOLUTION, DEVICES, GIB, MATMUL, MIB, OTHER, usable_cores
from seqpar.cluster.torch_setup import without_torch_compile
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group, Mesh
from seqpar.parallel.meta_tensors import meta_as_device
from seqpar.parallel.rendezvous import fake_group
from seqpar.planner.attention_choice import strategy_of
from seqpar.planner.memory_counter import MemoryCounter, Saved
from seqpar.planner.needs import Plan, RunToPlan, plan, steps_of
from seqpar.planner.step_counter import StepCost, WorkCounter, untimed
from seqpar.settings.presets import PRESETS
from seqpar.vit.encoder import SeqParViT

NET = rank.Work(patch=4, embed_dim=192, depth=2, heads=3, precision="fp32")
GRIDS = ((16, 8, 8), (16, 16, 16), (32, 32, 16), (64, 32, 32))  # 1,024 to 65,536 tokens
MOST_TIMED = 16384  # tokens
RANKS, TOKENS = (1, 2, 4, 8), 1024  # of a rank
TIMED_RANKS = (1, 2)
STEP = replace(PRESETS["modern"](), batch=1, mode="halo")
SIDE = 128  # voxels of a rank's cube where it stays the same
DEVICE_NAMES = ("h100", "mi250x")
CHANNELS, CLASSES = 1, 4
KINDS = {
    ATTENTION: "attention's products",
    MATMUL: "other products",
    CONVOLUTION: "convolutions",
    OTHER: "memory traffic",
}
Run = dict[str, Any]  # what ``row_of`` takes


@dataclass(frozen=True)
class Case:
    """A row: what grows, on how many ranks and tokens, and of what.

    - ``of``: a strategy or a peer; the device of a planned step
    - ``tile``: voxels of the encoder's or of the step's tile
    - ``attention``: the strategy of a planned step
    """

    grows: str
    ranks: int
    tokens: int
    of: str = ""
    tile: tuple[int, ...] = ()
    attention: str = "auto"

    def __str__(self) -> str:
        return f"{self.of} {self.attention}, {self.ranks} ranks, {self.tokens} tokens"


def series(quick: bool = False) -> list[Series]:
    """Returns one series: a row for each length, for each strategy on each number of ranks, and for each plan."""
    cases = {str(case): case for case in cases_of(quick)}

    def measure(turns: int) -> Generator[tuple[str, Run], None, None]:
        for _ in range(turns):
            for case, run in _measured(list(cases.values()), 3 if quick else 7):
                yield str(case), run

    what = "time and memory of a rank by tokens and by ranks"
    return [
        Series(
            what,
            tuple(cases),
            1,
            90.0 if quick else 240.0,
            measure,
            lambda name, runs: row_of(cases[name], runs[name]),
            lambda _: absent(),
        )
    ]


def cases_of(quick: bool) -> list[Case]:
    """Returns all cases in the order in which they are measured."""
    grids, tokens = (GRIDS[:2], TOKENS // 4) if quick else (GRIDS, TOKENS)
    cases = [Case("tokens", 1, math.prod(grid), "encoder", tuple(NET.patch * side for side in grid)) for grid in grids]
    cases += [Case("ranks", ranks, ranks * tokens, name) for ranks in RANKS for name in strategies(ranks)]
    steps = [(1, 1, "auto"), (2, 8, "auto")]
    if not quick:
        steps += [(4, 64, "auto"), (8, 8, "auto"), (8, 64, "auto"), (8, 512, "auto")]
        steps += [(8, 512, "gather-kv"), (8, 512, "ulysses")]
    for device in DEVICE_NAMES[: 1 if quick else None]:
        for times, ranks, strategy in steps:
            tile = (times * SIDE,) * 3
            tokens = math.prod(side // p for side, p in zip(tile, STEP.patch))
            cases.append(Case("both", ranks, tokens, device, tile, strategy))
    return cases


def strategies(ranks: int) -> list[str]:
    """Returns the strategies and peers to count; on one rank all do the same, and nothing is sent."""
    names = list(attention.makes(ranks))
    if ranks == 1:
        return names[:1]
    return [name for name in names if not name.endswith(PROJECTED) or name.startswith("gather-x")]


def absent() -> str:
    """Returns which peers are not installed."""
    missing = [peer for peer in ("DeepSpeed", "torch ring") if not any(peer in name for name in strategies(2))]
    return f"Without rows, because they are not installed: {', '.join(missing)}." if missing else ""


def row_of(case: Case, runs: Sequence[Run]) -> Row:
    """Returns a case's row; what is counted is the same in every run."""
    run, seconds = runs[0], [run["s"] for run in runs if run["s"] is not None]
    what = case.of
    if case.grows == "tokens":
        what = f"encoder {NET.embed_dim} x {NET.depth}"
    elif case.grows == "ranks" and case.ranks == 1:
        what = "any strategy"
    elif case.grows == "both":
        chosen = f"auto: {run['strategy']}" if case.attention == "auto" else case.attention
        what = f"step of {case.tile[0]} voxels a side, {case.of}" + (f", {chosen}" if case.ranks > 1 else "")
    return {
        "grows": case.grows,
        "of": what,
        "ranks": case.ranks,
        "tokens": case.tokens,
        "TFLOP": run["operations"] / 1e12,
        "of attention": run["attention"] / 1e12,
        "sent MiB": run["sent"] / MIB,
        "held MiB": run["held"] / MIB,
        "peak MiB": run["peak"] / MIB,
        "s": statistics.median(seconds) if seconds else "",
        "limited by": run["limit"],
    }


def _measured(cases: Sequence[Case], turns: int) -> Generator[tuple[Case, Run], None, None]:
    """Yields each case and what it comes to."""
    for case in cases:
        if case.grows == "tokens":
            yield case, count_encoder(replace(NET, tile=case.tile)) | {"s": _encoder_seconds(case)}
    for ranks in RANKS:
        of_ranks = {case.of: case for case in cases if case.grows == "ranks" and case.ranks == ranks}
        tokens = next(iter(of_ranks.values())).tokens
        seconds = _seconds(ranks, tokens, turns) if ranks in TIMED_RANKS and ranks <= usable_cores() else {}
        with closing(stream_apart("growth", [str(ranks), str(tokens)], 1, 1, attention.ENV[1])) as lines:
            for run in lines:
                name = run.pop("case")
                yield of_ranks[name], run | {"s": seconds.get(name)}
    for case in cases:
        if case.grows == "both":
            yield case, plan_step(case)


def _encoder_seconds(case: Case) -> float | None:
    if case.tokens > MOST_TIMED:
        return None
    work = replace(NET, tile=case.tile, steps=max(1, min(7, MOST_TIMED // case.tokens)))
    return float(measure_apart("rank", [json.dumps(asdict(work))], 1, 1)["s a step"])


def _seconds(ranks: int, tokens: int, turns: int) -> dict[str, float]:
    """Returns the median seconds of each strategy and peer on real ranks."""
    ms: dict[str, list[float]] = {}
    arguments = ["time", str(turns), str(tokens)]
    with closing(stream_apart("attention", arguments, ranks, 1, attention.ENV[1])) as lines:
        for line in lines:
            ms.setdefault(line["case"], []).append(line["ms"])
    return {name: statistics.median(values) / 1e3 for name, values in ms.items()}


def count_encoder(work: rank.Work) -> Run:
    """Returns what forward and backward of an encoder come to on one rank, counted without data."""
    done = WorkCounter(untimed)
    with torch.device("meta"), without_torch_compile(), meta_as_device("cpu"):
        net = SeqParViT(1, work.tile, work.patch, work.embed_dim, work.depth, work.heads, positions="none")
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(_drop_gradient)
        part = torch.empty(1, net.layout.num_tokens, 1, *net.layout.patch)
        with MemoryCounter(done.watch) as counter:
            with Saved(net, (part,)) as saved:
                tokens = net(part)
            tokens.backward(torch.empty_like(tokens))
    return _run(done.operations, 0, saved.total, counter.most)


def _drop_gradient(p: torch.Tensor) -> None:
    p.grad = None


def _run(operations: Counter[str], sent: float, held: float, peak: float, limit: str = "", strategy: str = "") -> Run:
    return {
        "operations": operations.total(),
        "attention": operations[ATTENTION],
        "sent": sent,
        "held": held,
        "peak": peak,
        "s": None,
        "limit": limit,
        "strategy": strategy,
    }


class SentBytes(TorchDispatchMode):
    """Counts the bytes that torch's collectives send from this rank, place ``index`` of ``size``, to others."""

    def __init__(self, index: int, size: int) -> None:
        super().__init__()
        self._index, self._size, self.total = index, size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.total += self._of(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _of(self, name: str, args: Any) -> int:
        others = self._size - 1
        if name == "send":
            return sum(t.nbytes for t in args[0])
        if name in ("recv_", "wait_tensor", "_wrap_tensor_autograd"):
            return 0
        if name == "all_gather_into_tensor":
            return int(args[0].nbytes * others)
        if name in ("alltoall_base_", "all_to_all_single"):
            whole, splits = (args[1], args[4]) if name == "alltoall_base_" else (args[0], args[2])
            own = splits[self._index] / len(whole) if splits else 1 / self._size
            return round(whole.nbytes * (1 - own))
        raise NotImplementedError(f"{name}: what it sends is not known")


def count_attention(ranks: int, tokens: int) -> Generator[Run, None, None]:
    """Yields each strategy and peer with what the first of ``ranks`` ranks does, sends and holds.

    It may be called once per process. The others are not there, so what it computes has no meaning.
    """
    group, alone = fake_group(ranks), Group("alone")
    mesh = Mesh(Launcher("bench"), torch.device("cpu"), group, alone, group, alone, group, group, alone)
    makes = attention.makes(ranks)
    for name in strategies(ranks):
        done, sent = WorkCounter(untimed), SentBytes(group.index, group.size)
        weights = 3 * WIDTH**2 * 4 if name.endswith(PROJECTED) else 0  # the projection's, and as much for its gradient
        with MemoryCounter(done.watch) as counter:
            try:
                act = makes[name](mesh, [tokens // ranks] * ranks)
                with Saved(nn.Module()) as saved, sent:
                    act()
            except AssertionError as refusal:
                yield {"case": name, **_run(Counter(), 0, 0, 0, f"{refusal}")}
                continue
        yield {"case": name, **_run(done.operations, sent.total, saved.total - weights, counter.most - 2 * weights)}


def plan_step(case: Case) -> Run:
    """Returns what a training step needs according to the planner."""
    config = replace(STEP, tile=case.tile, attention=case.attention)
    run = RunToPlan(config, DEVICES[case.of], CHANNELS, CLASSES)
    planned = plan(run, case.ranks)
    steps = steps_of(run, planned.config, planned.device, case.ranks)
    step = max(steps, key=lambda s: s.tokens + s.decoder + s.transient)
    held, strategy = step.tokens + step.decoder, planned.config.attention
    counted = _run(step.operations, sum(planned.sent.values()), held, planned.total, limit(planned, step), strategy)
    return counted | {"s": planned.step_seconds}


def limit(planned: Plan, step: StepCost) -> str:
    """Returns why a step does not fit, or else what takes most of its seconds."""
    if not planned.fits:
        return f"memory: {planned.total / GIB:.0f} of {planned.device.memory / GIB:.0f} GiB"
    waiting = planned.seconds.get("waiting", 0.0) + planned.seconds.get("summing", 0.0)
    seconds: dict[str, float] = {name: step.seconds[kind] for kind, name in KINDS.items()}
    seconds |= {"links": waiting, "the update": planned.seconds["update"]}
    most = max(seconds, key=lambda name: seconds[name])
    told = f"{most}, {seconds[most] / planned.step_seconds:.0%} of the time"
    inner, heads = strategy_of(planned.config).inner, planned.config.heads
    return f"heads: {heads} for {inner} ranks; {told}" if most == KINDS[ATTENTION] and heads % inner else told


def main(arguments: Sequence[str]) -> None:
    """Prints a line of JSON for each strategy on so many ranks and tokens."""
    for run in count_attention(*map(int, arguments)):
        print(json.dumps(run), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
