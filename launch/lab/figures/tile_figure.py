"""Figure 16: tiles of 64 and 96 against whole volumes, one kind of network on about as many voxels in each step.

Each has the stages that nnU-Net plans for it, and is validated as it was trained: in sliding windows, or whole. A tile
should be smaller than the cases: at ``laptop`` the built-in brains are resampled to 112 x 128 x 128 voxels, as many as
seven tiles of 64 have, and two of 96 but for 4 %.
"""

from dataclasses import replace

from lab.figures.figure import EPOCHS, Figure, FigureCurve, Results
from lab.figures.verdicts import differ, first_to_reach, highest, plateau
from seqpar.report.curves import DICE, QUANTITIES, Curve, Diagram, over_steps

SIDES = {"debug": (32, 48), "laptop": (64, 96), "paper": (64, 96)}
BATCHES = {"debug": (12, 4), "laptop": (7, 2), "paper": (27, 8)}  # of about as many voxels as one whole volume has
WHOLE_BRAINS = (112, 128, 128)  # voxels of a whole case at laptop
LAPTOP = {"features": 4, "augment": "none", "lr": 5e-3, "epochs": 6, "iterations": 10, "val_every": 1}  # 10 minutes
BRAINS = {"phantoms": 12, "spacing": "1.3,1.45,1.27", "join_labels": "tumour=1,2,3"}  # learned in few steps
NETWORK = {"network": "nnunet-plain", "deep_supervision": True, "output_bias": False}
SMALL, LARGE, WHOLE = "small tiles", "larger tiles", "whole volumes"


def _tiles(label: str, place: int) -> FigureCurve:
    return FigureCurve(label, {}, {s: {"tile": (SIDES[s][place],) * 3, "batch": BATCHES[s][place]} for s in SIDES})


def sizes(results: Results) -> dict[str, str]:
    """Returns the size of each arm's tiles in words, by its label."""
    sides = {label: "x".join(map(str, results.config(label).tile)) for label in results.runs}
    return {label: f"whole ({size})" if label == WHOLE else f"tile {size}" for label, size in sides.items()}


def curves(results: Results, quantity: str) -> list[Curve]:
    """Returns the curves of all arms, named by the size of their tiles."""
    names = sizes(results)
    return [replace(curve, label=names[curve.label]) for curve in results.curves(quantity)]


def voxels_a_step(results: Results, label: str) -> int:
    """Returns how many voxels a sequence group sees in a step."""
    config = results.config(label)
    w, d, h = config.tile
    return w * d * h * config.batch * config.accumulate


def judge(results: Results) -> list[str]:
    """Returns the voxels of a step, which size is ahead at equal steps and time, and which tiles are too large."""
    names, dice = sizes(results), curves(results, DICE)
    voxels = ", ".join(f"{name} {voxels_a_step(results, label) / 1e6:.2f} million" for label, name in names.items())
    small, *others = dice
    lines = [f"Tiles: voxels a step: {voxels}", highest("Tiles", DICE, dice)]
    lines += [differ("Tiles", DICE, small, other) for other in others]
    lines.append(first_to_reach("Tiles", DICE, dice, plateau(small)))
    whole = results.config(WHOLE).tile
    for label in (SMALL, LARGE):
        if all(side >= most for side, most in zip(results.config(label).tile, whole)):
            lines.append(f"Tiles: {names[label]} holds whole cases of these data: take larger ones (--data)")
    return lines


def draw(results: Results) -> list[Diagram]:
    """Returns losses and Dice over steps, and Dice over the seconds of training."""
    over = [over_steps(name, "step", curves(results, name)) for name in QUANTITIES]
    return [*over, over_steps(DICE, "seconds", curves(results, DICE))]


TILE_FIGURE = Figure(
    16,
    "Small tiles, larger ones and whole volumes",
    "tiles of 64 and 96 (debug: 32 and 48) against whole volumes, at equal voxels a step",
    (
        _tiles(SMALL, 0),
        _tiles(LARGE, 1),
        FigureCurve(WHOLE, {"curriculum": f"whole:{EPOCHS}:1", "val_window": "whole"}),
    ),
    judge,
    {"debug": NETWORK, "laptop": {**NETWORK, **LAPTOP}, "paper": NETWORK},
    draw,
    of_phantoms={"laptop": BRAINS},
)
