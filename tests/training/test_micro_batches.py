"""The gradient of a step, however its tiles are split into micro-batches, groups, parts and stages."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from seqpar.data.sampling.loader import Loader, MicroBatch
from seqpar.losses import LossOf
from seqpar.models.build import build_loss, build_network
from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Mesh
from seqpar.pipeline.stages import StageMap
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.tasks.lookup import task_of
from seqpar.tasks.training_data import TrainingData, outputs_shown, step_tiles
from seqpar.training import gradients
from seqpar.training.gradients import Gradients
from seqpar.training.pipeline_gradients import PipeGradients
from tests.support.configs import NoStop
from tests.support.folders import image_array, nnunet, save
from tests.support.ranks import run_ranks
from tests.support.training_runs import prepare

RUN = """
    --preset debug --tile 16 8 8 --workers 0 --augment none --device cpu --precision fp64 --no-batch-dice
"""
VIT = "--patch 4 --embed-dim 12 --heads 2 --depth 2 --decoder unetr --decoder-width 2"
LEVELS = "--network nnunet-plain --stages 333:111,333:222,333:222 --features 2 --deep-supervision"
CASES = {  # the data, and the flags of network and loss
    "ignored voxels": ("ignore", f"{VIT} --loss dice-ce"),
    "class weights": ("ignore", f"{VIT} --loss ce --class-weights 1 2 3"),
    "partly annotated": ("annotated", f"{VIT} --loss dice-ce --class-weights 1 2 3"),
    "levels": ("annotated", f"{LEVELS} --loss dice-ce"),
}
POOLED = {
    "batch Dice": ("ignore", f"{VIT} --loss dice-ce --batch-dice"),
    "batch Dice, partly annotated": ("annotated", f"{VIT} --loss dice-ce --batch-dice --class-weights 1 2 3"),
}
HIDDEN = {"hidden patches": ("ignore", f"{VIT} --task pretrain --mask-ratio 0.5 --foreground 0")}
LABELS = {"background": 0, "liver": 1, "spleen": 2}
SHOWN = {"c_000": ["spleen"], "c_001": ["liver"], "c_002": ["spleen"], "c_003": []}
FOUR = ((1, 4), (2, 2), (4, 1))  # tiles in a micro-batch of all groups, micro-batches


class Outcome(NamedTuple):
    """Loss and terms, and the gradients of the weights that a rank has."""

    sums: Tensor
    grads: dict[str, Tensor]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Returns flags by kind of data: cases with more and more ignored voxels, and some that do not show all labels."""
    root = tmp_path_factory.mktemp("micro-batches")
    flags = {}
    for name, more in {"ignore": {}, "annotated": {"annotated": SHOWN}}.items():
        folder = nnunet(root / name / "Dataset001_Tiny", cases=5, labels={**LABELS, "ignore": 3}, **more)
        for case in range(5):
            dice, shape = np.random.default_rng(case), (18, 12, 12)
            organs = [LABELS[organ] for organ in more.get("annotated", {}).get(f"c_{case:03d}", ["liver", "spleen"])]
            label = dice.choice([0, *organs], shape).astype(np.uint8)
            label[dice.random(shape) < case / 6] = 3
            save(folder / "imagesTr" / f"c_{case:03d}_0000.nii.gz", image_array(case, shape))
            save(folder / "labelsTr" / f"c_{case:03d}.nii.gz", label)
        flags[name] = [*RUN.split(), "--data", str(folder), "--cache", str(root / name / "cache")]
        prepare(flags[name])
    return flags


def config_of(line: Sequence[str], mesh: Mesh, mode: str, together: int, micros: int) -> Config:
    sizes = f"--mode {mode} --seqpar {mesh.seq.size} --pipe {mesh.pipe.size} --accumulate {micros}"
    return parse([*line, *sizes.split(), "--batch", str(together // mesh.data.size)], "debug")[1]


def micro_batches(
    config: Config, mesh: Mesh, source: TrainingData, engine: Gradients | PipeGradients
) -> list[MicroBatch]:
    tiles = step_tiles(source.tiles, config, mesh.data.size * config.batch * config.accumulate)
    sizes = {"batch": config.batch, "accumulate": config.accumulate, "workers": 0}
    with Loader(tiles, engine.net.layout, mesh, steps=range(1), **sizes) as loader:
        return list(loader)


def gradients_of(config: Config, mesh: Mesh, source: TrainingData) -> Gradients | PipeGradients:
    net = build_network(config, source.num_channels, source.num_outputs, mesh.seq, data=mesh.data).double()
    loss = build_loss(config, source.regions, source.dataset.ignore_label)
    if config.pipe == 1:
        return Gradients(config, mesh, source, net, loss)
    staged = net.staged()
    places = tuple(cell * config.pipe // len(staged.takes) for cell in range(len(staged.takes)))
    return PipeGradients(config, mesh, source, net, loss, StageMap.of_allocation(staged.takes, staged.outputs, places))


def step(mesh: Mesh, line: Sequence[str], mode: str, together: int, micros: int) -> Outcome:
    """Returns what a step computes on this rank; ``together``: tiles in a micro-batch of all groups."""
    config = config_of(line, mesh, mode, together, micros)
    source = task_of(config).open_data(config, mesh.is_first)
    engine = gradients_of(config, mesh, source)
    sums = engine.add(micro_batches(config, mesh, source, engine), 0, NoStop())  # type: ignore[arg-type]
    assert sums is not None
    grads = {name: p.grad for name, p in engine.net.named_parameters() if p is not None and p.grad is not None}
    return Outcome(all_reduce(sums, mesh.world) / mesh.stage.size, grads)


def steps(
    mesh: Mesh, lines: Sequence[Sequence[str]], mode: str, splits: Sequence[tuple[int, int]]
) -> list[list[Outcome]]:
    return [[step(mesh, line, mode, *split) for line in lines] for split in splits]


def gap(of_ranks: Sequence[Outcome], want: Outcome) -> float:
    """Returns the largest difference of any rank to one process, relative to each tensor's largest value."""
    assert {name for outcome in of_ranks for name in outcome.grads} == set(want.grads)
    largest = max(float(grad.abs().max()) for grad in want.grads.values())

    def apart(a: Tensor, b: Tensor) -> float:
        size = float(b.abs().max())
        return float((a - b).abs().max()) / (size if size > 1e-10 * largest else largest)

    gaps = [apart(own, want.grads[name]) for outcome in of_ranks for name, own in outcome.grads.items()]
    return max(*gaps, *(apart(outcome.sums, want.sums) for outcome in of_ranks))


@pytest.fixture(scope="module")
def alone(data: dict[str, list[str]]) -> list[Outcome]:
    """Returns each case's step of one process that has all four tiles in one micro-batch."""
    ((of_cases,),) = run_ranks(1, steps, lines_of(CASES, data), "gather", [(4, 1)])
    return of_cases


def lines_of(cases: dict[str, tuple[str, str]], data: dict[str, list[str]]) -> list[list[str]]:
    return [[*data[kind], *flags.split()] for kind, flags in cases.values()]


@pytest.mark.parametrize(
    ("world", "seqpar", "pipe", "mode", "splits"),
    [
        (1, 1, 1, "gather", FOUR),
        (2, 1, 1, "gather", FOUR[1:]),
        (4, 1, 1, "gather", FOUR[2:]),
        (2, 2, 1, "halo", FOUR[1:]),
        (2, 2, 1, "swap", FOUR[2:]),
        (4, 2, 1, "halo", FOUR[2:]),
        (2, 1, 2, "gather", FOUR[1:]),
        (8, 1, 2, "gather", FOUR[2:]),
    ],
)
def test_means_run_over_all_tiles_of_a_step_however_it_is_split(
    world: int,
    seqpar: int,
    pipe: int,
    mode: str,
    splits: Sequence[tuple[int, int]],
    data,
    alone,
    ranks: Callable[..., list],
) -> None:
    every = ranks(world, steps, lines_of(CASES, data), mode, splits, seqpar=seqpar, pipe=pipe, timeout=240)
    for at, split in enumerate(splits):
        for number, (name, want) in enumerate(zip(CASES, alone)):
            assert gap([of_rank[at][number] for of_rank in every], want) < 1e-10, (name, split)


@pytest.mark.started
def test_parts_that_are_decoded_alone_and_hidden_patches_have_one_gradient_too(
    data, ranks: Callable[..., list]
) -> None:
    """``nogather`` is another function on other parts, so it is held against itself."""
    for cases, mode in ((CASES, "nogather"), (HIDDEN, "gather")):
        lines = lines_of(cases, data)
        for splits in ranks(2, steps, lines, mode, FOUR, seqpar=2):
            for number, name in enumerate(cases):
                assert max(gap([splits[at][number]], splits[2][number]) for at in (0, 1)) < 1e-10, (name, mode)


def by_itself(net, loss, data, micros, loss_groups, device) -> list[LossOf]:
    """Returns losses whose means run over a micro-batch each: the mistake that this file looks for."""
    labels = [net.arrange(data.labels_of(micro)) for micro in micros]
    shown = [outputs_shown(data, micro.cases, net.mode, device) for micro in micros]

    def share(label: Tensor, own: Tensor | None, logits: Tensor):
        total, terms = loss.parts(logits, label, loss_groups, own)
        return type(loss.parts(logits, label))(
            total / len(micros), {name: x / len(micros) for name, x in terms.items()}
        )

    return [partial(share, *own) for own in zip(labels, shown)]


def test_means_over_each_micro_batch_are_another_loss(data, alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "losses_of_step", by_itself)
    ((of_cases,),) = run_ranks(1, steps, lines_of(CASES, data), "gather", [(2, 2)])
    for name, got, want in zip(CASES, of_cases, alone):
        assert gap([got], want) > 1e-3, name


def pooled_alone(mesh: Mesh, line: Sequence[str]) -> Outcome:
    """Returns the mean of three micro-batches' Dice, and cross-entropy over all six tiles, by plain backward."""
    config = config_of(line, mesh, "gather", 2, 3)
    source = task_of(config).open_data(config, True)
    engine = gradients_of(config, mesh, source)
    micros, net, loss = micro_batches(config, mesh, source, engine), engine.net, engine.loss
    logits = [net(micro.image.double()) for micro in micros]
    labels = [net.arrange(micro.label) for micro in micros]
    shown = [source.annotated(micro.cases) for micro in micros]
    dice = [loss.parts(*own, annotated=one).terms["dice"] for *own, one in zip(logits, labels, shown)]
    ce = loss.parts(
        torch.cat(logits), torch.cat(labels), annotated=None if shown[0] is None else torch.cat(shown)
    ).terms["ce"]
    pooled = torch.stack(dice).mean()
    (pooled + ce).backward()
    sums = torch.stack([pooled + ce, pooled, ce]).detach()
    return Outcome(sums, {name: p.grad for name, p in net.named_parameters() if p.grad is not None})


def pooled_all(mesh: Mesh, lines: Sequence[Sequence[str]]) -> list[Outcome]:
    return [pooled_alone(mesh, line) for line in lines]


@pytest.mark.parametrize(("world", "pipe"), [(1, 1), (2, 1), (4, 2)])
def test_dice_over_the_batch_is_the_mean_of_three_micro_batches_on_any_ranks(
    world: int, pipe: int, data, ranks: Callable[..., list]
) -> None:
    lines = lines_of(POOLED, data)
    (wanted,) = ranks(1, pooled_all, lines)
    every = ranks(world, steps, lines, "gather", [(2, 3)], seqpar=1, pipe=pipe, timeout=120)
    for number, (name, want) in enumerate(zip(POOLED, wanted)):
        assert gap([of_rank[0][number] for of_rank in every], want) < 1e-10, name
