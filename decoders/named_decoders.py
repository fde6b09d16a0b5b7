"""The decoders by name."""

from typing import Any

from seqpar.decoders.plain import PlainDecoder
from seqpar.decoders.primus import PrimusDecoder
from seqpar.decoders.unetr import UnetrDecoder

DECODERS: dict[str, Any] = {
    "plain": PlainDecoder,
    "primus": PrimusDecoder,
    "unetr": UnetrDecoder,
}
