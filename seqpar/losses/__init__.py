"""Losses of parts that equal the loss of the whole tile: terms, their sums over ranks, and the losses by name."""

from seqpar.losses.deep_supervision import DeepSupervision
from seqpar.losses.loss import Loss, LossGroups, LossOf, LossParts
from seqpar.losses.masked_error import MaskedError
from seqpar.losses.named_losses import LOSSES, DiceCE, has_batch_terms, has_class_terms, make_loss
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
    "make_loss",
    "has_batch_terms",
    "has_class_terms",
]
