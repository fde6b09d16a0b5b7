"""Reads a DICOM series, a folder with one file per slice of one volume, and writes a DICOM-SEG of one.

The affine comes from the positions of the slices themselves, so that a tilted gantry is kept. A folder whose slices are
not one evenly spaced volume (missing slices, several time points or series) is refused.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import seqpar
from seqpar.data.errors import DataError, unreadable
from seqpar.data.files import whole_file
from seqpar.data.geometry import Geometry, place_geometry
from seqpar.data.itk_files import faults_of, number_type
from seqpar.text import install_hint

_POSITION, _ORIENTATION, _SPACING = "0020|0032", "0020|0037", "0028|0030"
_DESCRIPTION, _THICKNESS = "0008|103e", "0018|0050"
_PHOTOMETRIC = "0028|0004"
_STUDY, _SERIES, _FRAME_OF_REFERENCE = "0020|000d", "0020|000e", "0020|0052"
_MAX_WHOLE = 2**30  # voxels of all segments, 128 MB, up to which empty slices are written too
_MAX_LABEL = 64  # letters of a segment's label
_EMPTY = (  # what a segmentation repeats of its patient and study, and may be empty
    "PatientID PatientName PatientBirthDate PatientSex AccessionNumber StudyID StudyDate StudyTime "
    "ReferringPhysicianName"
)
_TOLERANCE = 0.1  # how far a slice may be off its place, as a share of the distance between slices
_MAGIC = slice(128, 132)


class _Slice(NamedTuple):
    """One file: its position in space (LPS, in mm), its size and its voxels."""

    path: Path
    position: np.ndarray
    axes: np.ndarray  # rows: the directions in which W and D grow
    spacing: tuple[float, float]  # along W, D
    size: tuple[int, int]
    dtype: np.dtype[Any]
    thickness: float
    voxels: np.ndarray | None  # D W


def is_series(path: Path) -> bool:
    """Returns whether a path is a folder with DICOM files.

    A file that may not be read counts as none: who reads it says so.
    """

    def is_dicom(file: Path) -> bool:
        try:
            return _is_dicom(file)
        except OSError:
            return False

    return path.is_dir() and any(map(is_dicom, visible_files(path)))


def visible_files(folder: Path) -> list[Path]:
    """Returns a folder's files that are not hidden, sorted, without the index of a DICOM folder."""
    try:
        names = sorted(folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error
    return [file for file in names if file.is_file() and file.name[0] != "." and file.name != "DICOMDIR"]


def read_series_header(folder: Path) -> tuple[Geometry, int]:
    """Returns a series' geometry and its number of channels (1), from the headers of its files."""
    return _geometry(_slices(folder, False), folder), 1


def read_series(folder: Path) -> tuple[np.ndarray, Geometry]:
    """Returns a series' voxels ``(1, W, D, H)``, rescaled as its files say, and its geometry."""
    slices = _slices(folder, True)
    geometry = _geometry(slices, folder)
    voxels = [one.voxels for one in slices if one.voxels is not None]
    return np.stack(voxels).astype(geometry.dtype).transpose(2, 1, 0)[None], geometry


def _is_dicom(file: Path) -> bool:
    with open(file, "rb") as stream:
        return stream.read(_MAGIC.stop)[_MAGIC] == b"DICM"


def _slices(folder: Path, with_voxels: bool) -> list[_Slice]:
    """Returns the slices of the only series in a folder, in order along their normal."""
    if gone := next((file for file in sorted(folder.glob("[!.]*")) if file.is_symlink() and not file.exists()), None):
        raise DataError(gone, "is a link that leads nowhere, and may be a slice: copy the series again")
    if not is_series(folder):
        raise DataError(folder, "is a folder without DICOM files; give one volume: a file, or the folder of a series")
    with faults_of(folder) as itk:
        names = {uid: itk.ImageSeriesReader.GetGDCMSeriesFileNames(str(folder), uid)
                 for uid in itk.ImageSeriesReader.GetGDCMSeriesIDs(str(folder))}  # fmt: skip
    if not names:
        raise DataError(folder, "has DICOM files, but none of an image series; give the folder of one")
    if len(names) > 1:
        kinds = [f"{_describe(Path(files[0]))} ({len(files)} files)" for files in names.values()]
        raise DataError(folder, f"has {len(names)} series: {', '.join(sorted(kinds))}; give each its own folder")
    (files,) = names.values()
    suffixes = {Path(file).suffix for file in files}
    for file in visible_files(folder):
        is_slice = _is_dicom(file) or (file.suffix in suffixes and (file.suffix or not file.stat().st_size))
        if is_slice and str(file) not in files:  # the first or the last slice would be missing without a gap
            raise DataError(file, "cannot be read as part of its series; copy it again, or remove it if it is no slice")
    slices = [_slice(Path(file), with_voxels) for file in files]
    normal = np.cross(*slices[0].axes)
    return sorted(slices, key=lambda one: float(one.position @ normal))


def _describe(file: Path) -> str:
    """Returns the name of a file's series, as the scanner gave it."""
    with faults_of(file) as itk:
        reader = itk.ImageFileReader()
        reader.SetFileName(str(file))
        reader.ReadImageInformation()
        return str(reader.GetMetaData(_DESCRIPTION)).strip() if reader.HasMetaDataKey(_DESCRIPTION) else file.name


def _slice(file: Path, with_voxels: bool) -> _Slice:
    with faults_of(file) as itk:
        reader = itk.ImageFileReader()
        reader.SetFileName(str(file))
        image = reader.Execute() if with_voxels else None
        if image is None:
            reader.ReadImageInformation()
        size = reader.GetSize()
        dtype = number_type(itk, reader.GetPixelID(), file)
        voxels = None if image is None else itk.GetArrayFromImage(image)
        tags = {key: reader.GetMetaData(key) for key in reader.GetMetaDataKeys()}
    if len(size) > 2 and size[2] > 1:
        raise DataError(file, f"has {size[2]} frames, but one file per slice is needed; convert it to NIfTI")
    if reader.GetNumberOfComponents() > 1:
        raise DataError(file, "has colours; one number per voxel is needed")
    if tags.get(_PHOTOMETRIC, "").strip() == "MONOCHROME1":  # ITK reads -1 - value, or the largest value minus it
        raise DataError(file, "is MONOCHROME1, whose values would be read inverted: convert the series to NIfTI by a "
                        "tool that keeps them")  # fmt: skip
    position, axes, spacing = (_numbers(tags, key, file) for key in (_POSITION, _ORIENTATION, _SPACING))
    is_whole = (len(position), len(axes), len(spacing)) == (3, 6, 2) and min(spacing) > 0
    rows = np.reshape(axes, (2, -1))
    if not is_whole or not np.allclose(rows @ rows.T, np.eye(2), atol=0.01):  # two unit vectors at a right angle
        raise DataError(file, "its position, orientation or pixel spacing is damaged; copy the series again")
    thickness = _numbers(tags, _THICKNESS, file)[0] if tags.get(_THICKNESS, "").strip() else 1.0
    return _Slice(
        file,
        np.array(position),
        rows,
        (spacing[1], spacing[0]),
        (int(size[0]), int(size[1])),
        dtype,
        thickness,
        None if voxels is None else voxels.reshape(size[1], size[0]),
    )


def _numbers(tags: dict[str, str], key: str, file: Path) -> list[float]:
    """Returns the numbers of a tag."""
    if key not in tags:
        raise DataError(file, f"does not say where in the body it is (tag {key}); slices of a volume are needed")
    try:
        return [float(part) for part in tags[key].split("\\")]
    except ValueError:
        raise DataError(file, f"its tag {key} is {tags[key]!r}, not numbers; copy the series again") from None


def _geometry(slices: list[_Slice], folder: Path) -> Geometry:
    """Returns the geometry of slices in order; raises DataError if they do not form a volume."""
    first, last = slices[0], slices[-1]
    for one in slices:
        same = np.allclose(one.axes, first.axes, atol=1e-4) and np.allclose(one.spacing, first.spacing, rtol=1e-4)
        if one.size != first.size or not same:
            raise DataError(
                one.path, f"differs in size, spacing or orientation from {first.path.name} of its series; separate them"
            )
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1] = first.axes[0] * first.spacing[0], first.axes[1] * first.spacing[1]
    if len(slices) == 1:
        affine[:3, 2] = np.cross(*first.axes) * first.thickness
    else:
        affine[:3, 2] = (last.position - first.position) / (len(slices) - 1)
        _check_even(slices, affine[:3, 2], folder)
    affine[:3, 3] = first.position
    dtype = np.result_type(*{one.dtype for one in slices}).str
    shape = (*first.size, len(slices))
    return place_geometry(np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine, shape, dtype, folder)


def _check_even(slices: list[_Slice], step: np.ndarray, folder: Path) -> None:
    """Raises DataError unless the slices are evenly spaced by ``step``."""
    places = np.stack([one.position for one in slices])
    gaps = np.sqrt((np.diff(places, axis=0) ** 2).sum(1))
    closest, widest = int(gaps.argmin()), int(gaps.argmax())
    if gaps[closest] < 1e-3:
        pair = f"{slices[closest].path.name} and {slices[closest + 1].path.name}"
        raise DataError(folder, f"has two slices at the same position ({pair}); give each time point its own folder")
    off = np.sqrt(((places - places[0] - np.arange(len(slices))[:, None] * step) ** 2).sum(1))
    if off.max() > _TOLERANCE * np.linalg.norm(step):
        pair = f"{slices[widest].path.name} and {slices[widest + 1].path.name}"
        raise DataError(
            folder, f"its slices are not evenly spaced: {gaps[widest]:.4g} mm between {pair}, "
            f"{float(np.median(gaps)):.4g} mm elsewhere; slices are missing: copy the series again"
        )  # fmt: skip


def load_highdicom() -> Any:
    """Returns highdicom, imported when the first segmentation needs it; raises ValueError if it is missing."""
    try:
        import highdicom
    except ImportError:
        raise ValueError(
            f"--dicom-seg needs highdicom, which is not installed: {install_hint('dicom')}, or remove it"
        ) from None
    return highdicom


def name_series(folder: Path) -> dict[str, str]:
    """Returns names of a series and its study that identify nobody: the first digits of the SHA-256 of their UIDs.

    A UID itself may hold the date of a scan and the number of the scanner. Raises DataError if a segmentation cannot
    refer to the series.
    """
    if not is_series(folder):
        raise DataError(folder, "is not a DICOM series, and a DICOM-SEG refers to one: remove --dicom-seg")
    file = next(file for file in visible_files(folder) if _is_dicom(file))
    with faults_of(file) as itk:
        reader = itk.ImageFileReader()
        reader.SetFileName(str(file))
        reader.ReadImageInformation()
        uids = {
            key: reader.GetMetaData(key).strip(" \0") for key in reader.GetMetaDataKeys() if key.startswith("0020|")
        }
    for key, what in ((_STUDY, "study"), (_SERIES, "series"), (_FRAME_OF_REFERENCE, "frame of reference")):
        if not uids.get(key):
            raise DataError(
                file, f"does not name its {what} (tag {key}), which a DICOM-SEG has to: export the series again, or "
                "remove --dicom-seg"
            )  # fmt: skip
    return {name: hashlib.sha256(uids[key].encode()).hexdigest()[:12] for name, key in
            (("study", _STUDY), ("series", _SERIES))}  # fmt: skip


def write_segmentation(
    path: Path, folder: Path, labels: np.ndarray, classes: Mapping[str, Sequence[int]], network: str
) -> None:
    """Writes a DICOM-SEG with a binary segment for each class, whole or not at all; raises OSError if that fails.

    Patient and study are those of the series, as DICOM demands.

    - ``folder``: of the series that was labelled
    - ``labels``: ``W D H``, in the series' geometry
    - ``classes``: the label values of each class, by name; classes may overlap
    - ``network``: a number that tells the network's weights from others
    """
    hd = load_highdicom()
    from pydicom import dcmread
    from pydicom.sr.codedict import codes

    slices = _slices(folder, False)
    geometry, planes = _geometry(slices, folder), labels.transpose(2, 1, 0)
    if labels.shape != geometry.shape:
        raise ValueError(f"{folder}: the label map is {labels.shape}, the series {geometry.shape}; it has changed")
    algorithm = hd.AlgorithmIdentificationSequence(
        name="seqpar", version=seqpar.__version__, family=codes.cid7162.ArtificialIntelligence
    )
    segments = [
        hd.seg.SegmentDescription(
            segment_number=number,
            segment_label=(label := _plain(name)),
            segmented_property_category=codes.SCT.Tissue,
            segmented_property_type=hd.sr.CodedConcept(f"CLASS-{number}", "99SEQPAR", label),
            algorithm_type=hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm_identification=algorithm,
        )
        for number, name in enumerate(classes, 1)
    ]
    try:
        sources = [dcmread(one.path, stop_before_pixels=True) for one in slices]
        for source in sources:
            source.decode()
            source.SpecificCharacterSet = "ISO_IR 192"  # UTF-8, for the names of classes
            for name in _EMPTY.split():
                source.setdefault(name, "")
            source.SliceThickness = f"{slices[0].thickness:.10g}"
            source.SpacingBetweenSlices = f"{geometry.spacing[2]:.10g}"  # scanners count it in other ways
        is_whole = planes.size * len(classes) <= _MAX_WHOLE
        segmentation = hd.seg.Segmentation(
            source_images=sources,
            pixel_array=_pixels_of(planes, list(classes.values())),
            segmentation_type=hd.seg.SegmentationTypeValues.BINARY,
            segment_descriptions=segments,
            series_instance_uid=hd.UID(),
            series_number=1000 + int(sources[0].get("SeriesNumber") or 0),
            sop_instance_uid=hd.UID(),
            instance_number=1,
            manufacturer="seqpar",
            manufacturer_model_name="seqpar",
            software_versions=seqpar.__version__,
            device_serial_number=network,
            content_description="Predicted by seqpar. For research only.",
            series_description="Segmentation by seqpar",
            omit_empty_frames=not is_whole,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            folder, f"a DICOM-SEG cannot be made of its headers ({error}): export the series again, or remove "
            "--dicom-seg"
        ) from error  # fmt: skip
    if is_whole:
        _sort_frames(segmentation, np.cross(*slices[0].axes))
    with whole_file(path) as temporary:
        segmentation.save_as(temporary)


def is_whole_segmentation(path: Path) -> bool:
    """Returns whether a segmentation is there and can be read to its end."""
    load_highdicom()
    from pydicom import dcmread

    try:
        content = dcmread(path)  # which takes pixels that are cut off as they are
        return len(content.PixelData) * 8 >= content.Rows * content.Columns * int(content.NumberOfFrames)
    except Exception:  # of a damaged file, pydicom raises what its parts raise
        return False


def _sort_frames(segmentation: Any, normal: np.ndarray) -> None:
    """Sorts frames by their segments, and then along the normal: ITK takes them to lie in this order."""
    groups = list(segmentation.PerFrameFunctionalGroupsSequence)

    def key(number: int) -> tuple[int, float]:
        group = groups[number]
        position = np.array(group.PlanePositionSequence[0].ImagePositionPatient, float)
        segments = group.get("SegmentIdentificationSequence")  # a single segment's number is shared by all frames
        return segments[0].ReferencedSegmentNumber if segments else 1, float(position @ normal)

    order = sorted(range(len(groups)), key=key)
    count = len(groups) * segmentation.Rows * segmentation.Columns
    bits = np.unpackbits(np.frombuffer(segmentation.PixelData, np.uint8), count=count, bitorder="little")
    packed = np.packbits(bits.reshape(len(groups), -1)[order], bitorder="little").tobytes()
    segmentation.PixelData = packed + bytes(len(packed) % 2)
    segmentation.PerFrameFunctionalGroupsSequence = [groups[number] for number in order]


def _pixels_of(planes: np.ndarray, members: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns planes of segment numbers, from 1, or, if classes overlap, a plane for each class in a last dim."""
    every = list(chain.from_iterable(members))
    if len(set(every)) < len(every):
        return np.stack([np.isin(planes, own) for own in members], -1)
    numbers = np.zeros(max(*every, int(planes.max(initial=0))) + 1, np.uint16)
    for number, own in enumerate(members, 1):
        numbers[list(own)] = number
    return numbers[planes]


def _plain(name: str) -> str:
    """Returns a class's name as a DICOM string can hold it."""
    return "".join(letter if letter.isprintable() and letter != "\\" else " " for letter in name)[:_MAX_LABEL].strip()
