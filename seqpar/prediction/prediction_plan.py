"""Plans prediction: what windows, and a pass over the whole of a volume, take on each of so many ranks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from seqpar.cluster.devices import GIB, Device
from seqpar.models.build import kind_of
from seqpar.models.outline import outline
from seqpar.parallel.mesh import Group
from seqpar.planner.attention_choice import choose_quickest
from seqpar.prediction.prediction_memory import footprint
from seqpar.prediction.windows import Sliding
from seqpar.settings.config import Config


def print_prediction(
    config: Config, shape: Sequence[int], device: Device, sizes: Sequence[int], channels: int, classes: int
) -> int:
    """Prints the plan, each group size as soon as it is counted: the GiB on a rank; returns 0.

    - ``shape``: of the volume
    - ``sizes``: numbers of ranks that share a window, or the whole volume
    """
    for line in _lines(config, shape, device, sizes, channels, classes):
        print(line, flush=True)
    return 0


def _lines(
    config: Config, shape: Sequence[int], device: Device, sizes: Sequence[int], channels: int, classes: int
) -> Iterator[str]:
    if config.task == "classify":
        raise ValueError("--predict with --task classify: a case passes whole, and takes less than a step of training: "
                         "leave it out")  # fmt: skip
    if len(shape) != 3:
        raise ValueError("--predict needs the --volume to predict: its sides in voxels")
    every = math.prod(shape) * classes * (8 if config.precision == "fp64" else 4)
    tile = "x".join(map(str, config.tile))
    yield (
        f"prediction of {'x'.join(map(str, shape))} voxels by {kind_of(config).describe(config)}: {classes} classes, "
        f"{every / GIB:.1f} GiB of logits that lie nowhere at once"
    )
    yield f"{device.name}: {device.memory / GIB:.1f} GiB; a rank takes, in GiB (! more than there is):"
    yield f"{'seqpar':>6} | windows of {tile} | a whole pass"
    width = len(f"windows of {tile}")
    for size in sizes:
        cells = []
        for sliding in (Sliding(config.tile, config.val_overlap), None):
            try:
                total = _bytes(config, shape, device, size, channels, classes, sliding)
            except ValueError as error:
                cells.append(str(error))
            else:
                cells.append(f"{total / GIB:.2f}{'' if total <= device.memory else '!'}")
        yield f"{size:>6} | {cells[0]:>{width}} | {cells[1]:>12}"


def _bytes(
    config: Config,
    shape: Sequence[int],
    device: Device,
    size: int,
    channels: int,
    classes: int,
    sliding: Sliding | None,
) -> int:
    """Returns the bytes on the rank of a group that holds most."""
    mode = config.mode if config.mode == "nogather" else "auto"
    config = choose_quickest(replace(config, seqpar=size, mode=mode, batch=1), device.of(size))
    net = outline(config, Group("seq", tuple(range(size))), channels, classes)
    return footprint(net, shape, classes, size, sliding=sliding).total
