"""What a decoder is made for: channel counts and the patch, never an encoder."""

from typing import NamedTuple


class Sizes(NamedTuple):
    """All that a decoder may depend on; what it does not need it leaves.

    ``embed_dim``: of the tokens; ``num_classes``: channels of the logits; ``width``, ``skips``: as ``--decoder-width``
    and ``--skips`` say; ``depth``: blocks of the encoder.
    """

    in_channels: int
    embed_dim: int
    num_classes: int
    patch: tuple[int, ...]
    width: int
    depth: int
    skips: str
