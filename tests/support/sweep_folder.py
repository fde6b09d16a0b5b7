"""The folder of a sweep as ``tune`` leaves it in the middle, made in a moment."""

import json
import shutil
from pathlib import Path

from seqpar.cli import tune
from seqpar.runs.sweep_folder import Sweep, refresh_points, write_sweep
from tests.support.reported_run import make_run

SPACE = ["--space", "lr=1e-3,2e-3", "batch=1,2"]
TINY = ["--preset", "debug", "--epochs", "1", "--iterations", "5", "--device", "cpu"]


def asked(out: Path, *more: str):
    """Returns order, sweep and options of a command line."""
    options, rest = tune._parse([*SPACE, *TINY, "--out", str(out), *more])
    return (*tune._order(options, rest), options)


def begin(out: Path, sweep: Sweep) -> None:
    """Makes the run folder of a point as a training does when it begins."""
    (out / sweep.points[-1].name).mkdir()
    (out / sweep.points[-1].name / "config.json").write_text("{}")


def make_sweep_folder(folder: Path) -> Path:
    """Writes a sweep of four points: two finished, one killed while it ran, one that has not begun."""
    out = folder / "sweep"
    _, sweep, _ = asked(out)
    first, second, third, _ = (out / point.name for point in sweep.points)
    make_run(folder, ["case_a"]).rename(folder / "made")
    for place, losses, dices in (
        (first, [1.0, 0.9, 0.8, 0.7], [0.3, 0.5]),
        (second, [1.0, 0.8, 0.6, 0.5], [0.6, 0.4]),
        (third, [1.0], []),
    ):
        shutil.copytree(folder / "made", place)
        _write_rows(place, losses, dices)
        content = json.loads((place / "config.json").read_text())
        content["history"] = [{"command": ["launch/train.py", "--lr", "1e-3", "--out", str(place)]}]
        (place / "config.json").write_text(json.dumps(content))
    (third / "status.json").write_text(json.dumps({"state": "running", "step": 1, "steps": 4}))
    write_sweep(out, refresh_points(out, sweep))
    return out


def _write_rows(run: Path, losses: list[float], dices: list[float]) -> None:
    rows = [{"kind": "train", "step": n, "loss": loss, "seconds": 2.0} for n, loss in enumerate(losses)]
    rows += [
        {"kind": "val", "step": 2 * n + 2, "loss": 1.0, "dice": {"a": dice, "b": None}, "seconds": 1.0}
        for n, dice in enumerate(dices)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
