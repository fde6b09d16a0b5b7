"""A run folder as training leaves it, made in a moment: a small data set, prepared, and predictions that err."""

import dataclasses
import json
from pathlib import Path

import numpy as np
from scipy import ndimage

import seqpar
from seqpar.data.formats.dataset import Case, Dataset
from seqpar.data.preparation.cache import open_cache
from seqpar.data.preparation.prepare_dataset import prepare
from seqpar.runs.run_status import StatusFile
from seqpar.settings.presets import debug
from seqpar.tasks.segment.validation import ValidationFolder
from seqpar.tasks.training_data import TrainingData, training_tiles
from tests.support.folders import NEW, save

SHAPE = (26, 30, 22)


def make_data(root: Path, names: list[str]) -> Dataset:
    """Writes cases with a ball of three labels in a body of noise."""
    cases = []
    generator = np.random.default_rng(0)
    grid = np.indices(SHAPE)
    for number, name in enumerate(names):
        far = np.sqrt(sum((g - c) ** 2 for g, c in zip(grid, (13, 12 + number, 11))))
        body = np.sqrt(sum(((g - s / 2) / (s / 2 - 2)) ** 2 for g, s in zip(grid, SHAPE))) < 1
        label = np.select([far < 2.5, far < 4, far < 6], [3, 1, 2], 0)
        for kind in NEW[:-1]:
            image = body * (100 + 40 * (label > 0) + generator.normal(0, 8, SHAPE))
            save(root / name / f"{name}-{kind}.nii.gz", image.astype(np.int16))
        save(root / name / f"{name}-seg.nii.gz", label.astype(np.uint8))
        paths = [root / name / f"{name}-{kind}.nii.gz" for kind in NEW]
        cases.append(Case(name, tuple(paths[:-1]), paths[-1]))
    labels = {"background": 0, "NCR": 1, "ED": 2, "ET": 3}
    regions = {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)}
    return Dataset("balls", root, "files", tuple(cases), ("T1c", "T1", "FLAIR", "T2"), labels, regions, (2, 1, 3))


def make_run(folder: Path, names: list[str]) -> Path:
    """Writes a finished run whose predictions are shifted, the later a case the further; the first one is perfect."""
    out, data = folder / "run", make_data(folder / "data", names)
    prepare(data, folder / "cache", workers=0)
    dataset = open_cache(folder / "cache")
    config = dataclasses.replace(debug(), data=str(folder / "data"), out=str(out))
    training_data = TrainingData(dataset, (), dataset.ids, training_tiles(dataset, dataset.ids, config))
    out.mkdir()
    content = {
        "config": json.loads(config.to_json()),
        "dataset": training_data.describe(),
        "layout": {
            "ranks": 2,
            "data": 2,
            "seqpar": 1,
            "hosts": ["a", "b"],
            "devices": ["Chip 1", "Chip 1"],
            "parameters": {"encoder": 2_500_000, "decoder": 10_000},
        },
        "versions": {"seqpar": seqpar.__version__},
    }
    (out / "config.json").write_text(json.dumps(content))
    status = StatusFile(out)
    status.step = status.steps = config.steps
    status.write("finished")
    rows = [{"kind": "train", "step": n, "loss": 2 / (n + 1), "lr": 1e-3, "seconds": 2.0} for n in range(config.steps)]
    dice = {"NCR": 0.5, "ED": None}
    scores = {"loss": 0.4, "dice": dice, "global_dice": dice, "cases": 2, "seconds": 65.0}
    rows.append({"kind": "val", "step": config.steps, **scores})
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    validation = ValidationFolder(
        out / "validation",
        training_data.describe(),
        lambda: data,
        config.steps,
        dataset.preparation,
    )
    for number, name in enumerate(dataset.ids):
        case = dataset.cases[name]
        validation.add(case, ndimage.shift(np.array(case.label), (number, 0, 0), order=0))
    assert validation.close() == []
    return out
