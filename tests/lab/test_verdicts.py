"""Verdicts are true to the points: curves that coincide, that differ, that cross, within and beyond their seeds."""

import math
import re

import pytest

from lab.figures.figure import Results
from lab.figures.paper_figures import judge_gather, judge_patches
from lab.figures.verdicts import (
    OWN_QUESTION,
    coincide,
    differ,
    difference,
    first_to_reach,
    growth,
    highest,
    listed,
    plateau,
    reached,
    with_question,
)
from seqpar.report.curves import Curve


class Seen(Results):
    """Results with the same curves for every quantity."""

    tolerance = 1e-9  # type: ignore[assignment]

    def __init__(self, every: dict[str, Curve]) -> None:
        super().__init__({})
        self.__dict__["every"] = every

    def curves(self, quantity: str, *labels: str) -> list[Curve]:
        every: dict[str, Curve] = self.__dict__["every"]
        return [every[label] for label in labels or every]


STEPS = (10, 20, 30, 40)
FALLING = (1.0, 0.8, 0.6, 0.4)


def curve(label: str, *rows: tuple[float, ...]) -> Curve:
    return Curve(label, STEPS, rows, (1.0, 2.0, 3.0, 4.0))


def shifted(by: float, values: tuple[float, ...] = FALLING) -> tuple[float, ...]:
    return tuple(value + by for value in values)


def test_curves_that_coincide_are_said_to_with_their_largest_difference() -> None:
    same = [curve("SeqPar 1", FALLING), curve("SeqPar 2", FALLING[:3] + (0.4 + 2.5e-13,)), curve("SeqPar 4", FALLING)]
    words = coincide("Gather", "training loss", same, 1e-9)
    assert words == "Gather: SeqPar 1, 2, 4 coincide: largest difference of the training loss 2.5e-13"
    assert coincide("Gather", "training loss", same, 1e-2) == words
    rounded = [curve("SeqPar 1", FALLING), curve("SeqPar 2", FALLING[:3] + (0.4 + 3e-8,))]
    assert "SeqPar 1, 2 coincide within 1e-05: largest difference of the Dice 3.0e-08" in coincide(
        "Gather", "Dice", rounded, 1e-5
    )


def test_curves_that_do_not_coincide_are_said_not_to_and_where() -> None:
    off = [curve("SeqPar 1", FALLING), curve("SeqPar 2", (1.0, 0.85, 0.6, 0.4))]
    words = coincide("Gather", "training loss", off, 1e-9)
    assert "SeqPar 1, 2 do not coincide: largest difference of the training loss 0.05" in words
    assert "between SeqPar 1 and SeqPar 2 at step 20 (bound 1e-09)" in words


def test_each_seed_has_to_coincide_and_a_lost_value_does_not() -> None:
    """The means of both seeds are equal, the seeds are not."""
    turned = curve("SeqPar 2", shifted(-0.1), shifted(0.1))
    words = coincide("Gather", "Dice", [curve("SeqPar 1", shifted(0.1), shifted(-0.1)), turned], 1e-9)
    assert "do not coincide: largest difference of the Dice 0.2" in words
    lost = curve("SeqPar 2", (1.0, math.nan, 0.6, 0.4))
    assert difference(curve("SeqPar 1", FALLING), lost).largest == math.inf
    assert difference(lost, lost).largest == 0.0


def test_a_curve_beyond_the_seeds_spread_is_told_from_one_within() -> None:
    """Each seed is compared with itself: what both curves share tells nothing about their difference."""
    reference = curve("SeqPar 1", FALLING, shifted(0.3))
    far, near = (curve("SeqPar 2", shifted(by), shifted(by + 0.32)) for by in (0.1, 0.0))
    words = re.sub(r"at step \d+", "at step N", differ("No-Gather", "training loss", reference, far))
    assert words == (
        "No-Gather: SeqPar 2 differs from SeqPar 1: largest difference of the training loss 0.12 at step N; over the "
        "last half it lies above by 0.11, beyond the seeds' spread of 0.02, each compared with itself (seeds of one "
        "curve are up to 0.32 apart); they do not cross"
    )
    words = differ("No-Gather", "training loss", far, reference)
    assert "it lies below by 0.11, beyond" in words
    assert "above by 0.01, within the seeds' spread of 0.02" in differ("No-Gather", "training loss", reference, near)


def test_one_seed_is_said_to_show_no_spread() -> None:
    words = differ("No-Gather", "training loss", curve("SeqPar 1", FALLING), curve("SeqPar 2", shifted(0.1)))
    assert "one seed shows no spread" in words and "beyond" not in words and "within" not in words


def test_curves_that_cross_are_said_to_and_when() -> None:
    crossing = curve("patch 8", (1.1, 0.9, 0.5, 0.2))
    words = differ("Patches", "validation loss", curve("patch 16", FALLING), crossing)
    assert words.endswith("they cross once, last before step 30") and "it lies below by 0.15" in words
    twice = curve("patch 8", (1.1, 0.7, 0.7, 0.5))
    assert "cross 2 times, last before step 30" in differ("Patches", "Dice", curve("patch 16", FALLING), twice)
    assert difference(curve("a", FALLING), curve("b", FALLING)).crossings == ()
    same = differ("Patches", "Dice", curve("patch 16", FALLING), curve("patch 8", FALLING))
    assert same == "Patches: patch 8 is the same as patch 16: largest difference of the Dice 0"


def test_only_common_steps_count() -> None:
    short = Curve("SeqPar 2", (20, 40), ((0.8, 0.4),))
    assert difference(curve("SeqPar 1", FALLING), short).largest == 0.0
    with pytest.raises(ValueError, match="no step in common"):
        difference(curve("SeqPar 1", FALLING), Curve("SeqPar 2", (15,), ((0.9,),)))


def test_the_highest_is_that_after_the_same_number_of_steps() -> None:
    longer = Curve("patch 4", (20, 40, 80), ((0.2, 0.5, 0.9),))
    words = highest("Patches", "Dice", [curve("patch 16", (0.1, 0.2, 0.3, 0.4)), longer])
    assert words.startswith("Patches: Dice after 40 steps: patch 16 0.400, patch 4 0.500; patch 4 is highest, by 0.1;")
    seeds = [
        curve("patch 16", (0, 0, 0.4, 0.3), (0, 0, 0.4, 0.5)),
        curve("patch 8", (0, 0, 0.4, 0.4), (0, 0, 0.4, 0.5)),
    ]
    assert "patch 8 is highest, by 0.05, within the seeds' spread of 0.1" in highest("Patches", "Dice", seeds)
    assert "none is highest" in highest("Patches", "Dice", [curve("a", FALLING), curve("b", FALLING)])


def test_the_first_to_reach_a_value_is_the_quickest_in_seconds() -> None:
    quick = Curve("unetr", (10, 20), ((0.7, 0.9),), (0.5, 1.0))
    slow = Curve("plain", (10, 20, 30), ((0.7, 0.8, 0.85),), (2.0, 4.0, 6.0))
    words = first_to_reach("Networks", "Dice", [quick, slow, curve("primus", FALLING)], 0.8)
    assert "unetr 1 s (step 20), plain 4 s (step 20), primus 1 s (step 10)" in words
    assert reached(slow, 0.99).seconds is None
    assert plateau([Curve("plain", (10, 20), ((0.61, 0.32396),))]) == 0.61
    own = Curve("plain", (10, 20), ((0.3, 0.4239),), (2.0, 4.0))
    assert plateau([own]) == 0.423 and reached(own, plateau([own])).step == 20
    assert "plain never; none reaches it" in first_to_reach("Networks", "Dice", [slow], 0.99)


def test_labels_are_listed_in_short_where_they_differ_by_a_number() -> None:
    assert listed(["SeqPar 1", "SeqPar 2"]) == "SeqPar 1, 2" and listed(["Gather 2", "halo 2"]) == "Gather 2, halo 2"


def test_nothing_is_said_of_a_network_that_has_not_learned() -> None:
    """A Dice below 0.3 over the last half, in the mean over the seeds, has no rank, no difference and no time."""
    idle, able = curve("patch 16", (0.0, 0.01, 0.013, 0.0)), curve("patch 8", (0.0, 0.1, 0.4, 0.35))
    words = highest("Patches", "Dice", [idle, able])
    assert words.endswith("patch 16 0.000, patch 8 0.350; patch 16 has not learned")
    none = "Patches: patch 16 has not learned: over the last half Dice is 0.006, and 0.3 is needed to compare"
    assert differ("Patches", "Dice", idle, able) == differ("Patches", "Dice", able, idle) == none
    assert coincide("Patches", "Dice", [idle, idle], 1e-9) == none.replace("16 has", "16, 16 have").replace(
        "is 0", "is at most 0"
    )
    assert "differs from patch 16" in differ("Patches", "training loss", idle, able), "a loss is compared all the same"
    assert plateau([idle, able]) == 0.4 and plateau([idle]) == 0.0
    assert "says nothing below 0.3" in first_to_reach("Patches", "Dice", [idle, able], plateau([idle]))
    assert "patch 16 never" in first_to_reach("Patches", "Dice", [idle, able], plateau([idle, able]))
    of_seeds = curve("patch 8", (0.0, 0.0, 0.2, 0.2), (0.0, 0.0, 0.38, 0.38))
    late = curve("patch 8", (0.0, 0.1, 0.2, 0.35))
    for one in (of_seeds, late):
        assert "patch 8 has not learned" in highest("Patches", "Dice", [one])
    lost = curve("patch 8", (0.0, 0.1, math.nan, 0.35))
    assert "not learned" not in highest("Patches", "Dice", [lost])


def test_a_figure_is_set_beside_what_the_paper_says() -> None:
    """Reproduced, not, or open: where an arm has not learned, or one seed shows no spread."""
    low, high = curve("patch 16", (0.1, 0.3, 0.4, 0.4), (0.1, 0.3, 0.42, 0.41)), (0.3, 0.5, 0.6, 0.6)
    every = {"patch 16": low, "patch 8": low, "patch 4": curve("patch 4", high, shifted(0.01, high))}
    says, sees, answer = judge_patches(Seen(every))[-3:]
    assert says.startswith("The paper says: patch 4 converges faster") and answer == "Reproduced: yes"
    assert sees == "We see: patch 4 against patch 16, Dice above by 0.198 (beyond the seeds' spread)"
    turned = Seen({"patch 16": every["patch 4"], "patch 8": low, "patch 4": low})
    assert judge_patches(turned)[-1] == "Reproduced: no"
    for coarse in (
        curve("patch 16", (0.1, 0.3, 0.4, 0.4)),
        curve("patch 16", (0.0, 0.0, 0.1, 0.1), (0.0, 0.0, 0.1, 0.1)),
    ):
        assert judge_patches(Seen({**every, "patch 16": coarse}))[-1] == "Reproduced: cannot tell at this scale"
    late = curve("patch 16", (0.0, 0.1, 0.2, 0.35), (0.0, 0.1, 0.2, 0.35))
    _, sees, answer = judge_patches(Seen({**every, "patch 16": late}))[-3:]
    assert sees.startswith("We see: patch 16 has not learned: over the last half Dice is 0.275, ")
    assert answer == "Reproduced: cannot tell at this scale"
    alike = Seen({"SeqPar 1": low, "SeqPar 2": low})
    assert judge_gather(alike)[-1] == "Reproduced: yes"
    assert judge_gather(Seen({"SeqPar 1": low, "SeqPar 2": every["patch 4"]}))[-1] == "Reproduced: no"


def test_dice_that_grows_is_set_beside_what_a_paper_says() -> None:
    """From each curve to the next; open where one has not learned, or the seeds' spread is larger."""

    def of(label: str, *levels: float) -> Curve:
        return curve(label, *((0.1, 0.2, level, level) for level in levels))

    small, middle, large = of("small", 0.4, 0.42), of("middle", 0.5, 0.51), of("large", 0.6, 0.62)
    lines = growth("A paper", "larger is better", [small, middle, large])
    assert lines == [
        "A paper says: larger is better",
        "We see: Dice after 40 steps: small 0.410, middle 0.505, large 0.610; large against small, Dice above by 0.2 "
        "(beyond the seeds' spread)",
        "Reproduced: yes",
    ]
    assert with_question(lines) == lines and with_question(lines[:1]) == [OWN_QUESTION, lines[0]]
    assert growth("A paper", "", [small, large, middle])[-1] == "Reproduced: no"
    for within_spread in (of("below the last", 0.4, 0.6), of("above the last", 0.4, 0.9)):
        assert growth("A paper", "", [small, within_spread, large])[-1] == "Reproduced: cannot tell at this scale"
    for idle in (of("idle", 0.2, 0.21), of("of one seed", 0.5)):
        assert growth("A paper", "", [small, idle, large])[-1] == "Reproduced: cannot tell at this scale"
    assert growth("A paper", "", [of("idle", 0.2, 0.21), middle, large])[1].startswith("We see: idle has not learned")
