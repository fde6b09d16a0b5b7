"""Dropout keyed by global numbers, so that it is the same on any number of ranks.

Legend: b batch, n tokens, e embedding; ``n/s`` is this rank's share of the tokens. Random bits are hashes (splitmix64)
of what they decide: seed, step, sample of the global batch, site in the network, token, channel. On a GPU, elements are
drawn by another hash that takes fewer passes: the product of a token's number and a channel's number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from seqpar.parallel.device_constants import cached, copy_to_device
from seqpar.parallel.layout import Layout
from seqpar.parallel.meta_tensors import device_type

Site = tuple[int, ...]
_MASK64 = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # splitmix64's increment and its two multipliers
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(number: int) -> int:
    """Returns the int64 with the same 64 bits."""
    return number - (1 << 64) if number >> 63 else number


def _scramble_number(number: int) -> int:
    """Returns splitmix64 of a 64-bit number."""
    number = (number + _STEP) & _MASK64
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK64
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK64
    return number ^ (number >> 31)


_NUMBERS = 1 << 22  # random numbers of voxels that exist at a time


def _scramble(x: Tensor) -> Tensor:
    """Returns splitmix64 of int64 numbers; their arithmetic wraps, and the shifts are logical."""
    x = x + _signed(_STEP)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_FIRST)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_SECOND)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@dataclass(frozen=True)
class RandomDraws:
    """What a step draws at each site: hashes of samples, and which samples keep a branch at a given rate."""

    hashes: Mapping[Site, Tensor]  # each b
    kept: Mapping[tuple[Site, float], Tensor]  # each b, booleans
    factors: Mapping[tuple[Site, float], Tensor]  # each b: by what a branch is multiplied, 0 where it is dropped
    scales: Mapping[Site, Tensor] = field(default_factory=dict)  # each b 1 e: these factors times a LayerScale

    @property
    def tables(self) -> tuple[Mapping[Any, Tensor], ...]:
        """All that is drawn."""
        return self.hashes, self.kept, self.factors


@dataclass(frozen=True)
class DropoutKey:
    """Identifies a random draw by what it is for rather than by who draws it: the same on any number of ranks.

    Args:
        ``seed``, ``step``: of the run.
        ``samples``: the numbers of this batch's tiles in the step's global batch, over all micro-batches.
        ``site``: the site in the network; modules fill it in.
        ``draws``: draws made in advance; those that are missing are made when needed.
    """

    seed: int
    step: int
    samples: tuple[int, ...]
    site: Site = ()
    draws: RandomDraws | None = field(default=None, compare=False, repr=False)

    def at(self, *site: int) -> "DropoutKey":
        """Returns the key of a site in the network."""
        return replace(self, site=self.site + site)

    def drawn(self, sites: Sequence[Site], rates: Mapping[Site, float], device: torch.device) -> "DropoutKey":
        """Returns the key with its draws on ``device``, copied there at once.

        - ``sites``: where elements are dropped
        - ``rates``: where branches of whole samples are dropped, and at which rate
        """
        places = [self.at(*site) for site in sites]
        rows = [place._hashes() for place in places]
        branches = [(self.at(*site), rate) for site, rate in rates.items()]
        rows += [[int(_number_kept(number, rate)) for number in place._hashes()] for place, rate in branches]
        if not rows:
            return self
        table = copy_to_device(torch.tensor(rows, dtype=torch.int64), device)
        kept = table[len(places) :] != 0
        at = [(place.site, rate) for place, rate in branches]
        scales = _scales(tuple(rate for _, rate in branches), device)
        by_site = {place.site: row for place, row in zip(places, table)}
        return replace(self, draws=RandomDraws(by_site, dict(zip(at, kept)), dict(zip(at, kept * scales))))

    def _hashes(self) -> list[int]:
        """Returns a hash of this site for each sample, as int64."""
        number = 0
        for word in (
            self.seed,
            self.step,
            0,
            len(self.site),
            *self.site,
        ):  # without the 0, old runs would draw other numbers
            number = _scramble_number(number ^ (word & _MASK64))
        return [_signed(_scramble_number(number ^ sample)) for sample in self.samples]

    def sample_hashes(self, device: torch.device) -> Tensor:
        """Returns a hash ``b`` of this site for each sample."""
        if self.draws is not None and self.site in self.draws.hashes:
            return self.draws.hashes[self.site]
        return torch.tensor(self._hashes(), dtype=torch.int64, device=device)

    def samples_kept(self, rate: float, device: torch.device) -> Tensor:
        """Returns for each sample ``b`` whether this site keeps its branch."""
        if self.draws is not None and (self.site, rate) in self.draws.kept:
            return self.draws.kept[self.site, rate]
        return torch.tensor([_number_kept(number, rate) for number in self._hashes()], device=device)


@cached(16)
def _scales(rates: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns the factors of kept branches, one row ``1`` for each rate."""
    return copy_to_device(torch.tensor([1 / (1 - rate) for rate in rates]).view(-1, 1), device)


def _number_kept(number: int, rate: float) -> bool:
    """Returns ``_kept`` for one hashed number."""
    return _scramble_number(number & _MASK64) >> 11 >= int(rate * (1 << 53))


def _kept(bits: Tensor, rate: float) -> Tensor:
    """Returns where the highest 53 of 64 random bits, as a number in [0, 1), are at least the rate."""
    return ((bits >> 11) & ((1 << 53) - 1)) >= int(rate * (1 << 53))


def token_numbers(layout: Layout, rank: int, like: Tensor) -> Tensor:
    """Returns the numbers of a rank's tokens for ``keyed_dropout``: their global numbers, scrambled once on a GPU."""
    ids = layout.token_ids(rank, like.device)
    if device_type(like) == "cpu":
        return ids
    return layout.once(("scrambled ids", rank, like.device), lambda: numbers_of(ids, like))


def numbers_of(ids: Tensor, like: Tensor) -> Tensor:
    """Returns the numbers of tokens for ``keyed_dropout``, given their global ids and a tensor on their device."""
    return ids if device_type(like) == "cpu" else _scramble(ids)


def token_draws(key: DropoutKey, num_tokens: int) -> Tensor:
    """Returns a random number ``b n`` for each sample and token, on the CPU; those of a sample are all different."""
    tokens = torch.arange(num_tokens, device="cpu")
    return _scramble(key.sample_hashes(tokens.device)[:, None] ^ tokens)


@cached(16)
def _channel_numbers(width: int, device: torch.device) -> Tensor:
    """Returns an odd random number for each channel."""
    return (_scramble(torch.arange(width, device=device)) * 2 + 1).contiguous()


def _kept_by_products(samples: Tensor, tokens: Tensor, width: int, rate: float) -> Tensor:
    """Returns the mask ``b n/s e`` from sample hashes ``b`` and scrambled tokens, in three passes.

    The highest bits of the product of two random numbers, one of them odd, are random, and independent across tokens,
    samples and sites.
    """
    rows = samples[:, None, None] ^ tokens[..., None]  # b n/s 1
    return rows * _channel_numbers(width, tokens.device) >= int((rate - 0.5) * 2.0**64)


def keyed_dropout(x: Tensor, rate: float, key: DropoutKey | None, tokens: Tensor) -> Tensor:
    """Returns ``b n/s e`` with elements dropped by (key, sample, global token, channel).

    - ``tokens``: ``token_numbers`` of this rank's tokens ``n/s``, or ``b n/s`` if they differ between samples
    """
    if key is None or rate == 0.0:
        return x
    samples = key.sample_hashes(x.device)  # b
    if device_type(x) != "cpu":
        return x * _kept_by_products(samples, tokens, x.shape[2], rate) * (1 / (1 - rate))
    hashes = _scramble(samples[:, None, None] ^ tokens[..., None])  # b n/s 1
    kept = _kept(_scramble(hashes ^ torch.arange(x.shape[2], device=x.device)), rate)  # b n/s e
    return x * kept * (1 / (1 - rate))


def keyed_drop_path(x: Tensor, rate: float, key: DropoutKey | None) -> Tensor:
    """Returns a residual branch ``b n/s e`` with whole samples dropped by (key, sample)."""
    if key is None or rate == 0.0:
        return x
    return x * key.samples_kept(rate, x.device)[:, None, None] * (1 / (1 - rate))


def drop_path_factors(x: Tensor, rate: float, key: DropoutKey | None) -> Tensor | None:
    """Returns the factor ``b`` of each sample's branch, as ``keyed_drop_path`` multiplies it; None if all are 1."""
    if key is None or rate == 0.0:
        return None
    if key.draws is not None and (key.site, rate) in key.draws.factors:
        return key.draws.factors[key.site, rate]
    return key.samples_kept(rate, x.device) * (1 / (1 - rate))


def keyed_voxel_dropout(x: Tensor, rate: float, key: DropoutKey, voxels: Tensor) -> Tensor:
    """Returns ``b c W D H`` with elements dropped by (key, sample, global voxel, channel).

    The mask is made for some channels of a sample at a time, since its random numbers have eight times its bytes.

    - ``voxels``: the numbers ``W D H`` of the box's voxels in the whole volume
    """
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    step = max(1, _NUMBERS // max(1, voxels.numel()))
    for own, sample in zip(mask, key.sample_hashes(x.device), strict=True):
        rows = _scramble(sample ^ voxels)
        for first in range(0, len(own), step):
            channels = torch.arange(first, min(first + step, len(own)), device=x.device).view(-1, 1, 1, 1)
            own[first : first + step] = _kept(_scramble(rows ^ channels), rate)
    return x * mask * (1 / (1 - rate))
