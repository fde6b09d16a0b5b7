"""Seams: how much more a prediction changes at the borders of windows than elsewhere."""

import torch
from torch import Tensor

from seqpar.prediction.window_grid import WindowGrid


def seam_strength(probabilities: Tensor, windows: WindowGrid) -> float:
    """Returns how many times more probabilities ``k W D H`` change across W at borders of windows than elsewhere.

    NaN where no border lies inside of the volume.
    """
    jumps = (probabilities[:, 1:] - probabilities[:, :-1]).abs().mean((0, 2, 3))  # from each row to the next
    edges = {at + side for at in windows.starts[0] for side in (0, windows.tile[0])}
    border = torch.zeros(len(jumps), dtype=torch.bool)
    border[[edge - 1 for edge in sorted(edges) if 0 < edge < windows.shape[0]]] = True
    return float(jumps[border].mean() / jumps[~border].mean())
