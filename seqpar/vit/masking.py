"""Which tokens a masked autoencoder hides, and which rank encodes which of the visible ones.

Legend: b batch, n tokens, k visible tokens of a tile, r rows: tokens of all samples, one after the other; ``n/s``,
``k/s`` and ``r/s`` are this rank's.

A token is hidden by its number and the (seed, step, sample) of its tile, never by the rank that holds it: as many of
every tile are visible, those with the smallest draws. A rank owns more or fewer of them, in each sample others; so the
few that are too many on their rank move to one that has too few, and every rank encodes as many of each sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.attention.partition import split_evenly
from seqpar.parallel.device_constants import copy_to_device
from seqpar.parallel.layout import Layout
from seqpar.parallel.remaps import Remap, make_remap
from seqpar.vit.dropout import DropoutKey, token_draws

MASK_SITE = 1 << 20  # no network has so many places that draw


def num_visible(num_tokens: int, ratio: float) -> int:
    """Returns how many tokens of a tile stay visible where the share ``ratio`` is hidden."""
    return max(1, round(num_tokens * (1 - ratio)))


def visible_tokens(key: DropoutKey, num_tokens: int, count: int) -> Tensor:
    """Returns the numbers ``b k`` of the visible tokens, ascending, on the CPU: the same on any number of ranks."""
    draws = token_draws(key.at(MASK_SITE), num_tokens)
    return draws.topk(count, largest=False, sorted=False).indices.sort().values


@dataclass(frozen=True, eq=False)
class Visible:
    """A batch's visible and hidden tokens, and which rank encodes which of the visible ones.

    - ``ids``: each rank's tokens to encode, their global numbers ``b k/s``, ascending
    - ``shown``, ``hidden``: where this rank's visible and hidden tokens lie among its tokens of all samples, ``r/s``
    - ``moves``: brings the rows that this rank owns to those that it encodes
    """

    ids: tuple[Tensor, ...]
    shown: Tensor
    hidden: Tensor
    moves: Remap

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many tokens of each sample each rank encodes."""
        return tuple(ids.shape[1] for ids in self.ids)

    def on(self, device: torch.device) -> "Visible":
        """Returns the same with its places on a device; numbers stay."""
        shown, hidden = (copy_to_device(rows, device) for rows in (self.shown, self.hidden))
        return replace(self, shown=shown, hidden=hidden)


def make_visible(key: DropoutKey, layout: Layout, rank: int, ratio: float) -> Visible:
    """Returns what is visible of a batch of tiles.

    - ``key``: of the batch; its seed, step and samples count
    - ``rank``: in the sequence group
    - ``ratio``: the share of tokens that is hidden
    """
    count = num_visible(layout.num_tokens, ratio)
    check_num_visible(layout.num_tokens, layout.num_ranks, ratio)
    ids = visible_tokens(key, layout.num_tokens, count)
    owners = layout.owner.flatten()[ids]
    encoders = torch.stack([_spread_evenly(row, layout.num_ranks) for row in owners])
    rows = ids + layout.num_tokens * torch.arange(len(ids), device="cpu")[:, None]  # numbers over all samples
    every = range(layout.num_ranks)
    moves = make_remap([rows[owners == q] for q in every], [rows[encoders == q] for q in every], rank)
    own = layout.token_ids(rank)
    is_shown = torch.zeros(len(ids), layout.num_tokens, dtype=torch.bool, device="cpu").scatter_(1, ids, True)[:, own]
    shown, hidden = (mask.flatten().nonzero().flatten() for mask in (is_shown, ~is_shown))
    return Visible(tuple(ids[encoders == q].view(len(ids), -1) for q in every), shown, hidden, moves)


def check_num_visible(num_tokens: int, num_ranks: int, ratio: float) -> None:
    """Raises ValueError where fewer tokens stay visible than there are ranks that share a tile, or none is hidden."""
    count = num_visible(num_tokens, ratio)
    if count >= num_tokens:
        raise ValueError(
            f"--mask-ratio {ratio:g} hides none of {num_tokens} tokens: use a larger one, or a larger --tile"
        )
    if count < num_ranks:
        raise ValueError(
            f"--mask-ratio {ratio:g} leaves {count} of {num_tokens} tokens, fewer than the {num_ranks} ranks that "
            "share a tile: use a smaller --mask-ratio or --seqpar, or a larger --tile"
        )


def _spread_evenly(owners: Tensor, num_ranks: int) -> Tensor:
    """Returns the rank ``k`` that encodes each of a sample's tokens: its owner, but where that one has too many.

    Ranks then have equal numbers, the first ones one more where the tokens do not divide.
    """
    quotas = torch.tensor(split_evenly(len(owners), num_ranks), device="cpu")
    place = F.one_hot(owners, num_ranks).cumsum(0).gather(1, owners[:, None])[:, 0]  # among the owner's, from 1
    too_many = place > quotas[owners]
    lacking = (quotas - torch.bincount(owners, minlength=num_ranks)).clamp(min=0)
    result = owners.clone()
    result[too_many] = torch.arange(num_ranks, device="cpu").repeat_interleave(lacking)
    return result


def token_positions(layout: Layout, ids: Tensor | Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns where tokens ``b k`` of these numbers lie among all tokens in the order of ranks, on the device."""
    every = ids if isinstance(ids, Tensor) else torch.cat(tuple(ids), 1)
    order = layout.raster_order(torch.device("cpu"))
    return copy_to_device(order[every], device)
