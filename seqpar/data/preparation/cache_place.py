"""Where the cache of a data set lies, if nobody says."""

import hashlib
import os
from pathlib import Path

from seqpar.data.formats.dataset import Dataset

# Data sets are looked up by the beginning of a folder's name (Dataset901…): no cache may begin like one beside them.
SIBLING = "seqpar-prepared"


def cache_folder(dataset: Dataset, out: str | Path | None = None) -> Path:
    """Returns the folder of a data set's cache: ``out``, or else the first of these places.

    - in $SEQPAR_CACHE, with a digest of the data set's path in the name: names may repeat
    - for a data set of $nnUNet_raw, in ``seqpar-prepared`` beside $nnUNet_preprocessed
    - in ``seqpar-prepared`` beside the data set
    """
    if out is not None:
        return Path(out).expanduser().absolute()
    if "SEQPAR_CACHE" in os.environ:
        place = hashlib.blake2b(os.fsencode(dataset.root.resolve()), digest_size=4).hexdigest()
        return Path(os.environ["SEQPAR_CACHE"]).expanduser().absolute() / f"{dataset.name}-{place}"
    return _neighbour(dataset.root) / SIBLING / dataset.root.name


def _neighbour(root: Path) -> Path:
    """Returns the folder in which the caches' own folder lies."""
    raw, preprocessed = os.environ.get("nnUNet_raw"), os.environ.get("nnUNet_preprocessed")
    if raw and preprocessed and root.parent.resolve() == Path(raw).expanduser().resolve():
        return Path(preprocessed).expanduser().absolute().parent
    return root.parent
