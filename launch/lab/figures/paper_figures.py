"""The paper's figures, 5 to 8: which runs each takes, and what is said of them."""

from dataclasses import replace
from typing import Any

from lab.figures.figure import PAPER, Figure, FigureCurve, Results, Scale, losses_and_dice
from lab.figures.verdicts import (
    beside_paper,
    coincide,
    differ,
    difference,
    differs_alone,
    first_to_reach,
    highest,
    is_settled,
    not_learned,
    plateau,
    side,
)
from seqpar.report.curves import DICE, QUANTITIES, TRAIN_LOSS, Diagram, over_steps

DEBUG = dict(
    mode="gather", attention="gather-kv", decoder="plain", output_bias=False, augment="none", epochs=3, iterations=8
)
LAPTOP = dict(
    mode="gather", attention="gather-kv", decoder="plain", output_bias=False, epochs=10, iterations=30, val_every=2
)
WHOLE_TUMOUR = {"join_labels": "tumour=1,2,3"}  # which 50 to 300 steps teach; its parts take longer
SCALES = {
    "debug": Scale("debug", {**DEBUG, "val_every": 1, "val_cases": 1, "val_overlap": 0.0}),
    "laptop": Scale("laptop", {**LAPTOP, "val_cases": 2, "val_overlap": 0.25}, of_phantoms=WHOLE_TUMOUR),
    "paper": Scale("paper", {"val_every": 10}, groups=8),  # a node of Frontier where nobody shares a tile
}
LARGER_TILE: dict[str, dict[str, Any]] = {  # ordered chunks of it are boxes on 4 ranks, which nogather needs
    "debug": {"tile": (64, 32, 32)},
    "laptop": {"tile": (64, 64, 64), "epochs": 5, "iterations": 15, "val_every": 1},
    "paper": {"tile": (128, 128, 128), "batch": 16},
}
EXACT: dict[str, dict[str, Any]] = {
    "debug": {"precision": "fp64"},
    # at half of that rate, Dice was 0.27 after 40 steps; rounding grows with each step
    "laptop": {"precision": "fp64", "lr": 1e-3, "epochs": 6, "iterations": 10, "val_every": 1},
    "paper": {"batch": 32},
}
SHORT: dict[str, dict[str, Any]] = {"laptop": {"epochs": 6, "iterations": 20, "val_every": 1}}
NO_GATHER: dict[str, dict[str, Any]] = {
    **EXACT,
    "laptop": {"precision": "fp64", "epochs": 5, "iterations": 20, "val_every": 1},
}


def sizes(*numbers: int, **settings: Any) -> tuple[FigureCurve, ...]:
    """Returns an arm for each size of the sequence group; one rank alone has the same network in every mode."""
    return tuple(FigureCurve(f"SeqPar {n}", {"seqpar": n, **(settings if n > 1 else {})}) for n in numbers)


def judge_gather(results: Results) -> list[str]:
    """Returns whether all sizes of the group compute the same."""
    every = {name: results.curves(name) for name in QUANTITIES}
    lines = [coincide("Gather", name, curves, results.tolerance) for name, curves in every.items()]
    largest = max(difference(first, other).largest for first, *others in every.values() for other in others)
    says = "with Gather, losses converge to the same whatever the number of ranks that share a tile"
    return lines + beside_paper(
        says,
        f"no value of any curve differs by more than {largest:.1e}",
        largest <= results.tolerance if is_settled(results.curves(DICE)) else None,
    )


def judge_no_gather(results: Results) -> list[str]:
    """Returns how each size without a gather differs from one process."""
    lines = []
    for name in QUANTITIES:
        reference, *others = results.curves(name)
        lines += [differ("No-Gather", name, reference, other) for other in others]
    loss, dice = (difference(first, last) for first, *_, last in map(results.curves, (TRAIN_LOSS, DICE)))
    says = "with No-Gather, the training loss converges to other values, and validation loss and Dice follow alike"
    sees = f"on the most ranks, {side(TRAIN_LOSS, loss)}, {side(DICE, dice)}"
    holds = differs_alone(loss, dice) if is_settled(results.curves(DICE), loss, dice) else None
    return lines + beside_paper(says, sees, holds)


def judge_splits(results: Results) -> list[str]:
    """Returns whether the split matters: with a gather it does not, without one it may."""
    gather, no_gather = ("Gather spatial", "Gather ordered"), ("No-Gather spatial", "No-Gather ordered")
    lines = [
        coincide("Splits", name, results.curves(name, "SeqPar 1", *gather), results.tolerance) for name in QUANTITIES
    ]
    for name in QUANTITIES:
        lines.append(differ("Splits", name, *results.curves(name, *no_gather)))
    lines.append(differ("Splits", TRAIN_LOSS, *results.curves(TRAIN_LOSS, "SeqPar 1", no_gather[0])))
    loss = difference(*results.curves(TRAIN_LOSS, "SeqPar 1", no_gather[0]))
    splits = difference(*results.curves(DICE, *no_gather))
    says = "with No-Gather, the training loss is not that of one rank, and the splits differ little"
    sees = f"without a gather, {side(TRAIN_LOSS, loss)}; of ordered splits against spatial ones, {side(DICE, splits)}"
    holds = differs_alone(loss, splits) if is_settled(results.curves(DICE), loss, splits) else None
    return lines + beside_paper(says, sees, holds)


def judge_patches(results: Results) -> list[str]:
    """Returns which patch is ahead at equal steps and at equal time."""
    dice = results.curves(DICE)
    coarse, *finer = dice
    lines = [highest("Patches", DICE, dice), *(differ("Patches", DICE, coarse, other) for other in finer)]
    lines.append(first_to_reach("Patches", DICE, dice, plateau(dice)))
    d = difference(coarse, finer[-1])
    says = "patch 4 converges faster than patch 16 to a higher Dice; after convergence both are similar"
    sees = not_learned(DICE, dice) or f"patch 4 against patch 16, {side(DICE, d)}"
    holds = d.level > 0 if is_settled(results.curves(DICE), d) and d.is_beyond_seeds else None
    return lines + beside_paper(says, sees, holds)


def dice_over_time_too(results: Results) -> list[Diagram]:
    """Returns the usual diagrams, and Dice over the seconds of training."""
    return [*losses_and_dice(results), over_steps(DICE, "seconds", results.curves(DICE))]


PAPER_FIGURES = (
    Figure(
        5,
        "Gather: training on 1, 2 and 4 ranks a tile",
        "losses and Dice of SeqPar 1, 2, 4 in mode gather, which coincide",
        sizes(1, 2, 4, mode="gather"),
        judge_gather,
        EXACT,
    ),
    Figure(
        6,
        "No-Gather: each rank decodes its own part",
        "the same in mode nogather, whose training loss is another one",
        sizes(1, 2, 4, mode="nogather"),
        judge_no_gather,
        NO_GATHER,
    ),
    Figure(
        7,
        "Ordered and spatial splitting at the larger tile, SeqPar 4",
        "ordered against spatial splits with 4 ranks a tile, with and without a gather",
        (
            FigureCurve("SeqPar 1", {"seqpar": 1}),
            *(
                FigureCurve(f"{label} {split}", {"seqpar": 4, "mode": mode, "split": split})
                for label, mode in (("Gather", "gather"), ("No-Gather", "nogather"))
                for split in ("spatial", "ordered")
            ),
        ),
        judge_splits,
        LARGER_TILE,
        published=replace(PAPER, settings=LARGER_TILE["paper"]),
    ),
    Figure(
        8,
        "Long sequences: patches of 16, 8 and 4",
        "losses and Dice of patch 16, 8 and 4, Dice over steps and over time of training",
        (
            FigureCurve("patch 16", {"patch": (16, 16, 16), "seqpar": 1}, {"paper": {"batch": 32}}),
            FigureCurve("patch 8", {"patch": (8, 8, 8), "seqpar": 2}, {"paper": {"seqpar": 4}}),
            FigureCurve("patch 4", {"patch": (4, 4, 4), "seqpar": 2}, {"paper": {"seqpar": 4, "batch": 1}}),
        ),
        judge_patches,
        SHORT,
        dice_over_time_too,
    ),
)
