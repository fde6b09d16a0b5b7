"""``--preset auto``: spacing, patch, widths, tile and batch from a data set's headers and the device's memory.

As nnU-Net plans: the spacing is the cases' median, the tile as large as fits with two of them, the batch what is left.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace

from seqpar.cluster.devices import GIB, Device
from seqpar.data.preparation.fingerprint import Fingerprint, Millimetres, Sides
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.models.build import family_of
from seqpar.planner.fit import largest_batch
from seqpar.planner.needs import RunToPlan
from seqpar.planner.pipeline_plan import plan_run
from seqpar.planner.tile_choice import shape_at, smaller_tiles, suited_tile, target_spacing
from seqpar.settings.config import Config
from seqpar.settings.curriculum import parse_curriculum
from seqpar.text import format_sides, quantity

WIDTHS = ((768, 12, 12), (384, 12, 6), (192, 12, 3))  # --embed-dim, --depth, --heads for GPUs, the widest first
CPU_WIDTHS = ((96, 3, 4),)
MOST_VOXELS, CPU_VOXELS = 192**3, 64**3  # of a tile, with patch 8: beyond, time decides and not memory
USUAL_VOXELS = 96**3  # a width is taken if a tile of this size fits
LEAST_BATCH, CPU_BATCH, MOST_BATCH = 2, 2, 32
SHARE = 0.05  # of all voxels in a step, at most: nnU-Net's batch, which all its devices share
LONGEST_PATCH, LEAST_TOKENS = 8, 4  # voxels of a token's longest side, and tokens along a direction


def plan_from_data(
    config: Config, flags: Collection[str], fingerprint: Fingerprint, device: Device, ranks: int
) -> tuple[Config, dict[str, tuple[str, ...]]]:
    """Returns the config with what the data and the device decide, and sentences why, by name.

    - ``flags``: the settings on the command line, which stay as they are
    - ``ranks``: of the run
    """
    channels, outputs = len(fingerprint.modalities), len(fingerprint.outputs(config.targets))
    config, spacing_line = _with_spacing(config, flags, fingerprint)
    if "mode" not in flags:
        config = replace(config, mode="auto")  # with several ranks a decoder that they share fits larger tiles
    spacing = _resampled_to(config)
    shape, size = shape_at(fingerprint, spacing), spacing or fingerprint.spacing
    search = _Search(replace(config, seqpar=config.seqpar or 1), flags, device, ranks, channels, outputs, shape, size)
    search.choose_patch()
    if config.curriculum:
        search.take_lessons(fingerprint.largest(spacing or "source"))
    width_line = search.choose_widths()
    tile_line = search.choose_tile()
    data_line = (
        f"auto: {quantity(len(fingerprint.ids), 'case')}, median {_by(shape)} voxels of {_by(size)} mm, not cropped; "
        f"{quantity(channels, 'channel')}, {outputs} outputs; {device.memory / GIB:.0f} GiB of {device.name}"
    )
    lines = {"data": data_line, "spacing": spacing_line, "widths": width_line, "tile": tile_line}
    if not config.curriculum:  # its lessons have batches of their own
        lines["batch"] = search.choose_batch(sum(_voxels(fingerprint, spacing)))
    chosen = replace(search.config, seqpar=config.seqpar)
    return chosen, {f"auto_{name}": (line,) for name, line in lines.items()}


def _with_spacing(config: Config, flags: Collection[str], fingerprint: Fingerprint) -> tuple[Config, str]:
    if "spacing" in flags:
        return config, f"  --spacing {config.spacing}, as given"
    target = target_spacing(fingerprint)
    if target is None:
        return replace(config, spacing="source"), "  --spacing source: all cases have the same"
    text = ",".join(f"{size:g}" for size in target)
    return replace(config, spacing=text), f"  --spacing {text}: the cases' median (nnU-Net's rule)"


def _resampled_to(config: Config) -> Millimetres | None:
    """Returns the sizes in mm that the config names, None for those of the files."""
    spacing = PrepareSettings.spaced(config.spacing).spacing
    return None if isinstance(spacing, str) else spacing


def _voxels(fingerprint: Fingerprint, spacing: Millimetres | None) -> list[float]:
    """Returns the voxels of each case after preparation."""
    cases = zip(fingerprint.shapes, fingerprint.spacings)
    return [math.prod(n * size / to for n, size, to in zip(shape, sizes, spacing or sizes)) for shape, sizes in cases]


class _Search:
    """The search for what fits, setting after setting; ``config`` is what was chosen so far.

    ``shape`` and ``size``: voxels of the median case, and mm of a voxel.
    """

    def __init__(
        self, config: Config, flags: Collection[str], device: Device, ranks: int, channels: int, outputs: int,
        shape: Sides, size: Millimetres,
    ) -> None:  # fmt: skip
        self.config, self.flags, self.device, self.ranks = config, frozenset(flags), device, ranks
        self.channels, self.outputs, self.shape, self.size = channels, outputs, shape, size
        self.tile_voxels = float(CPU_VOXELS if device.cores else MOST_VOXELS)
        self.tile_line = ""  # what is said of tiles that are not chosen

    def choose_patch(self) -> None:
        """Takes tokens that are about as long in mm in every direction, and bounds their number."""
        if "patch" not in self.flags and family_of(self.config).attends:
            sides = [_patch_side(size / min(self.size), side) for size, side in zip(self.size, self.shape)]
            self.config = replace(self.config, patch=tuple(sides if max(sides) > 1 else [2] * 3))
        if family_of(self.config).attends:  # attention's time grows with the square of the tokens
            self.tile_voxels *= min(1.0, math.prod(self.config.patch) / LONGEST_PATCH**3)

    def take_lessons(self, largest: Sides) -> None:
        """Takes the largest tile of a curriculum for the one to plan by; ``largest``: sides that hold every case.

        An nnU-Net's stages are laid out for the first one.
        """
        tiles = [entry.tile or largest for entry in parse_curriculum(self.config.curriculum)]
        self.config = self._with_stages(replace(self.config, tile=tiles[0]))
        self.config = replace(family_of(self.config).pinned(self.config), tile=max(tiles, key=math.prod))
        self.tile_line = f"  tiles and batches of --curriculum, as given; the largest is {_by(self.config.tile)}"
        self.flags |= {"tile"}

    def choose_widths(self) -> str:
        """Takes the widest network that fits with a usual tile, or with the one that was typed; returns why."""
        kind = family_of(self.config)
        names = ("embed_dim", "depth", "heads") if kind.attends else ("features", "stages")
        typed = [name for name in names if name in self.flags]
        if typed or not kind.attends:
            how = f"{', '.join(typed)} as given" if typed else "as published"
            return f"  {kind.describe(self.config)}, {how}"
        widths = CPU_WIDTHS if self.device.cores else WIDTHS
        if "tile" in self.flags:
            tile, which = tuple(self.config.tile), f"the tile of {format_sides(self.config.tile)}"
        else:
            tile = tuple(self._tile_of(min(USUAL_VOXELS, self.tile_voxels)))
            which = f"a usual tile ({format_sides(tile)})"
        why = "narrow, for a CPU" if len(widths) == 1 else f"the narrowest: wider ones do not fit with {which}"
        for width, depth, heads in widths:
            self.config = replace(self.config, embed_dim=width, depth=depth, heads=heads)
            if (width, depth, heads) != widths[-1] and self.fits(tile):
                why = f"the widest that fits with {which}"
                break
        return f"  {kind.describe(self.config)}: {why}"

    def choose_tile(self) -> str:
        """Takes the largest tile that fits with the least batch; returns why."""
        described = family_of(self.config).describe_tile
        if self.tile_line:
            return self.tile_line
        if "tile" in self.flags:
            return f"  --tile {_spaced(self.config.tile)}, as given, {described(self.config)}"
        tiles = list(smaller_tiles(self._tile_of(self.tile_voxels), self.shape, self._unit()))
        at = bisect_left(tiles, True, hi=len(tiles) - 1, key=self.fits)  # the last is taken whatever it needs
        self.config = self._with_tile(tiles[at])
        lengths = " x ".join(f"{side * size:.0f}" for side, size in zip(self.config.tile, self.size))
        is_cut = math.prod(tiles[0]) < math.prod(self._tile_of(math.inf))
        most = "as large as is quick enough" if is_cut else "about as large as the median case"
        most = "the largest such that two fit" if at else most
        if at == len(tiles) - 1 and not self.fits(tiles[at]):
            most = "the smallest there is, though two may not fit"
        return f"  --tile {_spaced(self.config.tile)} ({lengths} mm), {described(self.config)}: {most}"

    def choose_batch(self, voxels: float) -> str:
        """Takes the largest batch that fits, up to a share of all ``voxels``; returns why."""
        if self.config.batch and "batch" in self.flags:
            return f"  --batch {self.config.batch}, as given"
        most = CPU_BATCH if self.device.cores else MOST_BATCH
        times = self.ranks // self.config.group_ranks * self.config.accumulate  # batches in a step
        share = int(SHARE * voxels / math.prod(self.config.tile) / times)
        unit = self.config.seqpar if self.config.mode == "swap" else 1
        few = max(-(-LEAST_BATCH // times), min(most, share) // unit * unit, unit)
        best = largest_batch(self._run(self.config), self.ranks, few)
        self.config = replace(self.config, batch=best.config.batch)
        of_step = "" if times == 1 else f" in a step of {times * best.config.batch} tiles"
        all_voxels = f"{SHARE:.0%} of the data set's voxels{of_step}"
        why = f"at most {all_voxels}" if share < most else f"at most {most}{' on a CPU' if self.device.cores else ''}"
        if few > share:
            why = f"the minimum, though more than {all_voxels}"
        if not best.fits:
            why = "which may not fit: use a larger --seqpar, or a smaller --embed-dim or --tile"
        return f"  --batch {best.config.batch}: {best.total / GIB:.1f} of {best.device.memory / GIB:.0f} GiB, {why}"

    def fits(self, tile: Sequence[int]) -> bool:
        """Returns whether the tile fits with the least batch; what cannot be at all does not."""
        try:
            return plan_run(self._run(self._with_tile(tile)), self.ranks).fits
        except ValueError:
            return False

    def _run(self, config: Config) -> RunToPlan:
        unit = config.seqpar if config.mode == "swap" else 1
        batch = config.batch if "batch" in self.flags and config.batch else -(-LEAST_BATCH // unit) * unit
        return RunToPlan(
            replace(config, batch=batch), self.device, self.channels, self.outputs, self.ranks, timed=False
        )

    def _tile_of(self, voxels: float) -> Sides:
        return suited_tile(voxels, self.shape, self.size, self._unit())

    def _unit(self) -> tuple[int, ...]:
        """Returns the steps in which tiles are looked at: patches, or what the stages of most U-Nets divide by."""
        kind = family_of(self.config)
        return kind.unit(self.config) if kind.attends else tuple(16 if side >= 64 else 4 for side in self.shape)

    def _with_tile(self, tile: Sequence[int]) -> Config:
        """Returns the config with a tile, shortened to whole units of the network that it gets."""
        config = replace(self.config, tile=tuple(tile))
        for _ in range(8):  # fewer stages have a smaller unit
            config = self._with_stages(config)
            unit = family_of(config).unit(config)
            whole = tuple(max(step, side // step * step) for side, step in zip(config.tile, unit))
            if whole == config.tile:
                break
            config = replace(config, tile=whole)
        return config

    def _with_stages(self, config: Config) -> Config:
        """Returns the config of a network whose stages follow from this spacing, where voxels are not cubes."""
        if "stages" in self.flags or max(self.size) < 2 * min(self.size):
            return config
        return family_of(config).pinned(config, self.size)


def _patch_side(length: float, side: int) -> int:
    """Returns the voxels of a token along a direction of ``side`` voxels, ``length`` times as long as the shortest."""
    sides = [p for p in (8, 4, 2) if p * length <= LONGEST_PATCH * 2**0.5 and p * LEAST_TOKENS <= side]
    return max(sides, default=1)


def _by(sides: Sequence[float]) -> str:
    return "x".join(f"{side:.4g}" for side in sides)


def _spaced(sides: Sequence[int]) -> str:
    return " ".join(map(str, sides))
