"""Attention over tokens that are split over ranks.

- ``ParallelAttention``: multi-head self-attention over the tokens of all ranks, as a module
- ``AttentionOptions``: strategy, kept keys and values, and chunks of heads, for ``SeqParViT(attention=...)``
- ``Strategy``: one way in which attention crosses ranks
- ``Windows``: which tokens attend to each other if attention is restricted to windows
"""

from seqpar.attention.self_attention import ParallelAttention
from seqpar.attention.strategies import AttentionOptions, Strategy
from seqpar.attention.window_attention import Windows

__all__ = ["AttentionOptions", "ParallelAttention", "Strategy", "Windows"]


def __dir__() -> list[str]:
    return __all__
