"""Which share of a step halos take: planned for many ranks, beside Hou et al.'s 5 %, and measured on 2 of this machine.

Measured seconds are those in which a rank takes borders out of its box, sends them, waits for its neighbours' and puts
them in place, forward and backward; the statistics of norms are a column of their own. Planned ones follow from bytes,
messages and the makers' figures, with nothing hidden behind arithmetic. Hou et al. cut two directions of three and
count what cutting a volume takes as well.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lab.benches.apart import measure_apart
from lab.benches.series import Row, Runs, Series
from lab.benches.step import STEPS, Step
from seqpar.cluster.devices import DEVICES
from seqpar.models.build import build_network
from seqpar.parallel.rendezvous import start
from seqpar.planner.needs import RunToPlan, plan, steps_of
from seqpar.planner.step_counter import StepCost as CountedStep
from seqpar.settings.config import Config
from seqpar.spatial import halos, moments

PAPER = "5 %, with cutting"
CLASSES = 3


@dataclass(frozen=True)
class Case:
    """A step of a network in halo: on ``device`` planned, else measured on this machine."""

    config: Config
    device: str = ""

    @property
    def name(self) -> str:
        config = self.config
        features = f", {config.features} features" if config.features else ""
        return f"{config.network}{features}, {'x'.join(map(str, config.tile))}, {config.seqpar} ranks {self.device}"


def _case(network: str, side: int, ranks: int, device: str = "", features: int = 0, precision: str = "fp32") -> Case:
    tile = (side,) * 3
    config = Config(network=network, tile=tile, features=features, seqpar=ranks, precision=precision, mode="halo")
    return Case(replace(config, batch=1), device)


MEASURED = (_case("unet-hou", 64, 2, features=16), _case("nnunet-plain", 96, 2))
PLANNED = tuple(
    _case("unet-hou", side, ranks, device, precision="bf16")
    for side, ranks in ((256, 128), (512, 256))
    for device in ("mi250x", "a100", "h100")
)
QUICK = (_case("unet-hou", 32, 2, features=4), _case("nnunet-plain", 32, 2, features=4))
PLANNING_S, MEASURING_S = 5.0, 40.0  # of a case on 2 idle CPU cores


def series(quick: bool = False) -> list[Series]:
    """Returns what is planned, which needs no machine, and then what is measured."""
    return [
        of_cases("planned", PLANNED[:2] if quick else PLANNED, 1),
        of_cases("measured", QUICK if quick else MEASURED, 1 if quick else 3),
    ]


def of_cases(how: str, cases: tuple[Case, ...], turns: int) -> Series:
    """Returns the series of some cases, all planned or all measured; ``how``: which, in a word.

    What is planned comes out the same in every turn, and is planned once.
    """
    by_name = {case.name: case for case in cases}

    def measure(turns: int) -> Generator[tuple[str, dict[str, float]], None, None]:
        plans: dict[str, dict[str, float]] = {}
        for _ in range(turns):
            for name, case in by_name.items():
                if case.device and name not in plans:
                    plans[name] = planned(case)
                yield name, plans.get(name) or measured(case)

    def row(name: str, runs: Runs) -> Row:
        return _row(by_name[name], runs[name])

    seconds = sum(PLANNING_S if case.device else MEASURING_S for case in cases)
    return Series(f"the share of a step that halos take, {how}", tuple(by_name), turns, seconds, measure, row)


def _row(case: Case, runs: list[Any]) -> Row:
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    config = case.config
    return {
        "net": config.network + (f", {config.features} features" if config.features else ""),
        "image": "x".join(map(str, config.tile)),
        "ranks": config.seqpar,
        "how": f"planned, {DEVICES[case.device].name}, {config.precision}" if case.device else "measured, 2 CPU cores",
        "s a step": middle["seconds"],
        "halos": f"{middle['halos'] / middle['seconds']:.1%}",
        "statistics": f"{middle['statistics'] / middle['seconds']:.1%}",
        "MB of halos a rank": middle["sent"] / 1e6,
        "Hou et al.": PAPER if config.network == "unet-hou" and case.device else "",
    }


def measured(case: Case) -> dict[str, float]:
    """Returns seconds of a step, those for halos and for statistics, and bytes sent, as measured in new processes."""
    return measure_apart("halo_share", [json.dumps(asdict(case.config))], case.config.seqpar, 1)


def planned(case: Case) -> dict[str, float]:
    """Returns the same as planned."""
    config, device = case.config, DEVICES[case.device]
    run = RunToPlan(config, device, 1, CLASSES)
    link, step = device.link(config.seqpar), max(steps_of(run, config, device, config.seqpar), key=_halo_bytes)

    def seconds(kind: str) -> float:
        return link.seconds(step.sent[kind], step.exchanges[kind], step.messages[kind])

    return {
        "seconds": plan(run, config.seqpar).step_seconds,
        "halos": seconds("window"),
        "statistics": seconds("statistics"),
        "sent": step.sent["window"],
    }


def _halo_bytes(step: CountedStep) -> float:
    return step.sent["window"]


class Stopwatch:
    """Adds up the seconds inside of functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def _worker(config: Config) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    halo_watch, statistics_watch = Stopwatch(), Stopwatch()
    for name in ("start_halo_exchange", "halo_exchange_adjoint"):
        setattr(halos, name, halo_watch.around(getattr(halos, name)))
    for name in ("all_gather", "all_reduce"):
        setattr(moments, name, statistics_watch.around(getattr(moments, name)))
    with start(config.seqpar, device="cpu") as mesh:
        torch.manual_seed(0)
        image, label = torch.randn(1, 1, *config.tile), torch.randint(CLASSES, (1, *config.tile))
        step = Step(build_network(config, 1, CLASSES, mesh.seq), image, label, mesh)
        step()  # the first one takes longer
        halo_watch.seconds = statistics_watch.seconds = 0.0
        sent, began = mesh.seq.traffic["window"], time.perf_counter()
        for _ in range(STEPS):
            step()
        totals = {
            "seconds": time.perf_counter() - began,
            "halos": halo_watch.seconds,
            "statistics": statistics_watch.seconds,
            "sent": mesh.seq.traffic["window"] - sent,
        }
        if mesh.is_first:
            print(json.dumps({name: total / STEPS for name, total in totals.items()}), flush=True)


if __name__ == "__main__":
    _worker(Config.from_dict(json.loads(sys.argv[1])))
