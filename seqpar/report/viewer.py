"""The section of cases: a viewer of their volumes, and three planes of each, the worst case first."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from seqpar.data.errors import DataError
from seqpar.report.cases import ShownCase, draw_planes, load
from seqpar.report.embedded_volumes import GREYS, Embedded, embed
from seqpar.report.images import Images
from seqpar.report.planes import COLOURS, LETTERS, PLANES, convention, favourite, sides
from seqpar.report.record import CaseScores, Record, ScoredCase
from seqpar.report.run_page import fill

BUDGET = 5_000_000  # bytes of the volumes in a page, which can still be mailed


def load_worst(
    record: Record, scored: CaseScores, count: int, images: Images, gaps: list[str]
) -> list[tuple[ShownCase, Embedded]]:
    """Returns the ``count`` worst cases with their volumes.

    A case that cannot be read is named in ``gaps``, to which lines are added, and the next one takes its place.
    """
    shown = list[tuple[ShownCase, Embedded]]()
    budget = BUDGET // max(1, min(count, len(scored.cases)))
    for case in scored.cases:
        if len(shown) == count:
            break
        try:
            loaded = load(case, record, images)
        except DataError as error:
            gaps.append(f"Case {case.name} cannot be shown: {error}.")
            continue
        volumes = list(loaded.images.values()), loaded.truth, loaded.prediction
        shown.append((loaded, embed(*volumes, loaded.spacing, budget)))
    return shown


def section(
    record: Record, scored: CaseScores, shown: list[tuple[ShownCase, Embedded]], neurological: bool
) -> tuple[str, dict[str, Any]]:
    """Returns the section of the cases, and the data that its viewer reads.

    - ``neurological``: the patient's left is on the left of a picture, and not on the right
    """
    by_name = {case.name: case for case in scored.cases}
    keys = legend(record)
    viewer = fill("viewer.html", {"legend": keys, "note": viewer_note([embedded for _, embedded in shown])})
    how_shown = f'<p class="small">{convention(neurological)}. {LETTERS}.</p>'
    note = '<p class="small">Planes that hold most of the truth; worst cases first.</p>'
    planes = "".join(case_section(by_name[case.name], case, neurological) for case, _ in shown)
    return how_shown + viewer + keys + note + planes, viewer_data(record, shown, neurological)


def case_section(case: ScoredCase, shown: ShownCase, neurological: bool) -> str:
    """Returns one case with its scores and three planes."""
    planes, at = draw_planes(shown, neurological)
    figures = "".join(
        f"<figure>{plane}<figcaption>{name} {place + 1} / {side}</figcaption></figure>"  # as the viewer counts
        for plane, name, place, side in zip(planes, [plane for plane, _ in PLANES], at, shown.truth.shape)
    )
    dice = ", ".join(
        f"{name} {'–' if math.isnan(value) else f'{value:.3f}'}"
        for name, value in ((name, row.get("Dice", math.nan)) for name, row in case.scores.items())
    )
    modality = f" · shown on {favourite(list(shown.images))}" if shown.images else ""
    note = f'<p class="small">{escape(shown.note)}</p>' if shown.note else ""
    caption = f"Dice: {dice}{modality} · voxels of {' × '.join(f'{step:.3g}' for step in shown.spacing)} mm"
    head = f'<h3>{escape(case.name)}</h3><p class="small">{escape(caption)}{escape(volumes_of(case))}</p>'
    w, d, _ = (side * step for side, step in zip(shown.truth.shape, shown.spacing))
    scale = f'style="grid-template-columns: {d:.6g}fr {w:.6g}fr {w:.6g}fr"'  # a mm takes as many pixels in each plane
    body = f'{head}{note}<div class="planes" {scale}>{figures}</div>'
    return f'<article class="case" data-case="{escape(case.name)}">{body}</article>'


def volumes_of(case: ScoredCase) -> str:
    """Returns the true and predicted volume of each class in words, "" where they were not recorded."""
    parts = [
        f"{name} {row['TrueVolumeMl']:.3g} → {row['VolumeMl']:.3g}"
        for name, row in case.scores.items()
        if {"TrueVolumeMl", "VolumeMl"} <= row.keys()
    ]
    return f" · ml, truth → prediction: {', '.join(parts)}" if parts else ""


def legend(record: Record) -> str:
    """Returns the legend: the colour of each label, and the line styles of truth and prediction."""
    keys = "".join(
        f'<span><i style="background:{COLOURS[n % len(COLOURS)]}"></i>{escape(name)}</span>'
        for n, name in enumerate(record.label_names.values())
    )
    lines = '<span><i class="solid"></i>truth</span><span><i class="dashed"></i>prediction</span>'
    return f'<p class="keys">{keys}{lines}</p>'


def viewer_data(record: Record, cases: Sequence[tuple[ShownCase, Embedded]], neurological: bool) -> dict[str, Any]:
    """Returns the data that the viewer reads: labels with colours, and each case's sheets."""
    labels = [{"name": n, "colour": COLOURS[k % len(COLOURS)]} for k, n in enumerate(record.label_names.values())]
    entries = [
        {
            "name": shown.name,
            "shape": embedded.shape,
            "whole": shown.truth.shape,
            "factors": embedded.factors,
            "spacing": [s * f for s, f in zip(shown.spacing, embedded.factors)],
            "columns": embedded.columns,
            "modalities": list(shown.images),
            "favourite": favourite(list(shown.images)),
            "images": embedded.images,
            "truth": embedded.truth,
            "prediction": embedded.prediction,
        }
        for shown, embedded in cases
    ]
    return {"labels": labels, "sides": sides(neurological), "mirrored": not neurological, "cases": entries}


def viewer_note(volumes: Sequence[Embedded]) -> str:
    """Returns a note of what was left out to keep the page small."""
    num_bytes = sum(volume.num_bytes for volume in volumes)
    note = f"Volumes are cropped to the body and kept in {GREYS} grey levels: {num_bytes / 1e6:.1f} MB of at most "
    note += f"{BUDGET / 1e6:g} MB in this page."
    factors = {volume.factors for volume in volumes}
    if factors == {(1, 1, 1)}:
        return note + " Every voxel is there."
    blocks = "; ".join(sorted(" × ".join(map(str, block)) for block in factors))
    return note + f" Blocks of {blocks} voxels became one (images by their mean, labels by their middle voxel)."
