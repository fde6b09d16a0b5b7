"""The settings of ``--task pretrain``: which tokens are hidden, and what rebuilds them."""

from dataclasses import dataclass
from functools import partial

from seqpar.settings.field import CHANNELS_OR_0, INSIDE_0_1, setting, whole_bounds
from seqpar.settings.network_settings import TOKENS

_pretraining = partial(setting, section="pretraining", tasks=("pretrain",), networks=TOKENS)
_WEIGHTS = "the weights belong to that network"


@dataclass(frozen=True)
class PretrainingSettings:
    """What is hidden, and what rebuilds it; a part of ``Config``."""

    mask_ratio: float = _pretraining(
        0.75, "share of a tile's tokens that is hidden", bounds=INSIDE_0_1, metavar="SHARE"
    )
    rebuild_blocks: int = _pretraining(
        2, "blocks that rebuild hidden tokens", bounds=whole_bounds(1, 1000), metavar="BLOCKS", fixed=_WEIGHTS
    )
    rebuild_width: int = _pretraining(
        0, "width of their tokens; 0: the encoder's", bounds=CHANNELS_OR_0, metavar="CHANNELS", fixed=_WEIGHTS
    )
    normalised_targets: bool = _pretraining(
        False, "rebuild patches minus their mean, divided by their standard deviation"
    )
