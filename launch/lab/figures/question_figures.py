"""Figures that the paper lacks, 9, 10, 13 and 14: what its modes and networks cost, and what they bring."""

from collections.abc import Callable

from lab.figures.costs import RunCost, measured_cost, planned_cost
from lab.figures.figure import Figure, FigureCurve, Results
from lab.figures.paper_figures import EXACT, dice_over_time_too
from lab.figures.verdicts import coincide, differ, first_to_reach, highest, plateau, reached, rounded
from seqpar.report.curves import DICE, QUANTITIES, TRAIN_LOSS, Bars, Diagram, over_steps

MEMORY, TIME, SECONDS_TO = "MiB of a rank", "seconds a step", "seconds to Dice"
SKIPS = (
    FigureCurve("no skips (plain)", {"decoder": "plain"}, matched="decoder_width"),
    FigureCurve("skips (UNETR)", {"decoder": "unetr"}, matched="decoder_width"),
    FigureCurve("no skips (Primus)", {"decoder": "primus"}),
)
U_NET = FigureCurve("U-Net (nnU-Net's plain)", {"network": "nnunet-plain"}, matched="features")
PATCHES = tuple(
    FigureCurve(f"{arm.label}, patch {patch}", {**arm.settings, "patch": (patch,) * 3}, matched=arm.matched)
    for arm in SKIPS
    for patch in (16, 8)
)


def costs(results: Results) -> dict[str, dict[str, RunCost]]:
    """Returns what each arm cost, measured and planned, by its label; of several seeds the first."""
    return {
        label: {"measured": measured_cost(runs[0]), "planned": planned_cost(runs[0])}
        for label, runs in results.runs.items()
    }


def judge_modes(results: Results) -> list[str]:
    """Returns that halo and swap coincide with Gather, and at what share of its memory and time."""
    lines = [coincide("Modes", name, results.curves(name), results.tolerance) for name in QUANTITIES]
    every = costs(results)
    gather = every["Gather"]
    for label in ("halo", "swap"):
        shares = [
            ", ".join(f"{kind} {getattr(cost, name) / getattr(gather[kind], name):.2f}" for kind, cost in own.items())
            for own, name in ((every[label], "memory"), (every[label], "seconds"))
        ]
        lines.append(f"Modes: {label} takes of Gather's memory {shares[0]}; of its time {shares[1]}")
    return lines


def draw_modes(results: Results) -> list[Diagram | Bars]:
    """Returns training loss and Dice, and bars of memory and time, measured and planned."""
    every = costs(results)
    return [
        *(over_steps(name, "step", results.curves(name)) for name in (TRAIN_LOSS, DICE)),
        Bars(MEMORY, {label: {kind: cost.memory for kind, cost in own.items()} for label, own in every.items()}),
        Bars(TIME, {label: {kind: cost.seconds for kind, cost in own.items()} for label, own in every.items()}),
    ]


def judge_networks(subject: str) -> Callable[[Results], list[str]]:
    """Returns the judge of networks of equal size: their sizes, and which is ahead at equal steps and at equal time."""

    def judge(results: Results) -> list[str]:
        dice = results.curves(DICE)
        sizes = ", ".join(f"{label} {results.parameters(label):,}" for label in results.runs)
        lines = [f"{subject}: parameters: {sizes}", highest(subject, DICE, dice)]
        first, *others = dice
        lines += [differ(subject, DICE, first, other) for other in others]
        return [*lines, first_to_reach(subject, DICE, dice, plateau(dice))]

    return judge


def judge_reach(results: Results) -> list[str]:
    """Returns the seconds to a Dice, by network and patch."""
    return [first_to_reach("Networks", DICE, results.curves(DICE), results.reach)]


def draw_reach(results: Results) -> list[Diagram | Bars]:
    """Returns Dice over time, and bars of the seconds to a Dice; an arm that never has it has none."""
    curves = results.curves(DICE)
    every = (reached(curve, results.reach) for curve in curves)
    bars = {one.label: {} if one.seconds is None else {SECONDS_TO: one.seconds} for one in every}
    name = f"{SECONDS_TO} {rounded(results.reach)}"
    return [over_steps(DICE, "seconds", curves), *([Bars(name, bars)] if any(bars.values()) else [])]


QUESTION_FIGURES = (
    Figure(
        9,
        "Gather, halo and swap on 2 ranks",
        "halo and swap coincide with Gather, at what share of its memory and time",
        (
            FigureCurve("SeqPar 1", {"seqpar": 1}),
            FigureCurve("Gather", {"seqpar": 2, "mode": "gather"}),
            FigureCurve("halo", {"seqpar": 2, "mode": "halo"}),
            FigureCurve("swap", {"seqpar": 2, "mode": "swap"}),
        ),
        judge_modes,
        EXACT,
        draw_modes,
    ),
    Figure(
        10,
        "Skips against none, at equal parameters",
        "decoders with skips and without, at equal parameters and steps",
        SKIPS,
        judge_networks("Skips"),
        draw=dice_over_time_too,
        size_of=SKIPS[-1].label,
    ),
    Figure(
        13,
        "A U-Net and the Vision Transformers, at equal parameters",
        "nnU-Net's plain U-Net and the ViTs of figure 10",
        (*SKIPS, U_NET),
        judge_networks("Networks"),
        draw=dice_over_time_too,
        size_of=SKIPS[-1].label,
    ),
    Figure(
        14,
        "Seconds of training to a validation Dice",
        "seconds to a Dice (--reach) by network and patch",
        (*PATCHES, U_NET),
        judge_reach,
        draw=draw_reach,
        size_of=f"{SKIPS[-1].label}, patch 8",
    ),
)
