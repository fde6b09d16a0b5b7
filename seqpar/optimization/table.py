"""Optimizers by name."""

from seqpar.choices import choices_in
from seqpar.optimization import choices
from seqpar.optimization.optimizers import OptimizerKind

OPTIMIZERS: dict[str, OptimizerKind] = choices_in(choices)
