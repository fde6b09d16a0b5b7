"""The cache's index: the data set, settings and files that it was made of, and whether they are unchanged."""

import json
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError, unreadable
from seqpar.data.files import write_json
from seqpar.data.formats.dataset import Case, Dataset
from seqpar.data.preparation.cache import VERSION, digest_of, read_index, read_record
from seqpar.data.preparation.cache_writer import ELSEWHERE, reopen, writable
from seqpar.data.preparation.recipe import PrepareSettings, Recipe
from seqpar.data.volumes import stamp_of


def is_current(dataset: Dataset, out: Path, settings: PrepareSettings) -> bool:
    """Returns whether the cache holds every case of the data set, made of the current files with these settings."""
    index = read_index(out)
    if index is None or index["settings"] != plain(settings.described()) or index["dataset"] != described(dataset):
        return False
    if set(index["cases"]) != set(dataset.ids):
        return False
    try:
        return all(
            index["cases"][case.id]["sources"] == sources_of(case) and read_record(out, case.id) is not None
            for case in dataset.cases
        )
    except DataError:
        return False


def refuse_other(dataset: Dataset, out: Path, settings: PrepareSettings | None) -> None:
    """Raises DataError if a folder holds the cache of another data set or of other settings: it would be lost."""
    index = read_index(out)
    if index is None:
        return
    if index["dataset"]["name"] != dataset.name:
        raise DataError(out, f"holds the cache of {index['dataset']['name']}, not of {dataset.name}; {ELSEWHERE}")
    now, was = plain(settings.described()) if settings else index["settings"], index["settings"]
    keys = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    if differing := [f"{key} {_typed(was.get(key))} there, {_typed(now.get(key))} here" for key in keys]:
        raise DataError(out, f"was prepared with other settings: {', '.join(differing)}; give the same, or {ELSEWHERE}")


def _typed(value: Any) -> str:
    """Returns a setting as typed on the command line."""
    if isinstance(value, list):
        return ",".join(f"{size:g}" if isinstance(size, (int, float)) else str(size) for size in value)
    return "unset" if value is None else str(value)


def is_of_settings(out: Path, settings: PrepareSettings) -> bool:
    """Returns whether a folder holds a finished cache that was made with these settings, of whichever files."""
    index = read_index(out)
    return index is not None and index["settings"] == plain(settings.described())


def withdraw_index(out: Path) -> None:
    """Removes the index, so that no cache counts as finished; cases stay, for a preparation by the same recipe."""
    with writable(out):
        reopen(out)


def write_index(dataset: Dataset, out: Path, settings: PrepareSettings, recipe: Recipe) -> None:
    """Writes cache.json, which marks the cache as finished; removes it if there is no usable case."""
    cases = {}
    for name in dataset.ids:
        if (record := read_record(out, name)) is not None:
            digest = digest_of(out / "cases" / name / "case.json")
            cases[name] = {"digest": digest, "sources": record["sources"]}
    if not cases:
        withdraw_index(out)
    else:
        content = {
            "settings": plain(settings.described()),
            "dataset": described(dataset),
            "recipe": recipe.to_json(),
        }
        with writable(out):
            write_json(out / "cache.json", {"version": VERSION, **content, "cases": cases})


def described(dataset: Dataset) -> dict[str, Any]:
    """Returns a data set's description in class ids, as it comes back from JSON."""
    ids = {value: n for n, value in enumerate(dataset.labels.values())}
    described = {
        "name": dataset.name,
        "layout": dataset.layout,
        "modalities": dataset.modalities,
        "labels": {name: ids[value] for name, value in dataset.labels.items()},
        "regions": {name: [ids[v] for v in members] for name, members in dataset.regions.items()},
        "regions_class_order": [ids[value] for value in dataset.regions_class_order],
        "ignore_label": None if dataset.ignore_label is None else len(ids),
        "values": [*ids, *([] if dataset.ignore_label is None else [dataset.ignore_label])],
        "splits": dataset.splits,
    }
    shown = {case.id: [ids[v] for v in case.annotated] for case in dataset.cases if case.annotated is not None}
    if shown:  # caches of data sets without such lists stay as they are
        described["annotated"] = dict(sorted(shown.items()))
    if dataset.volume_classes is not None:
        described["volume_classes"] = dataset.volume_classes.to_json()
    return {key: plain(value) for key, value in described.items()}


def files_of(case: Case) -> tuple[Path, ...]:
    """Returns a case's images and its label."""
    return case.images if case.label is None else (*case.images, case.label)


def sources_of(case: Case) -> list[list[Any]]:
    """Returns name, size and modification time of each of a case's files."""
    sources = []
    for path in files_of(case):
        try:
            sources.append([path.name, *stamp_of(path)])
        except OSError as error:
            raise unreadable(path, error) from error
    return sources


def plain(value: Any) -> Any:
    """Returns a value as it comes back from JSON, to be compared with one that does."""
    return json.loads(json.dumps(value))
