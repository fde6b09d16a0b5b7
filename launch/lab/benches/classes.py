"""What a classifier of phantom brains learns on 2 cores, and where it looks: 3D-ResAttNet on healthy and demented ones.

A small 3D-ResAttNet is trained on brains of one seed, by two ranks with other volumes each, and predicts those of
another. The mass of a map, by HiResCAM and by Grad-CAM, is the share of a demented case's map that lies in the region
where the groups differ, over the region's share of all voxels, and the same within the brain: 1 is chance.
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.benches.hybrid import start_ranks
from lab.benches.series import Row, Runs, Series, alternate
from seqpar.data.phantom.phantom_files import PhantomSettings, write_phantom
from seqpar.data.volumes import read_volume
from seqpar.tasks.classify.scores import TABLE, class_summary, read_class_table, read_truth

WAYS = ("hirescam", "grad-cam")
TRAIN = (
    "--task classify --preset laptop --network resattnet18 --batch 2 --fold all --val-every 0 --val-cases 4 "
    "--device cpu"
)


def series(quick: bool = False) -> list[Series]:
    """Returns the series of one training."""
    cases, epochs = (24, 2) if quick else (160, 14)
    case = f"{cases} brains, {epochs} epochs of 50 steps of 4"

    def measure(case: str) -> dict[str, Any]:
        return learn(cases, epochs)

    def row(case: str, runs: Runs) -> Row:
        middle = {name: statistics.median(run[name] for run in runs[case]) for name in runs[case][0]}
        return {"trained on": case, **middle}

    what = "accuracy on 40 new brains of 48x56x48, and the mass of maps in the region where the groups differ"
    measure_all: Any = partial(alternate, (case,), measure)
    return [Series(what, (case,), 1, 110.0 if quick else 440.0, measure_all, row)]


def learn(cases: int, epochs: int) -> dict[str, Any]:
    """Returns accuracy, area under the ROC curve, the mass of maps over chance, and the minutes of training."""
    with tempfile.TemporaryDirectory() as folder:
        own = write_phantom(Path(folder, "own"), cases, PhantomSettings.of("dementia"), 2)
        new = write_phantom(Path(folder, "new"), 40, PhantomSettings.of("dementia", seed=1), 2)
        began = time.monotonic()
        place = f"--data {own} --cache {folder}/cache --out {folder}/run --epochs {epochs}"
        start_ranks(2, "train", f"{TRAIN} {place}")
        minutes = (time.monotonic() - began) / 60
        truth = read_truth(new)
        for way in WAYS:
            out = Path(folder, way)
            start_ranks(
                1, "predict", f"{folder}/run -i {new} -o {out} --checkpoint latest --explain-by {way} --device cpu"
            )
        table = read_class_table(out / TABLE)
        content = class_summary(table, truth, out / TABLE)
        demented = [case for case in table.cases if truth[case] == "dementia"]
        masses = {way: [mass_over_chance(Path(folder, way), new, case) for case in demented] for way in WAYS}
    scores, means = content["scores"], {way: np.mean(pairs, 0) for way, pairs in masses.items()}
    return {
        "accuracy": scores["accuracy"],
        "AUC": scores["AUC"],
        **{f"{way}: mass over chance": float(of_volume) for way, (of_volume, _) in means.items()},
        **{f"{way}: within the brain": float(of_brain) for way, (_, of_brain) in means.items()},
        "minutes of training": minutes,
    }


def mass_over_chance(predicted: Path, data: Path, case: str) -> tuple[float, float]:
    """Returns the share of a case's map in the region, over the region's share of all voxels; then within the brain."""
    places = (predicted / "explanations", data / "regions", data)
    seen, region, image = (read_volume(place / f"{case}.nii.gz")[0][0] for place in places)
    return share_over_chance(seen, region > 0, np.ones_like(seen, bool)), share_over_chance(seen, region > 0, image > 0)


def share_over_chance(seen: np.ndarray, region: np.ndarray, within: np.ndarray) -> float:
    """Returns the share of a map that lies in a region, over that of voxels; both of what lies ``within`` alone."""
    share = seen[region & within].sum() / max(seen[within].sum(), 1e-12)
    return float(share / ((region & within).sum() / within.sum()))
