"""What reading costs in an epoch: whole volumes from the cache of prepared cases, against their NIfTI files."""

import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from statistics import median

import numpy as np

from lab.benches.series import Row, Runs, Series, alternate
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.phantom.phantom_files import PhantomSettings, write_phantom
from seqpar.data.preparation.prepare_dataset import prepare, prepared
from seqpar.data.preparation.prepared_case import prepare_case
from seqpar.data.preparation.recipe import PrepareSettings

SIDES = (240, 240, 155)
CROPPED = (240, 240, 152)
CASES = ("NIfTI files, prepared each time", "cache")


def series(quick: bool = False) -> list[Series]:
    """Returns the series: phantoms of the size of MSD's brains, four modalities, prepared as DistMIS does."""
    count, turns = (2, 1) if quick else (4, 3)
    settings = PrepareSettings(crop_to=CROPPED, normalise="volume")

    def row(case: str, runs: Runs) -> Row:
        known = {name: median(seconds for seconds, _ in every) for name, every in runs.items() if every}
        sizes = [size for _, size in runs[case]]
        return {
            "volumes": "x".join(map(str, SIDES)),
            "read_from": case,
            "s_per_volume": known[case] / count,
            "mb_per_volume": sizes[0] / count / 1e6,
            "times_as_fast": known[CASES[0]] / known[case],
        }

    def measure(turns: int) -> Generator[tuple[str, tuple[float, int]], None, None]:
        with tempfile.TemporaryDirectory() as folder:
            phantom = PhantomSettings(size=SIDES)
            write_phantom(Path(folder), count, phantom, 2)
            root = phantom.root(Path(folder))
            prepare(read_dataset(root), Path(folder) / "cache", settings)
            yield from alternate(CASES, lambda case: _epoch(root, Path(folder) / "cache", settings, case), turns)

    return [Series("an epoch's reading of whole volumes", CASES, turns, 40.0 if quick else 80.0, measure, row)]


def _epoch(root: Path, cache: Path, settings: PrepareSettings, case: str) -> tuple[float, int]:
    """Returns the seconds in which every volume comes into memory once, ready for a network, and the bytes on disk."""
    dataset = prepared(root, cache, settings, is_first=True)
    began, size = time.perf_counter(), 0
    if case == "cache":
        for one in dataset.cases.values():
            size += sum(path.stat().st_size for path in one.folder.glob("*.npy"))
            np.array(one.image), np.array(one.label)
        return time.perf_counter() - began, size
    for one_case in read_dataset(root).cases:
        size += sum(path.stat().st_size for path in (*one_case.images, *([one_case.label] if one_case.label else [])))
        prepare_case(one_case, dataset.recipe)
    return time.perf_counter() - began, size
