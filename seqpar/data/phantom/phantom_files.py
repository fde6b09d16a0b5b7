"""Writes phantom cases as NIfTI files in the layouts of BraTS 2023 and nnU-Net, or with a table of classes."""

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
from numpy.typing import NDArray

from seqpar.data.errors import DataError, reason, remedy
from seqpar.data.files import is_state, read_json, write_bytes, write_json
from seqpar.data.formats.dataset import TABLE
from seqpar.data.phantom.brain import MODALITIES
from seqpar.data.phantom.fields import PhantomCase
from seqpar.data.phantom.kinds import KINDS, PhantomKind
from seqpar.data.workers import Progress, no_progress
from seqpar.parallel.processes import calls_in_forks

LAYOUTS = ("brats", "nnunet", "classes")
SETTINGS_FILE = "phantom.json"
IMAGES = "phantom_*.nii.gz"  # in the layout with a table of classes
VERSION = 1  # of the images: files of different generators never mix


@dataclass(frozen=True)
class PhantomSettings:
    """Settings that all files of a phantom folder share."""

    layout: str = "brats"
    size: tuple[int, int, int] = KINDS["brain"].size
    seed: int = 0
    kind: str = "brain"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a phantom's kind must be one of {', '.join(KINDS)}, got {self.kind}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"a phantom's layout must be one of {', '.join(LAYOUTS)}, got {self.layout}")
        if self.layout not in self.of_kind.layouts:
            raise ValueError(
                f"phantoms of kind {self.kind} are written as {', '.join(self.of_kind.layouts)}; "
                f"got --layout {self.layout}; remove it"
            )
        if len(self.size) != 3 or not 16 <= min(self.size) <= max(self.size) <= LARGEST_SIDE:
            each = f"three numbers of voxels, each 16 to {LARGEST_SIDE}"
            raise ValueError(f"a phantom's size must be {each}, got {self.size}")
        if self.seed < 0:
            raise ValueError(f"a phantom's seed must be at least 0, got {self.seed}")

    @classmethod
    def of(
        cls, kind: str = "brain", layout: str | None = None, size: tuple[int, int, int] | None = None, seed: int = 0
    ) -> "PhantomSettings":
        """Returns the settings of a kind, by default with its own layout and size."""
        usual = KINDS[kind]
        return cls(layout or usual.layouts[0], size or usual.size, seed, kind)

    @property
    def of_kind(self) -> PhantomKind:
        return KINDS[self.kind]

    def root(self, out: Path) -> Path:
        """Returns the data set's folder, which --data takes."""
        return out / self.of_kind.dataset if self.layout == "nnunet" else out

    def files(self, out: Path, index: int) -> list[Path]:
        """Returns the files of a case: the modalities in order, the label last."""
        root = self.root(out)
        if self.layout == "brats":
            name = f"BraTS-GLI-{index:05d}-000"
            return [root / name / f"{name}-{kind}.nii.gz" for kind in (*MODALITIES, "seg")]
        name, channels = self.case_name(index), range(len(self.of_kind.channels))
        if self.layout == "classes":
            return [root / f"{name}.nii.gz", root / "regions" / f"{name}.nii.gz"]
        images = [root / "imagesTr" / f"{name}_{channel:04d}.nii.gz" for channel in channels]
        return [*images, root / "labelsTr" / f"{name}.nii.gz"]

    def case_name(self, index: int) -> str:
        """Returns the name of a case in every layout but BraTS's."""
        return f"phantom_{index:05d}"

    def record(self) -> dict[str, Any]:
        """Returns the content of phantom.json, which identifies the folder."""
        record = {
            "version": VERSION,
            "layout": self.layout,
            "size": list(self.size),
            "seed": self.seed,
            "field_of_view": list(self.of_kind.field_of_view),
        }
        return record if self.kind == "brain" else {**record, "kind": self.kind}  # as before there were kinds


GENERATED = "(generated, not a patient)"  # after a name in a picture: names may have the form of a patient's


def is_generated(path: str | Path | None) -> bool:
    """Returns whether a data set, or a file of one, holds phantoms; no path stands for the built-in ones."""
    places = (Path(path), *Path(path).parents[:2]) if path else ()
    return not path or any((place / SETTINGS_FILE).is_file() for place in places)


def has_phantoms(content: Mapping[str, Any]) -> bool:
    """Returns whether a run was trained on phantoms; ``content``: of its config.json."""
    return bool(content["dataset"].get("generated")) or is_generated(content["config"].get("data", "unknown"))


def flags_of_others(data: str) -> tuple[list[str], Path]:
    """Returns flags of ``phantom`` that make new cases as those of a data set, and the folder in which these will be.

    - ``data``: "" stands for the built-in ones
    """
    places = (Path(data), *Path(data).parents[:2]) if data else ()
    records = (place / SETTINGS_FILE for place in places)
    record: dict[str, Any] = next((read_json(path) for path in records if path.is_file()), {})
    kind, seed = record.get("kind", "brain"), record.get("seed", 0)
    usual, size = list(KINDS[kind].size) if kind in KINDS else [], record.get("size", [])
    sides = ["--size", *map(str, size)] * bool(size and size != usual)  # else voxels have another size
    out = Path(f"new-{kind}{f'-{seed + 1}' * (seed > 0)}")  # new-brain may hold the cases that it was trained on
    flags = [*["--kind", kind] * (kind != "brain"), *sides, "--seed", str(seed + 1), "--out", str(out)]
    return flags, PhantomSettings.of(kind).root(out) if kind in KINDS else out


def describe_layout(layout: str, generated: bool) -> str:
    """Returns the layout of a data set, such as "BraTS (2023)"; of phantoms also that they are generated."""
    if not generated:
        return layout
    return f"generated phantoms, in the layout of {layout.replace('(', '').replace(')', '')}"


MOST_CASES, LARGEST_SIDE = 100_000, 2048


def write_phantom(
    out: str | Path,
    cases: int,
    settings: PhantomSettings = PhantomSettings(),  # noqa: B008 (frozen)
    workers: int = 1,
    progress: Progress = no_progress,
) -> Path:
    """Writes those of the cases 0 to ``cases - 1`` that are missing; returns the data set's folder."""
    if cases < 1 or workers < 1:
        raise ValueError(f"cases and workers must be at least 1, got --cases {cases} and --workers {workers}")
    if cases > MOST_CASES:
        raise ValueError(f"--cases {cases}: give at most {MOST_CASES}")
    out = Path(out)
    root = settings.root(out)
    try:
        _claim(root, settings)
        about = root / (TABLE if settings.layout == "classes" else "dataset.json")
        if settings.layout != "brats" and about.exists():
            _refuse_changed(about, settings)
        missing = [i for i in range(cases) if not all(f.exists() for f in settings.files(out, i))]
        done = cases - len(missing)
        for _ in _write_cases(out, settings, missing, min(workers, len(missing))):
            done += 1
            progress(done, cases)
        if settings.layout == "nnunet":
            written = len(list((root / "labelsTr").glob("*.nii.gz")))
            write_bytes(about, _nnunet_description(settings, written))
        if settings.layout == "classes":
            write_bytes(about, _class_table(settings, len(list(root.glob(IMAGES)))))
    except OSError as error:
        raise DataError(
            error.filename or root,
            f"cannot write the phantom: {reason(error)}; {remedy(error)} or choose another --out",
        ) from error
    return root


def _claim(root: Path, settings: PhantomSettings) -> None:
    """Writes phantom.json; raises DataError if the folder has other settings, or somebody's files."""
    mark, record = root / SETTINGS_FILE, settings.record()
    root.mkdir(parents=True, exist_ok=True)
    found = next((file for file in sorted(root.glob("[!.]*")) if not is_state(file)), None)
    if mark.exists():  # another process may write it now, before its other files
        try:
            recorded = json.loads(mark.read_text())
        except ValueError as error:
            raise DataError(mark, f"is not a phantom description ({error}); choose another --out") from error
        if not isinstance(recorded, dict):
            raise DataError(mark, "is not a phantom description; choose another --out")
        if recorded != record:
            was, asked = ({"kind": "brain", **own} for own in (recorded, record))
            others = [f"{name} {_plain(was.get(name, 'none'))}, not {_plain(asked.get(name, 'none'))}"
                      for name in {**asked, **was} if was.get(name) != asked.get(name)]  # fmt: skip
            raise DataError(root, f"holds phantoms of other settings ({'; '.join(others)}); choose another --out")
    elif found:
        raise DataError(root, f"holds {found.name}, which phantom did not write; choose another --out")
    else:
        write_json(mark, record)


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _write_cases(out: Path, settings: PhantomSettings, indices: list[int], workers: int) -> Iterator[int]:
    """Writes cases and yields the index of each when it is done; several workers are processes."""
    write, workers = partial(_write_case, out, settings), min(workers, len(indices))
    if workers < 2:
        yield from map(write, indices)
        return
    with closing(calls_in_forks(write, indices, workers)) as calls:
        try:
            yield from (call.result() for call in calls)
        except BrokenProcessPool:
            raise DataError(
                out,
                "a process that wrote cases was killed; start again, what is there is kept (or lower --workers)",
            ) from None


def _write_case(out: Path, settings: PhantomSettings, index: int) -> int:
    case = settings.of_kind.make_case(settings.seed, index, settings.size)
    volumes = [*case.image, case.label]
    for path, volume in zip(settings.files(out, index), volumes):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, _nifti(volume, case))
    return index


def _nifti(volume: NDArray[Any], case: PhantomCase) -> bytes:
    """Returns a compressed NIfTI file, whose bytes do not depend on the time."""
    image = nibabel.Nifti1Image(volume, case.affine, dtype=volume.dtype)
    image.header.set_xyzt_units("mm")
    image.set_sform(case.affine, 1)
    image.set_qform(case.affine, 1)
    return gzip.compress(image.to_bytes(), compresslevel=1, mtime=0)


def _class_table(settings: PhantomSettings, cases: int) -> bytes:
    """Returns the content of labels.csv, with the first ``cases``."""
    class_of = settings.of_kind.class_of
    assert class_of is not None
    lines = ("case,class", *(f"{settings.case_name(index)},{class_of(settings.seed, index)}" for index in range(cases)))
    return "".join(f"{line}\n" for line in lines).encode()


def _refuse_changed(path: Path, settings: PhantomSettings) -> None:
    """Raises DataError for a labels.csv or dataset.json that somebody has changed, as more cases replace it."""
    content = path.read_bytes()
    if settings.layout == "classes":
        own = _class_table(settings, min(content.count(b"\n") - 1, MOST_CASES))
    else:
        count = re.search(rb'"numTraining": (\d{1,6})\b', content)
        own = _nnunet_description(settings, int(count[1]) if count else 0)
    if content != own:
        raise DataError(path, "is not as phantom wrote it, and would be replaced; choose another --out")


def _nnunet_description(settings: PhantomSettings, written: int) -> bytes:
    """Returns the content of dataset.json: the kind's, and the annotated classes of cases that do not show all.

    - ``written``: how many cases there are
    """
    kind = settings.of_kind
    content = {
        "name": kind.title,
        "description": kind.description,
        "channel_names": {str(number): name for number, name in enumerate(kind.channels)},
        **kind.classes,
        "numTraining": written,
        "file_ending": ".nii.gz",
    }
    shown = {settings.case_name(index): kind.annotated(settings.seed, index) for index in range(written)}
    partly = {case: list(names) for case, names in shown.items() if names is not None}
    content |= {"annotated": partly} if partly else {}
    return (json.dumps(content, indent=2) + "\n").encode()
