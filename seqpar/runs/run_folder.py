"""The files of a run folder: config.json and status.json."""

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import safetensors
import torch

import seqpar
from seqpar.cluster.torch_setup import arithmetic_now
from seqpar.data.errors import DataError, unreadable
from seqpar.data.files import read_whole
from seqpar.data.phantom.phantom_files import flags_of_others, has_phantoms
from seqpar.runs.archive import CONFIG, is_archive, read_archived
from seqpar.scores.label_classes import labels_of_run
from seqpar.settings.config import Config
from seqpar.settings.rules import with_absolute_paths
from seqpar.terminal import next_command, typed_command
from seqpar.text import quantity
from seqpar.weights.facts import ANCESTORS, IS_UNKNOWN, LEARNED, ORIGIN, SUBJECTS, VALIDATED, VOXELS, origin_of
from seqpar.weights.weight_files import ABOUT

FOLDS_FILE = "folds.json"  # is in a folder of five folds
# in config.json, of its data: the classes that no case to train on has; none in earlier versions
UNTAUGHT = "in_no_case"
SWEEP_FILE = "sweep.json"  # is in the folder of a sweep
_STATUS = re.compile(rb'\{\s*"state": "\w+",\s*"step": ')  # how each status.json of a run begins


def read_config(run: str | Path) -> dict[str, Any]:
    """Returns the config.json of a run folder, or of a run that was exported."""
    path = Path(run) / CONFIG
    try:
        content = read_archived(run, CONFIG) if is_archive(run) else json.loads(read_whole(path))
    except DataError:
        raise
    except FileNotFoundError:
        if not Path(run).exists():
            raise ValueError(
                f"{run} does not exist: name the folder that train wrote (--out), or an archive that export wrote"
            ) from None
        if holds_folds(run):
            raise ValueError(f"{run} holds five folds: name the run folder of one, such as {run}/fold0") from None
        raise ValueError(
            f"{path} is missing, so {run} is no run folder: name the folder that train wrote (--out)"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"is damaged ({error}): restore it or train again") from None
    if not isinstance(content, dict):
        raise DataError(path, "is damaged (no JSON object): restore it or train again")
    for name in ("config", "dataset", "layout"):
        if not isinstance(content.get(name, {}), dict):
            raise _damaged(run, f"{name!r} is no JSON object")
    data = content.get("dataset", {})
    for name in ("train", "held_out", "test", LEARNED, VALIDATED):
        if not _is_list_of_names(data.get(name, [])):
            raise _damaged(run, f"{name!r} of its data is no list of names")
    if not isinstance(data.get("digests", {}), dict):
        raise _damaged(run, "'digests' of its data is no JSON object")
    if not _is_texts(data.get(VOXELS, {})):
        raise _damaged(run, f"{VOXELS!r} of its data is no JSON object of texts")
    if not (isinstance(sets := data.get(ANCESTORS, []), list) and all(map(_is_learned_set, sets))):
        raise _damaged(run, f"{ANCESTORS!r} of its data is no list of data sets")
    return content


def _is_learned_set(value: Any) -> bool:
    """Returns whether a value says what ``seqpar.weights.facts.sets_learned`` says of a data set."""
    return (
        isinstance(value, dict)
        and {"name", "recipe"} <= value.keys()
        and _is_list_of_names(value.get("train"))
        and _is_list_of_names(value.get(VALIDATED, []))
        and isinstance(value.get("digests"), dict)
        and _is_texts(value.get(VOXELS, {}))
        and _is_texts(value.get(SUBJECTS, {}))
    )


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _damaged(run: str | Path, why: str) -> DataError:
    """Returns the error of a config.json that says what no run writes; an archive has it inside."""
    if is_archive(run):
        return DataError(run, f"its {CONFIG} is damaged ({why}): copy it again, or export the run again")
    return DataError(Path(run) / CONFIG, f"is damaged ({why}): restore it or train again")


def read_description(run: str | Path) -> dict[str, Any]:
    """Returns what a run's config.json says of its data; raises DataError if labels in it are missing or wrong."""
    dataset: dict[str, Any] = read_config(run).get("dataset", {})
    try:
        labels_of_run(dataset)
    except KeyError as error:
        raise DataError(Path(run) / CONFIG, f"lacks {error} of its data: restore it or train again") from None
    except (TypeError, AttributeError, IndexError, ValueError) as error:
        raise _damaged(run, f"labels of its data: {error}") from None
    return dataset


def tested_cases(*runs: str | Path) -> frozenset[str]:
    """Returns the cases that runs kept for tests, the same ones; raises ``ValueError`` where they did not."""
    parts = {_test_of(run) for run in runs}
    names = " and ".join(map(str, runs))
    if not all(parts):
        raise ValueError(
            f"{names} kept no cases for tests: train with three shares, such as --fold 70:15:15, "
            "or, to classify, give some cases of labels.csv the split test"
        )
    if len(parts) > 1:
        raise ValueError(f"{names} did not keep the same cases for tests: name one of them")
    return parts.pop()


def _test_of(run: str | Path) -> frozenset[str]:
    """Returns the cases that a run kept for tests, none if it kept none."""
    if is_archive(run):
        read_config(run)  # another file is none of ours
        raise ValueError(f"{run} is an exported run, which names no cases: name the run folder that it was made from")
    content = read_config(run)
    if "dataset" not in content:
        raise _damaged(run, "it lacks 'dataset'")
    names = content["dataset"].get("test", [])
    if not _is_list_of_names(names):
        raise _damaged(run, "'test' of its data is no list of names")
    return frozenset(names)


def holds_run(out: str | Path) -> bool:
    """Returns whether a folder holds a run that has begun."""
    return bool(out) and (Path(out) / CONFIG).exists()


def run_of_validation(prediction: Path) -> Path | None:
    """Returns the run whose own validation a prediction is: its folder, that of its predictions, or one of these."""
    if holds_run(prediction):
        return prediction
    path = Path(os.path.abspath(prediction))  # links stay, by their own names
    places = [place for place in (path, path.parent) if re.fullmatch("validation(-whole|-sliding)?", place.name)]
    own = (place.parent for place in places if not (place / "prediction.json").exists())
    return next(filter(holds_run, own), None)


def validation_in(prediction: Path) -> Path:
    """Returns where predictions are: a folder itself, or a run's own validation."""
    return prediction / "validation" if holds_run(prediction) else prediction


def holds_folds(out: str | Path) -> bool:
    """Returns whether a folder is that of five folds."""
    return bool(out) and (Path(out) / FOLDS_FILE).is_file()


def read_status(out: str | Path) -> dict[str, Any]:
    """Returns the content of a folder's status.json, {} if there is none that can be read."""
    try:
        return dict(json.loads(read_whole(Path(out) / "status.json")))
    except (OSError, ValueError, TypeError):
        return {}


def refuse_foreign_status(out: str | Path) -> None:
    """Raises ``ValueError`` if a folder has a status.json that no run began."""
    path = Path(out) / "status.json"
    if path.is_file() and (start := path.read_bytes()[:100]) and not _STATUS.match(start):  # empty: of a full disk
        raise ValueError(f"--out {out} holds a status.json that no run wrote, and that would be replaced: name another "
                         "folder")  # fmt: skip


def describe_run(
    config: Config, preset: str, dataset: dict[str, Any], layout: dict[str, Any], history: Sequence[Any] = ()
) -> dict[str, Any]:
    """Returns the content of config.json: settings, data, layout of the ranks, arithmetic, versions, commit, command.

    ``history``: the starts of the run so far, this one included, with the settings that each changed.
    """
    return {
        "config": json.loads(with_absolute_paths(config).to_json()),
        "preset": preset,
        "dataset": dataset,
        "layout": layout,
        "arithmetic": arithmetic_now(config.precision),
        "versions": {
            "seqpar": seqpar.__version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
            "safetensors": safetensors.__version__,
        },
        "commit": _commit(),
        "command": typed_command(),
        "history": list(history),
    }


def _commit() -> str:
    """Returns the git commit of this code, "" where it is no checkout."""
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return git.stdout.strip()


def origin_mark(run: Path) -> dict[str, str]:
    """Returns the entry that says which run a file is of; none if the run's config.json does not tell."""
    with suppress(ValueError, OSError, LookupError, TypeError, AttributeError):
        return {ORIGIN: own} if (own := origin_of(read_config(run))) else {}
    return {}


def describe_results(run: Path) -> list[str]:
    """Returns a line on each file that people look for after a run, if it is there; first, if its scores say little."""
    described = data_of_run(run)
    files = {"validation.png": name_validated(described), "progress.png": "curves", "model.safetensors": "weights"}
    told = "  scores of this run say nothing about new cases: it is validated on cases that it trains on"
    lines = [f"  {run / name}: {what}" for name, what in files.items() if (run / name).exists()]
    return [told] * validates_trained(described) + lines


def data_of_run(run: Path) -> dict[str, Any]:
    """Returns what a run folder records of its data, {} if it does not tell."""
    with suppress(ValueError, LookupError, TypeError, OSError):
        return dict(read_config(run)["dataset"])
    return {}


def validates_trained(described: Mapping[str, Any]) -> bool:
    """Returns whether a run trains on all cases that it validates, as with --fold all.

    - ``described``: what it records of its data
    """
    validated = {*described.get("held_out", ())}
    return bool(validated) and validated <= {*described.get("train", ())}


def acting_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a config.json; its targets are labels where the data have no regions to learn."""
    config = dict(content["config"])
    is_told = config.get("targets") == "sigmoids" or content["dataset"].get("regions")
    return config if is_told else config | {"targets": "labels"}


def kind_of_validated(described: Mapping[str, Any]) -> str:
    """Returns of what kind the cases that a run validates are, in a word; ``described``: as above."""
    return "validated" if validates_trained(described) else "held-out"


def untaught_classes(described: Mapping[str, Any]) -> list[str]:
    """Returns the classes that no case has from which a run's weights have learned, as far as it records that.

    - ``described``: as above; of weights that learned from further cases, nothing is known
    """
    if any(described.get(name) for name in (LEARNED, ANCESTORS, IS_UNKNOWN)):
        return []
    return list(map(str, described.get(UNTAUGHT, ())))


def name_validated(described: Mapping[str, Any], count: int | None = None) -> str:
    """Returns what to call the cases that a run validates; ``described``: as for ``validates_trained``.

    - ``count``: of the cases, if it is to be named
    """
    case, which = ("case", " that the run trains on") if validates_trained(described) else ("held-out case", "")
    return f"{f'{case}s' if count is None else quantity(count, case)}{which}"


def leaves_unvalidated(content: Mapping[str, Any]) -> int:
    """Returns how many of the cases that it holds out a run validates, if --val-cases leaves out others; else 0.

    - ``content``: of its config.json
    """
    count, described = content["config"].get("val_cases", 0), content["dataset"]
    return count if 0 < count < len(described["held_out"]) and not validates_trained(described) else 0


def its_validated(content: Mapping[str, Any], count: int | None) -> str:
    """Returns on which of its cases a run was validated, such as "2 of its 5 held-out cases"; ``content``: as above.

    - ``count``: of the cases, None if it is not known
    """
    case = f"{kind_of_validated(content['dataset'])} case"
    if count is None:
        return f"its {case}s"
    is_part = count == leaves_unvalidated(content)
    return (
        f"{count} of its {len(content['dataset']['held_out'])} {case}s" if is_part else f"its {quantity(count, case)}"
    )


def is_of_phantoms(run: Path) -> bool:
    """Returns whether a run was trained on phantoms, as far as its folder says."""
    try:
        return has_phantoms(read_config(run))
    except (ValueError, LookupError, TypeError, AttributeError, OSError):
        return False


def predict_command(run: Path) -> str:
    """Returns the command that predicts with a run; if it was trained on phantoms, with a note on where images are."""
    command = next_command("predict", run, "-i", "IMAGES", "-o", "PREDICTIONS")
    if not is_of_phantoms(run):
        return command
    others, place = flags_of_others(str(read_config(run)["config"].get("data") or ""))
    return f"{command}  (IMAGES: new cases; {next_command('phantom', *others)} makes some in {place})"


def next_lines(run: Path) -> list[str]:
    """Returns the commands that usually follow a finished run."""
    return [
        f"next: {predict_command(run)}",
        f"next: {next_command('report', run)}  (curves, scores and cases on one page)",
    ]


class MeasuredWindows(NamedTuple):
    """What the validation of the best checkpoint measured; all are empty where nothing is recorded.

    - ``dice``: the mean Dice by kind of window, the better first
    - ``whole_grid``: the most tokens per direction in whole passes
    - ``temperatures``: the temperature that fits best by kind of window
    """

    dice: Mapping[str, float] = MappingProxyType({})
    whole_grid: Sequence[int] = ()
    temperatures: Mapping[str, float] = MappingProxyType({})

    def as_json(self) -> dict[str, Any]:
        """Returns the content of a file; temperatures only if there are some."""
        content = {"dice": dict(self.dice), "whole_grid": list(self.whole_grid)}
        return content | ({"temperatures": dict(self.temperatures)} if self.temperatures else {})


def window_content(
    windows: Mapping[str, float], step: int, whole_grid: Sequence[int], temperatures: Mapping[str, float]
) -> dict[str, Any]:
    """Returns the content of window.json; for the arguments see ``MeasuredWindows``."""
    content = MeasuredWindows(windows, whole_grid, temperatures).as_json()
    return {"window": next(iter(windows)), "step": step, **content}


def read_windows(run: Path) -> MeasuredWindows:
    """Returns what validation measured."""
    try:
        content = read_archived(run, ABOUT) if is_archive(run) else json.loads(read_whole(run / "window.json"))
        dice, temperatures = (
            {str(window): float(value) for window, value in content.get(key, {}).items()}
            for key in ("dice", "temperatures")
        )
        if wrong := [value for value in temperatures.values() if not (math.isfinite(value) and value > 0)]:
            raise ValueError(f"a temperature is {wrong[0]}")
        return MeasuredWindows(dice, tuple(int(side) for side in content.get("whole_grid", ())), temperatures)
    except FileNotFoundError:
        return MeasuredWindows()
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if is_archive(run):
            raise DataError(run, f"its {ABOUT} is damaged ({error}); copy it again") from None
        raise DataError(run / "window.json", f"is damaged ({error}): remove it, and name --window yourself") from None


def read_best_step(run: str | Path, name: str = "window.json") -> int | None:
    """Returns the step of the best checkpoint of a run folder, or what ``name`` is about; None if it does not say."""
    try:
        return int(json.loads(read_whole(Path(run) / name))["step"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
