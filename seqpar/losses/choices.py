"""The losses that ``--loss`` names."""

from seqpar.losses.mixtures import ce, dice, dice_ce, dice_focal, focal
