"""Where the cache of a data set lies, if nobody says."""

import hashlib
import json
import os
from pathlib import Path

from seqpar.data.formats.dataset import Dataset
from seqpar.data.formats.recognise import OLD_CACHE
from seqpar.data.preparation.recipe import PrepareSettings

# Data sets are looked up by the beginning of a folder's name (Dataset901…): no cache may begin like one beside them.
SIBLING = "seqpar-prepared"
_RAW, _PREPROCESSED = "nnUNet_raw", "nnUNet_preprocessed"


def cache_folder(dataset: Dataset, out: str | Path | None = None, settings: PrepareSettings | None = None) -> Path:
    """Returns the folder of a data set's cache: ``out``, or else the first of these places.

    - in $SEQPAR_CACHE, with a digest of the data set's path in the name: names may repeat
    - for a data set of nnU-Net's raw folder, in ``seqpar-prepared`` beside $nnUNet_preprocessed, or beside that folder
    - in ``seqpar-prepared`` beside the data set

    There each spacing, and whatever else is set, has a folder of its own: one does not replace the other.
    """
    if out is not None:
        return Path(out).expanduser().absolute()
    if "SEQPAR_CACHE" in os.environ:
        place = hashlib.blake2b(os.fsencode(dataset.root.resolve()), digest_size=4).hexdigest()
        return (
            Path(os.environ["SEQPAR_CACHE"]).expanduser().absolute()
            / f"{dataset.name}-{place}{_kind(dataset)}{_suffix(settings)}"
        )
    return _neighbour(dataset.root) / SIBLING / f"{dataset.root.name}{_kind(dataset)}{_suffix(settings)}"


def outdated_cache(root: Path, cache: Path) -> str:
    """Returns a line on the cache of an earlier version beside the data set ``root``, "" where there is none.

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
        f"{' and '.join(old)} {what} of an earlier version, which nothing reads any more; "
        f"{'it' if len(old) == 1 else 'they'} can be deleted: now it is {cache}"
    )


def _kind(dataset: Dataset) -> str:
    """Returns what the name says of a cache without labels of voxels: the same images may have another with."""
    if dataset.volume_classes:
        return "-classes"
    return "" if dataset.labels else "-images"


def _suffix(settings: PrepareSettings | None) -> str:
    """Returns what settings add to a folder's name: nothing for the usual ones, else as "@median", "@1x1x1.5"."""
    described = settings.described() if settings else {}
    spacing = described.get("spacing", "source")
    text = spacing if isinstance(spacing, str) else "x".join(f"{size:.10g}" for size in spacing)
    others = {name: value for name, value in described.items() if name not in ("spacing", "locations")}
    if others:
        text += "-" + hashlib.blake2b(json.dumps(others).encode(), digest_size=4).hexdigest()
    return "" if text == "source" else f"@{text}"


def _neighbour(root: Path) -> Path:
    """Returns the folder in which the caches' own folder lies."""
    raw, beside = os.environ.get(_RAW), Path(os.environ.get(_PREPROCESSED) or root.parent)
    is_raw = root.parent.name == _RAW or raw and root.parent.resolve() == Path(raw).expanduser().resolve()
    return beside.expanduser().absolute().parent if is_raw else root.parent
