"""Runs of figures in forked processes, where the engine starts new ones."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.training_runs import Launch

FLAGS = """
    --tile 16 --patch 8 --embed-dim 12 --heads 2 --depth 1 --decoder-width 4 --augment none --device cpu --epochs 1
    --iterations 3 --val-overlap 0 --lr 0.01
"""


def forked(ranks: int, flags: Sequence[str], signals: list[int]) -> int:
    """Trains in forked processes, where the engine starts new ones."""
    out = Path(flags[flags.index("--out") + 1])
    rest = [word for n, word in enumerate(flags) if "--out" not in flags[max(n - 1, 0) : n + 1]]

    def typed(rank: int) -> None:
        sys.argv = ["train.py", *flags]

    with Launch(ranks, rest, out, typed) as launch:
        codes = launch.wait()
        assert not any(codes), launch.said()
    return max(codes)
