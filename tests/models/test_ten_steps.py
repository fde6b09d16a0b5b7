"""Ten steps over a pipe of 2, 3 and 4 places, with sequence and data groups, end with the weights of one process."""

from functools import cache

import pytest

from seqpar.settings.config import Config
from tests.support.marks import long_case
from tests.support.piped_nets import Case, differences, train, train_all
from tests.support.ranks import alone_mesh, run_ranks

UNET = {"network": "unet-hou", "tile": (8, 8, 16), "features": 2}  # with batch norm
VIT = {"tile": (8, 8, 8), "patch": 4, "depth": 3, "embed_dim": 12, "heads": 2, "decoder_width": 2, "dropout": 0.2}
STEPS = 10


def cases(seqpar: int) -> list[Case]:
    """Returns a U-Net whose running statistics move with each micro-batch, and a ViT with skips."""
    unet = Config(**UNET, mode="swap", seqpar=seqpar)  # halos of batch norms are too dear for ten steps
    unetr = Config(**VIT, decoder="unetr", attention="gather-kv", mode="halo", seqpar=seqpar)
    return [
        Case(name, config, schedule=schedule, micros=2, steps=STEPS)
        for name, config, schedule in (("U-Net", unet, "1f1b"), ("UNETR", unetr, "gpipe"))
    ]


@cache
def one_process() -> list:
    return [train(alone_mesh(), case) for case in cases(1)]


@pytest.mark.parametrize(("pipe", "seqpar", "data"), [long_case(2, 2, 1), long_case(2, 1, 2), (3, 1, 1), (4, 1, 1)])
def test_ten_steps_end_with_the_weights_and_statistics_of_one_process(pipe: int, seqpar: int, data: int) -> None:
    every, ranks = cases(seqpar), pipe * seqpar * data
    outcomes = run_ranks(ranks, train_all, every, seqpar=seqpar, pipe=pipe)
    for number, (case, want) in enumerate(zip(every, one_process())):
        gaps = differences(case, [rank[number] for rank in outcomes], want)
        assert len(want.losses) == STEPS * case.micros, case.name
        assert max(gaps["weights"], gaps["loss"]) < 1e-10, (case.name, gaps)
        assert max(gaps["logits"], gaps["grads"]) < 1e-12, (case.name, gaps)  # of the first step
