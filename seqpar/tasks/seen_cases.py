"""Which scored cases a run has seen: by what is in their files, by their names, and by their images."""

import filecmp
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.files import find_copies
from seqpar.data.formats.splits import patients_of
from seqpar.data.preparation.cache import open_cache, read_record
from seqpar.data.volumes import read_geometry, read_volume, to_canonical
from seqpar.prediction.prediction_folder import inputs_of, voxels_of
from seqpar.report.record import RunRecord
from seqpar.scores.label_files import MAX_NAMED
from seqpar.text import quantity
from seqpar.weights.facts import ANCESTORS, LEARNED, SUBJECTS, VALIDATED, VOXELS, same_scans

NEW, HELD, CHOSE = "new to the run", "held out by the run", "used to choose the weights"
UNSEEN, UNTOLD = "not seen by the other runs", "predicted with unknown settings"
SHOWN_LARGE = (NEW, UNSEEN, HELD, CHOSE)  # what is not trained on
SEEN, NAMESAKE = "seen in training", "with the name of one of the run's cases or patients"
NAMES = "has the name of one of the run's cases or patients", "have the names of the run's cases or patients"
SAME_PART = {"label file": "image", "image": "label file"}  # what is the same where the other is not
TOO_GOOD = ", which tend to be too good"


class Seen(NamedTuple):
    """Which of ``total`` scored cases a run was trained on, and which it used to choose its weights.

    - ``same``: those with the same file as a training case, which may have another name: ``copies`` has it
    - ``namesakes``: those that may be other cases of the same name, and further scans of the same patients
    - ``chose``: those that were held out, and on which the best weights were chosen
    - ``held``: those that were held out and chose nothing, as there was a single validation
    - ``differing``: which of all these have another file than there: a "label file", or an "image"
    - ``gone``: runs that nothing is known about, of several that predicted together: no case is called new
    - ``untold``: those that were predicted with settings that nothing tells, so maybe by other networks, and those that
      the prediction's record does not name, and that nothing else is known about
    - ``twins``: the names of each case that is scored under several
    """

    same: Sequence[str]
    namesakes: Sequence[str]
    total: int
    chose: Sequence[str] = ()
    held: Sequence[str] = ()
    copies: Mapping[str, str] = MappingProxyType({})
    differing: Mapping[str, str] = MappingProxyType({})
    gone: Sequence[str] = ()
    twins: Sequence[Sequence[str]] = ()
    untold: Sequence[str] = ()

    @staticmethod
    def by_any(
        runs: Sequence["Seen"], gone: Iterable[str] = (), untold: Iterable[str] = (), unlisted: Iterable[str] = ()
    ) -> "Seen":
        """Returns what is known of cases that several runs predicted together: what any of them has seen is not new.

        - ``gone``, ``untold``: as above; ``unlisted``: of the latter, those that these runs may not have predicted
        """
        apart = {*unlisted}
        same, namesakes, chose, held = (
            {name for run in runs for name in getattr(run, part)} - apart
            for part in ("same", "namesakes", "chose", "held")
        )
        chose, held = chose - same - namesakes, held - same - namesakes
        copies = {name: other for run in runs for name, other in run.copies.items()}
        equal = {name for run in runs for name in (*run.same, *run.chose, *run.held) if name not in run.differing}
        differing = {n: part for run in runs for n, part in run.differing.items() if n not in equal | apart}
        own = sorted(same), sorted(namesakes - same), runs[0].total, sorted(chose), sorted(held - chose)
        gone = list(dict.fromkeys([*chain.from_iterable(run.gone for run in runs), *gone]))
        untold = apart.union(untold, *(run.untold for run in runs))
        return Seen(*own, copies, differing, gone, runs[0].twins, sorted(untold))

    def of(self, cases: Iterable[str]) -> "Seen":
        """Returns what is known of some of the cases, such as those that could be scored."""
        own, parts = {*cases}, ("same", "namesakes", "chose", "held", "untold")
        kept: dict[str, Any] = {part: [name for name in getattr(self, part) if name in own] for part in parts}
        twins = [[name for name in names if name in own] for names in self.twins]
        return self._replace(**kept, total=len(own), twins=[names for names in twins if len(names) > 1])

    @property
    def words(self) -> str:
        """What is known of the cases that may have been trained on."""
        return " or ".join([SEEN] * bool(self.same) + [NAMESAKE] * bool(self.namesakes))

    def mark(self, case: str) -> str:
        """Returns what is known of a case before what else is said of it; "" of a new one."""
        if case in self.namesakes:
            return f"{NAMES[0].capitalize()}. "
        known = SEEN if case in self.same else self._of_validation(case)
        if part := self.differing.get(case):
            known = f"its {SAME_PART[part]} was {known}, with another {part}"
        return f"{known.capitalize()}. " * (known != NEW)

    def _of_validation(self, case: str) -> str:
        known = CHOSE if case in self.chose else HELD if case in self.held else NEW
        return UNTOLD if known == NEW and case in self.untold else known

    def apart(self, cases: Iterable[str]) -> tuple[dict[str, list[str]], str]:
        """Returns the cases by what is known of them, and a sentence on which the scores are of; "" if all are new.

        Scores are of the first group: the new cases if there are any, then those that were held out, and of these
        first what did not choose the weights.
        """
        cases = list(cases)
        own = self.of(cases)
        groups: dict[str, list[str]] = {NEW: [], UNSEEN: [], HELD: [], CHOSE: [], UNTOLD: [], own.words: []}
        for case in cases:
            is_known = case in self.same or case in self.namesakes
            which = own.words if is_known else self._of_validation(case)
            groups[UNSEEN if which == NEW and self.gone else which].append(case)
        groups = {which: names for which, names in groups.items() if names}
        shown = next(iter(groups), NEW)
        return groups, "" if shown == NEW and len(groups) < 2 else own._tell(shown, len(groups[shown]))

    def _tell(self, shown: str, count: int) -> str:
        """Returns a sentence on the group of cases whose scores are shown, and one on the others."""
        seen, alike, chose = len(self.same), len(self.namesakes), len(self.chose) * (shown in (NEW, UNSEEN, HELD))
        held = len(self.held) * (shown in (NEW, UNSEEN))
        unknown = f"No case is known to be new, since nothing tells what {' and '.join(self.gone)} learned from"
        untold = len({*self.untold}.difference(self.same, self.namesakes, self.chose, self.held)) * (shown != UNTOLD)
        others = [
            (untold, f"{'was' if untold == 1 else 'were'} {UNTOLD}"),
            (held, f"{'was' if held == 1 else 'were'} {HELD}"),
            (chose, f"{'was' if chose == 1 else 'were'} {CHOSE}"),
            (seen, f"{'was' if seen == 1 else 'were'} {SEEN}"),
            (alike, f"{NAMES[alike > 1]} and may have been seen"),
        ] * (shown != self.words)
        others = [(number, what) for number, what in others if number]
        if shown == self.words and alike:
            known = f"all {count} {f'were {SEEN} or ' * bool(seen)}{NAMES[1]}" if count > 1 else f"it {NAMES[0]}"
            return f"No case is known to be new: {known}."
        if not others and shown == UNSEEN:
            return f"{unknown}."
        if not others:
            which = f"all {count} were" if count > 1 else "the only one was"
            return f"No new case: {which} {shown}{TOO_GOOD * (shown == CHOSE)}."
        told = f"he scores are of the {quantity(count, 'case')} {shown}"
        which = unknown if shown == UNSEEN else "No new case"
        told = f"T{told}" if shown == NEW else f"{which}: t{told}{TOO_GOOD * (shown == CHOSE)}"
        if len(others) == 1:
            ((number, what),) = others
            return f"{told}. The other {'one' if number == 1 else number} {what}."
        *first, last = (f"{number} {what}" for number, what in others)
        return f"{told}. Of the other {untold + held + chose + seen + alike}, {', '.join(first)}, and {last}."

    @property
    def sentences(self) -> list[str]:
        """One for each kind, if there are any."""
        sentences, little = list[str](), "say little about new cases"
        for found, one, many, told in (
            (self.same, "was in the run's training data", "were in the run's training data", little),
            (self.namesakes, *NAMES, little),
            (self.chose, *["helped to choose the run's weights"] * 2, "tend to be too good"),
            (self.held, f"was {HELD}", f"were {HELD}", "are those of a validation, not of a test"),
        ):
            if found:
                names = list(map(self._named, found))
                between = "; " if any("," in name for name in names) else ", "
                shown = between.join(names[:MAX_NAMED]) + f"{between}…" * (len(found) > MAX_NAMED)
                what, whose = (one, "its scores") if len(found) == 1 else (many, "their scores")
                if_so = f"if {'it is' if len(found) == 1 else 'they are'} the same, " * (found is self.namesakes)
                of = f"{len(found)} of {quantity(self.total, 'scored case')} {what} ({shown})"
                sentences.append(f"{of}: {if_so}{whose} {told}.")
        return sentences + [
            f"{', '.join(names[:MAX_NAMED])}{', …' * (len(names) > MAX_NAMED)} are one case under {len(names)} names: "
            f"means and intervals count it {len(names)} times."
            for names in self.twins
        ]

    def _named(self, case: str) -> str:
        part = self.differing.get(case)
        named = f"{case}, whose {SAME_PART[part]} was there with another {part}" if part else case
        return named + (f", there {self.copies[case]}" if case in self.copies else "")


NONE_SEEN = Seen((), (), 0)


def find_seen(
    record: RunRecord,
    scored: Mapping[str, Path | None],
    read_files: Callable[[], Mapping[str, Path]],
    prediction: Path | None = None,
    subjects: Mapping[str, str] = MappingProxyType({}),
) -> Seen:
    """Returns which scored cases are among those that the run was trained on, or that it held out and validated.

    - ``scored``: a file of each case by name, None if it is not known
    - ``read_files``: returns the same file of each case of the run's data set; cases of another data set may have the
      names of these
    - ``prediction``: where predict recorded the images of each case; one with the image of a training case was seen,
      whichever labels it has now, and whichever data the run has
    - ``subjects``: the patients of scored cases that a table names
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
    patients = patients_of(train | held_out | scored.keys())
    patients |= {case: own for case, own in subjects.items() if case in scored} | record.subjects
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
    elsewhere = (
        _patients_elsewhere(before, {case: subjects.get(case) for case in scored})
        - train
        - held_out
        - others
        - {*same, *further}
    )
    further += sorted(elsewhere)
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


def _scored_twice(files: Mapping[str, Path], scans: Mapping[str, str]) -> list[list[str]]:
    """Returns the names of each case that is scored under several, as its image tells, or else its file.

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
    return [names for names in groups.values() if len(names) > 1]


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


def _patients_elsewhere(before: Sequence[Mapping[str, Any]], scored: Mapping[str, str | None]) -> set[str]:
    """Returns the scored cases of patients in data that weights have learned from and the run does not have now.

    - ``before``: what the run records of these data; ``scored``: the cases, each with the patient that a table names
    """
    found = set[str]()
    for own in before:
        cases = {*own["train"], *own.get(VALIDATED, ())}
        patients = patients_of(cases.union(scored)) | {name: patient for name, patient in scored.items() if patient}
        named = {**{case: patients_of(cases)[case] for case in cases}, **own.get(SUBJECTS, {})}
        found |= {name for name in scored if patients[name] in {*named.values()}}
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
