"""Where the cache of a data set lies, if nobody says."""

import hashlib
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
    - for a data set of $nnUNet_raw, in ``seqpar-prepared`` beside $nnUNet_preprocessed
    - in ``seqpar-prepared`` beside the data set

    There each spacing has a folder of its own, so that one does not replace the other.
    """
    if out is not None:
        return Path(out).expanduser().absolute()
    if "SEQPAR_CACHE" in os.environ:
        place = hashlib.blake2b(os.fsencode(dataset.root.resolve()), digest_size=4).hexdigest()
        return Path(os.environ["SEQPAR_CACHE"]).expanduser().absolute() / f"{dataset.name}-{place}{_suffix(settings)}"
    return _neighbour(dataset.root) / SIBLING / f"{dataset.root.name}{_suffix(settings)}"


def outdated_cache(root: Path, cache: Path) -> str:
    """Returns a line on the cache of an earlier version beside the data set ``root``, "" where there is none.

    - ``cache``: where the data set's cache is now
    """
    old = root.with_name(f"{root.name}{OLD_CACHE}")
    if old == cache or not (old / "cache.json").is_file():
        return ""
    return f"{old} is a cache of an earlier version, which nothing reads any more; it can be deleted: now it is {cache}"


def _suffix(settings: PrepareSettings | None) -> str:
    """Returns what a spacing adds to a folder's name: nothing for the files' own, else "@median" or "@1x1x1.5"."""
    spacing = settings.spacing if settings else "source"
    if spacing == "source":
        return ""
    return f"@{spacing}" if isinstance(spacing, str) else "@" + "x".join(f"{size:.10g}" for size in spacing)


def _neighbour(root: Path) -> Path:
    """Returns the folder in which the caches' own folder lies."""
    raw, preprocessed = os.environ.get(_RAW), os.environ.get(_PREPROCESSED)
    if raw and preprocessed and root.parent.resolve() == Path(raw).expanduser().resolve():
        return Path(preprocessed).expanduser().absolute().parent
    return root.parent
