"""A step over a pipe is an accumulated step of one process: all networks, on data x pipe x seq, whatever the cut."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from seqpar.models.build import NETWORKS, build_network
from seqpar.models.classifier_families import CLASSIFIERS
from seqpar.parallel.mesh import Group
from seqpar.pipeline.stage_weights import cells_of_names
from seqpar.settings.config import Config
from tests.support.marks import long_case
from tests.support.piped_nets import CHANNELS, CLASSES, Case, differences, is_identical, train, train_all
from tests.support.ranks import alone_mesh, run_ranks

UNET = {"network": "nnunet-plain", "tile": (8, 8, 16), "features": 2, "stages": "133:111 333:222 333:222"}
VIT = {
    "tile": (8, 8, 8),
    "patch": 4,
    "depth": 3,
    "embed_dim": 12,
    "heads": 2,
    "decoder_width": 2,
    "dropout": 0.2,
    "drop_path": 0.2,
    "layer_scale": 0.5,
    "attention": "gather-kv",
}
CLASSES_OF = {name: value for name, value in VIT.items() if name != "decoder_width"} | {"task": "classify"}
HOU = {"network": "unet-hou", "tile": (8, 8, 16), "features": 2}
MERGED = {**VIT, "patch": 2, "encoder": "hierarchical", "stage_depths": (1, 2), "decoder": "unetr"}
PRIMUS = {**VIT, "decoder": "primus"}
SHAPES = [(2, 1, 1), (3, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2), (3, 2, 1), (3, 1, 2), (4, 2, 2)]
LARGE = ((2, 2, 2), (3, 2, 1), (3, 1, 2), (4, 2, 2))
OF_SHAPE = {  # what three or four ranks could break: maps to several places, sums over a stage's ranks, each mode
    (3, 1, 1): ("UNETR", "batch norm, rings", "Primus, any map"),
    (4, 1, 1): ("U-Net, supervised levels", "batch norm, gpipe, recomputed", "Primus, any map"),
    (2, 1, 2): ("U-Net, supervised levels", "batch norm, rings", "plain decoder, swap, ordered"),
    (2, 2, 1): (
        "UNETR",
        "batch norm, rings",
        "UNETR, gather, gpipe",
        "plain decoder, swap, ordered",
        "class token",
        "mean of tokens, swap",
        "tokens that merge",
    ),
}


def cases(pipe: int, seqpar: int, data: int = 1) -> list[Case]:
    """Returns cases of all networks, modes and orders on two ranks; of more ranks, whose starts are dear, few."""
    halo, steps = {"mode": "halo", "seqpar": seqpar}, 4 if pipe * seqpar * data == 2 else 2
    unet = Case("U-Net, supervised levels", Config(**UNET, deep_supervision=True, **halo), steps=steps)
    unetr = Case("UNETR", Config(**VIT, decoder="unetr", **halo), steps=steps)
    if pipe * seqpar * data > 4:
        return [unetr if data == 1 else unet] if pipe == 3 else [unet, unetr]
    ring = Case("batch norm, rings", Config(**HOU, **halo), rings(pipe, len_of(HOU)), steps=steps)
    norm = Case("batch norm, gpipe, recomputed", Config(**HOU, **halo), (), "gpipe", True)
    gather = Case("UNETR, gather, gpipe", Config(**VIT, decoder="unetr", mode="gather", seqpar=seqpar), (), "gpipe")
    swap = {**VIT, "decoder": "plain", "mode": "swap", "split": "ordered", "seqpar": seqpar, "positions": "rope"}
    plain = Case("plain decoder, swap, ordered", Config(**swap), samples=4)
    primus = Case("Primus, any map", Config(**PRIMUS, **halo), any_map(pipe, len_of(PRIMUS)))
    token = Case("class token", Config(**CLASSES_OF, pooling="token", **halo), any_map(pipe, 5))
    mean = {**CLASSES_OF, "mode": "swap", "positions": "rope", "seqpar": seqpar}
    pooled = Case("mean of tokens, swap", Config(**mean), samples=4, schedule="gpipe", recompute=True)
    merged = Case("tokens that merge", Config(**MERGED, **halo))
    every = [unet, unetr, ring, norm, gather, plain, primus, token, pooled, merged]
    return [case for case in every if case.name in OF_SHAPE.get((pipe, seqpar, data), (case.name,))]


@cache
def len_of_config(config: Config) -> int:
    return len(build_network(config, CHANNELS, CLASSES, Group("seq"), device="meta").staged().takes)


def len_of(options: dict) -> int:
    return len_of_config(Config(**options))


def rings(pipe: int, num: int) -> tuple[int, ...]:
    """Returns both ends of the list at place 0, and so on inwards."""
    half = [min(pipe - 1, 2 * at * pipe // num) for at in range(num)]
    return tuple(min(half[at], half[num - 1 - at]) if at else 0 for at in range(num))


def any_map(pipe: int, num: int) -> tuple[int, ...]:
    return tuple((at * 5 + at // pipe) % pipe for at in range(num))


@cache
def one_process(case: Case):
    alone = replace(case, config=replace(case.config, seqpar=1), allocation=(), recompute=False)
    return train(alone_mesh(), alone)


@cache
def on_ranks(pipe: int, seqpar: int, data: int) -> list:
    return run_ranks(pipe * seqpar * data, train_all, cases(pipe, seqpar, data), seqpar=seqpar, pipe=pipe, timeout=300)


@pytest.mark.parametrize(
    ("pipe", "seqpar", "data"), [long_case(*shape) if shape in LARGE else shape for shape in SHAPES]
)
def test_logits_losses_gradients_weights_and_statistics_are_those_of_one_process(
    pipe: int, seqpar: int, data: int
) -> None:
    outcomes = on_ranks(pipe, seqpar, data)
    for number, case in enumerate(cases(pipe, seqpar, data)):
        gaps = differences(case, [rank[number] for rank in outcomes], one_process(case))
        assert gaps.pop("weights") < 1e-10, case.name
        assert max(gaps.values()) < 1e-12, (case.name, gaps)


def test_without_data_and_sequence_groups_all_bits_are_those_of_one_process() -> None:
    for pipe in (2, 3, 4):
        for number, case in enumerate(cases(pipe, 1)):
            assert is_identical([rank[number] for rank in on_ranks(pipe, 1, 1)], [one_process(case)]), (pipe, case.name)


@pytest.mark.parametrize(("seqpar", "data"), [(2, 1), (1, 2)])
def test_with_two_ranks_a_stage_all_bits_are_those_of_the_same_ranks_without_stages(seqpar: int, data: int) -> None:
    every = [replace(case, allocation=(), recompute=False) for case in cases(2, seqpar, data)]
    want = run_ranks(seqpar * data, train_all, every, seqpar=seqpar)
    for number, case in enumerate(every):
        outcomes = [rank[number] for rank in on_ranks(2, seqpar, data)]
        assert is_identical(outcomes, [rank[number] for rank in want]), case.name


def test_the_cells_are_the_network(ranks: Callable[..., list]) -> None:
    """The control of the above: one step's bits differ between networks and between seeds."""
    case = cases(2, 1)[0]
    other = replace(case, config=replace(case.config, seed=case.config.seed + 1))
    assert not is_identical([one_process(case)], [one_process(other)])


def test_in_bf16_all_bits_are_those_of_one_process() -> None:
    settings = {"precision": "bf16", "mode": "halo"}
    case = Case("bf16", Config(**VIT, decoder="unetr", **settings))
    unet = Case("bf16", Config(**UNET, **settings))
    want = [train(alone_mesh(), each) for each in (case, unet)]
    for rank in zip(*run_ranks(2, train_all, [case, unet], seqpar=1, pipe=2)):
        assert is_identical(rank, [want.pop(0)])


def test_every_weight_has_one_cell_in_every_network() -> None:
    usual = {"tile": (32, 32, 32), "patch": 8}
    every = [Config(network=network, features=4 if network != "vit" else 0, **usual) for network in NETWORKS]
    every += [Config(task="classify", network=network, features=8, **usual) for network in CLASSIFIERS]
    every += [Config(task="classify", pooling="token", **usual)]
    for config in every:
        net = build_network(config, CHANNELS, CLASSES, Group("seq"), device="meta")
        staged = net.staged()
        cells = cells_of_names(list(net.state_dict()), staged.owns)
        assert max(cells.values()) == len(staged.takes) - 1 == len(staged.owns) - 1
        assert all(torch.is_tensor(x) for x in net.state_dict().values())
