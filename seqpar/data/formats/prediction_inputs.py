"""Cases to predict: from any data set that training reads, a folder of images, or single files."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.nnunet import of_images
from seqpar.data.formats.recognise import describe, find
from seqpar.data.volumes import SUFFIXES


def find_inputs(given: Sequence[str | Path], modalities: Sequence[str]) -> tuple[list[Case], list[DataError]]:
    """Returns the cases to predict, their files in the order of ``modalities``, and what is wrong with others."""
    places = [find(path) for path in given]
    if all(place.is_file() and place.name.endswith(SUFFIXES) for place in places):
        dataset = of_images(places[0].parent, places, tuple(modalities))
    elif len(places) == 1:
        dataset = describe(places[0], labelled=False)
    else:
        other = next(place for place in places if not (place.is_file() and place.name.endswith(SUFFIXES)))
        raise DataError(other, f"is no {' or '.join(SUFFIXES)} file; give several files, or one folder or list")
    cases = [_ordered(case, dataset.modalities, modalities) for case in dataset.cases]
    twice = [name for name, times in Counter(case.id for case in cases).items() if times > 1]
    if twice:
        raise DataError(dataset.root, f"holds case {twice[0]} twice; keep one of them")
    return sorted(cases, key=lambda case: case.id), list(dataset.faults)


def _ordered(case: Case, named: Sequence[str], wanted: Sequence[str]) -> Case:
    """Returns the case with its files in the order that the network knows; unnamed channels are taken as they come."""
    given, needed = [name.casefold() for name in named], [name.casefold() for name in wanted]
    if given == needed or all(name.startswith("channel ") for name in given):
        return case
    if sorted(given) != sorted(needed) or len(case.images) != len(needed) or len(set(given)) < len(given):
        raise DataError(
            case.images[0], f"its modalities are {', '.join(named)}; the network knows {', '.join(wanted)}: "
            "give these, a file each"
        )  # fmt: skip
    return replace(case, images=tuple(case.images[given.index(name)] for name in needed))
