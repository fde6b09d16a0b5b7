"""The further steps of augmentation that ``--augment`` adds to a recipe, as in ``light+intensity-shift``."""

from seqpar.data.sampling.corruption import corruption
from seqpar.data.sampling.intensity_shift import intensity_shift
