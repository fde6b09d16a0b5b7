"""Compares a pass over a whole volume with sliding windows: time, memory, and seams at the borders of windows.

Windows are ours, and those of nnU-Net and MONAI at their defaults: with nnU-Net a step of half a tile, Gaussian weights
and all mirrored views, with MONAI an overlap of 0.25 and equal weights. Where nnU-Net is not installed, our code
computes its windows, and the row says so. Each run has a new process, so that its peak memory is its own. Times are CPU
seconds, which a busy machine affects little. Ratios are relative to the first row, the whole pass. ``seam`` says how
many times more the probabilities change between neighbouring rows of voxels at window borders than elsewhere.
``parts`` shows where the time goes.
"""

import math
import multiprocessing
import resource
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lab.benches.other_libraries import WINDOWS, windows_here
from lab.benches.series import Row, Runs, Series, alternate, ratio
from lab.benches.step_profile import KINDS, seconds_by_kind
from seqpar.cluster.torch_setup import keep_memory
from seqpar.models.build import build_network
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group
from seqpar.parallel.rendezvous import join
from seqpar.prediction.sliding_window import sliding_window, whole_volume
from seqpar.prediction.window_grid import Sliding, WindowGrid, mirrors
from seqpar.settings.config import Config

SHAPE, TILES, OVERLAP = (240, 240, 155), (96, 64), 0.5
NNUNET, MONAI = "nnU-Net", "MONAI"
NETWORK = Config(
    tile=(96, 96, 96), patch=(16, 16, 16), embed_dim=192, depth=6, heads=6, decoder_width=32, positions="sincos"
)
STAGES = "333:111 333:222 333:222 333:222"  # of every tile: the same weights
U_NET = Config(network="nnunet-plain", tile=(96, 96, 96), stages=STAGES, features=8)
PARTS = (*(name for name in KINDS if name != "messages"), "norms, sums, activations", "between operators")


@dataclass(frozen=True)
class Way:
    """How a volume is predicted: by windows of ``tile`` voxels a side; 0: in one pass.

    - ``by``: whose code slides the window; "": ours
    - ``rule``: where windows start and what their voxels weigh
    - ``is_mirrored``: whether all flips of each window are predicted too
    """

    tile: int = 0
    by: str = ""
    rule: str = "stride"
    overlap: float = OVERLAP
    is_mirrored: bool = False

    def __str__(self) -> str:
        if not self.tile:
            return "whole"
        own = self.by or ("" if self.rule == "stride" else f"as {self.rule}, by our code")
        words = [f"sliding {self.tile}", f"overlap {self.overlap}", *[own] * bool(own)]
        return ", ".join([*words, *["mirrored"] * self.is_mirrored])

    @property
    def sliding(self) -> Sliding:
        """The windows as ours; nnU-Net's are summed in half precision."""
        sums = "half" if self.rule == "nnU-Net" else "float"
        mirror = (0, 1, 2) if self.is_mirrored else ()
        return Sliding((self.tile,) * 3, self.overlap, "gaussian", 1, mirror, self.rule, sums)


def peers(tile: int) -> list[Way]:
    """Returns nnU-Net's windows, without mirrored views and with them, and those of MONAI if it is installed."""
    nnunet = NNUNET if NNUNET in windows_here() else ""
    monai = [Way(tile, MONAI, overlap=0.25)] if MONAI in windows_here() else []
    return [Way(tile, nnunet, NNUNET), *monai, Way(tile, nnunet, NNUNET, is_mirrored=True)]


def series(quick: bool = False) -> list[Series]:
    """Returns a series for a ViT and one for a U-Net; if quick, with windows of the first tile, none mirrored."""
    tiles = TILES[:1] if quick else TILES
    ways = [Way(), *map(Way, tiles), *(way for way in peers(tiles[0]) if not (quick and way.is_mirrored))]
    return [of_network(config, SHAPE, ways, 4) for config in (NETWORK, U_NET)]


def of_network(config: Config, shape: Sequence[int], ways: Sequence[Way], num_classes: int) -> Series:
    """Returns a network's series; the first of ``ways`` is what others are compared with."""
    cases = {str(way): way for way in ways}
    first = str(ways[0])

    def row(case: str, runs: Runs) -> Row:
        def to_whole(column: str) -> float | str:
            return ratio(*([run[column] for run in runs[name]] for name in (case, first)))

        columns = {name: statistics.median(run[name] for run in runs[case]) for name in runs[case][0]}
        network = "" if config.network == "vit" else f", {config.network}"
        return {
            "name": case + network,
            **columns,
            "times_whole": to_whole("cpu_s"),
            "voxels_times_whole": to_whole("voxels"),
        }

    voxels = "x".join(map(str, shape))
    what = f"prediction of {voxels} voxels by {config.network}, by a whole pass and by sliding windows"
    measure = partial(
        alternate, tuple(cases), lambda case: predict_apart(tuple(shape), cases[case], config, num_classes)
    )
    seconds = sum(100.0 if way.is_mirrored else 15.0 for way in ways)
    missing = "" if MONAI in windows_here() else "MONAI is not installed: without a row."
    return Series(what, tuple(cases), 1, seconds, measure, row, lambda _: missing)


def predict_apart(
    shape: tuple[int, ...], way: Way, config: Config, num_classes: int, profiled: bool = False
) -> dict[str, Any]:
    """Returns what a new process measures of a prediction.

    If ``profiled``, ``kinds`` has the seconds of its operators by kind; profiling slows the pass down.
    """
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(writer, shape, way, config, num_classes, profiled))
    child.start()
    writer.close()
    try:
        run: dict[str, Any] = reader.recv()
    except EOFError:
        raise MemoryError(f"predicting {shape} voxels ({way}) ended without a result, as when killed") from None
    except KeyboardInterrupt:
        child.kill()
        raise
    finally:
        child.join()
    return run


def _measure(result: Any, shape: tuple[int, ...], way: Way, config: Config, num_classes: int, profiled: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    torch.set_num_threads(1)
    keep_memory()  # as predict does
    mesh = join(Launcher("bench"), None, 1, torch.device("cpu"))
    if way.tile:  # the same weights: sine-cosine positions fit every tile
        config = replace(config, tile=(way.tile,) * 3)
    net = build_network(config, 1, num_classes, Group("seq")).eval()
    image = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    sliding = way.sliding if way.tile else Sliding(config.tile, way.overlap)
    window_grid = WindowGrid.of(shape, sliding)
    padded = (-(-side // p) * p for side, p in zip(shape, net.layout.patch))
    views = len(mirrors(sliding.mirror, 3))
    voxels = views * len(window_grid.corners) * way.tile**3 if way.tile else math.prod(padded)

    def predict(image: Tensor) -> Tensor:
        if way.by:
            return WINDOWS[way.by](net, image, config.tile, num_classes, way.is_mirrored)
        slabs = sliding_window([net], image, sliding, mesh) if way.tile else whole_volume([net], image, mesh)
        return torch.cat([slab.logits for slab in slabs], 1)

    with profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext(), torch.no_grad():
        predict(torch.zeros(1, *config.tile))  # excludes one-time work, such as starting the profiler
    profiler = profile(activities=[ProfilerActivity.CPU]) if profiled else None
    with profiler or nullcontext(), torch.no_grad():  # the profiler's own end takes a second
        before, began = _peak(), time.process_time()
        logits = predict(image)
        seconds, peak = time.process_time() - began, _peak() - before
    measured: dict[str, Any] = {
        "cpu_s": seconds,
        "peak_mb": peak,
        "voxels": voxels,
        "seam": seam_strength(logits.float().softmax(0), window_grid),
    }
    if profiler:
        measured["kinds"] = seconds_by_kind(profiler.key_averages())
    result.send(measured)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def parts(quick: bool = False) -> list[Series]:
    """Returns one series, none if quick: a ViT and a U-Net, each by a whole pass and by windows."""
    return [] if quick else [parts_of([NETWORK, U_NET], SHAPE, TILES[0], 3)]


def parts_of(configs: Sequence[Config], shape: tuple[int, ...], tile: int, turns: int) -> Series:
    """Returns the series of some networks over a volume of ``shape`` and windows of ``tile``."""
    cases = {
        f"{config.network}, {f'windows of {windows}' if windows else 'whole'}": (config, windows)
        for config in configs
        for windows in (0, tile)
    }

    def measure(case: str) -> dict[str, float]:
        config, windows = cases[case]
        run = predict_apart(shape, Way(windows), config, 4, profiled=True)
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


def seam_strength(probabilities: Tensor, windows: WindowGrid) -> float:
    """Returns how many times more probabilities ``k W D H`` change along W at window borders than elsewhere.

    NaN if no border is inside the volume.
    """
    jumps = (probabilities[:, 1:] - probabilities[:, :-1]).abs().mean((0, 2, 3))  # from each row to the next
    edges = {at + side for at in windows.starts[0] for side in (0, windows.tile[0])}
    border = torch.zeros(len(jumps), dtype=torch.bool)
    border[[edge - 1 for edge in sorted(edges) if 0 < edge < windows.shape[0]]] = True
    return float(jumps[border].mean() / jumps[~border].mean())
