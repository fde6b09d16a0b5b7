"""The metrics that every class of a case gets beside the counts of its voxels and what follows from them."""

from seqpar.scores.metrics import hd95_of as HD95, nsd_of as NSD
