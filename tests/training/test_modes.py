"""Whole runs of the trainer in halo and swap become, on any data x seq, what one process makes of the same tiles."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from seqpar.cluster.stop_request import StopRequest
from seqpar.data.sampling.tiles import Tile, TileKey, TileSource
from seqpar.losses import LossGroups
from seqpar.parallel.consensus import run_on_rank0
from seqpar.parallel.mesh import Mesh
from seqpar.runs.journal import read_metrics
from seqpar.runs.run_status import StatusFile
from seqpar.settings.command_line import parse
from seqpar.tasks.segment import validation
from seqpar.tasks.segment.data import open_data
from seqpar.training import trainer
from seqpar.training.run_request import RunRequest
from seqpar.training.setup import make_trainer
from tests.support.folders import image_array, nnunet, save
from tests.support.marks import long_case
from tests.support.ranks import relative, run_ranks
from tests.support.training_runs import TINY, prepare

STEPS = 8
RUN = "--precision fp64 --tile 12 8 8 --patch 4 --depth 1 --epochs 1 --val-cases 1"
DECODERS = {"unetr": "--decoder unetr --decoder-width 2", "primus": "--decoder primus"}
LAYOUTS = {"1 x 2": (2, 2, 4), "2 x 1": (2, 1, 2), "2 x 2": (4, 2, 2), "1 x 4": (4, 4, 4)}  # ranks, seq, tiles a group
MODES = ("halo", "swap")
LABELS = {"labels": {"background": 0, "a": 1, "b": 2, "c": 3}}
REGIONS = {
    "labels": {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3},
    "regions_class_order": [1, 2, 3],
}


@dataclass(frozen=True)
class Loss:
    """What the loss of a run sums: labels or regions, all voxels or those that are not ignored, tiles or batches."""

    declared: dict[str, Any]
    ignores: bool
    batch_dice: bool
    split: str = "spatial"

    def write(self, folder: Path) -> list[str]:
        """Writes five cases whose shares of ignored voxels differ; returns the flags of a run on them."""
        labels = {**self.declared["labels"], **({"ignore": 4} if self.ignores else {})}
        root, shape = nnunet(folder / "Dataset001_Tiny", cases=5, **{**self.declared, "labels": labels}), (18, 12, 12)
        for case in range(5):
            dice = np.random.default_rng(case)
            label = dice.integers(0, 4, shape, dtype=np.uint8)
            if self.ignores:
                label[dice.random(shape) < case / 6] = 4
            save(root / "imagesTr" / f"c_{case:03d}_0000.nii.gz", image_array(case, shape))
            save(root / "labelsTr" / f"c_{case:03d}.nii.gz", label)
        sums = "--batch-dice" if self.batch_dice else "--no-batch-dice"
        flags = [*TINY.split(), *RUN.split(), "--data", str(root), "--cache", str(folder / "cache"), sums]
        prepare(flags)
        return [*flags, "--split", self.split]


LOSSES = {
    "regions": Loss(REGIONS, ignores=True, batch_dice=True),
    "labels": Loss(LABELS, ignores=True, batch_dice=False, split="ordered"),
}
RUNS = [("unetr", "regions"), ("primus", "labels")]


@dataclass(frozen=True)
class Case:
    """A run to make: the loss by its name, the flags that come on top, and whether the loss sums alone (a mistake)."""

    decoder: str
    loss: str
    steps: int
    mode: str = "gather"
    more: str = "--batch 4 --accumulate 2"
    sums_alone: bool = False

    @property
    def name(self) -> str:
        return f"{self.decoder}, {self.loss}, {self.steps}, {self.mode}{', alone' if self.sums_alone else ''}"


Tiles = dict[tuple[str, TileKey], Tile]


def trained(
    mesh: Mesh, cases: list[Case], flags: dict[str, list[str]], drawn: Tiles, out: Path
) -> list[dict[str, Tensor]]:
    """Returns this rank's weights after each of the runs, which leave their journals in folders of their names.

    ``drawn``: the tiles of all runs, which were drawn once for all of them.
    """
    os.fsync = lambda fd: None  # this process ends with the test
    trainer.draw_progress = lambda out: None
    validation.draw_cases = lambda *of: None
    TileSource.draw = lambda source, key: drawn[case.loss, key]
    weights = []
    for case in cases:
        line = f"{DECODERS[case.decoder]} --mode {case.mode} --seqpar {mesh.seq.size} --iterations {case.steps}"
        config = parse([*flags[case.loss], *line.split(), *case.more.split()], "debug")[1]
        status = StatusFile(out / case.name)
        run_on_rank0(lambda: (out / case.name / "checkpoints").mkdir(parents=True), mesh.world)
        run = make_trainer(RunRequest(config, "debug", "for a test"), mesh, open_data(config, mesh.is_first), status)
        if case.sums_alone:
            run.gradients.loss_groups = LossGroups()
        stopper = StopRequest(math.inf)
        stopper.begin(mesh, print, out)
        assert run.run(stopper)
        stopper.close()
        weights.append({name: tensor.clone() for name, tensor in run.net.state_dict().items()})
    return weights


def rows(out: Path, case: Case) -> list[dict[str, Any]]:
    return read_metrics(out / case.name / "metrics.jsonl")


@dataclass(frozen=True)
class Alone:
    """The runs of one process: flags and tiles by their loss, rows and weights by loss."""

    flags: dict[str, list[str]]
    drawn: Tiles
    rows: dict[str, list[dict[str, Any]]]
    weights: dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    out = tmp_path_factory.mktemp("modes")
    flags = {name: loss.write(out / f"data {number}") for number, (name, loss) in enumerate(LOSSES.items())}
    keys = [TileKey(0, step, sample) for step in range(STEPS) for sample in range(8)]
    sources = {loss: open_data(parse(line, "debug")[1], True).tiles for loss, line in flags.items()}
    drawn = {(loss, key): source.draw(key) for loss, source in sources.items() for key in keys}
    cases = {run[1]: Case(*run, STEPS) for run in RUNS}
    (weights,) = run_ranks(1, trained, list(cases.values()), flags, drawn, out)
    return Alone(flags, drawn, {name: rows(out, case) for name, case in cases.items()}, dict(zip(cases, weights)))


@pytest.mark.parametrize("layout", [long_case(name) if name in ("1 x 4", "2 x 2") else name for name in LAYOUTS])
def test_a_run_in_halo_or_swap_becomes_what_one_process_makes(
    layout: str, one_process: Alone, tmp_path: Path, ranks: Callable[..., list]
) -> None:
    """Loss, its terms and the gradient's norm in each step, the loss of the validation, and the weights then."""
    world, seqpar, batch = LAYOUTS[layout]
    more = f"--batch {batch} --accumulate 2"
    cases = [Case(*run, STEPS, mode, more) for run in RUNS for mode in MODES]
    controls = [Case(*RUNS[0], 1, mode, more, sums_alone=True) for mode in MODES if world == 2]
    inputs = one_process.flags, one_process.drawn, tmp_path
    every = ranks(world, trained, [*cases, *controls], *inputs, seqpar=seqpar, timeout=600)
    for number, case in enumerate(cases):
        wanted, weights = (of[case.loss] for of in (one_process.rows, one_process.weights))
        journal = rows(tmp_path, case)
        assert [row["kind"] for row in journal] == [row["kind"] for row in wanted] == ["train"] * case.steps + ["val"]
        for ours, theirs in zip(journal, wanted):
            for name in {"loss", "dice_loss", "ce_loss", "grad_norm"} & theirs.keys():
                assert abs(ours[name] / theirs[name] - 1) < 1e-10, (case, name, ours, theirs)
        for own in (outcomes[number] for outcomes in every):
            assert own.keys() == weights.keys()
            for name, tensor in weights.items():
                assert relative(own[name], tensor) < 1e-10, (case, name)
    for case in controls:  # a trainer whose loss sums on each rank alone is seen in its first step
        first, wanted = rows(tmp_path, case)[0], one_process.rows[case.loss][0]
        assert abs(first["loss"] / wanted["loss"] - 1) > 1e-4, (case, first, wanted)
        assert abs(first["grad_norm"] / wanted["grad_norm"] - 1) > 1e-4, (case, first, wanted)
