"""What a whole pass and sliding windows do, in nanoseconds a voxel: why a pass is less quick than its voxels are fewer.

torch's profiler adds up the time of each operator alone, on one thread, and costs some itself; what is left over is
between operators: sums of windows, copies by numpy.
"""

import statistics
from collections.abc import Sequence
from functools import partial

from lab.benches.operator_seconds import KINDS
from lab.benches.predict import NETWORK, SHAPE, U_NET, predict_apart
from lab.benches.series import Row, Runs, Series, alternate
from seqpar.settings.config import Config

TILE = 96
PARTS = (*(name for name in KINDS if name != "messages"), "norms, sums, activations", "between operators")


def series(quick: bool = False) -> list[Series]:
    """Returns one series, none if quick: a ViT and a U-Net, each by a whole pass and by windows."""
    return [] if quick else [of_networks([NETWORK, U_NET], SHAPE, TILE, 3)]


def of_networks(configs: Sequence[Config], shape: tuple[int, ...], tile: int, turns: int) -> Series:
    """Returns the series of some networks over a volume of ``shape`` and windows of ``tile``."""
    cases = {
        f"{config.network}, {f'windows of {windows}' if windows else 'whole'}": (config, windows)
        for config in configs
        for windows in (0, tile)
    }

    def measure(case: str) -> dict[str, float]:
        config, windows = cases[case]
        run = predict_apart(shape, windows, config, 4, profiled=True)
        seconds = [run["kinds"][name] for name in PARTS[:-2]] + [run["kinds"][""]]
        seconds.append(run["cpu_s"] - sum(seconds))
        return {"all": 1e9 * run["cpu_s"] / run["voxels"]} | {
            name: 1e9 * value / run["voxels"] for name, value in zip(PARTS, seconds)
        }

    def row(case: str, runs: Runs) -> Row:
        return {"prediction": case} | {
            f"{name}, ns": statistics.median(run[name] for run in runs[case]) for name in ("all", *PARTS)
        }

    what = f"nanoseconds a voxel of {'x'.join(map(str, shape))}, as often as windows cover it, by what they go to"
    return Series(what, tuple(cases), turns, 20.0 * len(cases), partial(alternate, tuple(cases), measure), row)
