"""Rows of what is trained on pretended GPUs: a name, a command line, and the row whose losses these must be.

Ranks are forked from this process, which has imported everything: ``build.py`` starts pytest with pretended GPUs.
"""

import ctypes
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from seqpar.cluster import convolution_speed
from seqpar.cluster.acceptance import long_run, program, runs, two_ranks
from seqpar.cluster.acceptance.check import LEFT_OUT, Site
from seqpar.data.phantom.phantom_files import PhantomSettings, write_phantom
from seqpar.spatial import overlap
from seqpar.training.trainer import Trainer
from tests.pretended_gpu.build import is_pretended
from tests.support import training_runs
from tests.support.training_runs import Launch, farthest, losses

if not is_pretended(os.environ):
    pytest.skip("these tests run on pretended GPUs: make test-gpu", allow_module_level=True)

SHORT = "--device cuda --workers 0 --augment none --iterations 2"
VIT = "--tile 32 --patch 16 --depth 1 --embed-dim 32 --heads 2 --batch 2"  # heads of 16: CUDA's kernels take 8, 16 ...
EXACT, ROUNDED, HALF = 1e-6, 1e-4, 3e-2


@dataclass(frozen=True)
class Row:
    """A training: its flags, data and ranks, and the row whose losses it must have, up to ``within`` (relative)."""

    flags: str
    data: str = "brain"
    ranks: int = 1
    same_as: str = ""
    within: float = ROUNDED
    race_free: bool = False  # under torch's stream sanitizer, with every halo overlapped


PRESETS = {
    "paper": Row(f"--preset paper {VIT} --decoder-width 4 --epochs 1 --val-every 0"),
    "modern": Row(
        f"--preset modern {VIT} --patch 8 --decoder-width 4 --epochs 1 --warmup 0 --val-every 0", within=HALF
    ),
    "nnunet": Row("--preset nnunet --features 4 --tile 16 --batch 2 --epochs 1 --val-every 0"),
    "mae": Row(
        f"--preset mae {VIT} --patch 8 --rebuild-blocks 1 --global-batch 2 --epochs 1 --warmup 0 --val-every 0",
        within=HALF,
    ),
    "resattnet": Row(
        "--preset resattnet --features 8 --batch 2 --epochs 1 --val-every 0", data="dementia", within=1e-3
    ),
    "distmis": Row(
        "--preset distmis --crop-to 16 16 16 --tile 16 --force --features 4 --batch 2 --epochs 1 --val-every 0"
    ),
    "lamp": Row("--preset lamp --features 2 --curriculum 64x32x32:1:2,whole:1:1 --val-every 0"),
    "hou": Row(
        "--preset hou --features 4 --tile 32 --batch 2 --global-batch 0 --epochs 1 --val-every 0",
        data="liver",
        within=HALF,
    ),
}
DEBUG = Row(f"--preset debug {VIT} --patch 8 --decoder-width 4 --val-every 0 --precision fp32")
ROWS = {
    **PRESETS,
    **{
        f"{name}, two ranks": replace(row, flags=f"{row.flags} --seqpar 2", ranks=2, same_as=name)
        for name, row in PRESETS.items()
    },
    "debug": DEBUG,
    "two stages": Row(f"{DEBUG.flags} --pipe 2 --batch 1 --accumulate 2", ranks=2, same_as="debug"),
    "shards": Row(f"{DEBUG.flags} --seqpar 2 --shard-weights", ranks=2, same_as="debug"),
    "shards of two tiles": Row(f"{DEBUG.flags} --batch 1 --shard-weights", ranks=2, same_as="debug"),
    "modern, shards": Row(
        f"{PRESETS['modern'].flags} --seqpar 2 --shard-weights", ranks=2, same_as="modern", within=HALF
    ),
    "modern, replayed": Row(f"{PRESETS['modern'].flags} --cuda-graph", same_as="modern", within=EXACT),
    "modern, two groups": Row(f"{PRESETS['modern'].flags} --batch 1", ranks=2, same_as="modern", within=HALF),
    "modern, two groups, replayed": Row(
        f"{PRESETS['modern'].flags} --batch 1 --cuda-graph", ranks=2, same_as="modern, two groups", within=EXACT
    ),
    "deterministic": Row(f"{DEBUG.flags} --deterministic", same_as="debug", within=EXACT),
    "boxes": Row(f"{DEBUG.flags} --seqpar 2 --mode halo", ranks=2, same_as="debug"),
    "boxes, overlapped": Row(
        f"{DEBUG.flags} --seqpar 2 --mode halo", ranks=2, same_as="boxes", within=EXACT, race_free=True
    ),
}
DATA = {
    "brain": PhantomSettings("nnunet", (40, 44, 40)),
    "liver": PhantomSettings("nnunet", (40, 40, 40), kind="liver"),
    "dementia": PhantomSettings("classes", (64, 32, 32), kind="dementia"),
}


def forked(act: Callable[[], None], rank: int) -> None:
    """Lets a forked process use the GPUs, which CUDA's own runtime refuses after a fork, and calls ``act``."""
    torch.cuda._is_in_bad_fork = lambda: False
    act()


def find_races() -> None:
    """Raises at each read that does not wait for another stream's write, and overlaps halos of any size."""
    from torch.cuda._sanitizer import enable_cuda_sanitizer

    enable_cuda_sanitizer()
    overlap.ENOUGH = 0


class Trainings:
    """Trains rows in a folder, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known = dict[str, list[float]]()
        training_runs.count_once = lambda: None  # a backward here would leave threads that no fork has

    def train(self, row: Row, out: Path, hook: Callable[[int], None], more: str = "") -> list[float]:
        """Returns the losses of a training."""
        data = write_phantom(self.folder / row.data, 5, DATA[row.data])
        flags = f"{row.flags} {SHORT} {more} --data {data} --cache {data}-cache".split()
        with Launch(row.ranks, flags, out, hook) as launch:
            codes = launch.wait(400)
            assert codes == [0] * row.ranks, f"{codes}\n{launch.said()[-6000:]}"
        return losses(out)

    def losses_of(self, name: str) -> list[float]:
        """Returns the losses of a row."""
        if name not in self._known:
            row, out = ROWS[name], self.folder / name.replace(", ", "-").replace(" ", "-")
            hook = partial(forked, find_races if row.race_free else lambda: None)
            self._known[name] = self.train(row, out, hook)
        return self._known[name]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("name", ROWS)
def test_a_training_ends_and_its_losses_are_those_of_another(name: str, trainings: Trainings) -> None:
    row, own = ROWS[name], trainings.losses_of(name)
    assert own and all(map(math.isfinite, own))
    if row.same_as:
        assert farthest(own, trainings.losses_of(row.same_as)) <= row.within


@pytest.mark.parametrize("name", ["modern", "boxes", "two stages"])
def test_a_step_waits_for_the_device_once_at_most(name: str, trainings: Trainings, tmp_path: Path) -> None:
    """From the start of one step to that of the next, so that the row of the step before is counted too.

    DDP times its first ten steps, and waits in them.
    """
    row, noted = ROWS[name], tmp_path / "waits"

    def count(rank: int) -> None:
        forked(lambda: None, rank)
        import pretended_kernels

        step, of_runtime, before = Trainer._step, ctypes.CDLL(None).pretended_waits, [0, 0]

        def counted(self: Trainer, *of: Any) -> Any:
            now = [len(pretended_kernels.waits), of_runtime()]
            if self.progress.step > 11 and rank == 0:
                number, where = now[1] - before[1], pretended_kernels.waits[before[0] :]
                with open(noted, "a") as file:
                    print(json.dumps([number + len(where), number, where]), file=file)
            before[:] = now
            return step(self, *of)

        Trainer._step = counted  # type: ignore[method-assign]

    trainings.train(row, tmp_path / "run", count, "--iterations 16")
    steps = [json.loads(line) for line in noted.read_text().splitlines()]
    assert len(steps) == 4 and all(total <= 1 for total, *_ in steps), steps[-1]


@pytest.mark.parametrize("part", [1, 2, 3])
def test_the_acceptance_finds_nothing_wrong(part: int, tmp_path: Path) -> None:
    """With a CPU's sizes, and four times the limits, as a CPU may be busy.

    Without ``compiled``: Triton's kernels need a GPU.
    """
    checks = [check for check in program.CHECKS if check.name != "compiled"]
    pid = os.fork()
    if not pid:
        code = 99
        try:
            log = os.open(tmp_path / "said", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            forked(lambda: None, 0)
            Site.full_size = False  # type: ignore[assignment, method-assign]
            convolution_speed.ON_GPU = convolution_speed.ON_CPU
            program.PART_S *= 4
            for owner in (two_ranks, runs, long_run):
                owner.LIMIT_S *= 4  # type: ignore[attr-defined]
            code = program.accept("cuda", part, tmp_path / "record.json", checks)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said, record = ((tmp_path / name).read_text() for name in ("said", "record.json"))
    assert code == 0 and LEFT_OUT not in {of["verdict"] for of in json.loads(record)["parts"].values()}, said + record
