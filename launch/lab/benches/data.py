"""Measures the tiles per second of augmentation, against nnU-Net's default list in batchgeneratorsv2, which it uses.

All pipelines run in one process on one thread. Times are CPU seconds, which a busy machine affects little. Ratios are
speeds relative to the first row.
"""

import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lab.benches.series import Row, Runs, Series, spread
from seqpar.data.sampling.augmentation import Augmentation, augment

TILE, CHANNELS = (96, 96, 96), 4
BATCHGENERATORS = {  # orders of interpolation of image and label
    "batchgenerators, nnU-Net default, order 3/1": (3, 1),
    "batchgenerators, nnU-Net default, order 1/0": (1, 0),
}
OURS = ("none", "light", "full", "paper")
VERSION_2 = "batchgeneratorsv2, nnU-Net default, linear"


def series(quick: bool = False) -> list[Series]:
    """Returns one series: every pipeline augments the same number of tiles in a turn."""
    names = [*BATCHGENERATORS, *OURS]
    if importlib.util.find_spec("batchgeneratorsv2"):
        names.insert(0, VERSION_2)
    measure = partial(_measure, names, 5 if quick else 10)
    return [
        Series(
            f"augmentation of tiles of {TILE[0]}", tuple(names), 2 if quick else 8, 5.0 if quick else 9.0, measure, _row
        )
    ]


def _row(case: str, runs: Runs) -> Row:
    """Returns a pipeline's row: tiles a second, ms per tile in the mean and the median turn, how many times as fast."""
    mean, first = statistics.mean(runs[case]), next(iter(runs.values()))
    return {
        "pipeline": case,
        "tiles_per_s": 1 / mean,
        "mean_ms": 1000 * mean,
        "median_round_ms": 1000 * statistics.median(runs[case]),
        "ratio": statistics.mean(first) / mean,
        "of turns": spread(first, runs[case]),
    }


def _measure(names: Sequence[str], tiles: int, turns: int) -> Generator[tuple[str, float], None, None]:
    """Yields each pipeline with its CPU seconds per tile, turn after turn, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pipelines = _pipelines(names)
        for run in pipelines.values():
            run(0)  # imports libraries
        for turn in range(turns):
            for name, run in pipelines.items():
                began = time.process_time()
                for seed in range(turn * tiles, (turn + 1) * tiles):
                    run(seed)
                yield name, (time.process_time() - began) / tiles
    finally:
        torch.set_num_threads(threads)


def _pipelines(names: Sequence[str]) -> dict[str, Callable[[int], object]]:
    """Returns what augments the tile of a seed, by the pipeline's name."""
    rng, size = np.random.default_rng(0), largest_source()
    image = rng.standard_normal((CHANNELS, *size), dtype=np.float32)
    label = rng.integers(0, 4, [n // 8 + 1 for n in size], dtype=np.int16)
    for direction, n in enumerate(size):
        label = label.repeat(8, direction).take(range(n), direction)
    pipelines: dict[str, Callable[[int], object]] = {}
    for name in names:
        if name in BATCHGENERATORS:
            pipelines[name] = _batchgenerators(image, label, *BATCHGENERATORS[name])
        elif name == VERSION_2:
            pipelines[name] = _batchgeneratorsv2(image, label)
        else:
            pipelines[name] = _ours(augment(name, TILE), image, label)
    return pipelines


def largest_source() -> tuple[int, ...]:
    """Returns the size of a source that is large enough for all augmentations."""
    return tuple(map(max, *(augment(name, TILE).source_size for name in OURS)))


def _ours(augmentation: Augmentation, image: NDArray[Any], label: NDArray[Any]) -> Callable[[int], object]:
    """Returns a function that, like the loader, crops only what the seed's augmentation needs, and augments it."""

    def run(seed: int) -> object:
        size = augmentation.needed_size(seed)
        middle = tuple(slice((n - s) // 2, (n - s) // 2 + s) for n, s in zip(label.shape, size))
        return augmentation(image[(slice(None), *middle)], label[middle], seed)

    return run


def _batchgenerators(image: NDArray[Any], label: NDArray[Any], order: int, order_label: int) -> Callable[[int], object]:
    """Returns a function that runs nnU-Net's default list, made of batchgenerators' transforms."""
    from batchgenerators.transforms import color_transforms as color
    from batchgenerators.transforms import noise_transforms as noise
    from batchgenerators.transforms.abstract_transforms import Compose
    from batchgenerators.transforms.resample_transforms import SimulateLowResolutionTransform
    from batchgenerators.transforms.spatial_transforms import MirrorTransform, SpatialTransform

    angle = (-np.pi / 6, np.pi / 6)
    whole = Compose(
        [
            SpatialTransform(
                TILE,
                None,
                do_elastic_deform=False,
                angle_x=angle,
                angle_y=angle,
                angle_z=angle,
                scale=(0.7, 1.4),
                border_mode_data="constant",
                border_cval_seg=-1,
                order_data=order,
                order_seg=order_label,
                random_crop=False,
                p_scale_per_sample=0.2,
                p_rot_per_sample=0.2,
            ),
            noise.GaussianNoiseTransform(p_per_sample=0.1),
            noise.GaussianBlurTransform((0.5, 1.0), p_per_sample=0.2, p_per_channel=0.5),
            color.BrightnessMultiplicativeTransform((0.75, 1.25), p_per_sample=0.15),
            color.ContrastAugmentationTransform(p_per_sample=0.15),
            SimulateLowResolutionTransform(
                (0.5, 1), per_channel=True, p_per_channel=0.5, order_downsample=0, order_upsample=3, p_per_sample=0.25
            ),
            color.GammaTransform((0.7, 1.5), True, True, retain_stats=True, p_per_sample=0.1),
            color.GammaTransform((0.7, 1.5), False, True, retain_stats=True, p_per_sample=0.3),
            MirrorTransform((0, 1, 2)),
        ]
    )

    def run(seed: int) -> object:
        np.random.seed(seed)
        random.seed(seed)
        return whole(data=image[None], seg=label[None, None])  # its first transform makes new arrays

    return run


def _batchgeneratorsv2(image: NDArray[Any], label: NDArray[Any]) -> Callable[[int], object]:
    """Returns a function that runs nnU-Net's default list in batchgeneratorsv2, which is optional."""
    from batchgeneratorsv2.transforms.intensity.brightness import MultiplicativeBrightnessTransform
    from batchgeneratorsv2.transforms.intensity.contrast import BGContrast, ContrastTransform
    from batchgeneratorsv2.transforms.intensity.gamma import GammaTransform
    from batchgeneratorsv2.transforms.intensity.gaussian_noise import GaussianNoiseTransform
    from batchgeneratorsv2.transforms.noise.gaussian_blur import GaussianBlurTransform
    from batchgeneratorsv2.transforms.spatial.low_resolution import SimulateLowResolutionTransform
    from batchgeneratorsv2.transforms.spatial.mirroring import MirrorTransform
    from batchgeneratorsv2.transforms.spatial.spatial import SpatialTransform
    from batchgeneratorsv2.transforms.utils.compose import ComposeTransforms
    from batchgeneratorsv2.transforms.utils.random import RandomTransform

    whole = ComposeTransforms(
        [
            SpatialTransform(
                TILE,
                0,
                False,
                p_rotation=0.2,
                rotation=(-np.pi / 6, np.pi / 6),
                p_scaling=0.2,
                scaling=(0.7, 1.4),
                p_synchronize_scaling_across_axes=1,
                bg_style_seg_sampling=False,
            ),
            RandomTransform(GaussianNoiseTransform((0, 0.1), 1, True), 0.1),
            RandomTransform(GaussianBlurTransform((0.5, 1.0), False, False, 0.5), 0.2),
            RandomTransform(MultiplicativeBrightnessTransform(BGContrast((0.75, 1.25)), False, 1), 0.15),
            RandomTransform(ContrastTransform(BGContrast((0.75, 1.25)), True, False, 1), 0.15),
            RandomTransform(SimulateLowResolutionTransform((0.5, 1), False, True, (), None, 0.5), 0.25),
            RandomTransform(GammaTransform(BGContrast((0.7, 1.5)), 1, False, 1, 1), 0.1),
            RandomTransform(GammaTransform(BGContrast((0.7, 1.5)), 0, False, 1, 1), 0.3),
            MirrorTransform((0, 1, 2)),
        ]
    )

    def run(seed: int) -> object:
        np.random.seed(seed)
        torch.manual_seed(seed)
        return whole(image=torch.from_numpy(image), segmentation=torch.from_numpy(label)[None])

    return run
