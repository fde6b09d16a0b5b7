"""The settings of the loss: its terms and their weights."""

from dataclasses import dataclass, fields
from functools import partial

from seqpar.losses.named_losses import LOSSES, has_class_terms
from seqpar.losses.terms import LossOptions
from seqpar.settings.field import GAMMA, NOT_NEGATIVE, SUPERVISED, VOXELS, setting

DICE = ("linear", "squared")
CLASS_LOSSES = ("ce", "focal")  # those whose terms are means over labels
_loss = partial(setting, section="loss", tasks=SUPERVISED)
_of_dice = partial(_loss, tasks=VOXELS, acts_when=lambda c: "dice" in c.loss_terms, why="--loss {loss} has no Dice")


@dataclass(frozen=True)
class LossSettings:
    """What is minimised; a part of ``Config``."""

    loss: str = _loss("dice-ce", "what training minimises", choices=tuple(LOSSES), metavar="NAME", common=True)
    loss_weights: tuple[float, ...] = _loss(
        (),
        "weights of the loss's terms, such as 0.9 0.1 (1 each)",
        metavar="WEIGHT",
        acts_when=lambda c: len(c.loss_terms) > 1,
        why="--loss {loss} has one term",
        gives_way=lambda preset, c: preset.loss != c.loss,
    )
    class_weights: tuple[float, ...] = _loss(
        (), "weights of the outputs in the loss, background first (1 each)", metavar="WEIGHT"
    )
    focal_gamma: float = _loss(
        2.0,
        "exponent of the focal loss; the larger it is, the less voxels that are already right count",
        bounds=GAMMA,
        metavar="EXPONENT",
        acts_when=lambda c: "focal" in c.loss_terms,
        why="--loss {loss} has no focal term",
    )
    dice: str = _of_dice("linear", "denominator of soft Dice: probabilities, or their squares (V-Net)", choices=DICE)
    dice_smooth: float = _of_dice(
        1e-5, "what soft Dice adds to numerator and denominator", bounds=NOT_NEGATIVE, metavar="NUMBER"
    )
    dice_background: bool = _loss(
        False,
        "count the background in Dice too, if outputs exclude each other",
        tasks=VOXELS,
        acts_when=lambda c: has_class_terms(c.loss),
        why="--loss {loss} has no term per class",
        idle_here=lambda c, here: (
            "because the outputs are regions, without a background" if here.learns_regions else ""
        ),
    )
    batch_dice: bool = _loss(
        False,
        "Dice over the batch instead of per tile",
        tasks=VOXELS,
        acts_when=lambda c: has_class_terms(c.loss) or not c.batch_dice,
        why="--loss {loss} has no term per class",
    )

    @property
    def loss_terms(self) -> tuple[str, ...]:
        """The names of the loss's terms."""
        return tuple(term.name for term in LOSSES[self.loss](LossOptions()))


# the settings on which the size of a loss depends
OF_LOSS = (*(each.name for each in fields(LossSettings)), "targets", "deep_supervision", "normalised_targets")
