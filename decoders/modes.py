"""How tokens, image and label reach the decoder: all of them together, by one rule a mode.

Legend: b batch, c channels, n tokens, e embedding, p voxels of a patch along a direction, W D H voxels, w d h
tokens; ``/s`` after the letter that is spread over the sequence group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.collectives import all_gather, gather
from seqpar.layout import Layout, from_patches
from seqpar.losses import Share
from seqpar.mesh import Group
from seqpar.tokens import to_grid


class Gather:
    """Every rank decodes the whole tile: features come from all, gradients are scattered back."""

    name = "gather"

    def __init__(self, group: Group) -> None:
        self.group = group

    def check(self, layout: Layout) -> None:
        """Refuses a layout that this mode cannot decode: none."""

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns whole grids ``b e w d h`` of tokens ``b n/s e``, in one message.

        Every rank computes the same from them, so their gradients are equal and need no message back.
        """
        widths = [x.shape[2] for x in tokens]
        whole = gather(torch.cat(list(tokens), 2), self.group, 1, layout.counts, equal_gradients=True)
        if self.group.size > 1:
            order = torch.argsort(torch.cat(layout.all_ids)).to(whole.device)
            whole = whole.index_select(1, order)  # b n e, raster order
        return [to_grid(x, layout.grid) for x in whole.split(widths, 2)]

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns the whole image ``b c W D H`` or label ``b W D H`` of the ranks' parts."""
        whole = all_gather(part, self.group, 1, layout.counts, "voxels")
        return layout.join(whole.split(layout.counts, 1))

    def share(self, data: Group | None = None) -> Share:
        """Returns which sums of the loss are partial, given the group over which tiles are spread."""
        return Share(samples=_real(data))


class NoGather:
    """Each rank decodes its own part as if there were no other, and takes the loss of it: not exact, on purpose."""

    name = "nogather"

    def __init__(self, group: Group) -> None:
        self.group = group

    def check(self, layout: Layout) -> None:
        """Refuses a layout in which some rank's part is no box."""
        if not layout.is_box:
            raise ValueError(
                f"--mode nogather needs boxes, but --split {layout.split} cuts the grid {layout.grid} into "
                f"{layout.num_ranks} chunks that are none: {layout.box_advice()}"
            )

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns this rank's grids ``b e w/s d/s h/s``."""
        return [to_grid(x, self._grid(layout)) for x in tokens]

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns this rank's box of the image ``b c W/s D/s H/s`` or label ``b W/s D/s H/s``."""
        has_channels = part.ndim == len(layout.tile) + 3
        return from_patches(part.transpose(1, 2) if has_channels else part, self._grid(layout))

    def share(self, data: Group | None = None) -> Share:
        """Returns which sums of the loss are partial: none over the sequence group, the loss is the part's own."""
        return Share(samples=_real(data))

    def _grid(self, layout: Layout) -> tuple[int, ...]:
        return tuple(high - low for low, high in layout.box(self.group.index))


Mode = Gather | NoGather
_KINDS: dict[str, type[Gather] | type[NoGather]] = {kind.name: kind for kind in (Gather, NoGather)}
MODES = tuple(_KINDS)


def choose_mode(name: str, group: Group) -> Mode:
    """Returns the mode of that name on ``group``."""
    if name not in _KINDS:
        raise ValueError(f"--mode {name}: choose one of {', '.join(MODES)}")
    return _KINDS[name](group)


def _real(data: Group | None) -> tuple[Group, ...]:
    return (data,) if data is not None and data.size > 1 else ()
