"""The kinds of phantoms: what each shows, and how its files describe it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from seqpar.data.formats.brats import MODALITIES
from seqpar.data.phantom import abdomen, anatomy, brain, head_neck, vessels
from seqpar.data.phantom.fields import Extent, PhantomCase

Size = tuple[int, int, int]


def _all_classes(seed: int, index: int) -> tuple[str, ...] | None:
    return None


@dataclass(frozen=True)
class PhantomKind:
    """A kind of phantom.

    ``make_case``: takes seed, case index and size; ``size``: the default; ``layouts``: the default first. ``dataset``:
    the name of its folder; ``title``, ``description``, ``channels`` and ``classes`` (labels, and regions if any): for
    nnU-Net's dataset.json. ``annotated``: the classes that the label of a case (seed, index) shows, None for all.
    ``class_of``: the class of a whole case (seed, index), for kinds whose task is to classify.
    """

    make_case: Callable[[int, int, Size], PhantomCase]
    size: Size
    field_of_view: Extent
    layouts: tuple[str, ...]
    dataset: str
    title: str
    description: str
    channels: tuple[str, ...]
    classes: dict[str, Any]
    annotated: Callable[[int, int], tuple[str, ...] | None] = _all_classes
    class_of: Callable[[int, int], str] | None = None


def _partly(seed: int, index: int) -> tuple[str, ...] | None:
    shown = head_neck.annotated(seed, index)
    return None if shown == head_neck.ORGANS else shown


KINDS = {
    "brain": PhantomKind(
        brain.make_case,
        brain.DEFAULT_SIZE,
        anatomy.FIELD_OF_VIEW,
        ("brats", "nnunet"),
        "Dataset999_Phantom",
        "Phantom",
        "generated brains with tumours, four modalities",
        MODALITIES,
        {
            "labels": {"background": 0, "WT": [1, 2, 3], "TC": [1, 3], "ET": [3]},
            "regions_class_order": [2, 1, 3],  # each region is drawn over the one before
        },
    ),
    "liver": PhantomKind(
        abdomen.make_case,
        abdomen.DEFAULT_SIZE,
        abdomen.FIELD_OF_VIEW,
        ("nnunet",),
        "Dataset998_PhantomLiver",
        "PhantomLiver",
        "generated livers with lesions in CT numbers",
        ("CT",),
        {"labels": abdomen.LABELS},
    ),
    "organs": PhantomKind(
        head_neck.make_case,
        head_neck.DEFAULT_SIZE,
        head_neck.FIELD_OF_VIEW,
        ("nnunet",),
        "Dataset997_PhantomOrgans",
        "PhantomOrgans",
        "generated heads and necks in CT numbers, nine organs, not all of them in every case",
        ("clip -150:250",),
        {"labels": head_neck.LABELS},
        _partly,
    ),
    "vessels": PhantomKind(
        vessels.make_case,
        vessels.DEFAULT_SIZE,
        vessels.FIELD_OF_VIEW,
        ("nnunet",),
        "Dataset996_PhantomVessels",
        "PhantomVessels",
        "generated trees of vessels in CT numbers, one to three voxels thick",
        ("CT",),
        {"labels": vessels.LABELS},
    ),
    "dementia": PhantomKind(
        brain.make_dementia_case,
        brain.DEMENTIA_SIZE,
        anatomy.FIELD_OF_VIEW,
        ("classes",),
        "PhantomDementia",
        "PhantomDementia",
        "generated brains in T1 with one class each, healthy or dementia; their regions are stored separately",
        ("T1",),
        {},
        class_of=brain.class_of,
    ),
}
