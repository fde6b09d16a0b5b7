"""Volumes as SimpleITK writes and reads them by itself: what our own reading and writing is compared with."""

import locale
from pathlib import Path

import numpy as np
import SimpleITK as sitk

from tests.support.folders import OBLIQUE

SERIES = "1.2.826.0.1.3680043.2.1125."


def image_of(array: np.ndarray, affine: np.ndarray = OBLIQUE) -> sitk.Image:
    """Returns ``W D H`` or ``W D H c`` in ITK's terms, placed by an affine as NIfTI has it."""
    lps = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
    spacing = np.sqrt((lps[:3, :3] ** 2).sum(0))
    axes = (2, 1, 0, 3) if array.ndim == 4 else (2, 1, 0)
    image = sitk.GetImageFromArray(np.ascontiguousarray(array.transpose(axes)), isVector=array.ndim == 4)
    image.SetSpacing(spacing.tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    return image


def save_itk(path: Path, array: np.ndarray, affine: np.ndarray = OBLIQUE, packed: bool = True) -> Path:
    """Writes a volume by SimpleITK, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sitk.WriteImage(image_of(array, affine), str(path), useCompression=packed)
    return path


def affine_of(image: sitk.Image) -> np.ndarray:
    """Returns the affine of an ITK image as NIfTI has it."""
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    return np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine


def save_series(folder: Path, array: np.ndarray, affine: np.ndarray = OBLIQUE, series: int = 1, **tags: str) -> Path:
    """Writes ``W D H`` as a DICOM series, a file per slice, whose names are in another order than the slices.

    ``tags``: further ones for each file, named as t0008_103e.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lps = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
    spacing = np.sqrt((lps[:3, :3] ** 2).sum(0))
    across = (lps[:3, :2] / spacing[:2]).T
    for n in range(array.shape[2]):
        image = sitk.GetImageFromArray(np.ascontiguousarray(array[:, :, n].T))
        image.SetSpacing(spacing[:2].tolist())
        position = lps[:3, 3] + n * lps[:3, 2]
        for key, value in {
            "0008|0060": "CT",
            "0008|0018": f"{SERIES}{series}.{n + 1}",
            "0020|000e": f"{SERIES}{series}",
            "0020|000d": f"{SERIES}9",
            "0020|0013": str(n + 1),
            "0020|0032": "\\".join(f"{part:.6f}" for part in position),
            "0020|0037": "\\".join(f"{part:.9f}" for part in across.ravel()),
            **{name[1:].replace("_", "|"): value for name, value in tags.items()},
        }.items():
            image.SetMetaData(key, value)
        write_dicom(folder / f"{series}-{(7 * n) % 31:02d}.dcm", image)
    return folder


def write_dicom(path: Path, image: sitk.Image) -> None:
    """Writes a DICOM file with the image's own ids."""
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    writer.SetFileName(str(path))
    before = locale.setlocale(locale.LC_ALL)
    writer.Execute(image)
    locale.setlocale(locale.LC_ALL, before)  # it leaves the locale C behind, in which Python takes text for ASCII
