"""Geometry: where a volume is in space and how its file stores it; canonical orientation and back.

Legend: ``c`` channels, ``W D H`` voxels. A NIfTI header is kept as bytes, so that nothing is lost; for other formats,
affine, shape and number type are kept.
"""

import base64
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from nibabel.nifti1 import Nifti1Header
from nibabel.nifti2 import Nifti2Header
from nibabel.orientations import aff2axcodes, axcodes2ornt, inv_ornt_aff
from nibabel.spatialimages import HeaderDataError

from seqpar.data.errors import DataError

_MM = {1: 1000.0, 3: 0.001}  # of NIfTI's other units of space, metres and micrometres
_NEARLY_ALONG = 0.98  # cosine of about 11 degrees


@dataclass(frozen=True, eq=False)
class Geometry:
    """Where a volume is in space and how its file stores it: everything needed to write it back."""

    affine: np.ndarray  # voxel to mm, 4 × 4
    shape: tuple[int, int, int]
    spacing: tuple[float, float, float]
    orientation: str  # such as "LPS": the directions in which W, D, H grow
    dtype: str  # numpy's name with byte order, such as "<i2"
    ndim: int  # of the file: 3 or 4
    qform_code: int
    sform_code: int
    slope: float
    inter: float
    header: bytes  # of a NIfTI file; empty for other formats

    @property
    def canonical_affine(self) -> np.ndarray:
        """Returns the affine after `to_canonical`."""
        turn = axcodes2ornt(tuple(self.orientation))
        return np.asarray(self.affine @ inv_ornt_aff(turn, self.shape))

    @property
    def canonical_shape(self) -> tuple[int, int, int]:
        """Returns the shape after `to_canonical`."""
        a, b, c = _axes(self.orientation)[0]
        return self.shape[a], self.shape[b], self.shape[c]

    @property
    def canonical_spacing(self) -> tuple[float, float, float]:
        """Returns the spacing after `to_canonical`."""
        a, b, c = _axes(self.orientation)[0]
        return self.spacing[a], self.spacing[b], self.spacing[c]

    @property
    def slant(self) -> float:
        """Returns a voxel's volume as a share of an upright box's: below 1 where axes are sheared (a tilted gantry)."""
        directions = self.affine[:3, :3] / self.spacing
        is_upright = np.allclose(directions.T @ directions, np.eye(3), rtol=0, atol=1e-5)  # but for rounding
        return 1.0 if is_upright else float(abs(np.linalg.det(directions)))

    @property
    def tilt(self) -> float:
        """Returns the largest angle in degrees between an axis of the voxels and the patient's axis nearest to it."""
        along = np.abs(np.diag(self.canonical_affine[:3, :3])) / self.canonical_spacing
        return float(np.degrees(np.arccos(np.clip(along, 0, 1))).max())

    @property
    def askew(self) -> float:
        """Returns by how many degrees the voxels are sheared: the tilt of a gantry, about."""
        return float(np.degrees(np.arccos(min(self.slant, 1.0))))

    @property
    def orientation_doubt(self) -> str:
        """Returns what to say after a NIfTI file's name if it is not certain how the patient lies; "" if it is."""
        if not self.header or bool(self.qform_code) != bool(self.sform_code):
            return ""
        if not self.qform_code:
            return "does not say how the patient lies: its qform_code and sform_code are both 0"
        header = parse_header(self.header, "header")
        try:
            forms = header.get_qform(), header.get_sform()
        except (HeaderDataError, ValueError):  # of a damaged qform, which is not used
            return ""
        (q, s), (by_q, by_s) = map(_directions, forms), map(aff2axcodes, forms)
        if by_q == by_s or (q * s).sum(0).min() > _NEARLY_ALONG:
            return ""
        told = f"its qform says {''.join(by_q)}, its sform {''.join(by_s)}, and the sform is used"
        return f"contradicts itself on how the patient lies: {told}"

    @property
    def voxel_ml(self) -> float:
        """Returns the volume of a voxel."""
        return float(np.prod(self.spacing)) * self.slant / 1000

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` reads (the header, or affine and shape), plus values for people to read."""
        readable = {"shape": self.shape, "spacing": self.spacing, "orientation": self.orientation, "dtype": self.dtype}
        if not self.header:
            return {**readable, "affine": self.affine.tolist(), "ndim": self.ndim}
        return {**readable, "header": base64.b64encode(self.header).decode()}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Geometry":
        """Returns the geometry that `to_json` wrote."""
        if "header" in value:
            return geometry_of(base64.b64decode(value["header"]), "header")
        w, d, h = value["shape"]
        return place_geometry(np.array(value["affine"]), (w, d, h), value["dtype"], "header", value["ndim"])


def make_geometry(shape: tuple[int, int, int], affine: np.ndarray, dtype: Any = "<f4") -> Geometry:
    """Returns the geometry of a volume that was not read from a file."""
    header = Nifti1Header()
    header.set_data_dtype(dtype)
    header.set_data_shape(shape)
    header.set_qform(affine, 1, strip_shears=True)
    header.set_sform(affine, 1)
    header.set_xyzt_units("mm")
    return geometry_of(header.binaryblock, "header")


def geometry_of(head: bytes, path: str | Path) -> Geometry:
    """Returns the geometry in a NIfTI header's bytes; raises DataError for unusable values."""
    header = parse_header(head, path)
    ndim, shape = int(header["dim"][0]), tuple(int(n) for n in header["dim"][1 : 1 + int(header["dim"][0])])
    if ndim not in (3, 4):
        raise DataError(path, f"has a {ndim}-D array; a 3-D volume is needed, or 4-D with the modalities last")
    if min(shape) < 1:
        raise DataError(path, f"its header gives the shape {shape}; every size must be positive")
    pixdim = header["pixdim"][1:4].astype(float)
    if not (np.isfinite(pixdim).all() and (pixdim > 0).all()):
        raise DataError(path, f"its spacing is {pixdim.tolist()} mm; it must be positive: repair the header's pixdim")
    try:
        dtype = header.get_data_dtype()
    except KeyError:
        raise DataError(path, f"its numbers have the unknown type {int(header['datatype'])}; copy it again") from None
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise DataError(path, f"has numbers of type {dtype}; integers or real numbers of 8 to 64 bits are needed")
    try:
        affine = np.asarray(header.get_best_affine(), float)
        affine[:3] *= _MM.get(int(header["xyzt_units"]) & 7, 1.0)
        slope, inter = header.get_slope_inter()
    except (HeaderDataError, ValueError) as error:
        raise DataError(path, f"its header cannot be used: {error}; write the file again") from error
    placed = place_geometry(affine, (shape[0], shape[1], shape[2]), dtype.str, path, ndim)
    return replace(
        placed,
        qform_code=int(header["qform_code"]),
        sform_code=int(header["sform_code"]),
        slope=1.0 if slope is None else float(slope),
        inter=0.0 if inter is None else float(inter),
        header=header.binaryblock,
    )


def place_geometry(
    affine: np.ndarray, shape: tuple[int, int, int], dtype: str, path: str | Path, ndim: int = 3
) -> Geometry:
    """Returns the geometry of a file without a NIfTI header; raises DataError if its affine cannot be used."""
    usable = np.isfinite(affine).all() and abs(np.linalg.det(affine[:3, :3])) >= 1e-18
    if not usable or None in aff2axcodes(affine):  # None: one direction is negligible
        raise DataError(
            path, f"its affine {affine[:3].tolist()} gives voxels zero volume; repair it (NIfTI: qform, sform)"
        )
    w, d, h = np.sqrt((affine[:3, :3] ** 2).sum(0)).tolist()
    orientation = "".join(aff2axcodes(affine))
    return Geometry(affine, shape, (w, d, h), orientation, dtype, ndim, 0, 0, 1.0, 0.0, b"")


def parse_header(head: bytes, path: str | Path) -> Any:
    """Returns the header as stored, without nibabel's repairs, which would hide a bad spacing."""
    for kind in (Nifti1Header, Nifti2Header):
        for endian, name in (("<", "little"), (">", "big")):
            if len(head) >= kind.sizeof_hdr and int.from_bytes(head[:4], name) == kind.sizeof_hdr:  # type: ignore[arg-type]
                header = kind(head[: kind.sizeof_hdr], endianness=endian, check=False)
                if bytes(header["magic"].item())[:3] not in (b"n+1", b"n+2"):
                    raise DataError(path, "is no single-file NIfTI (an Analyze file or a pair's header?); convert it")
                if header["pixdim"][0] == 0:
                    header["pixdim"][0] = 1  # as the standard says to read it
                return header
    raise DataError(path, "is not a NIfTI file (it does not begin with a NIfTI header); write it as .nii or .nii.gz")


def to_canonical(array: np.ndarray, orientation: str) -> np.ndarray:
    """Returns a view whose last three dims run to the right, to the front and upwards (RAS)."""
    axes, flips = _axes(orientation)
    lead = array.ndim - 3
    return np.flip(array.transpose(*range(lead), *(lead + a for a in axes)), tuple(lead + k for k in flips))


def from_canonical(array: np.ndarray, orientation: str) -> np.ndarray:
    """Returns a view whose last three dims run as ``orientation`` says: the inverse of `to_canonical`."""
    axes, flips = _axes(orientation)
    lead = array.ndim - 3
    back = (lead + int(a) for a in np.argsort(axes))
    return np.flip(array, tuple(lead + k for k in flips)).transpose(*range(lead), *back)


def geometry_difference(first: Geometry, second: Geometry) -> str | None:
    """Returns how the positions of two volumes in space differ, in words about the first; None if they agree."""
    if first.canonical_shape != second.canonical_shape:
        return f"its shape is {first.canonical_shape}, the other's {second.canonical_shape} (both as RAS)"
    ends = np.array(np.meshgrid(*([0, n - 1] for n in first.canonical_shape))).reshape(3, -1)
    apart = (first.canonical_affine - second.canonical_affine) @ np.vstack([ends, np.ones(ends.shape[1])])
    worst = float(np.sqrt((apart[:3] ** 2).sum(0)).max())
    if worst > 0.1 * min(first.spacing):  # a tenth of a voxel; rounding in headers is far smaller
        return f"its affine puts a corner {worst:.3g} mm away from the other's"
    return None


def _directions(affine: np.ndarray) -> np.ndarray:
    """Returns the directions of the axes of the voxels, a column each."""
    columns = affine[:3, :3]
    return np.asarray(columns / np.sqrt((columns**2).sum(0)))


def _axes(orientation: str) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Returns the file's dim for each canonical dim, and the canonical dims that are flipped."""
    turn = axcodes2ornt(tuple(orientation))  # one row per dim of the file: canonical dim, direction
    a, b, c = (int(n) for n in np.argsort(turn[:, 0]))
    return (a, b, c), tuple(sorted(int(dim) for dim, sign in turn if sign < 0))
