"""The built-in phantom data set, written once into the cache folder."""

import os
from pathlib import Path

from seqpar.data.formats.brats import MEANINGS
from seqpar.data.formats.brats import MODALITIES as BRATS_MODALITIES
from seqpar.data.phantom.anatomy import FIELD_OF_VIEW
from seqpar.data.phantom.files import PhantomSettings, write_phantom
from seqpar.data.preparation.fingerprint import Fingerprint
from seqpar.data.preparation.waiting import announced, run_token, wait_for
from seqpar.data.workers import Progress, silent


def phantom_fingerprint(cases: int) -> Fingerprint:
    """Returns the fingerprint of the built-in phantom data set, written or not."""
    settings = PhantomSettings()
    spacing = tuple(mm / side for mm, side in zip(FIELD_OF_VIEW, settings.size))
    return Fingerprint(
        f"phantom-{cases}",
        "built-in phantom brains",
        tuple(settings.files(Path(), index)[0].parent.name for index in range(cases)),
        (),
        BRATS_MODALITIES,
        tuple(MEANINGS["2023"].labels),
        tuple(MEANINGS["2023"].regions),
        (settings.size,) * cases,
        (spacing,) * cases,  # type: ignore[arg-type]
    )


def phantom(cases: int, is_first: bool, progress: Progress = silent) -> Path:
    """Returns the folder of the built-in phantom data set with this number of cases.

    The first process writes it if it is missing, the others wait for it.
    """
    root = Path(os.environ.get("SEQPAR_CACHE") or Path.home() / ".cache" / "seqpar").expanduser()
    out = root / "data" / f"phantom-{cases}"
    settings, done = PhantomSettings(), out / "complete"
    folder = settings.root(out)
    if is_first:
        if not done.exists():
            with announced(out, run_token()) as announcement:

                def show(count: float, total: int) -> None:
                    announcement.tell(count, total)
                    progress(count, total)

                write_phantom(out, cases, settings, min(4, os.cpu_count() or 1), show)
                done.touch()
    else:
        wait_for(out, done, run_token(), done.exists, 600.0, progress)
    return folder
