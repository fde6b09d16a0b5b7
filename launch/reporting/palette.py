"""Colours and planes that pictures and pages share."""

COLOURS = ("#e69f00", "#56b4e9", "#cc79a7", "#009e73", "#d55e00", "#f0e442", "#0072b2", "#b2df8a")  # told apart by all


PLANES = (("sagittal", 0), ("coronal", 1), ("axial", 2))


SIDES = ("PASI", "LRSI", "LRAP")  # of the planes: what lies left, right, on top, at the bottom
