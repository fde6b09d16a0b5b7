"""Small tiles, larger ones and whole volumes: one kind of network trained on equally many voxels of phantoms.

Phantoms are the nine organs of heads and necks, where left and right differ by their side alone: what a tile does not
show of its surroundings a network has to do without. Each tile has the stages that nnU-Net plans for it. A step has
about as many voxels for every tile, so that steps and voxels are alike and the time is nearly so; held-out cases are
predicted as each network was trained, in sliding windows, or whole.
"""

import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lab.benches.series import LAUNCH, Row, Runs, Series, alternate
from seqpar.data.phantom.kinds import KINDS
from seqpar.data.phantom.phantom_files import PhantomSettings, write_phantom
from seqpar.runs.journal import read_metrics
from seqpar.runs.run_folder import read_config

TRAIN = LAUNCH / "train.py"
SIZE = KINDS["organs"].size
TILES = ("16", "24", "whole")
CASES, STEPS, EPOCH = 20, 350, 50
FLAGS = """
    --preset laptop --device cpu --network nnunet-plain --augment none --workers 0 --val-every 0 --lr 5e-3
    --deep-supervision --no-output-bias --class-weights 0.05 1 2 1 2 2 1 1 1 1
"""


def series(quick: bool = False) -> list[Series]:
    """Returns one series: a training for each tile; quick ones are too short to say anything of tiles."""
    return [of_tiles(("16", "whole"), 50, 1) if quick else of_tiles(TILES, STEPS, 1)]


def of_tiles(tiles: Sequence[str], steps: int, turns: int, size: Sequence[int] = SIZE, cases: int = CASES) -> Series:
    """Returns the series of trainings of so many steps on phantoms of ``size``."""

    def measure(tile: str) -> dict[str, float]:
        return trained(tile, steps, size, cases)

    def row(tile: str, runs: Runs) -> Row:
        middle = sorted(runs[tile], key=lambda run: run["mean"])[len(runs[tile]) // 2]
        return {
            "tile": tile,
            "batch": batch_of(tile, size),
            "steps": steps,
            "million voxels": middle["voxels"] / 1e6,
            "CPU s": middle["seconds"],
            "million parameters": middle["parameters"] / 1e6,
            "Dice of nine organs": middle["mean"],
            "of the three pairs": middle["pairs"],
        }

    what = f"nnunet-plain on phantoms of {'x'.join(map(str, size))} voxels, tile by tile"
    return Series(what, tuple(tiles), turns, 0.2 * steps * len(tiles), partial(alternate, tuple(tiles), measure), row)


def batch_of(tile: str, size: Sequence[int]) -> int:
    """Returns the tiles of a step, which has about as many voxels as a whole volume."""
    return 1 if tile == "whole" else max(1, round(math.prod(size) / int(tile) ** 3))


def trained(tile: str, steps: int, size: Sequence[int], cases: int) -> dict[str, float]:
    """Returns what a training in a process of its own comes to: CPU seconds, parameters, held-out cases' Dice."""
    with tempfile.TemporaryDirectory() as folder:
        settings = PhantomSettings.of("organs", None, (size[0], size[1], size[2]), 0)
        data, out = write_phantom(folder, cases, settings), Path(folder) / "run"
        epochs, batch = max(1, steps // EPOCH), batch_of(tile, size)
        how = ["--tile", tile, "--batch", str(batch), "--epochs", str(epochs)]
        if tile == "whole":
            how = ["--curriculum", f"whole:{epochs}:{batch}", "--val-window", "whole"]
        how += ["--iterations", str(min(steps, EPOCH)), "--data", str(data), "--out", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SEQPAR_CACHE": f"{folder}/cache"}
        before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        command = [sys.executable, str(TRAIN), *FLAGS.split(), *how]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stderr[-2000:]}")
        seconds = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
        content = read_config(out)
        (scores,) = [row["dice"] for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "val"]
    dice = {name: value for name, value in scores.items() if value is not None}  # no held-out case shows the others
    pairs = [value for name, value in dice.items() if name.endswith(("_left", "_right"))]
    return {
        "seconds": seconds,
        "voxels": math.prod(content["config"]["tile"]) * batch * steps,
        "parameters": sum(content["layout"]["parameters"].values()),
        "mean": statistics.mean(dice.values()),
        "pairs": statistics.mean(pairs),
    }
