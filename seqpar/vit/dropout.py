"""Dropout keyed by global numbers: the same on any number of ranks.

Legend: b batch, n tokens, e embedding; ``n/s`` is this rank's share of the tokens. Random bits are hashes (splitmix64)
of what is dropped: seed, step, sample of the global batch, place in the network, token, channel.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # splitmix64's increment and its two multipliers
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(number: int) -> int:
    """Returns the int64 that has the same 64 bits."""
    return number - (1 << 64) if number >> 63 else number


def _scramble_number(number: int) -> int:
    """Returns splitmix64 of a number of 64 bits."""
    number = (number + _STEP) & _MASK64
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK64
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK64
    return number ^ (number >> 31)


def _scramble(x: Tensor) -> Tensor:
    """Returns splitmix64 of int64 numbers, whose arithmetic wraps; shifts are logical."""
    x = x + _signed(_STEP)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_FIRST)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_SECOND)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@dataclass(frozen=True)
class DropoutKey:
    """What a draw is for, not who draws it: equal for any number of ranks.

    - ``seed``, ``step``: of the run
    - ``samples``: the numbers of this batch's tiles in the step's global batch, over all micro-batches
    - ``site``: the place in the network; modules fill it in
    """

    seed: int
    step: int
    samples: tuple[int, ...]
    site: tuple[int, ...] = ()

    def at(self, *site: int) -> "DropoutKey":
        """Returns the key of a place in the network."""
        return replace(self, site=self.site + site)

    def _sample_hashes(self, device: torch.device) -> Tensor:
        number = 0
        for word in (self.seed, self.step, 0, len(self.site), *self.site):  # without the 0 the draws of old runs change
            number = _scramble_number(number ^ (word & _MASK64))
        rows = [_signed(_scramble_number(number ^ sample)) for sample in self.samples]
        return torch.tensor(rows, dtype=torch.int64, device=device)  # b


def _kept(bits: Tensor, rate: float) -> Tensor:
    """Returns where the highest 53 of 64 random bits, as a number in [0, 1), are not below the rate."""
    return ((bits >> 11) & ((1 << 53) - 1)) >= int(rate * (1 << 53))


def keyed_dropout(x: Tensor, rate: float, key: DropoutKey | None, token_ids: Tensor) -> Tensor:
    """Returns ``b n/s e`` with elements dropped by (key, sample, global token, channel)."""
    if key is None or rate == 0.0:
        return x
    samples = key._sample_hashes(x.device)[:, None, None]  # b 1 1
    tokens = _scramble(samples ^ token_ids.to(x.device)[None, :, None])  # b n/s 1
    kept = _kept(_scramble(tokens ^ torch.arange(x.shape[2], device=x.device)), rate)  # b n/s e
    return x * kept * (1 / (1 - rate))


def keyed_drop_path(x: Tensor, rate: float, key: DropoutKey | None) -> Tensor:
    """Returns a residual branch ``b n/s e`` with whole samples dropped by (key, sample)."""
    if key is None or rate == 0.0:
        return x
    kept = _kept(_scramble(key._sample_hashes(x.device)), rate)[:, None, None]
    return x * kept * (1 / (1 - rate))
