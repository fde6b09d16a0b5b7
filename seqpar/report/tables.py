"""Tables of scores, each class's distribution over the cases, and headline numbers, as the templates draw them."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from seqpar.report.curves import count_of, number
from seqpar.report.plots import Strips, make_strips
from seqpar.report.record import CaseScores, RunRecord, ScoredCase, mean_of_numbers
from seqpar.runs.run_folder import name_validated
from seqpar.scores.class_scores import describe_share
from seqpar.scores.comparison import FEW, TOO_FEW
from seqpar.scores.label_scores import UNLABELLED_ML
from seqpar.scores.lesions import hidden_by_scale, largest_voxel_ml
from seqpar.text import millilitres, quantity, rounded

METRICS = (("Dice", 3, ("mean", "median", "global")), ("NSD", 3, ("mean", "median")), ("HD95", 1, ("mean", "median")))
COARSE = 2.0  # mm, the side of a voxel above which rules made for voxels of 1 mm mislead
DISPUTED_ML = "DisputedMl"  # of truths by several readers
CONSENSUS = "the readers' consensus"
SIZES = ("TrueVolumeMl", "VolumeMl", "LesionTP", "LesionFN", "LesionFP")
NOISE_PLACES = 9  # of a volume in ml: what is 0 with as many decimals is the rounding of a sum


class Score(NamedTuple):
    """A number in a cell, rounded to ``places`` decimals; ``is_signed``: a difference, with + where it is above 0."""

    value: float
    places: int
    suffix: str = ""
    is_signed: bool = False

    @property
    def text(self) -> str:
        plus = "+" * (self.is_signed and round(self.value, self.places) > 0) if math.isfinite(self.value) else ""
        return plus + rounded(self.value, self.places) + self.suffix * (not math.isnan(self.value))

    @property
    def exact(self) -> str:
        """The number with all digits, for scripts and tests."""
        return "" if math.isnan(self.value) else repr(self.value)


def volume_score(ml: float, places: int, suffix: str = "", is_signed: bool = False) -> Score:
    """Returns the cell of a volume; a small one has the decimals that it takes not to be shown as 0."""
    if round(ml, NOISE_PLACES) and not round(ml, places):
        places = math.ceil(-math.log10(abs(ml)))
    return Score(ml, places, suffix, is_signed)


def reader_score(metric: str, row: Mapping[str, float], places: int, suffix: str = "") -> Score:
    """Returns the cell of how well readers agree, which may be a volume."""
    value = row.get(metric, math.nan)
    return volume_score(value, places, suffix) if metric == DISPUTED_ML else Score(value, places, suffix)


class HeadlineTile(NamedTuple):
    """A headline number; ``more``: its interval and number of cases; ``caution``: what a low one means."""

    name: str
    score: Score
    more: str
    caution: str = ""


def tiles_of_steps(
    tiles: Sequence[HeadlineTile], own: int, best: Mapping[str, Any] | None, kind: str
) -> list[HeadlineTile]:
    """Returns tiles that say their step; they lead with the scores of the weights that predict takes, if these differ.

    - ``own``: the step of the scores, 0 if it is not known
    - ``best``: the row of the best validation, None if it is not known; ``kind``: where its scores are in it
    """
    if not own:
        return list(tiles)
    if best is None or best["step"] == own:
        return [tile._replace(more=f"{tile.more}, step {own:,}") for tile in tiles]
    cases = count_of([best]).strip(" ()") or "n unknown"
    return [
        HeadlineTile(
            tile.name,
            Score(number(best.get(kind, {}).get(tile.name)), 3),
            f"{cases}, step {best['step']:,}; step {own:,}: {tile.score.text} ({tile.more})",
        )
        for tile in tiles
    ]


class TableHead(NamedTuple):
    """The head of a column, or of several with heads ``below``."""

    text: str
    below: Sequence[str] = ()


class TableRow(NamedTuple):
    name: str
    cells: Sequence[Score | str]


@dataclass(frozen=True)
class Table:
    """A table, by whose ``name`` scripts find it.

    - ``of``: what its rows are: a "class", a "case", or nothing with a name
    - ``note``: a text below
    """

    name: str
    heads: Sequence[TableHead]
    rows: Sequence[TableRow]
    of: str = ""
    note: str = ""

    @property
    def has_groups(self) -> bool:
        return any(head.below for head in self.heads)


OVER_CASES = "Mean and median are over cases; global pools the voxels of all cases."


def metrics_table(scored: CaseScores) -> Table:
    """Returns the summary of each class over all cases."""
    rows, is_one = [], len(scored.cases) == 1  # of one case they are all alike
    substituted = {name: [c for c in scored.cases if only_one_map(c.scores[name])] for name in scored.classes}
    has_measured = not is_one and any(substituted.values())
    shown = [(metric, places, kinds[:1] if is_one else kinds) for metric, places, kinds in METRICS]
    for name, key in scored.classes.items():
        cells: list[Score | str] = [_labels_of(key)]
        for metric, places, kinds in shown:
            if metric == "HD95" and has_measured:
                measured = [c.scores[name].get(metric, math.nan) for c in scored.cases if c not in substituted[name]]
                known = [value for value in measured if not math.isnan(value)]
                cells.append(Score(mean_of_numbers(known), places, f" (n = {len(known)})"))
            cells += [Score(scored.summary.get(kind, {}).get(name, {}).get(metric, math.nan), places) for kind in kinds]
        count = scored.summary.get("num_values", {}).get(name, {}).get("Dice", math.nan)
        cells += [Score(len(substituted[name]), 0), Score(count, 0, f" of {len(scored.cases)}")]
        rows.append(TableRow(name, cells))
    below: list[tuple[str, ...]] = [("value",) if is_one else kinds for _, _, kinds in shown]
    if has_measured:
        below[-1] = ("measured mean", *(f"{kind} with substitutes" for kind in below[-1]))
    heads = [TableHead(name, kinds) for (name, *_), kinds in zip(METRICS[:-1], below)]
    heads.append(TableHead("HD95, mm", (*below[-1], "substituted")))
    note = f"Scores of {quantity(len(scored.cases), 'case')}: {scored.source}." + f" {OVER_CASES}" * (not is_one)
    note += f" {what_is_absent(scored)}"
    tolerance = scored.settings.get("nsd_tolerance")
    if isinstance(tolerance, (int, float)):
        note += f" The surface Dice (NSD) has a tolerance of {tolerance:g} mm."
    instead = "374 mm, as BraTS has it" if scored.settings.get("empty") == "brats" else "the image's diagonal"
    note += f" A case in which only one map has the class has no distance: its HD95 is replaced by {instead}."
    note += " The measured mean leaves such cases out; n is the number of the others." * has_measured
    return Table("metrics", [TableHead("Class"), TableHead("Labels"), *heads, TableHead("Cases")], rows, "class", note)


def mean_over(classes: Iterable[str], whose: str = "") -> str:
    """Returns a sentence with the classes that a mean Dice covers; "" for a single class."""
    *others, last = list(classes) or [""]
    return f"The mean Dice {whose}is the mean of {', '.join(others)} and {last}." if others else ""


class Absent(NamedTuple):
    """Cases whose truth lacks a class: how many, and in how many of them some of it was predicted.

    - ``unknown``: cases whose truth does not show the class
    """

    cases: int
    predicted: int
    unknown: int


ABSENT_RULE = (
    "Where the truth lacks a class, its Dice counts as 0 if any of it is predicted; if none is, the case is left out."
)


def absent_of(scored: CaseScores, name: str) -> Absent:
    """Returns how many cases lack a class."""
    rows = [case.scores[name] for case in scored.cases if name in case.scores]
    lacking = [row for row in rows if row.get("n_ref", 1) == 0]
    return Absent(
        len(lacking), sum(row["n_pred"] > 0 for row in lacking), sum(math.isnan(row.get("n_ref", 1)) for row in rows)
    )


def what_is_absent(scored: CaseScores) -> str:
    """Returns which classes the truth of how many cases lacks, and how these cases count."""
    total, parts = len(scored.cases), list[str]()
    left_out = "the Dice counts as 1" if scored.settings.get("empty") == "brats" else "the case is left out"
    for name, absent in ((name, absent_of(scored, name)) for name in scored.classes):
        if absent.cases:
            counts = (
                (absent.predicted, "some is", "the Dice counts as 0"),
                (absent.cases - absent.predicted, "none is", left_out),
            )
            ways = "; ".join(f"where {what} predicted ({quantity(n, 'case')}), {how}" for n, what, how in counts if n)
            which = (
                "The labelled part"
                if is_part_labelled(case.scores.get(name, {}) for case in scored.cases)
                else "The truth"
            )
            parts.append(f"{which} of {absent.cases} of {quantity(total, 'case')} has no {name}: {ways}.")
        if absent.unknown:
            parts.append(f"Cases that are not annotated for {name}, and left out: {absent.unknown} of {total}.")
    return " ".join(parts) or f"The truth of {'every' if total > 1 else 'the'} case has every class."


def is_part_labelled(rows: Iterable[Mapping[str, float]]) -> bool:
    """Returns whether the truth leaves a part of its image unlabelled (ignore label), where nothing is known."""
    return any(row.get(UNLABELLED_ML, 0.0) > 0 for row in rows)


def only_one_map(row: Mapping[str, float]) -> bool:
    """Returns whether only one of truth and prediction has a class."""
    counts = row.get("n_ref", 1), row.get("n_pred", 1)
    return not any(map(math.isnan, counts)) and bool(counts[0]) != bool(counts[1])  # NaN: the class is not annotated


def what_is_missing(name: str, row: Mapping[str, float]) -> str:
    """Returns which of truth and prediction lacks a class, and how much the other one has; "" if none or both do."""
    disputed = row.get(DISPUTED_ML, 0.0)
    if not only_one_map(row) and not (disputed > 0 and row.get("n_ref") == row.get("n_pred") == 0):
        return ""
    is_part = is_part_labelled([row])
    truth = "the labelled part" if is_part else CONSENSUS if DISPUTED_ML in row else "truth"
    if row["n_ref"]:
        ml, there = millilitres(row.get("TrueVolumeMl", math.nan)), " there" * is_part
        return f"no {name} predicted{there}; {ml} ml in {truth}"
    some = f", but {millilitres(disputed)} ml by some readers" * bool(disputed)
    ml = f"{millilitres(row.get('VolumeMl', math.nan))} ml" if row["n_pred"] else "none"
    return f"no {name} in {truth}{some}; {ml} predicted"


def voxel_ml(scored: CaseScores) -> float:
    """Returns the volume of the largest voxel of the cases, 0 if their scores do not tell."""
    return largest_voxel_ml(row for case in scored.cases for row in case.scores.values())


def _ml_places(scored: CaseScores) -> int:
    """Returns the decimals of a volume in ml, at most two and no more than a voxel justifies."""
    size = voxel_ml(scored)
    return min(2, max(0, math.ceil(-math.log10(size)))) if size else 2


def what_volumes_count(classes: Mapping[str, str]) -> str:
    """Returns a sentence on which labels a volume counts; "" for a single class with one label."""
    names = {_labels_of(key): name for name, key in classes.items()}
    several = list[str]()
    for name, key in classes.items():
        if len(labels := _labels_of(key).split(" + ")) > 1:
            are_named = all(label in names for label in labels)
            several.append(f"{name} = {' + '.join(names[label] if are_named else label for label in labels)}")
    if several:
        return f" A volume is that of all labels of its class: {'; '.join(several)}."
    alone = " Each volume counts only its class's label: an organ's volume leaves out lesions with labels of their own."
    return alone * (len(classes) > 1)


def _labels_of(key: str) -> str:
    return key.strip("()").rstrip(",").replace(", ", " + ")


def voxel_cautions(scored: CaseScores, sides: Collection[float] = ()) -> str:
    """Returns sentences if voxels are too coarse or too fine for some scores, else "".

    - ``sides``: of the cases' voxels in mm, as far as they are known
    """
    size, tolerance = 1000 * voxel_ml(scored), scored.settings.get("nsd_tolerance")
    side, sentences = max([*sides, size ** (1 / 3)]), list[str]()
    how = f"of up to {side:.3g} mm" if side in sides else f"of {side:.3g} mm on average"
    if size ** (1 / 3) > COARSE:
        text = f"Voxels are coarse, of up to {size:.3g} mm³: "
        if not scored.summary:
            return f"{text}outlines are rough, and so are the volumes of small structures."
        text += "a single voxel "
        text += "may count as a region, and regions that touch as one." if size > 50 else "changes small regions much."
        sentences.append(text)
    if scored.summary and isinstance(tolerance, (int, float)) and tolerance * (1 + 1e-6) < side:
        sentences.append(
            f"The surface Dice (NSD) has a tolerance of {tolerance:g} mm, and voxels have sides {how}: a boundary that "
            "is one voxel off may count as wrong, so compare it only at the same voxel size."
        )
    if scored.summary:
        sentences += hidden_by_scale([case.scores for case in scored.cases], tolerance, True, sides)
    return " ".join(sentences)


def sizes_table(scored: CaseScores) -> Table | None:
    """Returns volumes and found regions of each class; None where they were not recorded."""
    rows, counts, places = [], dict[str, int](), _ml_places(scored)
    for name in scored.classes:
        rows_of = (case.scores[name] for case in scored.cases)  # a class that is not annotated has NaN
        cases = [row for row in rows_of if all(math.isfinite(row.get(key, math.nan)) for key in SIZES)]
        if not cases:
            continue
        counts[name] = len(cases)
        true_ml, ml, found, missed, false = (sum(row[key] for row in cases) for key in SIZES)
        error = sum(abs(row["VolumeErrorMl"]) for row in cases)
        bias = volume_score((ml - true_ml) / len(cases), places, is_signed=True)
        true, predicted, off = (volume_score(value / len(cases), places) for value in (true_ml, ml, error))
        cells: list[Score | str] = [true, predicted, bias, off]
        small = sum(row.get("LesionSmall", 0) for row in cases)  # older summaries do not tell
        cells += [
            Score(found, 0, f" of {found + missed:.0f}{f', {small:.0f} too small' * bool(small)}"),
            Score(false, 0, f" ({false / len(cases):{'.3g' if false < 100 * len(cases) else ',.0f'}} per case)"),
        ]
        cells.append(_found_share(found, int(found + missed), false))
        rows.append(TableRow(name, cells))
    are_means = len(scored.cases) > 1
    mean = "mean " * are_means
    means = f"Volumes are means over {_over(counts)}. " if are_means else ""
    means += "An error above 0: too much is predicted."
    heads = [
        TableHead("Class"),
        TableHead("Volume of a case, ml", ("truth", "prediction", f"{mean}error", f"{mean}absolute error")),
        TableHead("Connected regions", ("regions found", "false regions", "sensitivity (regions)")),
    ]
    note = (
        f"{means}{what_volumes_count(scored.classes)} A region, such as a lesion, is a connected part of the class in "
        "the truth. True parts whose margins touch are one region; a margin is 3 mm "
        "wide, rounded down to whole voxels, so voxels larger than 3 mm have none. Regions of up to 50 mm³ are too "
        "small to count: neither found nor missed. A region is found if a predicted part touches it or its margin, by "
        "as little as one voxel: found does not mean outlined. A separate predicted part is false, however small, if "
        "it touches no region or margin, not even of a region too small to count. Sensitivity is the share of regions "
        "found, with Wilson's 95 % interval, which takes regions as independent. The rules are those of "
        "BraTS 2023, made for voxels of 1 mm."
    )
    if any(case.doubt and case.doubt.readers for case in scored.cases):
        note += f" Regions are found, missed and false against {CONSENSUS}: a reader may have outlined a false one."
    return Table("sizes", heads, rows, "class", note) if rows else None


def _over(counts: Mapping[str, int]) -> str:
    """Returns of how many cases the volumes of classes are means; ``counts``: by class."""
    numbers = list(counts.values())
    most = max(numbers, key=numbers.count, default=0)
    others = ", ".join(f"{name}: {count}" for name, count in counts.items() if count != most)
    return f"{quantity(most, 'case')}{f' ({others})' if others else ''}, those without the class included"


def _found_share(found: float, regions: int, false: float) -> Score | str:
    """Returns the share of found regions, its interval and the false ones; of few regions that they are few."""
    if regions < FEW:
        return TOO_FEW if regions else "–"
    return Score(found / regions, 3, f" ({describe_share(found / regions, regions)}), with {false:.0f} false")


MANY = 3  # times the true volume: at most a third of what is predicted is right


def volumes_table(scored: CaseScores) -> Table:
    """Returns the true and predicted volume of each class in each case."""
    places = _ml_places(scored)
    rows = [
        TableRow(
            case.name,
            [
                volume_score(case.scores[name].get(key, math.nan), places)
                for name in scored.classes
                for key in SIZES[:2]
            ],
        )
        for case in scored.cases
    ]
    heads = [TableHead("Case"), *(TableHead(name, ("truth", "prediction")) for name in scored.classes)]
    return Table("volumes-per-case", heads, rows, "case")


def predicted_volumes(scored: CaseScores) -> Table:
    """Returns the predicted volume of each class in each case."""
    places = _ml_places(scored)
    rows = [
        TableRow(c.name, [volume_score(row["VolumeMl"], places) for row in c.scores.values()]) for c in scored.cases
    ]
    heads = [TableHead("Case"), TableHead("Predicted volume, ml", tuple(scored.classes))]
    note = f"There is no truth here, so nothing shows how good these are.{what_volumes_count(scored.classes)}"
    return Table("predicted-volumes", heads, rows, "case", note)


def dice_table(scored: CaseScores) -> Table:
    """Returns the Dice of every case, the worst first."""
    rows = [
        TableRow(
            case.name,
            [*(_dice(case.scores[name]) for name in scored.classes), Score(case.dice, 3)],
        )
        for case in scored.cases
    ]
    note = mean_over(scored.classes, "of a case ")
    note += " A class that has no Dice in a case is left out." * bool(note)
    return Table("per-case", list(map(TableHead, ("Case", *scored.classes, "mean"))), rows, "case", note)


def _dice(row: Mapping[str, float]) -> Score:
    if only_one_map(row):
        return Score(row.get("Dice", math.nan), 3, f" (none {'predicted' if row['n_ref'] else 'in truth'})")
    return Score(row.get("Dice", math.nan), 3, " (no overlap)" * (row.get("Dice") == 0))


def last_validation(record: RunRecord) -> Table | None:
    """Returns the scores of the last validation in the journal; None before the first."""
    if not record.held_out:
        return None
    row = record.held_out[-1]
    pooled = row.get("global_dice", {})
    rows = [
        TableRow(name, [Score(number(value), 3), Score(number(pooled.get(name)), 3)])
        for name, value in row.get("dice", {}).items()
    ]
    cases = name_validated(record.dataset, row.get("cases"))
    note = f"From the validation after step {row['step']:,} on {cases}. {OVER_CASES} {ABSENT_RULE}"
    return Table("metrics", list(map(TableHead, ("Class", "Dice, mean", "Dice, global"))), rows, "class", note)


def score_strips(scored: CaseScores, colours: Mapping[str, str]) -> list[Strips]:
    """Returns the distribution of each class's scores over the cases."""
    return list(filter(None, _strips_of(scored, colours)))


def _dot(case: ScoredCase, name: str, metric: str, instead: str) -> tuple[float, str, str]:
    missing = what_is_missing(name, case.scores[name])
    return case.scores[name].get(metric, math.nan), case.name, f"{instead}{missing}" if missing else ""


def _strips_of(scored: CaseScores, colours: Mapping[str, str]) -> Iterable[Strips | None]:
    for metric, title, high in (("Dice", "Dice of each case", 1.0), ("HD95", "HD95 of each case, mm", None)):
        instead = "substituted, " if metric == "HD95" else ""
        rows = {name: [_dot(case, name, metric, instead) for case in scored.cases] for name in scored.classes}
        yield make_strips(title, rows, 0.0, high, colours, metric == "HD95")
