"""The cache's folder and its index: what the cache was made from, and whether that has changed."""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError, unreadable
from seqpar.data.files import expand_home, user_cache, write_json
from seqpar.data.formats.dataset import LISTED, Case, Dataset
from seqpar.data.formats.recognise import OLD_CACHE
from seqpar.data.preparation.cache import VERSION, digest_of, read_index, read_record
from seqpar.data.preparation.cache_writer import ELSEWHERE, as_cache_error, invalidate_cache
from seqpar.data.preparation.recipe import PrepareSettings, Recipe
from seqpar.data.volumes import digest_samples, size_and_mtime

_STAMP = ("name", "size", "time")  # what is recorded of each file, at least
_READERS = 8  # threads


def is_current(dataset: Dataset, out: Path, settings: PrepareSettings) -> bool:
    """Returns whether the cache has every case of the data set, made from the current files with these settings."""
    index = read_index(out)
    if (
        index is None
        or index["settings"] != json_round_trip(settings.described())
        or index["dataset"] != describe_dataset(dataset)
    ):
        return False
    if set(index["cases"]) != set(dataset.ids):
        return False
    cases = index["cases"]

    def is_same(case: Case) -> bool:
        record = read_record(out, case.id)
        if record is None or record["sources"] != cases[case.id]["sources"]:  # another case's folder
            return False
        return same_sources(record["sources"], sources_of(case))

    try:
        with ThreadPoolExecutor(_READERS) as pool:  # a file system of a cluster takes milliseconds to answer
            return all(pool.map(is_same, dataset.cases))
    except DataError:
        return False


def refuse_other(dataset: Dataset, out: Path, settings: PrepareSettings | None) -> None:
    """Raises DataError if a folder has the cache of another data set or of other settings, which would be lost."""
    index = read_index(out)
    if index is None:
        return
    if index["dataset"]["name"] != dataset.name:
        raise DataError(out, f"has the cache of {index['dataset']['name']}, not of {dataset.name}; {ELSEWHERE}")
    now, was = json_round_trip(settings.described()) if settings else index["settings"], index["settings"]
    keys = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    if differing := [f"{key} {_typed(was.get(key))} there, {_typed(now.get(key))} here" for key in keys]:
        raise DataError(out, f"was prepared with other settings: {', '.join(differing)}; give the same, or {ELSEWHERE}")


def refuse_in_data(dataset: Dataset, out: Path) -> None:
    """Raises DataError for a folder in the data set's own, unless it has a cache: what reads one may take its files.

    The folder of a list is anybody's: only the files that it names are read.
    """
    root, place = (Path(os.path.realpath(path)) for path in (dataset.root, out))
    if dataset.layout.startswith(LISTED):
        return
    if root.is_dir() and (place == root or root in place.parents) and not (out / "cache.json").exists():
        raise DataError(out, f"is in the data set {dataset.root}, to which nothing may be added; {ELSEWHERE}")


def _typed(value: Any) -> str:
    """Returns a setting as people type it on the command line."""
    if isinstance(value, list):
        return ",".join(f"{size:g}" if isinstance(size, (int, float)) else str(size) for size in value)
    return "unset" if value is None else str(value)


def is_of_settings(out: Path, settings: PrepareSettings) -> bool:
    """Returns whether a folder has a finished cache made with these settings, from whichever files."""
    index = read_index(out)
    return index is not None and index["settings"] == json_round_trip(settings.described())


def withdraw_index(out: Path) -> None:
    """Removes the index, so that the cache counts as unfinished; its cases stay, for another preparation."""
    with as_cache_error(out):
        invalidate_cache(out)


def write_index(dataset: Dataset, out: Path, settings: PrepareSettings, recipe: Recipe) -> None:
    """Writes cache.json, which marks the cache as finished; removes it if no case is usable."""
    cases = {}
    for name in dataset.ids:
        if (record := read_record(out, name)) is not None:
            digest = digest_of(out / "cases" / name / "case.json")
            cases[name] = {"digest": digest, "sources": record["sources"]}
    if not cases:
        withdraw_index(out)
    else:
        content = {
            "settings": json_round_trip(settings.described()),
            "dataset": describe_dataset(dataset),
            "recipe": recipe.to_json(),
        }
        with as_cache_error(out):
            write_json(out / "cache.json", {"version": VERSION, **content, "cases": cases})


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Returns a data set's description in class ids, as JSON would read it back."""
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
    if shown:  # caches of data sets without such lists stay unchanged
        described["annotated"] = dict(sorted(shown.items()))
    if dataset.readers:
        described["readers"] = dataset.readers
    if dataset.probabilities:
        described["soft_labels"] = True
    if dataset.volume_classes is not None:
        described["volume_classes"] = dataset.volume_classes.to_json()
    return {key: json_round_trip(value) for key, value in described.items()}


def sources_of(case: Case) -> list[list[Any]]:
    """Returns name, size and modification time of each file of a case, and a digest of some of its bytes.

    Files that cannot be read have no digest.
    """
    sources = list[list[Any]]()
    for path in case.files:
        try:
            sources.append([path.name, *size_and_mtime(path)])
        except OSError as error:
            raise unreadable(path, error) from error
        with suppress(OSError):
            sources[-1].append(digest_samples(path))
    return sources


def same_source(before: Any, now: Any) -> bool:
    """Returns whether a file is the same by what was recorded of it; older versions recorded no digest, or for a series
    one of another length.
    """
    if not isinstance(before, list) or not isinstance(now, list):
        return False
    if len(before) == len(now) > len(_STAMP) and len(str(before[-1])) != len(str(now[-1])):
        before, now = before[:-1], now[:-1]
    return min(len(before), len(now)) >= len(_STAMP) and all(a == b for a, b in zip(before, now))


def same_sources(before: Any, now: Sequence[Any]) -> bool:
    """Returns whether the files of a case are the same by what was recorded of each."""
    return isinstance(before, list) and len(before) == len(now) and all(map(same_source, before, now))


def json_round_trip(value: Any) -> Any:
    """Returns a value as JSON would read it back, to compare it with one that was read."""
    return json.loads(json.dumps(value))


# Data sets are found by the beginning of a folder's name (Dataset901…): no cache next to them may begin that way.
SIBLING = "seqpar-prepared"
_RAW, _PREPROCESSED = "nnUNet_raw", "nnUNet_preprocessed"


def cache_folder(dataset: Dataset, out: str | Path | None = None, settings: PrepareSettings | None = None) -> Path:
    """Returns the folder of a data set's cache: ``out`` or a folder in it, or else the first of these that applies.

    - in $SEQPAR_CACHE, with a digest of the data set's path in the name, since names may repeat
    - for data in nnU-Net's raw folder, in ``seqpar-prepared`` next to $nnUNet_preprocessed, or next to the raw folder
    - in ``seqpar-prepared`` next to the data set

    Each spacing, and each set of other settings, has a folder of its own there, so that none replaces another. In
    ``out`` itself is the preparation that came first, and the others of the same data set are in folders in it.
    """
    if out is not None:
        return _place_in(expand_home(out).absolute(), dataset, settings or PrepareSettings())
    if os.environ.get("SEQPAR_CACHE"):
        place = hashlib.blake2b(os.fsencode(dataset.root.resolve()), digest_size=4).hexdigest()
        return user_cache() / f"{dataset.name}-{place}{_kind(dataset)}{_suffix(settings)}"
    return _neighbour(dataset.root) / SIBLING / f"{dataset.root.name}{_kind(dataset)}{_suffix(settings)}"


def _place_in(out: Path, dataset: Dataset, settings: PrepareSettings) -> Path:
    """Returns ``out``, or a folder in it if ``out`` has another preparation of the data set."""
    index, own = read_index(out), out / (_suffix(settings) or "@source")
    if index is None:  # empty, or on the way: what has been put into its own folder stays there
        return own if own.is_dir() else out
    is_other = index["dataset"]["name"] == dataset.name and index["settings"] != json_round_trip(settings.described())
    return own if is_other else out


def outdated_cache(root: Path, cache: Path) -> str:
    """Returns a line about the cache of an earlier version next to the data set ``root``; "" if there is none.

    - ``cache``: where the data set's cache is now
    """
    places = [root.with_name(f"{root.name}{OLD_CACHE}")]
    if _neighbour(root) != root.parent:
        places.append(root.parent / SIBLING / cache.name)
    old = [str(place) for place in places if place != cache and (place / "cache.json").is_file()]
    if not old:
        return ""
    what = "is a cache" if len(old) == 1 else "are caches"
    return (
        f"{' and '.join(old)} {what} of an earlier version, which is no longer read; "
        f"{'it' if len(old) == 1 else 'they'} can be deleted: the cache is now {cache}"
    )


def _kind(dataset: Dataset) -> str:
    """Returns a suffix for caches without label maps, since the same images may have another cache with them."""
    if dataset.volume_classes:
        return "-classes"
    return "" if dataset.labels else "-images"


def _suffix(settings: PrepareSettings | None) -> str:
    """Returns what settings add to a folder's name: nothing for the defaults, else such as "@median" or "@1x1x1.5"."""
    described = settings.described() if settings else {}
    spacing = described.get("spacing", "source")
    text = spacing if isinstance(spacing, str) else "x".join(f"{size:.10g}" for size in spacing)
    others = {name: value for name, value in described.items() if name not in ("spacing", "locations")}
    if others:
        text += "-" + hashlib.blake2b(json.dumps(others).encode(), digest_size=4).hexdigest()
    return "" if text == "source" else f"@{text}"


def _neighbour(root: Path) -> Path:
    """Returns the folder that contains the folder of caches."""
    raw, beside = os.environ.get(_RAW), Path(os.environ.get(_PREPROCESSED) or root.parent)
    is_raw = root.parent.name == _RAW or raw and root.parent.resolve() == expand_home(raw).resolve()
    return expand_home(beside).absolute().parent if is_raw else root.parent
