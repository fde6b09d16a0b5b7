"""The optimizers that ``--optimizer`` names."""

from seqpar.optimization.optimizers import adafactor, adam, adamw, rmsprop, sgd
