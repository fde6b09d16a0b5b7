"""Optimizers by name."""

from seqpar.choices import choices_in
from seqpar.launch.optimization import choices
from seqpar.launch.optimization.optimizers import OptimizerKind

OPTIMIZERS: dict[str, OptimizerKind] = choices_in(choices)
