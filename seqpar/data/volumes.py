"""Reads and writes volumes as arrays ``(c, W, D, H)`` with their geometry; reads DICOM series.

Legend: ``c`` channels, ``W D H`` voxels, in the file's own order of dims until `to_canonical` turns them to RAS.
Whatever is read can be written back voxel for voxel with the same affine, qform, sform and number type.
NIfTI is read here, other formats are read by `itk_files` and `dicom_series`.
"""

import gzip
import hashlib
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from nibabel.nifti2 import Nifti2Header

from seqpar.data import dicom_series, itk_files
from seqpar.data.errors import DataError, unreadable, unwritable
from seqpar.data.files import SUFFIXES, refuse_special, suffix_of, write_bytes
from seqpar.data.geometry import Geometry, from_canonical, geometry_of, make_geometry, parse_header, to_canonical

__all__ = [
    "SUFFIXES",
    "Geometry",
    "Volume",
    "digest_file",
    "digest_samples",
    "digest_voxels",
    "from_canonical",
    "is_volume",
    "files_digest",
    "join_digests",
    "make_geometry",
    "output_suffix",
    "read_geometry",
    "read_volume",
    "size_and_mtime",
    "to_canonical",
    "write_volume",
]
_NIFTI = (".nii.gz", ".nii")
_SAMPLE = 1 << 16  # bytes
_MOST_VOXELS = 1 << 19  # that a digest is of: digests are kept, so that another number makes them others
_MAX_DEFLATE = 1100  # gzip compresses at most about 1032 to 1


class Volume(NamedTuple):
    """A file's voxels ``(c, W, D, H)`` in the file's own number type (float64 if it scales them)."""

    array: np.ndarray
    geometry: Geometry
    digest: str  # of the file's bytes (NIfTI: decompressed)


def is_volume(path: Path) -> bool:
    """Returns whether `read_volume` takes a path, by its name: a visible file, or a folder of DICOM slices."""
    if path.name.startswith("."):
        return False
    return path.name.endswith(SUFFIXES) if path.is_file() else dicom_series.is_series(path)


def output_suffix(path: Path) -> str:
    """Returns the suffix for files written in a volume's geometry: the volume's own, .nii.gz for a DICOM series."""
    return suffix_of(path.name) or _NIFTI[0]


def size_and_mtime(path: Path) -> tuple[int, int]:
    """Returns a volume's size in bytes and its modification time in ns; for a series, those of all its files."""
    files = dicom_series.visible_files(path) if path.is_dir() else [path]
    stats = [file.stat() for file in files]
    return sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)


def read_geometry(path: str | Path) -> tuple[Geometry, int]:
    """Returns a file's geometry and number of channels from its header alone."""
    refuse_special(path)
    if Path(path).is_dir():
        return dicom_series.read_series_header(Path(path))
    if str(path).endswith(itk_files.SUFFIXES):
        return itk_files.read_header(path)
    with _opened(path) as file:
        head = file.read(Nifti2Header.sizeof_hdr)
    geometry, shape, _, _ = _announced(head, path)
    return geometry, shape[3] if len(shape) == 4 else 1


def read_volume(path: str | Path) -> Volume:
    """Returns a file's voxels ``(c, W, D, H)`` and geometry; raises DataError for an unusable file."""
    refuse_special(path)
    if Path(path).is_dir():
        array, geometry = dicom_series.read_series(Path(path))
        return Volume(_finite(array, path), geometry, digest_file(path))
    if str(path).endswith(itk_files.SUFFIXES):
        array, geometry = itk_files.read_voxels(path)
        return Volume(_finite(array, path), geometry, digest_file(path))
    return _read_nifti(path)


def _read_nifti(path: str | Path) -> Volume:
    with _opened(path) as file:
        head = file.read(Nifti2Header.sizeof_hdr)
        geometry, shape, start, length = _announced(head, path)
        raw = head + file.read()  # to the end: gzip compares its checksum only there
    if len(raw) < start + length:
        raise DataError(path, f"ends after {len(raw)} of {start + length} bytes: it is truncated; copy it again")
    stored = np.frombuffer(raw, geometry.dtype, count=length // np.dtype(geometry.dtype).itemsize, offset=start)
    array = stored.reshape(shape, order="F").astype(stored.dtype.newbyteorder("="))
    if (geometry.slope, geometry.inter) != (1.0, 0.0):
        array = array * np.float64(geometry.slope) + geometry.inter
    array = np.moveaxis(array, 3, 0) if geometry.ndim == 4 else array[None]
    return Volume(_finite(array, path), geometry, hashlib.blake2b(raw, digest_size=16).hexdigest())


def _announced(head: bytes, path: str | Path) -> tuple[Geometry, tuple[int, ...], int, int]:
    """Returns what a NIfTI header announces: geometry, shape, and where the voxels' bytes start and how many there are.

    Raises DataError if the file cannot hold as many.
    """
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    geometry, header = geometry_of(head, path), parse_header(head, path)
    shape = geometry.shape + ((int(header["dim"][4]),) if geometry.ndim == 4 else ())
    start = int(np.nan_to_num(header["vox_offset"])) or header.single_vox_offset
    length = int(np.prod(shape, dtype=object)) * np.dtype(geometry.dtype).itemsize
    room = size * (_MAX_DEFLATE if str(path).endswith(".gz") else 1)
    if not header.sizeof_hdr <= start <= start + length <= room:
        raise DataError(
            path,
            f"is {size} bytes long, but its header announces {shape} of {geometry.dtype}: "
            "it is truncated or damaged; copy it again",
        )
    return geometry, shape, start, length


def _finite(array: np.ndarray, path: str | Path) -> np.ndarray:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = int((~np.isfinite(array)).sum())
        raise DataError(path, f"{bad} of its {array.size} voxels are NaN or infinite; set them to a number")
    return array


def digest_samples(path: Path) -> str:
    """Returns a digest of the first, middle and last blocks of a volume's file, which reads next to nothing.

    The end of a gzip file is a checksum of the whole. Of a series, names, sizes and middle blocks of all files and what
    is in the one in the middle stand for all: a copy has other times. Those of earlier versions, which had the times in
    them, are shorter.
    """
    digest = hashlib.blake2b(digest_size=9 if path.is_dir() else 8)
    if path.is_dir():
        files = dicom_series.visible_files(path)
        for each in files:
            digest.update(os.fsencode(each.name) + b"\0%d " % each.stat().st_size)
            _add_blocks(digest, each, _SAMPLE // 16, (0.5,))
        path = files[len(files) // 2] if files else path
    if path.is_file():  # to open a pipe may never end
        _add_blocks(digest, path, _SAMPLE, (0, 0.5, 1))
    return digest.hexdigest()


def _add_blocks(digest: Any, path: Path, length: int, places: Sequence[float]) -> None:
    """Adds blocks of a file, at these shares of its length, to a digest."""
    with open(path, "rb", buffering=0) as file:
        last = max(os.fstat(file.fileno()).st_size - length, 0)
        for place in sorted({int(share * last) for share in places}):
            digest.update(os.pread(file.fileno(), length, place))


def digest_file(path: str | Path) -> str:
    """Returns the digest of a volume's bytes (NIfTI: decompressed; a series: all files), equal to `read_volume`'s."""
    digest = hashlib.blake2b(digest_size=16)
    if os.path.isdir(path):
        for part in dicom_series.visible_files(Path(path)):
            digest.update(os.fsencode(part.name) + b"\0" + part.read_bytes())
        return digest.hexdigest()
    with _opened(path, SUFFIXES) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digest_voxels(channel: np.ndarray) -> str:
    """Returns a digest of a channel ``W D H`` in canonical axes, however it is stored; "" if all voxels are equal,
    which tells no scans apart.

    Of a large one, voxels on a regular grid count, so that it takes next to no time.
    """
    step = max(1, math.ceil((channel.size / _MOST_VOXELS) ** (1 / 3)))
    with np.errstate(over="ignore"):
        some = channel[::step, ::step, ::step].astype(np.float32) + np.float32(0)  # no -0
    if (some == some.flat[0]).all():
        return ""
    return hashlib.blake2b(repr(channel.shape).encode() + some.tobytes("F"), digest_size=8).hexdigest()


def files_digest(digests: Iterable[str]) -> str:
    """Returns the digests of a case's files as text, each shortened."""
    return " ".join(own[:16] for own in digests)


def join_digests(digests: Iterable[str]) -> str:
    """Returns the digests of a case's channels as text, without those of channels that tell no scans apart."""
    return " ".join(filter(None, digests))


def write_volume(path: str | Path, array: np.ndarray, geometry: Geometry, dtype: Any = None) -> None:
    """Writes ``(c, W, D, H)`` or ``(W, D, H)`` in the geometry of its source, whole or not at all.

    Without `dtype`, numbers are stored as in the source, with its scale factor.
    """
    path = Path(path)
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path}: volumes can be written as {' or '.join(SUFFIXES)}; change the name")
    if array.shape[-3:] != geometry.shape:
        raise ValueError(
            f"{path}: the array is {array.shape[-3:]}, its geometry {geometry.shape}; undo all preparation first"
        )
    if array.ndim == 4 and len(array) == 1 and geometry.ndim == 3:
        array = array[0]
    try:
        if path.name.endswith(_NIFTI):
            _write_nifti(path, array, geometry, dtype)
        else:
            scaled = (geometry.slope, geometry.inter) != (1.0, 0.0)  # such files cannot store a scale
            number = np.dtype(dtype or (array.dtype if scaled else geometry.dtype)).newbyteorder("=")
            itk_files.write_file(path, _stored(array, number, 1.0, 0.0, path), geometry)
    except OSError as error:
        raise unwritable(path, error) from error


def _write_nifti(path: Path, array: np.ndarray, geometry: Geometry, dtype: Any) -> None:
    if array.ndim == 4:  # W D H c in the file
        array = np.moveaxis(array, 0, 3)
    source = geometry.header or make_geometry(geometry.shape, geometry.affine, geometry.dtype).header
    header = parse_header(source, path).copy()
    slope, inter = (geometry.slope, geometry.inter) if dtype is None else (1.0, 0.0)
    if dtype is not None:
        header.set_data_dtype(dtype)
        header["cal_min"] = header["cal_max"] = 0  # the source's display window does not suit other numbers
    pixdim = header["pixdim"].copy()
    header.set_data_shape(array.shape)  # also resets the spacing of unused dims
    header["pixdim"] = pixdim
    header["scl_slope"], header["scl_inter"] = slope, inter
    header["vox_offset"], header["magic"] = header.single_vox_offset, header.single_magic
    stored = _stored(array, header.get_data_dtype(), slope, inter, path)
    body = header.binaryblock + bytes(header.single_vox_offset - header.sizeof_hdr) + stored.tobytes(order="F")
    if path.name.endswith(".gz"):
        body = gzip.compress(body, compresslevel=1, mtime=0)
    write_bytes(path, body)


@contextmanager
def _opened(path: str | Path, suffixes: tuple[str, ...] = _NIFTI) -> Iterator[IO[bytes]]:
    """Opens a file, decompressing .gz; turns errors in the block into DataErrors."""
    try:
        if not str(path).endswith(suffixes):
            raise DataError(path, f"is not a {' or '.join(SUFFIXES)} file; convert it to NIfTI")
        if os.path.isfile(path) and os.path.getsize(path) == 0:
            raise DataError(path, "is empty (0 bytes); copy it again")
        opening: Any = gzip.open if str(path).endswith(".gz") else open
        with opening(path, "rb") as file:
            yield file
    except gzip.BadGzipFile as error:
        raise DataError(
            path,
            f"is not compressed with gzip, or is damaged ({error}); "
            "if it is an uncompressed NIfTI file, name it .nii, else copy it again",
        ) from error
    except (EOFError, zlib.error) as error:
        raise DataError(path, f"is truncated or damaged ({error}); copy it again") from error
    except OSError as error:
        raise unreadable(path, error) from error


def _stored(array: np.ndarray, dtype: np.dtype, slope: float, inter: float, path: Path) -> np.ndarray:
    """Returns the numbers to store for these values: the inverse of `read_volume`'s scaling."""
    if (slope, inter) != (1.0, 0.0):
        array = (array.astype(np.float64) - inter) / slope
    if dtype.kind in "iu":
        if array.dtype.kind == "f":
            array = np.rint(array)
        limits = np.iinfo(dtype)
        if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
            raise ValueError(f"{path}: values {array.min()} to {array.max()} do not fit {dtype}; give another dtype")
    return array.astype(dtype)
