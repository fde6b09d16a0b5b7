"""The loss of a config."""

from collections.abc import Sequence

from seqpar.losses import Loss, LossOptions, MaskedError, make_loss
from seqpar.settings.config import Config


def loss_of(config: Config, regions: Sequence[Sequence[int]] = (), ignore_label: int | None = None) -> Loss:
    """Returns the loss that ``--loss`` names; ``regions`` where the outputs are regions by themselves.

    That of ``--task pretrain`` is the error of what was hidden.
    """
    if config.task == "pretrain":
        return MaskedError(config.normalised_targets)
    options = LossOptions(
        config.dice == "squared", config.dice_background, config.batch_dice, config.focal_gamma, config.dice_smooth
    )
    return make_loss(config.loss, options, config.loss_weights, regions, ignore_label, config.class_weights)
