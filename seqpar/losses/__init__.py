"""Losses of parts that equal the loss of the whole tile.

- ``DiceCE``: soft Dice plus cross-entropy
- ``make_loss``: returns the loss of a name, such as ``"dice-focal"``; ``LOSSES`` has all names
- ``Loss``: a weighted sum of terms; ``LossParts``: its value and its terms
- ``LossGroups``: the ranks over which a loss sums; a mode's ``loss_groups`` returns it
- ``LossOptions``: options of the losses with a name
- ``DeepSupervision``: a loss on several levels of logits
- ``MaskedError``: the loss of masked autoencoders
- ``mark_skeleton``: marks the skeletons of labels, which ``"skeleton-recall"`` needs
- ``has_class_terms``: whether a named loss has a term per class
- ``has_batch_terms``: whether a named loss has a term of sums over the batch
- ``needs_marks``: whether a named loss takes labels with marked skeletons
- ``Readers``, ``Probabilities``: labels with doubt, one code per voxel (``SoftLabels``)
- ``takes_soft_labels``: whether a named loss takes them
- ``LossOf``: a micro-batch's loss as a function of its logits, as ``Loss.of_step`` returns it
"""

from seqpar.losses.loss import Loss, LossGroups, LossOf, LossParts
from seqpar.losses.named_losses import (
    LOSSES,
    DiceCE,
    has_batch_terms,
    has_class_terms,
    make_loss,
    needs_marks,
    takes_soft_labels,
)
from seqpar.losses.other_outputs import DeepSupervision, MaskedError
from seqpar.losses.skeletons import mark_skeleton
from seqpar.losses.soft_labels import Probabilities, Readers, SoftLabels
from seqpar.losses.terms import LossOptions

__all__ = [
    "LOSSES",
    "DeepSupervision",
    "DiceCE",
    "Loss",
    "LossGroups",
    "LossOf",
    "LossOptions",
    "LossParts",
    "MaskedError",
    "Probabilities",
    "Readers",
    "SoftLabels",
    "has_batch_terms",
    "has_class_terms",
    "make_loss",
    "mark_skeleton",
    "needs_marks",
    "takes_soft_labels",
]


def __dir__() -> list[str]:
    return __all__
