"""Which scored cases a run has seen: by what is in their files, by their names, and by their images."""

import filecmp
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.files import find_copies
from seqpar.data.formats.splits import patients_of
from seqpar.data.preparation.cache import open_cache, read_record
from seqpar.data.volumes import read_geometry, read_volume, to_canonical
from seqpar.prediction.prediction_folder import inputs_of, voxels_of
from seqpar.report.record import RunRecord
from seqpar.scores.label_files import MAX_NAMED
from seqpar.tasks.case_evaluation import Seen
from seqpar.weights.facts import ANCESTORS, LEARNED, VALIDATED, VOXELS, same_scans


def find_seen(
    record: RunRecord,
    scored: Mapping[str, Path | None],
    read_files: Callable[[], Mapping[str, Path]],
    prediction: Path | None = None,
) -> Seen:
    """Returns which scored cases are among those that the run was trained on, or that it held out and validated.

    - ``scored``: a file of each case by name, None if it is not known
    - ``read_files``: returns the same file of each case of the run's data set; cases of another data set may have the
      names of these
    - ``prediction``: where predict recorded the images of each case; one with the image of a training case was seen,
      whichever labels it has now, and whichever data the run has
    """
    train, held_out = (set(map(str, record.dataset.get(part, ()))) for part in ("train", "held_out"))
    held_out = set(map(str, record.dataset.get(VALIDATED, held_out)))  # others have not been looked at
    learned = set(map(str, record.dataset.get(LEARNED, ())))
    train, held_out = train | learned, held_out - learned
    before, own_scans = record.dataset.get(ANCESTORS, ()), record.dataset.get(VOXELS, {})
    others = {str(case) for own in before for case in own["train"]} - train - held_out
    scans = {name: own for name, own in (voxels_of(prediction) if prediction else {}).items() if name in scored}
    by_scan = same_scans(scans, own_scans)
    new = {name for name in scans if name in own_scans and name not in by_scan[name]}
    patients = patients_of(train | held_out | scored.keys()) | record.subjects
    known = {patients[name] for name in (train | held_out if record.has_chosen else train)}
    names = [name for name in scored if name in train | held_out]
    there = {name: path for name, path in scored.items() if path and path.is_file()}
    files, same = dict[str, Path](), dict[str, str]()
    with suppress(DataError, ValueError, OSError):  # nothing is known of files that are gone
        if names or there and record.config.get("data"):
            found = sorted(read_files().items(), key=lambda own: own[0] not in train)
            files = {name: path for name, path in found if name in train | held_out and path.is_file()}
            both = [name for name in names if name in there and name in files and name not in new]
            same = {name: name for name in both if _holds_same(there[name], files[name])}
            ignore = record.dataset.get("ignore_label")
            ignore = None if ignore is None else record.dataset["values"][ignore]
            copied = find_copies(there, files).items()
            same |= {n: one for n, one in copied if n not in same and _is_of_one(there[n], ignore)}
    images = inputs_of(prediction) if prediction else {}
    alike = same_images(record, {name: images[name] for name in scored if name in images and name not in same})
    alike |= {name: alike.get(name, set()) | own for name, own in by_scan.items() if name not in same}
    alike = {name: own & train or own & held_out for name, own in alike.items()}
    by_image = {name: name if name in own else min(own) for name, own in alike.items() if own}
    same |= by_image
    seen = [name for name, one in same.items() if one in train]
    earlier = {name: one for name, one in _known_elsewhere(before, scans, "train").items() if name not in seen}
    same |= {name: one for name, one in _known_elsewhere(before, scans, VALIDATED).items() if name not in same}
    same, seen = same | earlier, [*seen, *earlier]
    copies = {name: one for name, one in same.items() if name != one}
    unknown = [name for name in names if (name not in there or name not in files) and name not in new]
    further = [n for n in scored if n not in train | held_out and n not in same and patients[n] in known]
    chose = [name for name in same if name not in seen]
    namesakes = [name for name in unknown if name not in same]
    told = {name for name in scans if all(name in own.get(VOXELS, {}) for own in before if name in own["train"])}
    namesakes += [name for name in scored if name in others - told and name not in same and name not in further]
    validated = (chose, []) if record.has_chosen else ([], chose)
    differing = {name: "image" for name, one in same.items() if scans.get(name) and one in own_scans
                 and name not in by_image and one not in by_scan[name] and name not in earlier}  # fmt: skip
    differing |= {name: "label file" for name, one in by_image.items() if name in there and one in files}
    twins = _scored_twice(there, scans)
    return Seen(seen, namesakes + further, len(scored), *validated, copies, differing, twins=twins)


def _scored_twice(files: Mapping[str, Path], scans: Mapping[str, str]) -> list[str]:
    """Returns a sentence on each case that is scored under several names, as its image tells, or else its file.

    - ``files``: of the cases, as far as they are known; ``scans``: digests of the voxels of their images, likewise
    """
    groups, sizes = defaultdict[str, list[str]](list), defaultdict[int, list[str]](list)
    for name, path in files.items():
        if scans.get(name):
            groups[scans[name]].append(name)
        else:
            sizes[path.stat().st_size].append(name)
    for name in chain.from_iterable(names for names in sizes.values() if len(names) > 1):
        with suppress(OSError):
            if not _is_of_one(files[name]):
                continue
            groups[hashlib.sha256(files[name].read_bytes()).hexdigest()].append(name)
    return [
        f"{', '.join(names[:MAX_NAMED])}{', …' * (len(names) > MAX_NAMED)} are one case under {len(names)} names: "
        f"means and intervals count it {len(names)} times."
        for names in groups.values()
        if len(names) > 1
    ]


def _known_elsewhere(before: Sequence[Mapping[str, Any]], scans: Mapping[str, str], part: str) -> dict[str, str]:
    """Returns what scored cases are called in data that weights have learned from and the run does not have now.

    - ``before``: what the run records of these data; ``part``: of them
    """
    found = dict[str, str]()
    for own in before:
        for name, others in same_scans(scans, own.get(VOXELS, {})).items():
            if alike := others & {*own.get(part, ())}:
                found.setdefault(name, f"{name if name in alike else min(alike)} of {own['name']}")
    return found


def _holds_same(path: Path, other: Path) -> bool:
    """Returns whether two volumes have the same bytes, or were written differently with the same voxels."""
    if filecmp.cmp(path, other, shallow=False):
        return True
    try:
        if sorted(read_geometry(path)[0].shape) != sorted(read_geometry(other)[0].shape):
            return False
        (one, first, _), (two, second, _) = read_volume(path), read_volume(other)
    except DataError:
        return False
    ours, theirs = to_canonical(one, first.orientation), to_canonical(two, second.orientation)
    is_of_size = np.allclose(first.canonical_spacing, second.canonical_spacing, rtol=1e-3)
    return is_of_size and np.array_equal(ours, theirs) and bool((ours != ours.flat[0]).any())


def _is_of_one(path: Path, ignore: int | None = None) -> bool:
    """Returns whether a volume tells a patient from others: label maps without a label are equal, whatever part of them
    is unlabelled (``ignore``).
    """
    try:
        array = read_volume(path).array
    except DataError:
        return False
    values = array[array != ignore] if ignore is not None else array
    return bool(values.size) and bool((values != values.flat[0]).any())


def same_images(record: RunRecord, images: Mapping[str, Sequence[Any]]) -> dict[str, set[str]]:
    """Returns, for each case, the names of a run's prepared cases with the same images.

    Bytes count, and neither names nor times.

    - ``images``: name, size, time and digest of each image of a case, as predict records them; older versions
      recorded no digest
    """
    if not images:
        return {}
    known, found = defaultdict[tuple[Any, ...], set[str]](set), dict[str, set[str]]()
    with suppress(OSError, ValueError, LookupError, TypeError):  # the cache may be gone, a record damaged
        cache = open_cache(Path(str(record.dataset["prepared"])))
        for name in cache.cases:
            for own in (read_record(cache.path, name) or {}).get("sources", ()):
                known[_bytes_of(own)].add(name)
        for case, files in images.items():
            shared = [known[_bytes_of(own)] if len(own) > SIZE_AND_TIME else set() for own in files]
            found[case] = set.intersection(*shared) if shared else set()
    return found


SIZE_AND_TIME = 3  # with the name: what older versions recorded of a file


def _bytes_of(source: Sequence[Any]) -> tuple[Any, ...]:
    _, size, _, *digest = source
    return size, *digest
