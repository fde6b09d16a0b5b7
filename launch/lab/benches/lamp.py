"""Times LAMP's U-Nets on a whole image against windows of 64 and 128, by size, beside the figures of its paper.

Times are CPU seconds of one thread on an image with half the sides of its largest head and neck image; windows overlap
by a quarter. The paper's are seconds of several GPUs on whole cases ("whole" of the liver: windows of 256): its tables
3 and 5.
"""

import statistics
from collections.abc import Sequence
from functools import partial

from lab.benches.predict import predict_apart
from lab.benches.series import Row, Runs, Series, alternate, ratio
from seqpar.settings.config import Config

SHAPE, TILES, OVERLAP, CLASSES = (176, 128, 144), (64, 128), 0.25, 10
FEATURES = (32, 64, 128)
# by features and window: seconds of a head and neck case, of a liver case
PAPER = {
    (32, 64): (1.21, 6.78), (32, 128): (1.1, 1.77), (32, 0): (0.61, 1.52),
    (64, 64): (1.75, 14.52), (64, 128): (1.19, 3.30), (64, 0): (0.96, 2.11),
    (128, 64): (2.53, 25.37), (128, 128): (1.23, 5.84), (128, 0): (0.90, 4.39),
}  # fmt: skip


def series(quick: bool = False) -> list[Series]:
    """Returns a series: each size on a whole image, then by windows; if quick the smallest, by windows of 64 alone."""
    return [of_sizes(SHAPE, TILES[:1] if quick else TILES, FEATURES[:1] if quick else FEATURES)]


def of_sizes(shape: tuple[int, ...], tiles: Sequence[int], features: Sequence[int]) -> Series:
    """Returns the series of some sizes: of each a whole pass, then windows of ``tiles``."""
    cases = {_name(size, tile): (size, tile) for size in features for tile in (0, *tiles)}

    def measure(case: str) -> dict[str, float]:
        size, tile = cases[case]
        config = Config(network="unet-lamp", features=size, tile=(tile or 64,) * 3)
        return predict_apart(shape, tile, config, CLASSES, OVERLAP)

    def row(case: str, runs: Runs) -> Row:
        size, tile = cases[case]
        whole = runs[_name(size, 0)]
        theirs = PAPER.get((size, tile), ("", ""))
        times = [_times(size, tile, which) for which in (0, 1)]
        return {
            "net": f"U-Net-{size}",
            "input": f"windows of {tile}" if tile else "whole",
            "cpu_s": statistics.median(run["cpu_s"] for run in runs[case]),
            "times_whole": ratio([run["cpu_s"] for run in runs[case]], [run["cpu_s"] for run in whole]),
            "voxels_times_whole": ratio([run["voxels"] for run in runs[case]], [run["voxels"] for run in whole]),
            "LAMP, head and neck, s": theirs[0],
            "LAMP, times whole": times[0],
            "LAMP, liver, s": theirs[1],
            "LAMP, liver, times 256": times[1],
        }

    what = f"prediction of {'x'.join(map(str, shape))} voxels by LAMP's U-Nets, whole and by windows"
    return Series(what, tuple(cases), 1, 13.0 * len(cases), partial(alternate, tuple(cases), measure), row)


def _name(size: int, tile: int) -> str:
    return f"U-Net-{size}, {tile or 'whole'}"


def _times(size: int, tile: int, which: int) -> float | str:
    """Returns how many times the whole image's time the paper's figure is, "" where it has none."""
    return PAPER[size, tile][which] / PAPER[size, 0][which] if (size, tile) in PAPER else ""
