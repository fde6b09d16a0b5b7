"""Figures 16 and 18: what a network sees of a volume, by the size of its tiles, and by the resolution of whole volumes.

Figure 16: tiles of 64 and 96 against whole volumes, one kind of network on about as many voxels in each step. Each has
the stages that nnU-Net plans for it, and is validated as it was trained: in sliding windows, or whole. A tile should be
smaller than the cases: at ``laptop`` the built-in brains are resampled to 112 x 128 x 128 voxels, as many as seven
tiles of 64 have, and two of 96 but for 4 %.

Figure 18: the study of Hou et al., their network on whole volumes of 64 voxels along each side and more, and their
two-dimensional one on slabs of five slices. Each is scored on its own grid. ``--scale paper`` is the preset ``hou``.
"""

from dataclasses import replace
from typing import Any

from lab.figures.figure import EPOCHS, Figure, FigureCurve, Published, Results
from lab.figures.paper_figures import WHOLE_TUMOUR
from lab.figures.verdicts import differ, first_to_reach, growth, highest, plateau
from seqpar.decoders.unets.published import HOU_SLAB
from seqpar.report.curves import DICE, QUANTITIES, Curve, Diagram, over_steps

SIDES = {"debug": (32, 48), "laptop": (64, 96), "paper": (64, 96)}
BATCHES = {"debug": (12, 4), "laptop": (7, 2), "paper": (27, 8)}  # of about as many voxels as one whole volume has
WHOLE_BRAINS = (112, 128, 128)  # voxels of a whole case at laptop
LAPTOP = {"features": 4, "augment": "none", "lr": 5e-3, "epochs": 6, "iterations": 10, "val_every": 1}  # 10 minutes
BRAINS = {"phantoms": 12, "spacing": "1.3,1.45,1.27", **WHOLE_TUMOUR}
NETWORK = {"network": "nnunet-plain", "deep_supervision": True}
SMALL, LARGE, WHOLE = "small tiles", "larger tiles", "whole volumes"
SLABS, RESOLUTIONS = "slabs", ("coarse", "middle", "fine", "finest")
CUBES = {"debug": (16, 32, 48), "laptop": (64, 96, 128), "paper": (64, 128, 256, 512)}  # voxels along each side
WIDTH = {"debug": 32, "laptop": 32, "paper": 1}  # what the published numbers of features are divided by
FINEST = 128, (1.3, 1.45, 1.27)  # along a side of a built-in brain, with these mm between them
FIELD_MM = 350  # of scans of livers
HOU = Published("Hou et al.", "hou", {"features": 256}, ("clip",))
SMALLER = {"loss": "lesion-dice-ce", "loss_weights": (0.45, 0.45, 0.1), "augment": "flips", "foreground": 0.0}
BY_RESOLUTION: dict[str, dict[str, Any]] = {
    "debug": SMALLER,
    "laptop": {**SMALLER, "lr": 5e-3, "epochs": 6, "iterations": 20},
}


def _tiles(label: str, place: int) -> FigureCurve:
    return FigureCurve(label, {}, {s: {"tile": (SIDES[s][place],) * 3, "batch": BATCHES[s][place]} for s in SIDES})


def sizes(results: Results) -> dict[str, str]:
    """Returns the size of each arm's tiles in words, by its label."""
    sides = {label: "x".join(map(str, results.config(label).tile)) for label in results.runs}
    words = {WHOLE: "whole ({})", SLABS: "2D {}"}
    return {label: words.get(label, "tile {}").format(size) for label, size in sides.items()}


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
    lines.append(first_to_reach("Tiles", DICE, dice, plateau(dice)))
    whole = results.config(WHOLE).tile
    for label in (SMALL, LARGE):
        if all(side >= most for side, most in zip(results.config(label).tile, whole)):
            lines.append(f"Tiles: {names[label]} holds whole cases of these data: take larger ones (--data)")
    return lines + growth("LAMP", "larger inputs give a higher Dice", dice)


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


def _spacing(scale: str, side: int) -> str:
    """Returns the spacing that gives a whole volume about ``side`` voxels along each side."""
    count, fine = FINEST
    each = (FIELD_MM / side,) * 3 if scale == "paper" else tuple(mm * count / side for mm in fine)
    return ",".join(f"{mm:.4g}" for mm in each)


def _of_resolution(label: str) -> FigureCurve:
    """Returns the arm of a resolution, or of slabs of five slices at the highest."""
    at = dict[str, dict[str, Any]]()
    is_slab = label == SLABS
    for scale, sides in CUBES.items():
        place = -1 if is_slab else RESOLUTIONS.index(label)
        if place == len(sides):
            continue
        side = sides[place]
        levels = 3 + sum(side > most for most in (64, 128, 256))
        at[scale] = {
            "network": "unet-hou-2d" if is_slab else "unet-hou",
            "tile": (side, side, HOU_SLAB) if is_slab else (side,) * 3,
            "spacing": _spacing(scale, side),
            "features": (256 >> (levels - 3)) // WIDTH[scale],
        }
        if scale != "paper":
            at[scale]["batch"] = 8 if is_slab else 2
        elif side == 512 and not is_slab:
            at[scale]["global_batch"] = 8
    return FigureCurve(label, {}, at, scales=tuple(at))


def judge_resolutions(results: Results) -> list[str]:
    """Returns which resolution is ahead at equal steps, and how each differs from the coarsest."""
    dice = curves(results, DICE)
    coarse, *others = dice
    lines = [highest("Resolutions", DICE, dice), *(differ("Resolutions", DICE, coarse, other) for other in others)]
    says = "a higher resolution gives a higher Dice"
    return lines + growth("The paper of Hou et al.", says, dice[:-1])  # without the slabs


RESOLUTION_FIGURE = Figure(
    18,
    "Whole volumes at higher and higher resolution, and slabs of slices",
    "Hou et al.'s network on whole volumes of 64, 96 and 128 voxels a side (paper: to 512), and on slabs",
    tuple(map(_of_resolution, (*RESOLUTIONS, SLABS))),
    judge_resolutions,
    BY_RESOLUTION,
    draw,
    of_phantoms={
        "debug": WHOLE_TUMOUR,
        "laptop": {"phantoms": 12, **WHOLE_TUMOUR},
        "paper": {"synthesis_per": "tile", **WHOLE_TUMOUR},  # a built-in brain has no label around its tumours
    },
    published=HOU,
)
