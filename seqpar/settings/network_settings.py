"""The settings of an encoder whose tokens merge, or see near ones alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from seqpar.settings.field import NOT_NEGATIVE, setting

_network = partial(setting, topic="network")
ENCODERS = ("plain", "hierarchical")
UNETR_WIDTH = 16  # channels at full resolution
HIERARCHY = frozenset(["stage_depths"])  # settings of an encoder of stages alone


@dataclass(frozen=True)
class EncoderSettings:
    """Stages and windows of an encoder; a part of ``Config``."""

    encoder: str = _network("plain", "tokens of one size, or stages between which they merge", choices=ENCODERS)
    stage_depths: tuple[int, ...] = _network((2, 2), "hierarchical: blocks of each stage", metavar="BLOCKS")
    window: int = _network(
        0, "side of the windows in which tokens see each other; 0: all do", bounds=NOT_NEGATIVE, metavar="TOKENS"
    )


def with_decoder_of_stages(values: Mapping[str, Any], usual_decoder: str) -> dict[str, Any]:
    """Returns the settings of a command line, with the decoder that takes the tokens of all stages where there are any.

    - ``usual_decoder``: the preset's; where it is another one, its width is not this one's
    """
    if values.get("encoder") != "hierarchical" or "decoder" in values or usual_decoder == "unetr":
        return dict(values)
    return {"decoder_width": UNETR_WIDTH, **values, "decoder": "unetr"}


def check_stages(depths: Sequence[int]) -> None:
    """Raises ValueError for numbers that are no blocks of stages."""
    if len(depths) < 2 or min(depths) < 1:
        typed = " ".join(map(str, depths))
        raise ValueError(f"--stage-depths {typed}: give the blocks of two stages or more, such as 2 2 6")
