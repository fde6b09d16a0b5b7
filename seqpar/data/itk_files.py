"""Reads and writes NRRD and MetaImage files through SimpleITK, with the geometry that NIfTI files have here.

ITK's coordinates grow to the left and to the back (LPS), ours to the right and to the front: x and y change sign.
Legend: ``c`` channels, ``W D H`` voxels in the file's own order of dims.
"""

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.data.errors import DataError, unreadable
from seqpar.data.files import whole_file
from seqpar.data.geometry import Geometry, place_geometry
from seqpar.text import install_hint

SUFFIXES = (".nrrd", ".mha")
_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
_NUMBERS = {
    "Int8": "i1", "UInt8": "u1", "Int16": "i2", "UInt16": "u2", "Int32": "i4", "UInt32": "u4", "Int64": "i8",
    "UInt64": "u8", "Float32": "f4", "Float64": "f8",
}  # fmt: skip


def load_library(path: str | Path) -> Any:
    """Returns SimpleITK, imported when the first file needs it; raises DataError for ``path`` if it is missing."""
    try:
        import SimpleITK
    except ImportError:
        raise DataError(
            path, f"is read by SimpleITK, which is not installed: {install_hint('itk')}, or convert it to NIfTI"
        ) from None
    return SimpleITK


@contextmanager
def faults_of(path: str | Path) -> Iterator[Any]:
    """Yields SimpleITK; its exceptions in the block become DataErrors about ``path``, its warnings are not printed."""
    itk = load_library(path)
    shown = itk.ProcessObject.GetGlobalWarningDisplay()
    itk.ProcessObject.SetGlobalWarningDisplay(False)
    try:
        yield itk
    except RuntimeError as error:
        reasons = re.findall(r"ERROR: (.+)", str(error)) or [str(error).strip()]  # later lines may give a wrong one
        why = re.sub(r"^\w+\(0x\w+\): ", "", reasons[-1])
        raise DataError(path, f"cannot be read as an image ({why}); copy it again, or convert it") from error
    finally:
        itk.ProcessObject.SetGlobalWarningDisplay(shown)


def read_header(path: str | Path) -> tuple[Geometry, int]:
    """Returns a file's geometry and number of channels from its header alone."""
    _refuse_unusable(path)
    with faults_of(path) as itk:
        reader = itk.ImageFileReader()
        reader.SetFileName(str(path))
        reader.ReadImageInformation()
        return _geometry(itk, reader, reader.GetNumberOfComponents(), path)


def read_voxels(path: str | Path) -> tuple[np.ndarray, Geometry]:
    """Returns a file's voxels ``(c, W, D, H)`` and its geometry."""
    _refuse_unusable(path)
    _refuse_damaged(path)
    with faults_of(path) as itk:
        image = itk.ReadImage(str(path))
        geometry, _ = _geometry(itk, image, image.GetNumberOfComponentsPerPixel(), path)
        return channels_first(itk.GetArrayFromImage(image), image.GetDimension()), geometry


def channels_first(array: np.ndarray, ndim: int) -> np.ndarray:
    """Returns SimpleITK's array, which has its dims reversed and a pixel's numbers last, as ``(c, W, D, H)``.

    ndim: of the image; its channels are its fourth dim, or the numbers of a pixel.
    """
    if ndim == 4:
        return array.transpose(0, 3, 2, 1)
    return array.transpose(3, 2, 1, 0) if array.ndim == 4 else array.transpose(2, 1, 0)[None]


def number_type(itk: Any, pixel: int, path: str | Path) -> np.dtype[Any]:
    """Returns numpy's type for a SimpleITK pixel type; for pixels of several numbers, that of one of them."""
    for name, code in _NUMBERS.items():
        if pixel in (getattr(itk, f"sitk{name}"), getattr(itk, f"sitkVector{name}")):
            return np.dtype(code)
    raise DataError(
        path, f"has numbers of type {itk.GetPixelIDValueAsString(pixel)}; integers or real numbers of 8 to 64 bits "
        "are needed"
    )  # fmt: skip


def write_file(path: Path, array: np.ndarray, geometry: Geometry) -> None:
    """Writes ``(c, W, D, H)`` or ``(W, D, H)``, compressed, whole or not at all; raises OSError if that fails."""
    itk = load_library(path)
    affine = _LPS @ geometry.affine
    spacing = np.sqrt((affine[:3, :3] ** 2).sum(0))
    image = itk.GetImageFromArray(np.ascontiguousarray(array.T), isVector=array.ndim == 4)
    image.SetSpacing(spacing.tolist())
    image.SetOrigin(affine[:3, 3].tolist())
    image.SetDirection((affine[:3, :3] / spacing).ravel().tolist())
    with whole_file(path) as temporary:
        named = temporary.with_name(f"{temporary.name}{path.suffix}")  # ITK chooses the format by the suffix
        try:
            itk.WriteImage(image, str(named), useCompression=True)
            os.replace(named, temporary)
        except RuntimeError as error:
            raise OSError(f"{error}".strip().splitlines()[-1]) from error
        finally:
            named.unlink(missing_ok=True)


def _refuse_unusable(path: str | Path) -> None:
    """Raises DataError for files that ITK explains badly or reads partly: missing, empty, or voxels in another file."""
    try:
        with open(path, "rb") as file:
            head = file.read(1 << 16)
    except OSError as error:
        raise unreadable(path, error) from error
    if not head:
        raise DataError(path, "is empty (0 bytes); copy it again")
    if head.startswith(b"NRRD"):
        header = re.split(rb"\r?\n\r?\n", head, maxsplit=1)[0]
        elsewhere = re.search(rb"\ndata ?file:", header, re.IGNORECASE) is not None
    else:
        place = re.search(rb"^ElementDataFile\s*[=:]([^\r\n]*)", head, re.MULTILINE)
        elsewhere = place is None or place[1].strip().lower() != b"local"
    if elsewhere:
        raise DataError(path, "does not contain its own voxels; write it as one .nrrd or .mha file")


def _refuse_damaged(path: str | Path) -> None:
    """Raises DataError if the checksum of compressed voxels is wrong, since SimpleITK would read them silently."""
    with open(path, "rb") as file:
        head = file.read(1 << 16)
        if head.startswith(b"NRRD"):
            packed = re.search(rb"\nencoding: *gz(ip)?\s*\n", head, re.IGNORECASE)
            begin = re.search(rb"\r?\n\r?\n", head)
        else:
            packed = re.search(rb"\nCompressedData *= *True", head, re.IGNORECASE)
            begin = re.search(rb"ElementDataFile *= *\w+ *\r?\n", head)
        if not packed or not begin:
            return
        file.seek(begin.end())
        unpacking = zlib.decompressobj(47)  # gzip or zlib
        try:
            while not unpacking.eof:
                if not (block := file.read(1 << 20)):
                    raise EOFError("it ends too early")
                unpacking.decompress(block)
        except (zlib.error, EOFError) as error:
            raise DataError(path, f"is truncated or damaged ({error}); copy it again") from error


def _geometry(itk: Any, image: Any, components: int, path: str | Path) -> tuple[Geometry, int]:
    """Returns geometry and number of channels of an image, or of a reader that has read its header."""
    size, ndim = image.GetSize(), image.GetDimension()
    dtype = number_type(itk, image.GetPixelID(), path)
    if ndim not in (3, 4) or (ndim == 4 and components > 1):
        ndim += components > 1
        raise DataError(path, f"has a {ndim}-D array; a 3-D volume is needed, or 4-D with the modalities last")
    channels = int(size[3]) if ndim == 4 else int(components)
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (ndim, ndim))[:3, :3] * image.GetSpacing()[:3]
    affine[:3, 3] = image.GetOrigin()[:3]
    shape = (int(size[0]), int(size[1]), int(size[2]))
    return place_geometry(_LPS @ affine, shape, dtype.str, path, ndim=3 if channels == 1 else 4), channels
