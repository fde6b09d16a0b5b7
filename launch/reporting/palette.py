"""Colours and planes that the pictures and the viewer share."""

# The palette of Okabe and Ito without its black, which people with colour blindness can tell apart, and one more.
COLOURS = ("#e69f00", "#56b4e9", "#cc79a7", "#009e73", "#d55e00", "#f0e442", "#0072b2", "#b2df8a")

PLANES = (("sagittal", 0), ("coronal", 1), ("axial", 2))  # a plane's name, and the direction that it is across

SIDES = ("PASI", "LRSI", "LRAP")  # of each plane: what lies at its left, right, top and bottom
