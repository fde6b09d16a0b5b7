"""The folder that predictions are written to: each file is whole or absent, and finished cases can be skipped.

FOLDER/prediction.json        how everything in it was predicted, from which files, and the names of its own; written
                              before them
FOLDER/…                      what a task writes: label maps, or a table of classes
"""

import errno
import fcntl
import os
import re
import sys
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from seqpar.cluster.exit_codes import FolderInUse
from seqpar.data.errors import DataError, reason, remedy
from seqpar.data.files import SUFFIXES, read_json, strip_suffix, suffix_of, write_json
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.recognise import place_in_data
from seqpar.data.phantom.phantom_files import is_generated
from seqpar.data.preparation.cache_index import same_sources, sources_of
from seqpar.data.volumes import digest_file, digest_samples, read_volume
from seqpar.report.record import predicted_otherwise
from seqpar.runs.run_folder import holds_run
from seqpar.scores.label_files import list_label_files
from seqpar.terminal import coloured
from seqpar.text import quantity

RECORD = "prediction.json"
# keys of the record: every file that predict wrote there, or is writing; what tells each case's images; whether images
# of generated phantoms are among them; and which series and study a case is, by names that identify nobody
_FILES, _INPUTS, _GENERATED, SERIES = "files", "inputs", "generated", "series"
MAPS, _VOXELS = "label_maps", "voxels"  # of each case: size and digest of what predict wrote; digests of its images

_RUNS_OWN = re.compile("checkpoints$|validation")  # folders in a run's, which training clears
# settings that change no label map but for rounding
_NO_OTHER_LABELS = ("probabilities", "npz", "dicom_seg", "uncertainty", "statistics", "window_batch")
_ENDS = {".json": b"}\n", ".pkl": b".", ".png": b"IEND\xaeB`\x82"}  # the last bytes of a whole file


class PredictionFolder(ABC):
    """A folder that predict writes to; the first rank alone uses it. A task says which files are in it.

    Only files that an earlier prediction lists are ever replaced or removed, and none that has changed since.

    - ``path``: where to find the predictions: the folder, or the one file that holds them
    - ``listed``: the names of files that earlier predictions wrote; known once it is read
    - ``changed``: the cases that are predicted again because their images are others; known once it is open
    - ``others``: the cases in it that were predicted with other settings, and stay; known once it is open
    - ``edited``: the cases whose predictions stay though somebody changed them; known once it is open

    An earlier prediction of a case stays until the new one is written, and until then the record speaks of the earlier.
    """

    path: Path

    series: Mapping[str, Mapping[str, str]] = {}  # of the cases to predict, if the record names them
    _handle = -1  # of the folder, while it is locked

    def __init__(self, folder: Path) -> None:
        self.folder = self.path = folder
        self.listed = frozenset[str]()
        self.changed: Sequence[str] = ()
        self.others: Sequence[str] = ()
        self.replaced: Sequence[str] = ()
        self.edited: Sequence[str] = ()
        self._replacing = dict[str, Any]()  # what is known of the predictions that are there and will be replaced
        self._tells_voxels = False  # as no earlier version did
        self._content, self._pending = dict[str, Any](), dict[str, Any]()  # of the record; what will be known of images
        # what is known of label maps, and of images; digests of the images of each case, once they are read
        self._maps, self._voxels, self.voxels = dict[str, Any](), dict[str, str](), dict[str, str]()

    def open(self, cases: Sequence[Case], record: dict[str, Any], resume: bool) -> list[Case]:
        """Returns the cases that are still to be predicted.

        - ``record``: the content of prediction.json
        - ``resume``: keep finished cases whose images are the same, which needs an equal record
        """
        self._lock()
        previous, listed, inputs, series = self._read_record()
        self.refuse_collisions(cases)
        self._refuse_data(cases, is_ours=previous is not None)
        now, earlier = comparable(record), comparable(previous)
        is_there = any((self.folder / name).exists() for name in listed)
        if earlier is not None and earlier.get("task") != now.get("task") and is_there:
            raise DataError(self.folder, "holds predictions of a run with another --task; choose another --output")
        stays = earlier is not None and self.must_stay(earlier, now, listed)
        if earlier is not None and earlier != now and (resume or stays):
            changed = [name for name in {**now, **earlier} if earlier.get(name) != now.get(name)]
            again = "" if stays else ", or leave --continue out to predict everything again"
            raise DataError(
                self.folder, f"was predicted with other settings ({', '.join(changed)}); choose another --output{again}"
            )
        self._refuse_unlisted([], listed)  # before it is read
        is_same, images = earlier == now, {case.id: _stamps(case) for case in cases}
        of_labels = [comparable(one, _NO_OTHER_LABELS) for one in (previous, record)]
        recorded = images if inputs is None else inputs  # older versions did not record them
        before = recorded if of_labels[0] == of_labels[1] else {}
        same = frozenset(name for name, stamps in images.items() if same_sources(before.get(name), stamps))
        self.changed = [name for name in images if resume and name in before and name not in same]
        self.listed = listed
        told = {case for case in same if case in self._voxels or not self._tells_voxels}  # else killed before it did
        left = self.unfinished(cases, frozenset(told) if resume and is_same else frozenset())
        self._refuse_unlisted(left, listed)
        for case in self._changed_since(left):
            self._refuse_to_replace(
                case, "add --continue, which keeps it, " * (case.id in told and is_same and not resume)
            )
        self.edited = [case.id for case in self._changed_since(cases)]
        self._replacing = {case.id: self._maps[case.id] for case in left if case.id in self._maps}
        with self.writable():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            if previous is None and (self.folder / RECORD).exists():  # since it was read
                raise self._in_use()
            self.clear(left, cases)
            files = {name for name in listed if (self.folder / name).exists()}.union(self._names(self.files_of(left)))
            self._pending = {case.id: images[case.id] for case in left if self.holds(case)}
            known = {**before, **{name: stamps for name, stamps in images.items() if name not in self._pending}}
            anew = {case.id for case in left}
            self._maps = {name: stamp for name, stamp in self._maps.items() if name not in anew}
            self._voxels = {name: own for name, own in self._voxels.items() if name not in anew - {*self._pending}}
            if not self._tells_voxels:  # what an earlier version predicted stays finished
                self._voxels = {name: "" for name in known if name not in anew} | self._voxels
            self._stamp_maps([case for case in cases if case.id not in {*anew, *self._maps}])
            own: dict[str, Any] = {_FILES: sorted(files), _INPUTS: known, _VOXELS: self._voxels}
            if any(is_generated(path) for case in cases for path in case.images[:1]):
                own[_GENERATED] = True
            own |= {MAPS: self._maps} if self._maps else {}
            if self.series:
                own[SERIES] = {**(series if is_same else {}), **self.series}
            self._content = {**record, **own}
            write_json(self.folder / RECORD, self._content)
            self.others = sorted({*predicted_otherwise(self.folder)} - {*self._pending})
            self.replaced = sorted(self._pending.keys() - {*self.changed})
        return left

    def record_written(self, case: Case) -> None:
        """Says in the record that what it holds of a case is the new prediction, if it held an earlier one."""
        if case.id in self._pending:
            self._content[_INPUTS][case.id] = self._pending.pop(case.id)
        self._voxels[case.id] = self.voxels.get(case.id, "")
        self._stamp_maps([case])
        self._content |= {_VOXELS: dict(sorted(self._voxels.items()))} | ({MAPS: self._maps} if self._maps else {})
        write_json(self.folder / RECORD, self._content)

    def stamp_of(self, case: Case) -> list[Any] | None:
        """Returns what tells what is written of a case from what replaces it later; None if nothing is."""
        return None

    def refuse_edited(self, case: Case) -> None:
        """Raises DataError if an earlier prediction was changed while this one was at work."""
        if case.id in self._replacing and self.differs(case, self._replacing[case.id]):
            self._refuse_to_replace(case)

    def _refuse_to_replace(self, case: Case, keep: str = "") -> None:
        why = f"holds a prediction of {case.id} that has changed since predict wrote it, and would be replaced"
        raise DataError(self.files_of([case])[0], f"{why}; {keep}move the file elsewhere, or choose another --output")

    def differs(self, case: Case, stamp: Any) -> bool:
        """Returns whether something whole is written of a case that is not what a stamp was made of."""
        return self.stamp_of(case) not in (None, stamp)

    def _stamp_maps(self, cases: Sequence[Case]) -> None:
        """Notes what is written of cases."""
        stamps = {case.id: stamp for case in cases if (stamp := self.stamp_of(case)) is not None}
        self._maps = dict(sorted({**self._maps, **stamps}.items()))

    def _changed_since(self, cases: Sequence[Case]) -> list[Case]:
        """Returns the cases whose predictions are there and whole, but no longer as they were written."""
        return [case for case in cases if case.id in self._maps and self.differs(case, self._maps[case.id])]

    def forget(self, names: Collection[str]) -> None:
        """Takes files that were removed from the record, which `record_written` then writes."""
        self._content[_FILES] = [name for name in self._content[_FILES] if name not in names]

    @property
    def not_replaced(self) -> list[str]:
        """The cases to predict that still have a map from other settings."""
        return sorted(self._pending.keys() & {*predicted_otherwise(self.folder)})

    def close(self) -> None:
        """Lets other predictions use the folder."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def __del__(self) -> None:
        self.close()

    def _lock(self) -> None:
        """Keeps other predictions out of the folder, if it is there, until it is closed or this process ends.

        Raises FolderInUse if one is at work. A file system without locks keeps nobody out.
        """
        if self._handle >= 0 or not self.folder.is_dir():
            return
        with suppress(OSError):
            handle = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(handle)
                if isinstance(error, BlockingIOError):
                    raise self._in_use() from None
            else:
                self._handle = handle

    def _in_use(self) -> FolderInUse:
        told = "is in use by another prediction: wait for its end, or choose another --output"
        return FolderInUse(f"--output {self.folder} {told}")

    @abstractmethod
    def files_of(self, cases: Sequence[Case]) -> list[Path]:
        """Returns the files that these cases are written to; without cases those that all cases share."""

    def name_sources(self, cases: Sequence[Case]) -> dict[str, DataError]:
        """Learns what the record says of each case's source; returns what is wrong with those that cannot be used.

        Called before `open`.
        """
        return {}

    def must_stay(self, previous: Mapping[str, Any], record: Mapping[str, Any], listed: frozenset[str]) -> bool:
        """Returns whether what is there cannot be replaced case by case, and these settings would replace it.

        - ``previous``: the settings that it was predicted with; ``record``: those of now, both made `comparable`
        """
        return False

    @abstractmethod
    def unfinished(self, cases: Sequence[Case], kept: frozenset[str]) -> list[Case]:
        """Reads what is there; returns the cases to predict.

        - ``kept``: the cases that are not predicted again if they are finished
        """

    def clear(self, left: Sequence[Case], cases: Sequence[Case]) -> None:  # noqa: B027 - a table has nothing to clear
        """Removes what a killed run left half written of ``cases``, and learns what is there of ``left``."""

    @abstractmethod
    def holds(self, case: Case) -> bool:
        """Returns whether an earlier prediction of a case is there, once the folder was cleared."""

    def refuse_collisions(self, cases: Sequence[Case]) -> None:  # noqa: B027 - a single file collides with none
        """Raises DataError if a file would overwrite an input, or another output."""

    def _read_record(self) -> tuple[dict[str, Any] | None, frozenset[str], dict[str, Any] | None, dict[str, Any]]:
        """Returns the settings of the predictions that are here, None if there are none, the files they list, what
        their images were, None if that is not known, and the names of their series.

        Older versions listed neither; what they wrote for all cases together has a name that only predict gives.
        """
        if not (self.folder / RECORD).is_file():
            return None, frozenset(), None, {}
        record = read_json(self.folder / RECORD)
        own: dict[str, Any] = record if isinstance(record, dict) else {_FILES: None}
        self._tells_voxels = _VOXELS in own
        files, inputs = own.pop(_FILES, self._names(self.files_of([]))), own.pop(_INPUTS, None)
        series, maps, voxels, _ = (own.pop(name, {}) for name in (SERIES, MAPS, _VOXELS, _GENERATED))
        self._maps, self._voxels = (dict(of_cases) if isinstance(of_cases, dict) else {} for of_cases in (maps, voxels))
        is_list = isinstance(files, list) and all(isinstance(name, str) and _is_inside(name) for name in files)
        if files is None or not is_list or not isinstance(inputs, dict | None):
            raise DataError(self.folder / RECORD, "is not a record that predict wrote; choose another --output")
        return record, frozenset(files), inputs, series

    def _names(self, paths: Sequence[Path]) -> list[str]:
        return [path.relative_to(self.folder).as_posix() for path in paths]

    def _refuse_unlisted(self, cases: Sequence[Case], listed: frozenset[str]) -> None:
        """Raises DataError if writing these cases would replace a file that no earlier prediction lists."""
        files = self.files_of(cases)
        for name, path in zip(self._names(files), files):
            if name not in listed and path.exists():
                told = f"would be overwritten, and no {RECORD} next to it lists it as written by predict"
                raise DataError(path, f"{told}; choose another --output")

    def _refuse_data(self, cases: Sequence[Case], is_ours: bool) -> None:
        """Raises DataError if the folder is part of a data set, or holds volumes and was never predicted to."""
        folder = Path(os.path.realpath(self.folder))  # resolve() ends in a RuntimeError in a circle of links
        if kept := place_in_data(folder):
            raise DataError(self.folder, f"{kept}, which predict never writes into; choose another --output")
        if holds_run(folder):
            told = "is a run folder, which evaluate takes for its validation"
            raise DataError(self.folder, f"{told}; choose another --output, such as a folder in it")
        if any(holds_run(place.parent) and _RUNS_OWN.match(place.name) for place in (folder, *folder.parents)):
            raise DataError(self.folder, "is a run's own, which training clears; choose another --output")
        inputs = (path for case in cases for path in case.images if Path(os.path.realpath(path)).parent == folder)
        others = () if is_ours else (path for path in sorted(folder.glob("[!.]*")) if suffix_of(path.name))
        if found := next(chain(inputs, others), None):
            told = f"holds {found.name}, an image or label map that predict did not write"
            raise DataError(self.folder, f"{told}; choose another --output")

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Raises whatever fails inside as an error of the folder, as no other case would fare better, but for names
        that are too long.
        """
        try:
            yield
        except (OSError, DataError) as error:
            cause = error.__cause__ if isinstance(error, DataError) else error
            if isinstance(cause, OSError) and cause.errno == errno.ENAMETOOLONG:
                raise DataError(cause.filename, f"cannot be written ({reason(cause)})") from error
            why = error.problem if isinstance(error, DataError) else f"cannot be written ({reason(error)})"
            raise DataError(self.folder, f"{why}; what is finished is kept: {remedy(why)} or choose another "
                              "--output, and go on with --continue") from error  # fmt: skip


def warn_if_predicting(*folders: Path) -> None:
    """Prints a warning on stderr for each of these folders that a prediction is writing into."""
    for folder in dict.fromkeys(folders):
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                line = f"warning: {folder} is in use by a prediction: its files may be missing, or of an earlier one"
                print(coloured(line, sys.stderr), file=sys.stderr, flush=True)
            finally:
                os.close(handle)


def inputs_of(prediction: Path) -> dict[str, list[list[Any]]]:
    """Returns name, size, time and a digest of the files that each case was predicted from; empty if nothing tells.

    - ``prediction``: a folder, or a file in it
    """
    return {name: files for name, files in _recorded(prediction, _INPUTS).items() if isinstance(files, list)}


def voxels_of(prediction: Path) -> dict[str, str]:
    """Returns digests of the voxels that each case was predicted from, however files are written; as `inputs_of`."""
    return {name: own for name, own in _recorded(prediction, _VOXELS).items() if own and isinstance(own, str)}


def _recorded(prediction: Path, name: str) -> dict[str, Any]:
    """Returns what a prediction's record says of each case; {} if nobody predicted it, or an older version did."""
    with suppress(DataError, AttributeError, KeyError, TypeError, ValueError):
        return dict(read_json((prediction.parent if prediction.is_file() else prediction) / RECORD)[name])
    return {}


def replaced_line(folder: Path) -> str:
    """Returns a sentence if label maps in a folder, or a single one, are no longer those that predict, or a run's
    validation, wrote; "" if all are. Older versions did not record them.
    """
    folder, only = (folder.parent, folder.name) if folder.is_file() else (folder, "")
    try:
        if (folder / RECORD).exists():
            record = read_json(folder / RECORD)
            names, known = [name for name in record[_FILES] if "/" not in name and suffix_of(name)], record[MAPS]
        else:
            known = read_json(folder / "summary.json")["digests"]
            names = [f"{case}.nii.gz" for case in known]
        there, found = list_label_files(folder), list[tuple[Path, Any]]()
        for case, name in ((strip_suffix(name), name) for name in names):
            own = sorted(there.get(case, ()), key=lambda path: path.name != name)  # another ending only in its place
            if case in known and own and (own[0].name == name or tells_of_packing(known[case])):
                found.append((own[0], known[case]))
        others = [path.name for path, stamp in found if only in ("", path.name) and not is_as_written(path, stamp)]
    except (DataError, OSError, LookupError, TypeError, AttributeError):
        return ""
    if not others:
        return ""
    return say_replaced(len(others), f"{quantity(len(found), 'label map')} in {folder}, such as {others[0]}")


def say_replaced(count: int, among: str) -> str:
    """Returns a sentence on predictions that are no longer as they were written.

    - ``among``: of how many they are some, where these are, and one of them
    """
    changed = "has changed since it was" if count == 1 else "have changed since they were"
    return f"{count} of {among}, {changed} written."


def map_stamp(path: Path) -> list[Any]:
    """Returns what tells a label map from one that replaces it, also if it is packed in another way."""
    return [path.stat().st_size, digest_samples(path), digest_file(path)]


def tells_of_packing(stamp: Any) -> bool:
    """Returns whether a stamp tells a label map that was packed in another way from one that was replaced."""
    return not isinstance(stamp, list) or len(stamp) > 2


def is_as_written(path: Path, stamp: Any) -> bool:
    """Returns whether a label map is the one that was written.

    - ``stamp``: of ``map_stamp``, which in earlier versions did not tell of other packing, or of ``digest_file``
    """
    if not isinstance(stamp, str) and not (isinstance(stamp, list) and len(stamp) in (2, 3)):
        return True  # no version wrote that: nothing is known
    if isinstance(stamp, list):
        is_same = [path.stat().st_size, digest_samples(path)] == stamp[:2]
        if is_same or not tells_of_packing(stamp):
            return is_same
        stamp = stamp[2]
    try:
        return digest_file(path) == stamp
    except DataError:
        return False


def comparable(settings: Any, but: Collection[str] = ()) -> Any:
    """Returns settings ``but`` for some, without paths, as a run may be moved: it counts by its weights' content."""
    if isinstance(settings, list):
        return [comparable(one, but) for one in settings]
    if not isinstance(settings, dict):
        return settings
    own = {name: comparable(value, but) for name, value in settings.items() if name not in ("run", *but)}
    if isinstance(own.get("weights"), dict):  # digests by path; those of windows have a name
        own["weights"] = sorted(map(str, own["weights"].values()))
    return own


def is_whole(path: Path) -> bool:
    """Returns whether a file that predict writes is there and can be read to its end."""
    try:
        if path.name.endswith(SUFFIXES):
            return path.is_file() and bool(read_volume(path))
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as content:
                return content.testzip() is None
        return path.read_bytes().endswith(_ENDS[path.suffix])
    except (DataError, OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        return False


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _stamps(case: Case) -> list[Any]:
    """Returns what tells a case's images from others; what cannot be read is told once the case is predicted."""
    try:
        return sources_of(case)
    except DataError:
        return []
