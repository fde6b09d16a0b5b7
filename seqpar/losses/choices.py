"""The losses that ``--loss`` names."""

from seqpar.losses.mixtures import dice_ce, dice_focal, focal
