"""Steps that one process could hardly hold, on four ranks of this machine: once each, since they take long."""

import sys
from typing import Any

from seqpar.launch.benches.memory import Case, measure, row
from seqpar.launch.settings.config import Config

VIT_B = Config(
    tile=(128, 128, 128), patch=4, seqpar=4, mode="halo", batch=1, device="cpu", precision="bf16", mlp_chunks=8,
    attention="gather-x", decoder_width=32, shard_weights=True,
)  # fmt: skip
VOLUME = Config(
    tile=(240, 240, 156), patch=4, seqpar=4, mode="halo", batch=1, device="cpu", precision="bf16", mlp_chunks=8,
    attention="gather-x", embed_dim=64, depth=2, heads=2, decoder_width=16,
)  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Returns a row for ViT-B on a tile of 128 at patch 4, and one for a whole volume with a small encoder."""
    cases = [Case("a whole volume of 240 x 240 x 155", VOLUME, 4, 1), Case("tile 128, ViT-B", VIT_B, 4, 1)]
    found = []
    for case in cases:
        runs = [measure(case)]
        found.append(row(case, runs, runs))
        print(found[-1], file=sys.stderr, flush=True)  # not lost, should the next one be ended
    return found
