"""Speed-up S = T1/Tn and accuracy of 3D-ResAttNet over devices: measured here, planned for eight, and as published.

Measured are whole runs of ``train`` on phantoms of two groups, on 1, 2, 4, ... of the GPUs or else cores that are
here, each step of as many volumes: by data, by a pipe, by boxes, and by several of these. Tiles are loaded by the ranks
themselves, so that no loader shares a core with a rank. A training of so few steps has learned little: its accuracy
shows that ways of spreading do not differ, ``classes`` beside it what is learned. Planned are steps of volumes of
182 x 218 x 182 mm, six for each group of ranks. T is the time of as many volumes. Published are minutes and accuracies
of the paper's table 3 (ADNI, V100s), and speed-ups of that table; its text has those of the 18-layer rows for the
34-layer network, which a remark says.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lab.benches.series import Row, Runs, Series
from seqpar.cluster.devices import DEVICES, GIB, Device, num_devices
from seqpar.data.phantom.phantom_files import PhantomSettings, write_phantom
from seqpar.planner.needs import RunToPlan, plan
from seqpar.planner.pipeline_plan import plan_run
from seqpar.runs.journal import read_metrics
from seqpar.settings.config import Config

FLAGS = "--task classify --preset debug --augment none --epochs 1 --val-every 0 --workers 0"
MOST = 8  # devices that runs here take
BRAIN = Config(task="classify", network="resattnet18", tile=(184, 224, 184), batch=6, mode="halo", loss="ce")
PLANNED = (  # devices, stages of a pipe, ranks that share a volume
    *((1, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1), (8, 1, 1), (4, 1, 2), (4, 2, 1), (4, 1, 4), (8, 1, 2)),
    *((8, 2, 1), (8, 4, 1), (8, 2, 2), (8, 1, 8)),
)
# as published: accuracies and minutes of 50 epochs on 1 to 8 V100s
ACCURACIES = {
    "18 layers, sMCI and pMCI": (0.82, 0.81, 0.81, 0.82, 0.80, 0.82, 0.81, 0.81),
    "18 layers, AD and NC": (0.95, 0.94, 0.96, 0.92, 0.94, 0.95, 0.95, 0.95),
    "34 layers, sMCI and pMCI": (0.83, 0.84, 0.84, 0.83, 0.84, 0.82, 0.84, 0.84),
    "34 layers, AD and NC": (0.96, 0.96, 0.97, 0.96, 0.97, 0.96, 0.96, 0.96),
}
# for which row the text has the speed-ups of which
MISLABELLED = {
    "34 layers, sMCI and pMCI": "18 layers, sMCI and pMCI",
    "34 layers, AD and NC": "18 layers, AD and NC",
}
MINUTES = {
    "18 layers, sMCI and pMCI": (34, 15, 13, 11, 10, 9, 7, 6),
    "18 layers, AD and NC": (62, 26, 21, 18, 17, 15, 12, 11),
    "34 layers, sMCI and pMCI": (37, 17, 14, 12, 11, 10, 8, 7),
    "34 layers, AD and NC": (68, 29, 24, 21, 19, 16, 14, 12),
}


def v100() -> Device:
    """Returns a V100 of 16 GB by the maker's figures, eight of them joined by NVLink."""
    peak = {"fp32": 15.7e12, "tf32": 15.7e12, "bf16": 15.7e12, "fp64": 7.8e12}
    return replace(DEVICES["a100"], name="V100", memory=16e9, peak=peak, bandwidth=0.8 * 0.9e12)


@dataclass(frozen=True)
class Job:
    """A run to measure: its network and size, and how many steps."""

    network: str
    features: int
    steps: int
    size: tuple[int, int, int]


def series(quick: bool = False) -> list[Series]:
    """Returns the series of runs here, then that of plans and published figures."""
    job = Job("resattnet18", 8, 6, (48, 56, 48)) if quick else Job("resattnet18", 32, 16, (48, 56, 48))
    on_gpu = torch.cuda.is_available()
    return [of_runs(job, 1 if quick else 2, num_devices(on_gpu), on_gpu), of_others(PLANNED[::4] if quick else PLANNED)]


def ways_to_measure(devices: int) -> dict[str, tuple[int, str]]:
    """Returns ranks and flags of train for 1, 2, 4, ... devices, up to so many; all have as many volumes a step."""
    most = min(MOST, 1 << devices.bit_length() - 1)
    volumes, ways = max(4, most), dict[str, tuple[int, str]]()
    for ranks in (1 << power for power in range(most.bit_length())):
        for pipe, seq in ((1, 1), (ranks, 1), (1, ranks), (2, 1), (1, 2), (2, 2)):
            if ranks % (pipe * seq):
                continue
            data, flags = ranks // (pipe * seq), list[str]()
            own = volumes // data
            flags += [f"--pipe {pipe} --batch 1 --accumulate {own}" if pipe > 1 else f"--batch {own}"]
            flags += [f"--seqpar {seq} --mode halo"] if seq > 1 else []
            ways.setdefault(in_words(data, pipe, seq), (ranks, " ".join(flags)))
    return ways


def in_words(data: int, pipe: int, seq: int) -> str:
    """Returns how ranks are spread, "data 2 x pipe 2" of four."""
    parts = [f"data {data}"] * (data > 1) + [f"pipe {pipe}"] * (pipe > 1) + [f"seq {seq}, halo"] * (seq > 1)
    return " x ".join(parts) or "one process"


def of_runs(job: Job, turns: int, devices: int, on_gpu: bool = False) -> Series:
    """Returns the series of runs on 1, 2, 4, ... of so many devices: GPUs, or cores."""
    ways = ways_to_measure(devices)

    def measure(turns: int) -> Generator[tuple[str, Any], None, None]:
        with tempfile.TemporaryDirectory() as folder:
            data = write_phantom(Path(folder, "data"), 30, PhantomSettings.of("dementia", size=job.size))
            for turn in range(turns):
                for case, (ranks, more) in ways.items():
                    out = Path(folder, f"{turn}-{case.replace(' ', '-')}")
                    own = f"--network {job.network} --features {job.features} --iterations {job.steps} {more}"
                    own += f" --tile {' '.join(map(str, job.size))}"  # that boxes of all ways can halve
                    place = f"--data {data} --cache {folder}/cache --out {out}{'' if on_gpu else ' --device cpu'}"
                    start_ranks(ranks, "train", f"{FLAGS} {own} {place}")
                    yield case, step_and_accuracy(out)

    def row(case: str, runs: Runs) -> Row:
        ranks, seconds = ways[case][0], [seconds for seconds, _ in runs[case]]
        speedup = statistics.median(one / own for (one, _), own in zip(runs["one process"], seconds))
        accuracy = statistics.median(accuracy for _, accuracy in runs[case])
        return _row(f"measured, {what}", case, statistics.median(seconds), ranks, speedup, accuracy)

    what = f"{devices} {'GPU' if on_gpu else 'core'}{'s' * (devices > 1)}"
    size, volumes = "x".join(map(str, job.size)), max(4, *(ranks for ranks, _ in ways.values()))
    text = f"a step of {volumes} volumes of {size}, {job.network} from {job.features} features, one thread a rank; "
    text += f"accuracy on held-out brains after {job.steps} steps"
    return Series(text, tuple(ways), turns, (32.0 if turns > 1 else 10.0) * len(ways), measure, row)


def step_and_accuracy(run: Path) -> tuple[float, float]:
    """Returns the median seconds of a run's steps behind the second, and the accuracy of its last validation."""
    rows = read_metrics(run / "metrics.jsonl")
    seconds = [row["seconds"] for row in rows if row["kind"] == "train"][2:]
    return statistics.median(seconds), next(r for r in reversed(rows) if r["kind"] == "val")["scores"]["accuracy"]


def of_others(shapes: Sequence[tuple[int, int, int]]) -> Series:
    """Returns the series of plans for V100s and H100s, by data, pipe and boxes, and of what the paper has.

    - ``shapes``: of plans: devices, stages of a pipe, and how many devices share a volume
    """
    plans = {
        f"planned, {count} x {device}: {count // (pipe * size)} x {pipe} x {size}": (device, count, pipe, size)
        for device in ("V100", "H100")
        for count, pipe, size in shapes
    }
    cases = (*plans, *MINUTES)

    def measure(turns: int) -> Generator[tuple[str, Any], None, None]:
        for _ in range(turns):
            for case in cases:
                yield case, planned_step(*plans[case]) if case in plans else MINUTES[case]

    def row(case: str, runs: Runs) -> Row:
        if case in plans:
            device, count, pipe, size = plans[case]
            (one, _), (own, gib) = planned_step(device, 1, 1, 1), planned_step(device, count, pipe, size)
            data = count // (pipe * size)
            way = in_words(data, pipe, size)
            return _row(f"planned, {device}", way, own, count, data * one / own) | {"GiB a rank": gib}
        minutes, accuracies = MINUTES[case], ACCURACIES[case]
        speedup = minutes[0] / minutes[-1]
        row = _row("published, V100", f"{case}: 1 to 8", 60.0 * minutes[-1], 8, speedup, accuracies[-1])
        remark = f"S {speedups(case)}; accuracy {' '.join(f'{own:.2f}' for own in accuracies)}"
        if other := MISLABELLED.get(case):
            remark += f"; the paper's text says {speedups(other)}, which are those of {other}"
        return row | {"remark": remark}

    seconds = 3.0 * len(plans)
    return Series("eight devices: planned steps, published minutes of a training", cases, 1, seconds, measure, row)


def speedups(case: str) -> str:
    """Returns the speed-ups of 1 to 8 devices by a published row's minutes."""
    return " ".join(f"{MINUTES[case][0] / own:.2f}" for own in MINUTES[case])


@cache
def planned_step(name: str, count: int, pipe: int, size: int) -> tuple[float, float]:
    """Returns the planned seconds of a step of six volumes for each group of ranks, and the GiB on its fullest rank.

    A pipe takes them one by one.

    - ``name``: of the devices, ``count`` of them; ``pipe``: stages; ``size``: how many share a volume
    """
    device = v100() if name == "V100" else DEVICES["h100"]
    if pipe > 1:
        config = replace(BRAIN, batch=1, accumulate=BRAIN.batch, pipe=pipe, seqpar=size)
        own = plan_run(RunToPlan(config, device, 1, 2, ranks=count), count)
    else:
        own = plan(RunToPlan(BRAIN, device, 1, 2, ranks=count), size)
    return own.step_seconds, own.total / GIB


def _row(what: str, case: str, seconds: float, devices: int, speedup: float, accuracy: float | str = "") -> Row:
    return {
        "what": what,
        "case": case,
        "s": seconds,
        "S = T1/Tn": speedup,
        "S / devices": speedup / devices,
        "accuracy": accuracy,
        "GiB a rank": "",
        "remark": "",
    }


def start_ranks(ranks: int, act: str, flags: str) -> None:
    """Runs an act on so many processes of one thread each; raises RuntimeError with what it said where it fails."""
    line = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", f"seqpar.cli.{act}"]
    done = subprocess.run(
        [sys.executable, *line, *flags.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{act} {flags} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
