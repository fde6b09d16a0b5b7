"""Networks of equal size: the setting that gives one as many parameters as another."""

from dataclasses import replace
from functools import cache
from typing import Any

from seqpar.models.build import build_on_meta
from seqpar.parallel.mesh import Group
from seqpar.settings.config import Config
from seqpar.tasks.segment.data import read_headers

_MOST = 1024  # channels that are tried


def match_parameters(config: Config, name: str, other: Config) -> int:
    """Returns the value of a setting that gives a config's network about as many parameters as another's.

    - ``name``: a number of channels, with which parameters grow
    """
    target = count_parameters(other)

    def far(value: int) -> int:
        channels: dict[str, Any] = {name: value}
        return count_parameters(replace(config, **channels)) - target

    low, high = 1, 2
    while far(high) < 0 and high < _MOST:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if far(middle) < 0 else (low, middle)
    return min(low, high, key=lambda value: abs(far(value)))


@cache
def count_parameters(config: Config) -> int:
    """Returns the parameters of a config's network for its data."""
    data = read_headers(config)
    sizes = len(data.modalities), len(data.outputs(config.targets))
    return sum(build_on_meta(replace(config, seqpar=1), Group("seq"), *sizes).num_parameters().values())
