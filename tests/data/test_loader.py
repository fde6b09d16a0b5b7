"""The same tiles however they are spread; each prepared once in a group; faults reach all ranks; nothing is left."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from seqpar.data.errors import DataError
from seqpar.data.sampling.augmentation import augment
from seqpar.data.sampling.loader import Loader, MicroBatch
from seqpar.data.sampling.tiles import TileKey, TileSource
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Mesh
from tests.support.cases import NoiseCase, lines, load, noise_source

TILE = (8, 8, 8)
ROOT = Path(__file__).parents[2]


def tiles_of(source: TileSource, steps: range, number: int) -> dict[tuple[int, int], tuple[Tensor, Tensor, str]]:
    """Returns (step, sample) to image, label and case, drawn here and whole: what every loader must deliver."""
    keys = [TileKey(0, step, sample) for step in steps for sample in range(number)]
    drawn = {(key.step, key.sample): (source.draw(key), source.case_of(key)) for key in keys}
    return {at: (torch.from_numpy(t.image), torch.from_numpy(t.label), case) for at, (t, case) in drawn.items()}


def deliver(mesh: Mesh, source: TileSource, workers: tuple[int, ...], **how: Any) -> list[list[MicroBatch]]:
    return [list(load(mesh, source, workers=number, **how)) for number in workers]


def joined(parts: list[MicroBatch], layout: Layout) -> tuple[Tensor, Tensor]:
    return layout.join([part.image for part in parts]), layout.join([part.label for part in parts])


@pytest.mark.parametrize(
    "world, seqpar, batch, accumulate, split",
    [(1, 1, 4, 1, "spatial"), (2, 2, 2, 2, "ordered"), (3, 3, 4, 1, "ordered"), (4, 4, 4, 1, "spatial"),
     (4, 2, 2, 1, "ordered"), (4, 1, 1, 1, "spatial"), (2, 1, 1, 2, "spatial")],
)  # fmt: skip
def test_joined_parts_are_the_same_tiles_for_any_ranks_and_workers(
    world: int, seqpar: int, batch: int, accumulate: int, split: str, ranks: Callable[..., list]
) -> None:
    source, steps, workers = noise_source(augment("paper", TILE)), range(3, 6), (0, 1, 3)
    expected = tiles_of(source, steps, 4)
    how = {"batch": batch, "accumulate": accumulate, "split": split, "steps": steps}
    parts = ranks(world, lambda mesh: deliver(mesh, source, workers, **how), seqpar=seqpar, timeout=120)
    layout, seen = Layout.of(TILE, 4, seqpar, split), Counter[tuple[int, int]]()
    for turn in range(len(workers)):
        for data in range(world // seqpar):
            group = [parts[data * seqpar + rank][turn] for rank in range(seqpar)]
            assert len(group[0]) == len(steps) * accumulate
            for same in zip(*group):
                assert len({(p.step, p.samples, p.cases) for p in same}) == 1
                image, label = joined(list(same), layout)
                for b, sample in enumerate(same[0].samples):
                    seen[same[0].step, sample] += 1
                    wanted_image, wanted_label, case = expected[same[0].step, sample]
                    assert torch.equal(image[b], wanted_image) and torch.equal(label[b], wanted_label)
                    assert same[0].cases[b] == case and round(float(image[b, 0].max())) == int(case) + 1
    assert seen == Counter(dict.fromkeys(expected, len(workers)))


def read_and_deliver(mesh: Mesh, log: str) -> list[MicroBatch]:
    source = noise_source(augment("paper", TILE), count=1, log=log)
    return list(load(mesh, source, workers=0, batch=2, accumulate=2, split="ordered", steps=range(3)))


def test_every_place_of_a_pipe_gets_the_parts_and_prepares_some(ranks: Callable[..., list], tmp_path: Path) -> None:
    """Two places of two parts each: no tile is prepared twice, and each rank prepares as many."""
    expected = tiles_of(noise_source(augment("paper", TILE), count=1), range(3), 4)
    parts = ranks(4, read_and_deliver, str(tmp_path / "log"), seqpar=2, pipe=2)
    layout = Layout.of(TILE, 4, 2, "ordered")
    for place in (0, 1):
        for same in zip(*parts[2 * place : 2 * place + 2], strict=True):
            image, label = joined(list(same), layout)
            for b, sample in enumerate(same[0].samples):
                wanted_image, wanted_label, _ = expected[same[0].step, sample]
                assert torch.equal(image[b], wanted_image) and torch.equal(label[b], wanted_label)
    reads = Counter(line.split()[0] for line in lines(tmp_path / "log"))
    assert sorted(reads.values()) == [3, 3, 3, 3]


def test_started_later_the_same_follows(alone: Mesh) -> None:
    source = noise_source(augment("paper", TILE))
    whole = list(load(alone, source, steps=range(6), batch=2, workers=1))
    later = list(load(alone, source, steps=range(4, 6), batch=2, workers=2))
    assert [part.step for part in later] == [4, 5]
    assert all(torch.equal(a.image, b.image) for a, b in zip(whole[4:], later))
    other = next(load(alone, source, batch=2, seed=1))
    assert not torch.equal(other.image, whole[0].image)


def test_types_are_those_of_the_cache(alone: Mesh) -> None:
    small, large = (next(load(alone, replace(noise_source(), num_values=n))) for n in (256, 257))
    assert small.image.shape == (1, 8, 2, 4, 4, 4) and small.image.dtype == torch.float32
    assert small.label.shape == (1, 8, 4, 4, 4) and small.label.dtype == torch.uint8
    assert large.label.dtype == torch.int16 and torch.equal(large.label, small.label.to(torch.int16))


def count_reads(mesh: Mesh, log: str, workers: int) -> int:
    source = noise_source(count=1, log=log)
    return len(list(load(mesh, source, "ordered", steps=range(6), batch=3, workers=workers)))


@pytest.mark.parametrize("world, seqpar, workers", [(4, 4, 1), (4, 2, 0), (3, 3, 2)])
def test_a_tile_is_read_once_in_its_group_and_by_ranks_in_turn(
    world: int, seqpar: int, workers: int, ranks: Callable[..., list], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    ranks(world, count_reads, str(log), workers, seqpar=seqpar)
    reads = Counter(line.split()[0] for line in lines(log))
    assert sum(reads.values()) == 18 * (world // seqpar)
    assert len(reads) == world * max(1, workers) and max(reads.values()) - min(reads.values()) <= 1


def count_bytes(mesh: Mesh) -> tuple[int, int, int]:
    loader = load(mesh, noise_source(), split="ordered", steps=range(2), batch=3)
    counts = loader.layout.counts
    mine = [t % mesh.seq.size for t in range(6)].count(mesh.seq.index)
    batches = list(loader)
    got = sum(part.image.numel() * 4 + part.label.numel() for part in batches)
    row = loader.packing.row_bytes
    assert got == 6 * counts[mesh.seq.index] * row
    return mesh.seq.traffic["tiles"], got - mine * counts[mesh.seq.index] * row, len(mesh.seq.traffic)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_rank_receives_its_part_of_others_tiles_and_nothing_else(world: int, ranks: Callable[..., list]) -> None:
    counts = ranks(world, count_bytes)
    assert sum(sent for sent, _, _ in counts) == sum(wanted for _, wanted, _ in counts) > 0
    assert {kinds for _, _, kinds in counts} == {1}


def meet_fault(mesh: Mesh, source: TileSource, workers: int) -> tuple[str, str, str, int, int]:
    loader, done = load(mesh, source, steps=range(50), workers=workers), 0
    pids = loader.worker_ids
    try:
        for _ in loader:
            done += 1
    except Exception as error:
        left = sum(os.path.exists(f"/proc/{pid}") for pid in pids)
        return type(error).__name__, str(error), getattr(error, "path", ""), done, left
    raise AssertionError("no fault came")


def first_of_case(source: TileSource, name: str, per_step: int) -> tuple[int, int]:
    return next(
        (n // per_step, n % per_step) for n in range(999)
        if source.case_of(TileKey(0, n // per_step, n % per_step)) == name
    )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world, seqpar", [(1, 1), (4, 2), (4, 4)])
def test_a_bad_case_is_the_same_data_error_on_all_ranks(
    world: int, seqpar: int, workers: int, ranks: Callable[..., list]
) -> None:
    source = noise_source(count=8, fault="is damaged")
    step, sample = first_of_case(source, "0", world // seqpar)
    errors = ranks(world, meet_fault, source, workers, seqpar=seqpar)
    text = f"/cache/0/label.npy: is damaged (case 0, for sample {sample} of step {step})"
    assert set(errors) == {("DataError", text, "/cache/0/label.npy", step, 0)}


@pytest.mark.parametrize(
    "what, kind, text",
    [({"fault": "crash"}, "RuntimeError", "ZeroDivisionError: a mistake of ours"),
     ({"ends_with": signal.SIGKILL}, "MemoryError", "a worker was killed at case 0, for sample "),
     ({"ends_with": signal.SIGBUS}, "DataError", "case 0, for sample "),
     ({"ends_with": signal.SIGSEGV}, "RuntimeError", "a worker ended with exit code -11 at case 0, for sample ")],
)  # fmt: skip
def test_a_worker_that_fails_or_is_killed_is_an_error_on_all_ranks(
    what: dict[str, Any], kind: str, text: str, ranks: Callable[..., list]
) -> None:
    errors = ranks(2, meet_fault, noise_source(count=8, **what), 2)
    assert errors[0] == errors[1] and errors[0][0] == kind and text in errors[0][1] and errors[0][4] == 0
    assert kind == "DataError" or errors[0][1].startswith("rank ")


def wait_for_tiles(mesh: Mesh, slow_rank: int) -> list[float]:
    source = noise_source(count=1, wait_s=0.3 if mesh.seq.index == slow_rank else 0.0)
    return [part.wait_s for part in load(mesh, source, steps=range(2), workers=0)]


def test_all_report_the_longest_wait(ranks: Callable[..., list]) -> None:
    first, second = ranks(2, wait_for_tiles, 1)
    assert first == second and first[1] >= 0.3 > first[0] > 0  # rank 1 prepares the second step's tile


@pytest.mark.parametrize(
    "how, text",
    [({"batch": 0}, "--batch 0: it must be at least 1"), ({"accumulate": 0}, "--accumulate 0"),
     ({"workers": -1}, "--workers -1"),
     ({"prefetch": 0}, "--prefetch 0"), ({"seed": -1}, "--seed -1"), ({"steps": range(0, 4, 2)}, "count up by one"),
     ({"layout": Layout.of(8, 4, 2)}, "for 2 ranks, but the seq group"), ({"layout": Layout.of(4, 4)}, "use one size")],
)  # fmt: skip
def test_what_cannot_be_loaded_is_refused(how: dict[str, Any], text: str, alone: Mesh) -> None:
    layout = how.pop("layout", Layout.of(8, 4))
    with pytest.raises(ValueError, match=text):
        Loader(noise_source(), layout, alone, **{"batch": 1, "steps": range(1), **how})


def test_the_fakes_are_cases(alone: Mesh) -> None:
    """The control: a healthy case raises nothing, a bad one does where it is drawn."""
    assert NoiseCase("1").label.shape == NoiseCase("1").image.shape[1:]
    with pytest.raises(DataError):
        next(load(alone, noise_source(count=1, fault="is damaged")))
    assert np.isfinite(next(load(alone, noise_source())).image.numpy()).all()
