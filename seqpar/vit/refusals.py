"""What an encoder refuses when it is built, with what there is instead."""

from seqpar.vit.blocks import MLPS, RECOMPUTED
from seqpar.vit.tokens import POSITIONS


def refuse_window(window: int, split: str) -> None:
    """Raises ValueError for a window that is none, or for parts that need not be boxes."""
    if window < 0 or window == 1:
        raise ValueError(f"--window {window}: give the tokens of its side, 2 or more, or 0 for no windows")
    if window and split != "spatial":
        raise ValueError(f"--window {window} with --split {split}: windows reach into boxes: use --split spatial")


def refuse_unknown(positions: str, mlp: str, recompute: str, dropout: float, drop_path: float) -> None:
    """Raises ValueError for names that there are not, and for rates out of bounds."""
    if positions not in POSITIONS:
        raise ValueError(f"--positions {positions}: choose one of {', '.join(POSITIONS)}")
    if mlp not in MLPS:
        raise ValueError(f"--mlp {mlp}: choose {' or '.join(MLPS)}")
    if recompute not in RECOMPUTED:
        raise ValueError(f"--grad-checkpoint {recompute}: choose {', '.join(RECOMPUTED)}")
    if not (0 <= dropout < 1 and 0 <= drop_path < 1):
        raise ValueError(f"dropout {dropout} and drop-path {drop_path} must lie in [0, 1)")
