"""Measures the error of what is hidden in each held-out case and draws pictures of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqpar.cluster.stop_request import StopRequest
from seqpar.data.boxes import read_box
from seqpar.data.phantom.phantom_files import GENERATED, is_generated
from seqpar.data.preparation.cache import PreparedCase
from seqpar.data.preparation.prepared_case import Preparation
from seqpar.data.sampling.tiles import position_bounds
from seqpar.losses import MaskedError
from seqpar.models.network import Network, autocast
from seqpar.parallel.collectives import all_gather, all_reduce
from seqpar.report.pictures import mark_plane
from seqpar.report.planes import (
    PLANES,
    FileSlices,
    best_modality,
    counted,
    limits_of,
    orientation_text,
    plane_of,
    sides,
    slices_of,
)
from seqpar.report.plots import escape_mathtext, make_figure, save_figure, title_of_run
from seqpar.runs.journal import Journal
from seqpar.runs.metrics_tail import GUESS, OF_MODALITIES, PADDING, guess_of, score_of_error
from seqpar.tasks.case_validation import NUM_PICTURED, CaseValidation, ValidationResult, when_validated
from seqpar.text import name_images, with_minus
from seqpar.vit.dropout import DropoutKey

COLUMNS = ("image", "what the encoder saw", "rebuilt", "rebuilt − image")
AXIAL = 2
GIVEN = (
    "Mean and contrast of each hidden patch are taken from the image, as they are not rebuilt (--normalised-targets)"
)
HIDDEN, SEEN = "#b9a06a", "#8f8f8f"  # of patches: sand is no grey level of an image, and neither is an error


@dataclass(frozen=True)
class RebuiltTile:
    """A tile ``W D H`` of a case in canonical axes, with its hidden patches rebuilt, and which voxels were hidden.

    ``axial``: the slices of the case's file at the tile's planes along H
    ``error``, ``error_of_mean``: over all channels, of what was rebuilt and of a mean in its place
    ``guess``: which mean; ``modality``: the one that is shown
    ``hounsfield``: of a CT, the HU that 1 and 0 of its values stand for: a deviation and a mean
    """

    name: str
    image: NDArray[Any]
    rebuilt: NDArray[Any]
    hidden: NDArray[np.bool_]
    spacing: tuple[float, ...]
    axial: FileSlices
    error: float = math.nan
    error_of_mean: float = math.nan
    guess: str = "the tile's mean"
    modality: str = ""
    hounsfield: tuple[float, float] | None = None


def draw_tiles(path: Path, tiles: Sequence[RebuiltTile], when: str, neurological: bool) -> None:
    """Draws four pictures of each tile, two in a row: image, what the encoder saw, rebuilt, and the difference.

    - ``when``: after which step
    - ``neurological``: the patient's left is on the left of a picture, and not on the right
    """
    save_figure(figure_of_tiles(tiles, neurological, path.parent, when), path, dpi=150)


def figure_of_tiles(tiles: Sequence[RebuiltTile], neurological: bool, run: Path, when: str = "") -> Any:
    """Returns the figure of ``draw_tiles``: the axial plane through the middle of each tile; ``run``: of whom."""
    from matplotlib import colormaps
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter

    figure = make_figure(5.4, 5.5 * len(tiles) + 2.1)  # narrow, so that it can be read on a narrow page
    of_modality = f" of {escape_mathtext(tiles[0].modality)}" if tiles[0].modality else ""
    errors = f"Errors are mean squared errors of hidden voxels of the scan{', of all modalities' * bool(of_modality)}"
    if tiles[0].guess != guess_of(normalised=False):
        errors += f", in standard deviations of each patch. {GIVEN}"
    count = counted([tile.axial] for tile in tiles)
    ranges, window, unit = [limits_of([tile.image]) for tile in tiles], "", ""
    if (hounsfield := tiles[0].hounsfield) is not None:
        deviation, mean = hounsfield
        ranges = [limits_of([tile.image for tile in tiles])] * len(tiles)
        black, white = (round(end * deviation + mean) for end in ranges[0])
        window = with_minus(f", shown from {black} HU (black) to {white} HU (white)")
        unit = f" (1 is {deviation:.3g} HU)"
    what = f"Hidden patches{of_modality}, rebuilt from the visible ones{window}"
    what = f"{when[:1].upper()}{when[1:]}: {what[:1].lower()}{what[1:]}" if when else what
    texts = f"{what}, in the axial plane through the tile's middle", orientation_text(neurological), count, errors
    lines = [part for text in texts for part in wrap(f"{text}.", 76)]
    figure.suptitle(title_of_run(run, *lines), fontsize=9)
    greys, differences = (colormaps[name].with_extremes(bad=bad) for name, bad in (("gray", HIDDEN), ("RdBu_r", SEEN)))
    most = max(1e-6, *(float(high - low) / 2 for low, high in ranges))  # the same for all tiles
    every = figure.subplots(2 * len(tiles), 2, squeeze=False)
    for panels, tile, (low, high) in zip(every.reshape(len(tiles), len(COLUMNS)), tiles, ranges):
        seen = np.where(tile.hidden, np.nan, tile.image)
        wrong = np.where(tile.hidden, tile.rebuilt - tile.image, np.nan)
        at = tile.image.shape[AXIAL] // 2
        aspect = tile.spacing[1] / tile.spacing[0]
        for name, volume, panel in zip(COLUMNS, (tile.image, seen, tile.rebuilt, wrong), panels):
            plane, reach = plane_of(volume, AXIAL, at, neurological), max(high - low, 1e-6)
            is_difference = name == COLUMNS[-1]
            colours, ends = (differences, (-most, most)) if is_difference else (greys, (low, low + reach))
            shown = panel.imshow(plane, cmap=colours, vmin=ends[0], vmax=ends[1], aspect=aspect)
            mark_plane(panel, sides(neurological, [tile.axial])[AXIAL], tile.spacing[0])
            panel.set_xticks([])
            panel.set_yticks([])
            title = name
            if name == COLUMNS[0]:
                title = f"{escape_mathtext(tile.name)}\n{PLANES[AXIAL][0]} {tile.axial.text(at)}: {name}"
            if name == COLUMNS[2] and not math.isnan(tile.error):
                title += f": error {tile.error:.3f}\n(error of {tile.guess}: {tile.error_of_mean:.3f})"
            panel.set_title(title, fontsize=9)
    form = FuncFormatter(lambda x, _: f"{x:+.3g}".replace("-", "−") if x else "0")
    bar = figure.colorbar(shown, ax=every, location="bottom", aspect=40, pad=0.01, format=form, extend="both")
    bar.ax.tick_params(labelsize=8)
    bar.set_label(f"too dark ← rebuilt − image, in normalised intensity{unit} → too bright", fontsize=8)
    keys = [Patch(color=HIDDEN, label="hidden patch"), Patch(color=SEEN, label="visible patch, not compared")]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, fontsize=8)
    return figure


STEP = -1  # no step of training hides the same tokens


class MaskedValidation(CaseValidation):
    """The loss on a tile of each held-out case, the same on all ranks; sequence groups take cases in turn.

    What is hidden of a case is the same in each validation, so that they can be compared.
    """

    @property
    def error(self) -> MaskedError:
        assert isinstance(self.loss, MaskedError)
        return self.loss

    def measured_on(self, digests: Mapping[str, str]) -> str:
        """Returns it as other validations do; earlier versions hid other voxels if the seed was not 0."""
        cases, tile = self.data.dataset.cases, self.config.tile  # errors of earlier versions count padding, too
        is_padded = any(extent < side for name in self.ids for extent, side in zip(cases[name].image.shape[1:], tile))
        return super().measured_on(digests) + " hidden=0" * (self.config.seed != 0) + " padding=0" * is_padded

    @property
    def _guess(self) -> str:
        """What the error is compared with, in words."""
        is_joint = self.error.normalised and len(self.data.dataset.modalities) > 1
        return OF_MODALITIES if is_joint else guess_of(self.error.normalised)

    @property
    def shown(self) -> int:
        """The modality that pictures show."""
        modalities = self.data.dataset.modalities
        return modalities.index(best_modality(modalities))

    def run(self, net: Network, journal: Journal, stopper: StopRequest, keep: bool = False) -> ValidationResult | None:
        """Returns the result, None where all ranks leave before its end; the last one's pictures stay."""
        net.eval()
        tiles = list[RebuiltTile]()
        means = self._means(net, journal, stopper, tiles)
        net.train()
        if means is None:
            return None
        mean, of_mean, padding = means
        self.refuse_taken_over()
        picture = journal.path.parent / "validation.png"
        row: dict[str, Any] = {"loss": mean, "error_of_mean": of_mean, "cases": len(self.ids)}
        row |= {PADDING: padding} if padding else {}
        row |= {GUESS: self._guess} if self._guess == OF_MODALITIES else {}
        if tiles:
            journal.draw(lambda: draw_tiles(picture, tiles, when_validated(journal, row), self.config.neurological))
        of_scans = " of scans" * bool(padding)
        text = (
            f"validation on {self.counted}: mean squared error of hidden voxels{of_scans} {mean:.4f} "
            f"({of_mean:.4f} if they were filled with {self._guess})"
        )
        return ValidationResult(row, text, score_of_error(mean), {})

    def _means(
        self, net: Network, journal: Journal, stopper: StopRequest, tiles: list[RebuiltTile]
    ) -> tuple[float, float, float] | None:
        """Returns the mean error and that of a mean in place of what is hidden, both over cases and within scans, and
        which share of what is hidden is padding; None if all ranks leave.

        - ``tiles``: gets what the first rank pictures
        """
        data, total = self.mesh.data, torch.zeros(5, dtype=torch.float64, device=self.mesh.device)
        for first in self.turns(journal, stopper):
            if first is None:
                return None
            number = first + data.index
            if number < len(self.ids):
                total += self._case(net, number, tiles if first < NUM_PICTURED * data.size else None)
        mean, of_mean, count, within, hidden = all_reduce(total, data).tolist()
        if not count:  # what is hidden of every case is padding
            return math.nan, math.nan, 1.0
        return mean / count, of_mean / count, 1 - within / hidden

    @torch.no_grad()
    def _case(self, net: Network, number: int, tiles: list[RebuiltTile] | None) -> Tensor:
        """Returns the error in the scan of a case's tile, and that of a mean; 1, or 0 if nothing is hidden there; how
        many hidden voxels are in the scan, and how many in all. The picture is added to ``tiles``.
        """
        case = self.data.dataset.cases[self.ids[number]]
        whole = torch.from_numpy(middle_of(case, net.layout.tile))[None]
        part = net.layout.cut(whole, self.mesh.seq.index).to(self.mesh.device)
        image = part.double() if self.config.precision == "fp64" else part
        with autocast(self.config.precision, self.mesh.device):
            rebuilt, hidden = net(image, None, DropoutKey(0, STEP, (number,)))  # the same, whatever the run's seed
        place = _of_scan(case, net.layout.tile)
        within = torch.zeros(1, 1, *net.layout.tile)
        within[place] = 1
        groups, own = net.loss_groups(None, 1), net.layout.cut(within, self.mesh.seq.index).to(self.mesh.device)
        means = torch.zeros(len(whole[0]))  # each patch's own, where patches of one modality are normalised
        if not self.error.normalised:
            means = whole[place][0].flatten(1).mean(1)
        elif len(means) > 1:
            means = self.error.means_within(part, own, groups)
        guess = torch.zeros_like(rebuilt) + means.to(rebuilt)[None, :, None, None, None]
        sums = torch.stack([self.error.sums_within((it, hidden), part, own, groups) for it in (rebuilt, guess)])
        errors, (_, count, total) = sums[:, 0] / sums[:, 1], sums[0]
        if tiles is not None:
            tile = self._tile(net, case, whole, part, rebuilt, hidden)
            tiles.append(replace(tile, error=float(errors[0]), error_of_mean=float(errors[1])))
        found = (count > 0).to(count)
        return torch.stack([*errors.nan_to_num(0).mul(found), found, count, total])

    def _tile(
        self, net: Network, case: PreparedCase, whole: Tensor, part: Tensor, rebuilt: Tensor, hidden: Tensor
    ) -> RebuiltTile:
        """Returns a tile, what was seen of it, and what it became: one channel, gathered from all ranks."""
        patches = part.flatten(0, 1).index_select(0, hidden)
        result = part.flatten(0, 1).clone()
        result[hidden] = self.error.shown(rebuilt.to(part.dtype), patches)
        is_hidden = torch.zeros(len(result), dtype=part.dtype, device=part.device)
        is_hidden[hidden] = 1
        rows = torch.stack([result[:, self.shown], is_hidden.view(-1, 1, 1, 1).expand_as(result[:, 0])], 1)[None]
        counts, group = net.layout.counts, self.mesh.seq
        together = all_gather(rows, group, 1, counts, "pictures").cpu()  # 1 n 2 p p p
        image, mask = net.layout.join(together.split(counts, 1))[0].float().numpy()
        preparation, properties = self.data.dataset.preparation, case.properties
        shown = whole[0, self.shown].numpy()
        shown, image, mask = (preparation.canonical(volume, properties) for volume in (shown, image, mask))
        axial, spacing = axial_slices(case, net.layout.tile, preparation)
        images = name_images(self.data.dataset.modalities)
        modality = "" if images == ["image"] else images[self.shown]
        name = f"{case.id}\n{GENERATED}" if is_generated(self.config.data) else case.id
        units = (properties.stds[self.shown], properties.means[self.shown])
        is_ct = properties.schemes[self.shown] == "ct"
        more: dict[str, Any] = {"guess": self._guess, "modality": modality, "hounsfield": units if is_ct else None}
        return RebuiltTile(name, shown, image, mask > 0, spacing, axial, **more)


def middle_of(case: PreparedCase, tile: tuple[int, ...]) -> np.ndarray:
    """Returns the tile ``c W D H`` in the middle of a case; outside of the case it is 0."""
    return np.ascontiguousarray(read_box(case.image, _first_of(case, tile), tile, 0), np.float32)


def _of_scan(case: PreparedCase, tile: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns which part ``… W D H`` of the tile in the middle of a case is in the case: elsewhere it is padded."""
    every = zip(_first_of(case, tile), case.image.shape[1:], tile)
    return ..., *(slice(max(0, -first), min(side, extent - first)) for first, extent, side in every)


def _first_of(case: PreparedCase, tile: tuple[int, ...]) -> list[int]:
    """Returns where the tile in the middle of a case begins."""
    return [sum(position_bounds(extent, side)) // 2 for extent, side in zip(case.image.shape[1:], tile)]


def axial_slices(
    case: PreparedCase, tile: tuple[int, ...], preparation: Preparation
) -> tuple[FileSlices, tuple[float, ...]]:
    """Returns the slices of the file at the planes of the middle tile along H in canonical axes, and its spacing."""
    turned, centre = preparation.canonical_properties(case.properties), [side // 2 for side in tile]
    places = []  # of the tile's central voxel along H, in the case and in the tile
    for shape, first in ((case.image.shape[1:], _first_of(case, tile)), (tile, (0, 0, 0))):
        mark = np.zeros(shape, bool)
        mark[tuple(start + middle for start, middle in zip(first, centre))] = True
        places.append(int(np.argwhere(preparation.canonical(mark, case.properties))[0][AXIAL]))
        planes = preparation.canonical(mark, case.properties).shape[AXIAL]
    own = slices_of(turned.geometry, turned.box, turned.shape)[AXIAL]
    inside = np.clip(np.arange(planes) + places[0] - places[1], 0, len(own.numbers) - 1)
    return own._replace(numbers=[own.numbers[n] for n in inside.tolist()]), turned.spacing
