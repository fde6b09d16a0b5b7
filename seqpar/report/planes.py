"""How planes of a volume are shown, in a run's pictures and in reports alike: colours, sides, slices, grey levels.

Legend: ``W D H`` voxels in canonical orientation: they grow to the patient's right, to the front, upwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.late_import import late
from seqpar.scores.lesions import MIN_VOLUME, Part, unmatched_parts, vanished
from seqpar.text import millilitres, quantity, with_minus

if TYPE_CHECKING:
    from seqpar.data.boxes import Box
    from seqpar.data.geometry import Geometry

# The palette of Okabe and Ito without its black, which people with colour blindness can tell apart, and one more.
ndimage = late("scipy.ndimage")
COLOURS = ("#e69f00", "#56b4e9", "#cc79a7", "#009e73", "#d55e00", "#f0e442", "#0072b2", "#b2df8a")
# Runs have other colours than classes. All of these can be read on white and on black.
RUN_COLOURS = ("#8a63d2", "#a0703c", "#d6336c", "#1f9e9e", "#7f8790", "#8f9a1f", "#c05bd6", "#5a7bd8")
DISPUTED = "#a838ff"  # where readers disagree; no class is violet
TINT = 0.25  # opacity of what is inside the line of truth or prediction; its colour is multiplied by the image's greys
TINTED = "tinted: inside a line"
CONTRAST = 0.35  # of stripes over what the truth leaves unlabelled, as a share of black to white
BLACK = 0.2  # up to this share, on which stripes are lighter
STRIPES = 30  # across the longer side of a plane, whichever voxels it has
UNLABELLED = "hatched: unlabelled"
PLANES = (("sagittal", 0), ("coronal", 1), ("axial", 2))  # a plane's name, and the direction that it is across
KEPT_HU = (-150.0, 250.0)  # of a CT: fat and soft tissue are told apart
COUNTED = "Slice numbers are positions in the scan, from 1, not DICOM instance numbers"
NEAREST = "; where voxels were resampled, of the nearest slice"
TILTED = 5.0  # degrees, from which on an image is called oblique
DOUBTED = ". Sides marked ? are not known: the file leaves open how the patient lies, and left and right are a guess"
LINES = "A line between two labels has the colour of the rarer one"
LETTERS = "R right, L left, A front (anterior), P back (posterior), S top (superior), I bottom (inferior)"


def colours_of(names: Iterable[str], palette: Sequence[str] = COLOURS) -> dict[str, str]:
    """Returns the colour of each name, by its place."""
    return {name: palette[n % len(palette)] for n, name in enumerate(dict.fromkeys(names))}


def repeated(names: Sequence[str]) -> str:
    """Returns a sentence without its full stop if labels share colours; "" if each has its own."""
    if len(names) <= len(COLOURS):
        return ""
    shared = f"{names[0]} and {names[len(COLOURS)]}"
    return f"Colours repeat after {len(COLOURS)} labels, as in {shared}: point at a plane to read its label"


def sides(neurological: bool, slices: Sequence[FileSlices] = ()) -> tuple[str, str, str]:
    """Returns what lies at the left, right, top and bottom of each plane, a letter each; ? if the file leaves it open.

    - ``slices``: of the file
    """
    if doubt_of(slices):
        return "????", "????", "????"
    return ("PASI", "LRSI", "LRAP") if neurological else ("APSI", "RLSI", "RLAP")


def orientation_text(neurological: bool) -> str:
    """Returns the convention of left and right in words."""
    name, side = ("Neurological", "left") if neurological else ("Radiological", "right")
    return f"{name} convention: the patient's left is on the {side} of a picture"


def plane_of(volume: NDArray[Any], dim: int, at: int, neurological: bool) -> NDArray[Any]:
    """Returns a plane ``[y, x]`` of a volume ``W D H``, its first row at the top, its sides as ``sides`` says."""
    picture = np.take(volume, at, dim).T[::-1]
    return picture if neurological else picture[:, ::-1]


def bar_length(width: float) -> float:
    """Returns the length of a scale bar in mm, a round number of at most a quarter of a picture's width."""
    power = 10.0 ** math.floor(math.log10(width / 4))
    return max(power * factor for factor in (1, 2, 5) if power * factor <= width / 4)


def fullest_planes(mask: NDArray[Any]) -> tuple[int, ...]:
    """Returns the index of the plane with most of the mask in each direction; the middle ones of an empty mask."""
    if not mask.any():
        return tuple(side // 2 for side in mask.shape)
    others = [tuple(d for d in range(mask.ndim) if d != dim) for dim in range(mask.ndim)]
    return tuple(int(np.argmax((mask > 0).sum(axis))) for axis in others)


def body_of(image: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns which voxels ``W D H`` of a prepared image show the body and not air.

    Images that are 0 outside the body say so themselves. Of others the darkest tenth of the grey levels is air, or what
    the corners' noise has, if that is more; what the body encloses in a plane belongs to it.
    """
    if (image == 0).mean() > 0.01:
        nonzero: NDArray[np.bool_] = image != 0
        return nonzero
    low, high = np.percentile(image, (0.5, 99.5))
    bright: NDArray[np.bool_] = image > max(low + 0.1 * (high - low), _level_of_air(image))
    body = bright.copy()
    for dim in range(image.ndim):
        in_plane = np.expand_dims(ndimage.generate_binary_structure(image.ndim - 1, 1), dim)
        body |= ndimage.binary_fill_holes(bright, in_plane)
    parts, _ = ndimage.label(body)
    sizes = np.bincount(parts.ravel())
    sizes[0] = 0
    return np.asarray((100 * sizes >= max(sizes.max(), 1))[parts])  # without specks of noise


def _level_of_air(image: NDArray[Any]) -> float:
    """Returns the grey level that nearly all of the noise in the corners is below; -inf if they do not show air."""
    ends = [(slice(max(1, side // 8)), slice(-max(1, side // 8), None)) for side in image.shape]
    corners = sorted((image[corner].ravel() for corner in product(*ends)), key=np.median)
    air = np.concatenate(corners[: len(corners) // 2])  # an arm may be in the others
    level = float(air.mean() + 3 * air.std())
    above = image[image > level]
    shows_air = above.size > image.size / 10 and air.std() < (np.median(above) - air.mean()) / 5
    return level if shows_air else -math.inf


class FileSlices(NamedTuple):
    """The slices of a case's file along a direction: the number of each plane's, from 1, and how many the file has.

    - ``resampled``: the planes lie between the slices, and their numbers are those of the nearest ones
    - ``tilt``: the largest angle between an axis of the file and the patient's, in degrees
    - ``doubt``: what the file leaves open about how the patient lies, as `Geometry.orientation_doubt` says it
    - ``askew``: by how many degrees its slices do not lie straight above each other
    """

    numbers: Sequence[int]
    total: int
    resampled: bool = False
    tilt: float = 0.0
    doubt: str = ""
    askew: float = 0.0

    def text(self, at: int) -> str:
        """Returns which slice a plane is, of how many."""
        return f"{self.numbers[at]} / {self.total}"

    def coarsened(self, factor: int) -> list[int]:
        """Returns the number in the middle of each block of ``factor`` planes."""
        last = len(self.numbers) - 1
        return [self.numbers[min(first + factor // 2, last)] for first in range(0, last + 1, factor)]


def slices_of(geometry: Geometry, box: Box, shape: Sequence[int]) -> tuple[FileSlices, ...]:
    """Returns the slices of the file that are nearest to the planes of a crop, along W, D and H.

    - ``box``: the crop, in voxels of the file in canonical axes; ``shape``: of the crop after resampling
    """
    slices = []
    for letter, (start, stop), side, whole in zip("RAS", box, shape, geometry.canonical_shape):
        at = start + np.floor((np.arange(side) + 0.5) * (stop - start) / side).astype(int)
        numbers = at + 1 if letter in geometry.orientation else whole - at
        of_file = geometry.tilt, geometry.orientation_doubt, geometry.askew
        slices.append(FileSlices(numbers.tolist(), whole, side != stop - start, *of_file))
    return tuple(slices)


def grid_of(spacing: Sequence[float], slices: Sequence[FileSlices]) -> str:
    """Returns in which voxels a case is drawn, and whether they are its file's."""
    drawn = "drawn in " * any(own.resampled for own in slices)
    return f"{drawn}voxels of {' × '.join(f'{step:.3g}' for step in spacing)} mm"


class Outside(NamedTuple):
    """Regions of a class that no shown plane cuts, the largest first; ``kind``: false, missed or predicted."""

    kind: str
    name: str
    parts: Sequence[Part]

    def text(self, voxel_ml: float, slices: Sequence[FileSlices]) -> str:
        """Returns how many there are, and how large and where the largest is."""
        first, several = self.parts[0], "the largest: " * (len(self.parts) > 1)
        place = ", ".join(f"{plane} {slices[dim].numbers[first.fullest[dim]]}" for plane, dim in PLANES)
        is_small = self.kind == "missed" and first.voxels * voxel_ml * 1000 <= MIN_VOLUME
        size = f"{millilitres(first.voxels * voxel_ml)} ml{', too small to count in tables' * is_small}, at {place}"
        return f"{quantity(len(self.parts), f'{self.kind} region')} of {self.name} ({several}{size})"


def outside_planes(
    truth: NDArray[Any],
    prediction: NDArray[Any],
    classes: Mapping[str, Sequence[int]],
    spacing: Sequence[float],
    at: Sequence[int],
    has_truth: bool = True,
) -> list[Outside]:
    """Returns the false and missed regions of label maps that no shown plane cuts, by class.

    - ``truth``: -1 where it is ignored
    - ``classes``: the numbers of the labels that each class consists of
    - ``at``: the shown planes
    - ``has_truth``: without a truth, predicted regions are neither right nor false
    """
    found, known = list[Outside](), truth >= 0
    for name, numbers in classes.items():
        masks = np.isin(truth, numbers), np.isin(prediction, numbers) & known
        both = unmatched_parts(*masks, spacing, min_volume=0.0)  # those that tables leave out as too small, too
        for kind, parts in zip(("false" if has_truth else "predicted", "missed"), both):
            out = [part for part in parts if not any(own.start <= n < own.stop for own, n in zip(part.box, at))]
            found += [Outside(kind, name, out)] * bool(out)
    return found


def count_vanished_regions(
    fine: NDArray[Any], coarse: NDArray[Any], classes: Iterable[int] | Iterable[Sequence[int]]
) -> int:
    """Returns how many regions of a label map are too small for the grid of a prepared image.

    A region within one of another class that is lost, too, is not counted again.

    - ``classes``: the value of each, or its values
    """
    if not any(few < many for few, many in zip(coarse.shape, fine.shape)):
        return 0
    lost, total = np.zeros(fine.shape, bool), 0
    for values in sorted(classes, key=np.size, reverse=True):
        count, own = vanished(np.isin(fine, values) & ~lost, np.isin(coarse, values))
        lost, total = lost | own, total + count
    return total


def vanished_note(counts: Mapping[str, int], spacing: Sequence[float]) -> str:
    """Returns which regions the network's grid cannot show, a sentence; "" of none."""
    told = [f"{quantity(count, 'region')} of the {whose}" for whose, count in counts.items() if count]
    if not told:
        return ""
    grid = " × ".join(f"{step:.3g}" for step in spacing)
    are = "is" if sum(counts.values()) == 1 else "are"
    return (
        f"The case is drawn as the network saw it, in voxels of {grid} mm, in which {' and '.join(told)} {are} too "
        "small to be seen. The tables count the files' own voxels."
    )


def count_vanished_briefly(counts: Mapping[str, int]) -> str:
    """Returns how many regions of truth and prediction a grid cannot show, for a title; "" of none."""
    words = {"truth": "true", "prediction": "predicted"}
    told = ", ".join(f"{count} {words[whose]}" for whose, count in counts.items() if count)
    return f"regions too small to draw: {told}" if told else ""


def count_outside(found: Sequence[Outside]) -> str:
    """Returns how many regions no plane cuts, for a title; "" of none."""
    counts = {kind: sum(len(own.parts) for own in found if own.kind == kind) for kind in ("false", "missed")}
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return f"regions not shown: {told}" if told else ""


def counted(cases: Iterable[Sequence[FileSlices]]) -> str:
    """Returns how the slices of cases are numbered, tilted and marked, sentences without the last full stop."""
    every = [own for slices in cases for own in slices]
    tilt = max((own.tilt for own in every), default=0.0)
    told = f". Oblique images: planes are tilted by up to {tilt:.0f}°; letters name the nearest sides"
    askew = max((own.askew for own in every), default=0.0)
    sheared = f". Sheared images, as of a tilted gantry: their slices are askew by up to {askew:.0f}°, but are drawn "
    sheared += "straight above each other, which distorts shapes, and distances such as HD95"
    told = told * (tilt >= TILTED) + sheared * (askew >= TILTED) + DOUBTED * bool(doubt_of(every))
    return COUNTED + NEAREST * any(own.resampled for own in every) + told


def doubt_of(slices: Iterable[FileSlices]) -> str:
    """Returns what a file leaves open about how the patient lies; "" if nothing."""
    return next((own.doubt for own in slices if own.doubt), "")


def tilt_of(slices: Sequence[FileSlices]) -> str:
    """Returns by how much a case's planes are tilted against the patient's axes, and its slices askew; "" if that is a
    few degrees.
    """
    angles = {"planes tilted": max(own.tilt for own in slices), "slices askew": max(own.askew for own in slices)}
    return ", ".join(f"{what} by {angle:.0f}°" for what, angle in angles.items() if angle >= TILTED)


def ranks_of(*maps: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns the rank of each label of label maps by number, the rarest highest; 0 is the background's.

    A line between two labels is the rarer one's: it encloses that label more often, as a lesion in an organ.
    """
    counts = np.bincount(np.concatenate([labels.ravel() for labels in maps]))
    ranks = np.zeros(len(counts), np.uint8)
    ranks[1 + np.argsort(-counts[1:], kind="stable")] = np.arange(1, len(counts))
    return ranks


def limits_of(images: Sequence[NDArray[Any]]) -> tuple[float, float]:
    """Returns what is black and white: all but the darkest and the brightest half percent lie between."""
    values = np.concatenate([image.ravel() for image in images])
    low, high = np.percentile(values, (0.5, 99.5)) if values.size else (0.0, 1.0)
    return float(low), float(high)


def grey_window(image: NDArray[Any]) -> tuple[float, float]:
    """Returns what is black and white in an image ``W D H`` without units; half a percent of the body is brighter.

    Air has noise in most images, so that half a percent of all voxels would be more of the body.
    """
    shown, body = image[image != 0], image[body_of(image)]
    low, high = limits_of([shown])
    return low, max(high, limits_of([body])[1] if body.size else high)


def ct_window(limits: tuple[float, float], images: Sequence[NDArray[Any]]) -> tuple[float, float]:
    """Returns what is black and white in CT: ``limits``, and at least what its images have of ``KEPT_HU``.

    Of images clipped to brighter values it is as wide as that, as far as they go: most of their voxels are equal.
    """
    least, most = min(float(image.min()) for image in images), max(float(image.max()) for image in images)
    low = min(limits[0], max(KEPT_HU[0], least))
    return low, max(limits[1], min(max(KEPT_HU[1], low + KEPT_HU[1] - KEPT_HU[0]), most))


def kept_of_ct(ranges: Sequence[tuple[float, float]]) -> str:
    """Returns which Hounsfield units are no longer told apart, a sentence; "" without a CT.

    - ``ranges``: what black and white are
    """
    if not ranges:
        return ""
    low, high = round(min(low for low, _ in ranges)), round(max(high for _, high in ranges))
    names = ((60, " (such as soft tissue, fat and air)"), (-50, " (such as fat and air)"), (-800, " (such as air)"))
    dark = next((name for least, name in names if low >= least), "")
    bright = " (such as bone)" * (high <= 300)
    darker, brighter = f"below {low} HU{dark} is equally black", f"above {high} HU{bright} equally white"
    return with_minus(f"Of the CT, everything {darker}, everything {brighter}.")


def hatched(image: NDArray[Any], area: NDArray[Any], low: float, high: float, across: float, up: float) -> NDArray[Any]:
    """Returns a plane with stripes where an area is: lighter on black, darker elsewhere, to be seen on each.

    Light ones on grey would look like calcifications or vessels, where noise decides.

    - ``low``, ``high``: what is black and white; ``across``, ``up``: sides of a pixel in mm
    """
    rows, columns = np.indices(area.shape)
    period = max(area.shape[0] * up / STRIPES, area.shape[1] * across / STRIPES, 4 * min(across, up))
    width = max(period / 4, min(across, up))
    is_stripe = (rows * min(up, width) + columns * min(across, width)) % period < width  # which join in every row
    around = ndimage.uniform_filter(np.clip(image, low, high).astype(float), 7)  # so that noise decides nothing
    is_black = (around < low + (high - low) * BLACK) & (image < low + 1.5 * (high - low) * BLACK)
    stripes: NDArray[Any] = np.where(is_black, image + (high - low) * CONTRAST, image - (high - low) * CONTRAST)
    return np.where((area > 0) & is_stripe, np.clip(stripes, low, high), image).astype(image.dtype)


Steps = list[tuple[int, int, bool]]  # to the right, downwards, and whether a line is drawn


def outline_steps(labels: NDArray[Any], number: int) -> list[tuple[tuple[int, int], Steps]]:
    """Returns where each way around a label of ``[y, x]`` begins, and its steps on the edges of pixels.

    Inside is on the right. Edges to a label with a higher number are left to that label: two dashed lines there would
    look solid. So numbers are ranks, as ``ranks_of`` gives them.
    """
    padded = np.pad(labels.astype(int), 1)
    core, turns = padded[1:-1, 1:-1] == number, dict[tuple[int, int], Steps]()
    sides = (
        (padded[:-2, 1:-1], (0, 0), (1, 0)),
        (padded[1:-1, 2:], (1, 0), (0, 1)),
        (padded[2:, 1:-1], (1, 1), (-1, 0)),
        (padded[1:-1, :-2], (0, 1), (0, -1)),
    )
    for neighbour, (x0, y0), step in sides:
        for y, x in zip(*(index.tolist() for index in np.nonzero(core & (neighbour != number)))):
            turns.setdefault((x + x0, y + y0), []).append((*step, bool(neighbour[y, x] < number)))
    ways = list[tuple[tuple[int, int], Steps]]()
    while turns:
        x, y = first = next(iter(turns))
        steps = Steps()
        while True:
            dx, dy, drawn = turns[x, y].pop()
            if not turns[x, y]:
                del turns[x, y]
            x, y = x + dx, y + dy
            if steps and ((dx != 0) == (steps[-1][0] != 0) and drawn == steps[-1][2]):
                dx, dy = dx + steps[-1][0], dy + steps[-1][1]
                steps.pop()
            steps.append((dx, dy, drawn))
            if (x, y) == first:
                break
        if any(drawn for *_, drawn in steps):
            ways.append((first, steps))
    return ways


def outline_lines(labels: NDArray[Any], number: int) -> list[list[tuple[float, float]]]:
    """Returns the lines of ``outline_steps`` through the middles of the edges of pixels, each as its points ``x y``.

    The middle of a pixel is a whole number.
    """
    lines = list[list[tuple[float, float]]]()
    for (column, row), steps in outline_steps(labels, number):
        x, y, goes_on = column - 0.5, row - 0.5, False
        for dx, dy, drawn in steps:
            length = abs(dx + dy)
            if drawn:
                lines += [[(x, y)]] * (not goes_on)
                lines[-1] += [(x + dx * part, y + dy * part) for part in (np.arange(length) + 0.5) / length]
            elif goes_on:
                lines[-1].append((x, y))
            x, y, goes_on = x + dx, y + dy, drawn
        if all(drawn for *_, drawn in steps):
            lines[-1][0] = lines[-1][-1]
        elif goes_on:
            lines[-1].append((x, y))
    return lines


def best_modality(names: Sequence[str]) -> str:
    """Returns the modality on which a tumour is seen best: FLAIR, or else the first one; "" of none."""
    return next((name for name in names if name.lower() in ("flair", "t2f", "t2-flair")), names[0] if names else "")
