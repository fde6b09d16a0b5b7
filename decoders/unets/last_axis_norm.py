"""Batch norm over the last axis, as in DistMIS's code: each position along it has its own statistics and weights.

Legend: b batch, c channels, W D H voxels of a box; ``H`` is whole on every rank.
"""

from typing import Any

from einops import rearrange
from torch import Tensor, nn

from seqpar.parallel.mesh import Group
from seqpar.pipeline.cells import Value
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.norms import BatchNorm3d


class LastAxisNorm(nn.Module):
    """Batch norm that takes positions along the last axis for channels, and channels for an axis.

    - ``length``: of the last axis; a volume of another length has other positions, so it is refused
    - ``options``: of ``BatchNorm3d``
    """

    def __init__(self, length: int, data: Group | None = None, peers: Group | None = None, **options: Any) -> None:
        super().__init__()
        self.norm = BatchNorm3d(length, data=data, peers=peers, **options)

    def forward(self, x: Tensor, grid: BoxGrid | None = None, slope: float | None = None) -> Value:
        """Returns the normed volume and its unchanged box grid; the last axis may not be cut.

        ``slope``: of a leaky ReLU that follows.
        """
        assert x.shape[-1] == self.norm.num_features, (x.shape, self.norm.num_features)
        turned_grid = None
        if grid is not None:
            assert grid.parts[-1] == 1, grid.edges
            turned_grid = BoxGrid(((0, x.shape[1]), *grid.edges[:-1]), grid.group)
        turned, _ = self.norm(rearrange(x, "b c w d h -> b h c w d").contiguous(), turned_grid, slope)
        return rearrange(turned, "b h c w d -> b c w d h"), grid
