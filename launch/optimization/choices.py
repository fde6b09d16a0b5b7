"""The optimizers that ``--optimizer`` names."""

from seqpar.launch.optimization.optimizers import adafactor, adam, adamw, rmsprop, sgd
