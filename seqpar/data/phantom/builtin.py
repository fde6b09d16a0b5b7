"""The built-in phantom data set, written once into the cache folder."""

import os
from pathlib import Path

from seqpar.data.files import user_cache
from seqpar.data.formats.brats import LABEL_SCHEMES
from seqpar.data.formats.brats import MODALITIES as BRATS_MODALITIES
from seqpar.data.formats.dataset import Case, Dataset
from seqpar.data.formats.joined_labels import Joins, join_labels
from seqpar.data.phantom.anatomy import FIELD_OF_VIEW
from seqpar.data.phantom.phantom_files import PhantomSettings, write_phantom
from seqpar.data.preparation.fingerprint import Fingerprint
from seqpar.data.preparation.waiting import run_token, wait_for, writing_progress
from seqpar.data.workers import Progress, no_progress


def phantom_fingerprint(cases: int, joins: Joins = ()) -> Fingerprint:
    """Returns the fingerprint of the built-in phantom data set with labels joined; it need not exist yet."""
    settings, meaning = PhantomSettings(), LABEL_SCHEMES["2023"]
    spacing = tuple(mm / side for mm, side in zip(FIELD_OF_VIEW, settings.size))
    ids = [settings.files(Path(), index)[0].parent.name for index in range(cases)]
    dataset = join_labels(
        Dataset(
            f"phantom-{cases}",
            Path(),
            "built-in phantom brains",
            tuple(Case(name, ()) for name in ids),
            BRATS_MODALITIES,
            meaning.labels,
            meaning.regions,
            meaning.order,
        ),
        joins,
    )
    return Fingerprint(
        dataset.name,
        dataset.layout,
        tuple(ids),
        (),
        BRATS_MODALITIES,
        tuple(dataset.labels),
        tuple(dataset.regions),
        (settings.size,) * cases,
        (spacing,) * cases,  # type: ignore[arg-type]
    )


def phantom(cases: int, is_first: bool, progress: Progress = no_progress) -> Path:
    """Returns the folder of the built-in phantom data set with this number of cases.

    The first process writes it if it is missing; the others wait for it.
    """
    out = user_cache() / "data" / f"phantom-{cases}"
    settings, done = PhantomSettings(), out / "complete"
    folder = settings.root(out)
    if is_first:
        if not done.exists():
            with writing_progress(out, run_token()) as announcement:

                def show(count: float, total: int) -> None:
                    announcement.tell(count, total)
                    progress(count, total)

                write_phantom(out, cases, settings, min(4, os.cpu_count() or 1), show)
                done.touch()
    else:
        wait_for(out, done, run_token(), done.exists, 600.0, progress)
    return folder
