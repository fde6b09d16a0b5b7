"""Volumes as a page embeds them: coarsened to a budget, all slices side by side in one PNG sheet; planes of each.

Legend: ``W D H`` voxels as in canonical volumes. Voxel (w, d, h) lies in its sheet at column ``(h mod n) W + w`` and
row ``(h div n) D + d``, where n is the number of slices side by side.
"""

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

from seqpar.report.pictures import heat_colours, heat_palette
from seqpar.report.planes import (
    COLOURS,
    PLANES,
    FileSlices,
    bar_length,
    best_modality,
    colours_of,
    doubt_of,
    fullest_planes,
    hatched,
    outline_steps,
    plane_of,
    ranks_of,
    sides,
)
from seqpar.scores.label_files import DISAGREEMENT, ENTROPY
from seqpar.text import millilitres

Bytes = NDArray[np.uint8]
Factors = tuple[int, int, int]
GREYS = 64  # levels that an image keeps: more would be noise, which costs most of the bytes
_MARK = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Embedded:
    """A case's volumes as base64 PNG sheets; ``factors`` says how many voxels along W, D, H became one."""

    shape: tuple[int, int, int]
    factors: Factors
    columns: int
    images: tuple[str, ...]  # a sheet per modality
    truth: str  # a sheet of label numbers, 0 for none
    prediction: str
    heat: str = ""  # a sheet of a map from 0 to 255
    areas: Mapping[str, str] = field(default_factory=dict)  # by name, a sheet with 1 where an area is

    @property
    def num_bytes(self) -> int:
        return sum(map(len, (*self.images, self.truth, self.prediction, self.heat, *self.areas.values())))


@dataclass(frozen=True)
class ShownCase:
    """A case on one grid: grey images by modality, and both label maps as numbers from 1 (the first label) on.

    - ``ranges``: what black and white are in the files' numbers, by modality
    - ``is_ct``: whether these are Hounsfield units
    - ``slices``: of the case's file, along W, D and H
    - ``disputed``: 1 where several readers gave different labels, else 0; None without several readers
    - ``hidden``: numbers of the labels that the truth is not annotated for
    - ``ignored``: the mask of what the truth leaves open; None of nothing
    - ``unlabelled_ml``: how much that is, by the file's own voxels; NaN if it is not known
    - ``heat``: a map from 0 to 255; ``heat_name``: what it shows, such as its class; ``heat_caution``: what to know
      before reading it; ``most_nats``: what 255 stands for in a map of entropy, and when it has that, in ``most_when``
    - ``disagreement``: of several runs, from 0 to 255, which stands for ``most_apart``; None of one run
    - ``at``: the planes to begin with; None: those that are also drawn
    """

    name: str
    images: dict[str, Bytes]  # W D H each; empty if there is no prepared image
    truth: Bytes
    prediction: Bytes
    spacing: tuple[float, float, float]
    slices: Sequence[FileSlices]
    note: str = ""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    is_ct: bool = False
    heat: Bytes | None = None
    at: tuple[int, ...] | None = None
    heat_name: str = ""
    heat_caution: str = ""
    most_nats: float = 0.0
    most_when: str = ""
    disputed: Bytes | None = None
    ignored: NDArray[np.bool_] | None = None
    unlabelled_ml: float = math.nan
    disagreement: Bytes | None = None
    most_apart: str = ""
    hidden: Sequence[int] = ()
    slant: float = 1.0  # a voxel's volume in boxes of the spacing; less than 1 where axes are no right angles

    @property
    def voxel_ml(self) -> float:
        return math.prod(self.spacing) * self.slant / 1000

    @property
    def unlabelled(self) -> str:
        """A sentence on how much the truth leaves open, of the file and of what is shown; "" of nothing."""
        count = 0 if self.ignored is None else int(np.count_nonzero(self.ignored))
        ml = count * self.voxel_ml if math.isnan(self.unlabelled_ml) else self.unlabelled_ml
        part = f"; hatched: {count / self.truth.size:.1%} of the volume shown" if count else "; not in the volume shown"
        return f"The truth leaves {millilitres(ml)} ml unlabelled (ignore label{part})." if ml else ""

    @property
    def areas(self) -> dict[str, Bytes]:
        """What the viewer marks besides labels, by name: 1 inside, else 0."""
        areas = {} if self.disputed is None else {"disputed": self.disputed}
        is_open = self.ignored is not None and self.ignored.any()
        return areas | ({"ignored": np.asarray(self.ignored, np.uint8)} if is_open else {})

    def embedded(self, budget: int) -> Embedded:
        """Returns the volumes as a page holds them, CT in 256 levels for windows of few Hounsfield units."""
        volumes, greys = list(self.images.values()), 256 if self.is_ct else GREYS
        return embed(volumes, self.truth, self.prediction, self.spacing, budget, self.heat, greys, self.areas)


def embed(
    images: Sequence[Bytes],
    truth: Bytes,
    prediction: Bytes,
    spacing: Sequence[float],
    budget: int,
    heat: Bytes | None = None,
    greys: int = GREYS,
    areas: Mapping[str, Bytes] | None = None,
) -> Embedded:
    """Returns the volumes as finely as the budget of bytes allows.

    - ``spacing``: in mm
    - ``heat``: a map from 0 to 255
    - ``greys``: levels that images keep
    - ``areas``: by name, 1 inside and else 0
    """
    factors: Factors = (1, 1, 1)
    while True:
        estimate = math.prod(-(-side // f) for side, f in zip(truth.shape, factors)) * len(images) / 6
        if estimate < budget:  # a sheet takes at least about a byte for six voxels: do not try what cannot fit
            embedded = _embed(images, truth, prediction, factors, heat, greys, areas or {})
            if embedded.num_bytes <= budget or max(embedded.shape) == 1:
                return embedded
        factors = coarser(factors, truth.shape, spacing)


def coarser(factors: Factors, shape: Sequence[int], spacing: Sequence[float]) -> Factors:
    """Returns the next coarser factors: one more along the direction with the finest voxels."""
    steps = [s * f if f < side else math.inf for s, f, side in zip(spacing, factors, shape)]
    dim = steps.index(min(steps))
    w, d, h = (f + (n == dim) for n, f in enumerate(factors))
    return w, d, h


def _embed(
    images: Sequence[Bytes],
    truth: Bytes,
    prediction: Bytes,
    factors: Factors,
    heat: Bytes | None,
    greys: int,
    areas: Mapping[str, Bytes],
) -> Embedded:
    labels = [coarsen_label(label, factors) for label in (truth, prediction)]
    columns = math.ceil(math.sqrt(labels[0].shape[2]))
    pictures = [levels(coarsen(image, factors), greys) for image in images]
    sheets = [encode(png(sheet(volume, columns))) for volume in (*pictures, *labels)]
    own = "" if heat is None else encode(png(sheet(levels(coarsen(heat, factors)), columns)))
    drawn = {name: encode(png(sheet(coarsen_label(area, factors), columns))) for name, area in areas.items()}
    w, d, h = labels[0].shape
    return Embedded((w, d, h), factors, columns, tuple(sheets[:-2]), sheets[-2], sheets[-1], own, drawn)


def levels(image: Bytes, greys: int = GREYS) -> Bytes:
    """Returns an image rounded to a number of levels from 0 to 255."""
    step = 255 / (greys - 1)
    rounded: Bytes = np.rint(np.rint(image / step) * step).astype(np.uint8)
    return rounded


def coarsen(volume: Bytes, factors: Factors) -> Bytes:
    """Returns the mean over blocks of voxels; the last block along a direction may reach over the edge."""
    sums: NDArray[Any] = volume.astype(np.float32)
    for dim, factor in enumerate(factors):
        starts = np.arange(0, volume.shape[dim], factor)
        counts = np.diff([*starts, volume.shape[dim]])
        shape = [-1 if n == dim else 1 for n in range(3)]
        sums = np.add.reduceat(sums, starts, dim) / counts.reshape(shape)
    means: Bytes = np.rint(sums).astype(np.uint8)
    return means


def coarsen_label(label: Bytes, factors: Factors) -> Bytes:
    """Returns the label in the middle of each block of voxels."""
    picks = [np.minimum(np.arange(0, side, f) + f // 2, side - 1) for side, f in zip(label.shape, factors)]
    picked: Bytes = label[np.ix_(*picks)]
    return picked


def sheet(volume: Bytes, columns: int) -> Bytes:
    """Returns all slices across H of a volume in one picture, ``columns`` side by side."""
    w, d, h = volume.shape
    rows = -(-h // columns)
    padded = np.zeros((w, d, rows * columns), np.uint8)
    padded[..., :h] = volume
    return np.ascontiguousarray(rearrange(padded, "W D (row column) -> (row D) (column W)", column=columns))


def png(picture: Bytes, palette: bytes = b"") -> bytes:
    """Returns a picture as a PNG file; each row is stored by the filter that leaves the smallest differences.

    - ``palette``: red, green and blue of each value; none: greys
    """
    rows, columns = picture.shape
    left, above = np.zeros_like(picture), np.zeros_like(picture)
    left[:, 1:], above[1:] = picture[:, :-1], picture[:-1]
    filtered = np.stack([picture, picture - left, picture - above])  # modulo 256, as the format has it
    cost = np.abs(filtered.view(np.int8).astype(np.int16)).sum(2)
    kinds = cost.argmin(0)
    body = np.empty((rows, columns + 1), np.uint8)
    body[:, 0], body[:, 1:] = kinds, filtered[kinds, np.arange(rows)]
    head = struct.pack(">IIBBBBB", columns, rows, 8, 3 if palette else 0, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"PLTE", palette), (b"IDAT", zlib.compress(body.tobytes(), 9)), (b"IEND", b"")]
    return _MARK + b"".join(_chunk(kind, data) for kind, data in chunks if data or kind == b"IEND")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def encode(data: bytes) -> str:
    """Returns bytes as base64."""
    return base64.b64encode(data).decode()


def outline(labels: NDArray[Any], number: int = 1) -> str:
    """Returns an SVG path of ``outline_steps``."""
    path = []
    for (x, y), steps in outline_steps(labels, number):
        moves = "".join((f"h{dx}" if dx else f"v{dy}") if drawn else f"m{dx} {dy}" for dx, dy, drawn in steps)
        path.append(f"M{x} {y}{moves}" + "z" * all(drawn for *_, drawn in steps))
    return "".join(path)


def viewer_note(volumes: Sequence[Embedded], is_ct: bool = False) -> str:
    """Returns a note of what was left out to keep the page small."""
    factors, pictured = {volume.factors for volume in volumes}, [bool(volume.images) for volume in volumes]
    to = "body" if all(pictured) else "labels or the body" if any(pictured) else "labels"
    note = f"Volumes are cropped to the {to}."
    if any(pictured):
        cut = "" if is_ct else "; the brightest half percent of the body is white"
        note += f" Images are stored in {256 if is_ct else GREYS} grey levels, so values are rounded{cut}."
    if factors == {(1, 1, 1)}:
        return note
    blocks = " or of ".join(" × ".join(map(str, block)) for block in sorted(factors - {(1, 1, 1)}))
    where = "in some cases " * ((1, 1, 1) in factors)
    note += f" To keep the page small, {where}blocks of {blocks} voxels became one"
    return f"{note} (images by their mean, labels by one voxel in their middle)."


def shown_best(case: ShownCase) -> tuple[NDArray[np.bool_], int]:
    """Returns the voxels through which planes are chosen, and their label: the rarest, for large ones are seen anyway.

    The label is 0 if the case has only one, or none; without a label, what readers dispute counts.
    """
    labels = case.truth if case.truth.any() else case.prediction
    if not labels.any() and case.disputed is not None and case.disputed.any():
        return case.disputed > 0, 0
    counts = np.bincount(labels.ravel())
    present = [number for number in np.flatnonzero(counts).tolist() if number]
    if len(present) < 2:
        return labels > 0, 0
    rarest = min(present, key=lambda number: int(counts[number]))
    return labels == rarest, rarest


def viewer_data(
    names: Sequence[str], cases: Sequence[tuple[ShownCase, Embedded]], neurological: bool
) -> dict[str, Any]:
    """Returns the data that the viewer reads: labels with colours, and each case's sheets."""
    labels = [{"name": name, "colour": colour} for name, colour in colours_of(names).items()]
    entries = [
        {
            "name": shown.name,
            "shape": embedded.shape,
            "slices": [own.coarsened(f) for own, f in zip(shown.slices, embedded.factors)],
            "counts": [own.total for own in shown.slices],
            "factors": embedded.factors,
            "spacing": [s * f for s, f in zip(shown.spacing, embedded.factors)],
            "columns": embedded.columns,
            "modalities": list(shown.images),
            "favourite": best_modality(list(shown.images)),
            "images": embedded.images,
            "truth": embedded.truth,
            "prediction": embedded.prediction,
            "areas": embedded.areas,
            "heat": embedded.heat,
            "heat_name": shown.heat_name,
            "heat_caution": shown.heat_caution,
            "open_sides": doubt_of(shown.slices),
            "ranks": ranks_of(shown.truth, shown.prediction).tolist(),
            "hidden": list(shown.hidden),
            "present": {  # blocks of voxels may have lost some
                kind: [n for n in np.unique(labels).tolist() if n]
                for kind, labels in (("truth", shown.truth), ("prediction", shown.prediction))
            },
            "most_nats": shown.most_nats,
            "ranges": shown.ranges,
            "unit": "HU" if shown.is_ct else "",
            "at": [n // f for n, f in zip(shown.at or fullest_planes(shown_best(shown)[0]), embedded.factors)],
        }
        for shown, embedded in cases
    ]
    more = {"heat_colours": heat_colours()} if any(case.heat is not None for case, _ in cases) else {}
    return {"labels": labels, "sides": sides(neurological), "mirrored": not neurological, "cases": entries, **more}


@dataclass(frozen=True)
class ShownPlane:
    """A plane of a case as its template draws it, in mm.

    - ``slice``: which slice of the file, of how many
    - ``across``, ``up``: sides of a pixel
    - ``outlines``: kind (truth, prediction, or of areas disputed, ignored, and inside, bare without an image), colour
      and SVG path in pixels
    - ``sides``: place and letter of what is at the left, right, top and bottom
    - ``letter``, ``bar``: height of a letter, the same in all three planes, and length of the scale bar
    """

    name: str
    label: str
    slice: str
    width: float
    height: float
    across: float
    up: float
    png: str
    outlines: Sequence[tuple[str, str, str]]
    sides: Sequence[tuple[float, float, str]]
    letter: float
    bar: float


class HeatRow(NamedTuple):
    """Planes of a map of a case; ``most``: what its brightest colour stands for."""

    title: str
    planes: Sequence[ShownPlane]
    most: str


def planes_of(case: ShownCase, neurological: bool) -> list[ShownPlane]:
    """Returns a case's three planes: through most of the rarest label of the truth, else of the prediction."""
    at = fullest_planes(shown_best(case)[0])
    return [draw_plane(case, name, dim, at[dim], neurological) for name, dim in PLANES]


def heat_rows(case: ShownCase, neurological: bool) -> list[HeatRow]:
    """Returns a case's maps of uncertainty in the same planes, with the prediction's outlines; none without maps."""
    rows, palette, at = list[HeatRow](), heat_palette(), fullest_planes(shown_best(case)[0])
    of_entropy = f"{case.most_nats:.2f} nats ({case.most_when})"
    for name, whose, heat, most in (
        (ENTROPY, "the prediction", case.heat if case.most_nats else None, of_entropy),
        (DISAGREEMENT, "the averaged networks", case.disagreement, case.most_apart),
    ):
        if heat is None:
            continue
        planes = list[ShownPlane]()
        for (_, dim), plane in zip(PLANES, planes_of(case, neurological)):
            picture = png(np.ascontiguousarray(plane_of(heat, dim, at[dim], neurological)), palette)
            predicted = [  # in black between their dashes, for some labels have the colours of the map
                drawn
                for kind, colour, path in plane.outlines
                if kind == "prediction"
                for drawn in (("between", "#000000", path), (kind, colour, path))
            ]
            planes.append(replace(plane, png=encode(picture), outlines=predicted, label=f"{name} of {plane.label}"))
        rows.append(HeatRow(f"{name} of {whose}", planes, most))
    return rows


def draw_plane(case: ShownCase, name: str, dim: int, at: int, neurological: bool) -> ShownPlane:
    across, up = (step for n, step in enumerate(case.spacing) if n != dim)
    truth, prediction = (plane_of(labels, dim, at, neurological) for labels in (case.truth, case.prediction))
    width, height = truth.shape[1] * across, truth.shape[0] * up
    picture, inside = "", "inside" if case.images else "inside bare"
    if case.images or case.areas.get("ignored") is not None:
        grey = plane_of(
            case.images.get(best_modality(list(case.images)), np.zeros_like(case.truth)), dim, at, neurological
        )
        if case.ignored is not None:
            area = plane_of(case.ignored, dim, at, neurological)
            grey = hatched(grey.astype(int), area, 0, 255, across, up).astype(np.uint8)
        picture = encode(png(np.ascontiguousarray(grey)))
    ranks = ranks_of(case.truth, case.prediction)
    outlines = []
    if case.disputed is not None:  # below the lines
        outlines.append(("disputed", "none", outline(plane_of(case.disputed, dim, at, neurological))))
    if case.ignored is not None:
        outlines.append(("ignored", "#ffffff", outline(plane_of(case.ignored, dim, at, neurological))))
    parts = [(kind, labels, n) for kind, labels in (("truth", truth), ("prediction", prediction))
             for n in np.unique(labels[labels > 0]).tolist()]  # fmt: skip
    outlines += [(inside, COLOURS[(n - 1) % len(COLOURS)], outline(labels == n)) for _, labels, n in parts]
    outlines += [
        (kind, COLOURS[(n - 1) % len(COLOURS)], outline(ranks[labels], int(ranks[n]))) for kind, labels, n in parts
    ]
    letter = max(side * step for side, step in zip(case.truth.shape, case.spacing)) / 24
    far = 0.8 * letter
    places = ((far, height / 2), (width - far, height / 2), (width / 2, far), (width / 2, height - far))
    return ShownPlane(
        name,
        f"{case.name}, {name} slice {case.slices[dim].text(at)}",
        case.slices[dim].text(at),
        width,
        height,
        across,
        up,
        picture,
        outlines,
        [(x, y, side) for (x, y), side in zip(places, sides(neurological, case.slices)[dim])],
        letter,
        bar_length(width),
    )


def most_entropy(labels: int, regions: int, targets: str) -> tuple[float, str]:
    """Returns the largest entropy in nats that predictions can have, and when they have it.

    - ``regions``: how many outputs are learned by sigmoids, 0 for a softmax of labels
    """
    if not regions:
        return math.log(labels), "all labels are equally likely"
    return regions * math.log(2), f"each {'label' if targets == 'sigmoids' else 'region'} has a probability of 0.5"


def most_disagreement(networks: int, labels: int, regions: int = 0) -> float:
    """Returns the largest disagreement of averaged networks in nats, if each is certain of one of the labels.

    - ``regions``: how many they learned instead, each with a disagreement of its own; 0: none
    """
    choices = 2 if regions else labels
    shares = [len(range(n, networks, choices)) / networks for n in range(min(networks, choices))]
    return max(regions, 1) * sum(-share * math.log(share) for share in shares)
