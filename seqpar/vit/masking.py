"""Which tokens a masked autoencoder hides, and which rank encodes which of the visible ones.

Legend: b batch, n tokens, k visible tokens of a tile, r rows: tokens of all samples, one after the other; ``n/s``,
``k/s`` and ``r/s`` are this rank's.

Whether a token is hidden depends on its number and the (seed, step, sample) of its tile, never on the rank that holds
it. Every tile has the same number of visible tokens, those with the smallest draws, but a rank may own more or fewer of
them. The few that exceed a rank's share move to a rank that has too few, so that every rank encodes equally many tokens
of each sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.attention.partition import split_evenly
from seqpar.parallel.device_constants import copy_to_device
from seqpar.parallel.layout import Layout
from seqpar.parallel.remaps import Remap, count_remap, make_remap
from seqpar.vit.dropout import DropoutKey, token_draws

LISTED = 1 << 20  # tokens of a batch, whose numbers take little memory
MASK_SITE = 1 << 20  # larger than any dropout site of a network


def num_visible(num_tokens: int, ratio: float) -> int:
    """Returns how many tokens of a tile stay visible if the share ``ratio`` is hidden."""
    return max(1, round(num_tokens * (1 - ratio)))


def visible_tokens(key: DropoutKey, num_tokens: int, count: int) -> Tensor:
    """Returns the numbers ``b k`` of the visible tokens, ascending, on the CPU: the same on any number of ranks."""
    draws = token_draws(key.at(MASK_SITE), num_tokens)
    return draws.topk(count, largest=False, sorted=False).indices.sort().values


@dataclass(frozen=True, eq=False)
class Visible:
    """A batch's visible and hidden tokens, and which rank encodes which of the visible ones.

    - ``ids``: global numbers ``b k/s`` of the tokens that each rank encodes, ascending
    - ``shown``, ``hidden``: positions ``r/s`` of this rank's visible and hidden tokens among its tokens of all samples
    - ``moves``: sends the rows that this rank owns to the ranks that encode them
    """

    ids: tuple[Tensor, ...]
    shown: Tensor
    hidden: Tensor
    moves: Remap

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of tokens of each sample that each rank encodes."""
        return tuple(ids.shape[1] for ids in self.ids)

    def on(self, device: torch.device) -> "Visible":
        """Returns the same with positions on ``device``; token numbers stay on the CPU."""
        shown, hidden = (copy_to_device(rows, device) for rows in (self.shown, self.hidden))
        return replace(self, shown=shown, hidden=hidden)


def make_visible(key: DropoutKey, layout: Layout, rank: int, ratio: float) -> Visible:
    """Chooses the visible tokens of a batch of tiles.

    - ``key``: of the batch; its seed, step and samples are used
    - ``rank``: index in the sequence group
    - ``ratio``: share of tokens that is hidden
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


def count_visible(batch: int, layout: Layout, rank: int, ratio: float) -> Visible:
    """Returns as many visible and hidden tokens as are expected, without their numbers, for tensors without data.

    One rank's counts are exact; more ranks own as many visible tokens as their shares of the tile.
    """
    count, own = num_visible(layout.num_tokens, ratio), layout.counts[rank]
    check_num_visible(layout.num_tokens, layout.num_ranks, ratio)
    sizes = [batch * size for size in split_evenly(count, layout.num_ranks)]
    num_shown = round(batch * count * own / layout.num_tokens)
    staying, other = min(num_shown, sizes[rank]), (rank + 1) % layout.num_ranks
    sent, received = [0] * layout.num_ranks, [0] * layout.num_ranks
    sent[other], received[other] = num_shown - staying, sizes[rank] - staying
    sent[rank] += staying
    received[rank] += staying

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    ids = tuple(numbers(batch, size // batch) for size in sizes)
    return Visible(ids, numbers(num_shown), numbers(batch * own - num_shown), count_remap(sent, received))


def check_num_visible(num_tokens: int, num_ranks: int, ratio: float) -> None:
    """Raises ValueError if fewer tokens stay visible than ranks share a tile, or if none is hidden."""
    count = num_visible(num_tokens, ratio)
    if count >= num_tokens:
        raise ValueError(
            f"mask_ratio={ratio:g} hides none of {num_tokens} tokens: use a larger `mask_ratio` or a larger `tile`"
        )
    if count < num_ranks:
        raise ValueError(
            f"mask_ratio={ratio:g} leaves {count} of {num_tokens} tokens, fewer than the {num_ranks} ranks that "
            "share a tile: use a smaller `mask_ratio` or `seqpar`, or a larger `tile`"
        )


def _spread_evenly(owners: Tensor, num_ranks: int) -> Tensor:
    """Returns the rank ``k`` that encodes each of a sample's tokens: its owner, unless that one has too many.

    All ranks get the same number; if the tokens do not divide evenly, the first ones get one more.
    """
    quotas = torch.tensor(split_evenly(len(owners), num_ranks), device="cpu")
    place = F.one_hot(owners, num_ranks).cumsum(0).gather(1, owners[:, None])[:, 0]  # among the owner's tokens, from 1
    too_many = place > quotas[owners]
    lacking = (quotas - torch.bincount(owners, minlength=num_ranks)).clamp(min=0)
    result = owners.clone()
    result[too_many] = torch.arange(num_ranks, device="cpu").repeat_interleave(lacking)
    return result


def token_positions(layout: Layout, ids: Tensor | Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the positions of tokens ``b k`` among all tokens in rank order, on the device."""
    every = ids if isinstance(ids, Tensor) else torch.cat(tuple(ids), 1)
    if every.is_meta:
        return every
    order = layout.raster_order(torch.device("cpu"))
    return copy_to_device(order[every], device)
