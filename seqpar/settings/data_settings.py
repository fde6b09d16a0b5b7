"""The settings of a run that say what it trains on."""

from dataclasses import dataclass
from functools import partial

from seqpar.data.preparation.recipe import NORMALISATIONS
from seqpar.data.sampling.augmentation_presets import ORDERS, RECIPES
from seqpar.data.sampling.extra_steps import EXTRA_STEPS
from seqpar.settings.field import NOT_NEGATIVE, setting, share_bounds

ALL_FOLDS = "all5"  # value of --fold: five trainings, one after the other
TARGETS = ("regions", "labels", "sigmoids")
TASKS = ("segment", "classify", "pretrain")
FOREGROUND_BY = ("chance", "count")
_data = partial(setting, topic="data")


@dataclass(frozen=True)
class DataSettings:
    """Data and their tiles; a part of ``Config``."""

    task: str = _data(
        "segment", "segment: labels of voxels; classify: one class a volume; pretrain: no labels", choices=TASKS
    )
    data: str = _data(
        "",
        "data set: folder of nnU-Net, MSD or BraTS, or list of cases of MSD or MONAI; with --task classify also images "
        "and labels.csv; none: built-in phantom brains",
        metavar="FOLDER",
    )
    out: str = _data("", "run folder; none: runs/<preset>-<time>", metavar="FOLDER")
    spacing: str = _data("source", "voxel size of the prepared data: source, median, or R,A,S in mm", metavar="MM")
    cache: str = _data(
        "", "folder of prepared data; none: $SEQPAR_CACHE, else seqpar-prepared near DATA", metavar="FOLDER"
    )
    fold: str = _data(
        "0",
        "held-out fold: number of nnU-Net's or the data set's own, 90:10, 70:15:15 (the last for tests), or all; "
        "all5: five runs",
        metavar="FOLD",
    )
    train_cases: int = _data(
        0, "cases of the fold to train on, drawn by nnU-Net's seed; 0: all", bounds=NOT_NEGATIVE, metavar="CASES"
    )
    join_labels: str = _data(
        "", "labels that become one class, as tumour=1,2,3 (several: quoted)", metavar="NAME=LABELS"
    )
    crop_to: tuple[int, ...] = _data(
        (),
        "three sides to cut volumes to; none: to what is not 0",
        metavar="VOXELS",
    )
    force: bool = _data(False, "let --crop-to cut off labelled voxels")
    normalise: str = _data(
        "by-name",
        "modalities are normalised by their names, or over whole volumes",
        choices=NORMALISATIONS,
    )
    workers: int = _data(2, "processes per rank that prepare tiles; 0: none", bounds=NOT_NEGATIVE, metavar="PROCESSES")
    augment: str = _data(
        "light",
        f"augmentation: {', '.join(RECIPES)}; steps are added as in light+{next(iter(EXTRA_STEPS))}: "
        f"{', '.join(EXTRA_STEPS)}",
        metavar="RECIPE",
    )
    interpolation: str = _data(
        "linear", "how a deformed image is interpolated; batchgenerators takes cubic", choices=tuple(ORDERS)
    )
    synthesis: float = _data(
        0.0,
        "share of tiles that get a synthetic tumour in place of the real one",
        bounds=share_bounds(0.5),
        metavar="SHARE",
    )
    synthesis_per: str = _data(
        "tile",
        "where a synthetic tumour's contrast and place are found: the tile, or the volume, whose lesions must be "
        "darker than their organ (Hou et al.)",
        choices=("tile", "volume"),
    )
    foreground: float = _data(
        0.33, "share of tiles centred on a labelled voxel (nnU-Net: 0.33)", bounds=share_bounds(0.33), metavar="SHARE"
    )
    foreground_by: str = _data(
        "chance",
        "which tiles these are: each by chance, or by count the last ones of a step (nnU-Net)",
        choices=FOREGROUND_BY,
    )
    targets: str = _data(
        "regions",
        "what to learn: regions, by sigmoids, where the data declare some; labels, by a softmax; or sigmoids, one of "
        "each label",
        choices=TARGETS,
    )
    phantoms: int = _data(24, "number of phantom cases where no --data is given", metavar="CASES")
