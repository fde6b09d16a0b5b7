"""The settings of a run's data: the data set, its split, preparation and augmentation."""

import json
from dataclasses import dataclass, replace
from functools import partial

from seqpar.data.formats.joined_labels import parse_joins
from seqpar.data.formats.nnunet_plans import ImagePlan
from seqpar.data.preparation.recipe import NORMALISATIONS, PrepareSettings
from seqpar.data.sampling.augmentation import recipe_of
from seqpar.data.sampling.augmentation_presets import ORDERS, RECIPES
from seqpar.data.sampling.extra_steps import EXTRA_STEPS
from seqpar.settings.curriculum import ends_with_whole_volumes
from seqpar.settings.field import NOT_NEGATIVE, PROCESSES, TASKS, VOXELS, setting, share_bounds, whole_bounds

ALL_FOLDS = "all5"  # value of --fold: five trainings, one after the other
TARGETS = ("regions", "labels", "sigmoids")
FOREGROUND_BY = ("chance", "count")
_data = partial(setting, section="data")
OWN = "own"  # value of --prepare
_PREPARED = "the run's data were prepared with it"
_PLANNED = "nnU-Net's plan prepares the data: add --prepare own"


def _deforms(augment: str) -> bool:
    """Returns whether the augmentation interpolates; True for an unknown name, which the checks refuse."""
    try:
        return recipe_of(augment).deforms
    except ValueError:
        return True


@dataclass(frozen=True)
class DataSettings:
    """Data and their tiles; a part of ``Config``."""

    task: str = _data(
        "segment",
        "segment: labels of voxels; classify: one class per volume; pretrain: no labels",
        choices=TASKS,
        common=True,
        fixed="the network was built for it",
    )
    data: str = _data(
        "",
        "data set: folder of nnU-Net, MSD or BraTS, or list of cases of MSD or MONAI; with --task classify also images "
        "and labels.csv; none: built-in phantom brains",
        metavar="FOLDER",
        common=True,
    )
    spacing: str = _data(
        "source",
        "voxel size of the prepared data: source, median, or R,A,S in mm",
        metavar="MM",
        common=True,
        fixed=_PREPARED,
    )
    prepare: str = _data(
        OWN,
        "how to prepare data with nnU-Net's --plans or weights: as its plan says (the default then), or own: as all "
        "other data",
        metavar="HOW",
        tasks=VOXELS,
        fixed=_PREPARED,
    )
    cache: str = _data(
        "", "folder of prepared data; none: $SEQPAR_CACHE, else seqpar-prepared next to DATA", metavar="FOLDER"
    )
    fold: str = _data(
        "0",
        "held-out fold: a number in nnU-Net's or the data's split; 90:10 (no other pair); 70:15:15 or other shares "
        "(last: tests); all; all5: five runs",
        metavar="FOLD",
        common=True,
    )
    train_cases: int = _data(
        0, "cases of the fold to train on, drawn by nnU-Net's seed; 0: all", bounds=NOT_NEGATIVE, metavar="CASES"
    )
    join_labels: str = _data(
        "",
        "labels that become one class, as in tumour=1,2,3 (several: quoted)",
        metavar="NAME=LABELS",
        tasks=VOXELS,
        fixed=_PREPARED,
    )
    crop_to: tuple[int, ...] = _data(
        (),
        "three sides to which volumes are cropped; none: to what is not 0",
        metavar="VOXELS",
        fixed=_PREPARED,
        acts_when=lambda c: c.prepare == OWN,
        why=_PLANNED,
    )
    force: bool = _data(
        False,
        "let --crop-to cut off labelled voxels",
        tasks=VOXELS,
        acts_when=lambda c: bool(c.crop_to),
        why="there is no --crop-to",
    )
    normalise: str = _data(
        "by-name",
        "normalise modalities by their names, or over whole volumes",
        choices=NORMALISATIONS,
        fixed=_PREPARED,
        acts_when=lambda c: c.prepare == OWN,
        why=_PLANNED,
    )
    workers: int = _data(2, "processes per rank that prepare tiles; 0: none", bounds=PROCESSES, metavar="PROCESSES")
    augment: str = _data(
        "light",
        f"augmentation: {', '.join(RECIPES)}; add steps as in light+{next(iter(EXTRA_STEPS))}: "
        f"{', '.join(EXTRA_STEPS)}",
        metavar="RECIPE",
        common=True,
    )
    interpolation: str = _data(
        "linear",
        "how a deformed image is interpolated; batchgenerators uses cubic",
        choices=tuple(ORDERS),
        acts_when=lambda c: _deforms(c.augment),
        why="--augment {augment} deforms nothing",
    )
    synthesis: float = _data(
        0.0,
        "share of tiles that get a synthetic tumour in place of the real one",
        bounds=share_bounds(0.5),
        metavar="SHARE",
        tasks=VOXELS,
    )
    synthesis_per: str = _data(
        "tile",
        "what a synthetic tumour's contrast and place are taken from: the tile, or the volume, whose lesions must be "
        "darker than their organ (Hou et al.)",
        choices=("tile", "volume"),
        tasks=VOXELS,
        acts_when=lambda c: c.synthesis > 0,
        why="--synthesis is 0",
    )
    foreground: float = _data(
        0.33,
        "share of tiles centred on a labelled voxel (nnU-Net: 0.33)",
        bounds=share_bounds(0.33),
        metavar="SHARE",
        tasks=VOXELS,
        acts_when=lambda c: not c.foreground or not ends_with_whole_volumes(c.curriculum),
        why="the last lesson of --curriculum takes whole volumes, which have one place",
    )
    foreground_by: str = _data(
        "chance",
        "how these tiles are chosen: each by chance, or by count as the last ones of a step (nnU-Net)",
        choices=FOREGROUND_BY,
        tasks=VOXELS,
        acts_when=lambda c: bool(c.foreground),
        why="--foreground 0 centres no tile",
    )
    foreground_shift: bool = _data(
        False,
        "shift these tiles by chance, so that the labelled voxel is anywhere in its tile instead of in the middle",
        tasks=VOXELS,
        acts_when=lambda c: bool(c.foreground),
        why="--foreground 0 centres no tile",
    )
    targets: str = _data(
        "regions",
        "what to learn: regions, by sigmoids, if the data declare them; labels, by a softmax; or sigmoids, one per "
        "label",
        choices=TARGETS,
        tasks=VOXELS,
        idle_here=lambda c, here: (
            "because the data declare no regions" if here.declares_regions is False and c.targets != "sigmoids" else ""
        ),
        fixed="the network's outputs follow from it",
    )
    phantoms: int = _data(
        24,
        "number of phantom cases, if there is no --data",
        bounds=whole_bounds(1, 100_000),
        metavar="CASES",
        tasks=("segment", "pretrain"),
        acts_when=lambda c: not c.data,
        why="--data is given",
    )


def prepare_settings(config: DataSettings) -> PrepareSettings:
    """Returns the settings of preparation; raises ValueError for what cannot be, with the flag."""
    sides = config.crop_to
    if config.prepare != OWN:
        plan = planned(config)
        w, d, h = (plan.spacing[axis] for axis in plan.file_axes)
        spacing = (w, d, h) if plan.resamples else "source"
        return PrepareSettings(spacing, joins=parse_joins(config.join_labels), plan=plan)
    if sides and (len(sides) != 3 or min(sides) < 1):
        raise ValueError(f"--crop-to {' '.join(map(str, sides))}: give three sides in voxels, such as 240 240 152")
    return replace(
        PrepareSettings.spaced(config.spacing),
        joins=parse_joins(config.join_labels),
        crop_to=(sides[0], sides[1], sides[2]) if sides else None,
        normalise=config.normalise,
        cut_labels=config.force,
    )


def planned(config: DataSettings) -> ImagePlan:
    """Returns nnU-Net's plan that a run prepares its data with; it is in ``prepare``, as JSON."""
    try:
        return ImagePlan.from_json(json.loads(config.prepare))
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"--prepare {config.prepare}: give own, or remove it") from None
