"""Cases to predict: from any data set that training reads, a folder of images, or single files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from seqpar.data.errors import DataError
from seqpar.data.files import SUFFIXES
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.nnunet_folders import of_images
from seqpar.data.formats.recognise import describe, find, refuse_twice
from seqpar.data.volumes import is_volume


def find_inputs(paths: Sequence[str | Path], modalities: Sequence[str]) -> tuple[list[Case], list[DataError]]:
    """Returns the cases to predict, with their files in the order of ``modalities``, and the faults of other cases."""
    places = [find(path) for path in paths]
    if all(map(is_volume, places)):
        dataset = of_images(places[0].parent, places, tuple(modalities))
    elif len(places) == 1:
        dataset = describe(places[0], labelled=False)
    else:
        other = next(place for place in places if not is_volume(place))
        raise DataError(
            other,
            f"is no {' or '.join(SUFFIXES)} file and no DICOM series; give several of them, or one folder or list",
        )
    cases = [_ordered(case, dataset.modalities, modalities) for case in dataset.cases]
    refuse_twice(dataset.root, cases)
    return sorted(cases, key=lambda case: case.id), list(dataset.faults)


def _ordered(case: Case, modalities: Sequence[str], trained: Sequence[str]) -> Case:
    """Returns the case with its files in the network's order of modalities; unnamed channels keep theirs.

    trained: the modalities that the network was trained on.
    """
    names, needed = [name.casefold() for name in modalities], [name.casefold() for name in trained]
    if names == needed or all(name.startswith("channel ") for name in names):
        return case
    if sorted(names) != sorted(needed) or len(case.images) != len(needed) or len(set(names)) < len(names):
        raise DataError(
            case.images[0], f"its modalities are {', '.join(modalities)}; the network knows {', '.join(trained)}: "
            "give these, a file each"
        )  # fmt: skip
    return replace(case, images=tuple(case.images[names.index(name)] for name in needed))
