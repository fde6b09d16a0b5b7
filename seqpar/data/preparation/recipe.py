"""The recipe: what preparation does to every case, decided once from the settings and a survey of the cases."""

import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Dataset, soft_labels
from seqpar.data.formats.joined_labels import Joins
from seqpar.data.formats.nnunet_plans import SCHEMES, ImagePlan

if TYPE_CHECKING:
    from seqpar.losses import SoftLabels

_CLIP = re.compile(r"clip\b", re.IGNORECASE)
BY_NAME, BY_VOLUME = "by-name", "volume"
NORMALISATIONS = (BY_NAME, BY_VOLUME)
IN_HU = {"ct", "CTNormalization"}  # schemes of images in Hounsfield units: ours, and that of nnU-Net's plans
SURVEYED = {"ct", "zscore"}  # schemes that depend on what is in the images
_SCHEMES = {*SURVEYED, "clip", BY_VOLUME, "none"}


@dataclass(frozen=True)
class PrepareSettings:
    """The settings of a preparation.

    - ``spacing``: "source", "median" or three sizes in mm (R, A, S)
    - ``locations``: voxels stored per class and case, to centre tiles on
    - ``joins``: labels that become one class
    - ``crop_to``: the sides that volumes are cut to, in voxels of the files; None: to the nonzero part
    - ``normalise``: by the modalities' names, or each over its whole volume
    - ``cut_labels``: whether ``crop_to`` may cut off labelled voxels
    - ``plan``: nnU-Net's, which then decides crop, normalisation and resampling
    """

    spacing: str | tuple[float, float, float] = "source"
    locations: int = 10_000
    joins: Joins = ()
    crop_to: tuple[int, int, int] | None = None
    normalise: str = BY_NAME
    cut_labels: bool = False
    plan: ImagePlan | None = None

    def described(self) -> dict[str, Any]:
        """Returns the settings as the cache stores them; those added later are omitted if they have no effect."""
        own = {"spacing": self.spacing, "locations": self.locations}
        usual = {"joins": (), "crop_to": None, "normalise": BY_NAME, "cut_labels": False}
        more = {name: getattr(self, name) for name in usual}
        planned = {"plan": self.plan.to_json()} if self.plan else {}
        return own | {name: value for name, value in more.items() if value != usual[name]} | planned

    def __post_init__(self) -> None:
        if self.normalise not in NORMALISATIONS:
            raise ValueError(f"normalise is {self.normalise!r}; choose one of {', '.join(NORMALISATIONS)}")
        if self.crop_to is not None and (len(self.crop_to) != 3 or min(self.crop_to) < 1):
            raise ValueError(f"crop_to is {self.crop_to}; it must be three sides of at least 1 voxel")
        if self.locations < 1:
            raise ValueError(f"locations is {self.locations}; it must be at least 1")
        if isinstance(self.spacing, str):
            if self.spacing not in ("source", "median"):
                raise ValueError(f"spacing is {self.spacing!r}; it must be source, median or three sizes in mm")
        elif len(self.spacing) != 3 or not all(0 < size < np.inf for size in self.spacing):
            raise ValueError(f"spacing is {self.spacing}; it must be three positive sizes in mm")

    @property
    def own_spacing(self) -> str | tuple[float, float, float]:
        """The spacing that was asked for here, and by no plan."""
        return "source" if self.plan else self.spacing

    @staticmethod
    def spaced(text: str) -> "PrepareSettings":
        """Returns the settings for a spacing as typed on the command line: source, median, or sizes such as 1,1,1."""
        try:
            if "," not in text:
                return PrepareSettings(text)
            w, d, h = (float(part) for part in text.split(","))
            return PrepareSettings((w, d, h))
        except ValueError:
            raise ValueError(f"--spacing {text}: give source, median, or three sizes above 0 in mm, as 1,1,1") from None


@dataclass(frozen=True)
class Intensity:
    """How a CT channel is normalised: clipped to low and high, then (x − mean) / std."""

    low: float
    high: float
    mean: float
    std: float


@dataclass(frozen=True)
class Recipe:
    """What is done to each case, in training and in prediction."""

    modalities: tuple[str, ...]
    schemes: tuple[str, ...]  # per modality: "zscore", "ct", "clip", "volume" or "none"; a plan's own names
    intensities: tuple[Intensity | None, ...]  # per modality, for "ct" and "clip"
    spacing: tuple[float, float, float] | None  # None: each case keeps its own
    values: tuple[int, ...]  # the file's label for each class id, the ignore label last
    has_ignore: bool
    locations: int
    joined: tuple[tuple[int, int], ...] = ()  # values in the files that are read as another value
    crop_to: tuple[int, ...] | None = None
    cut_labels: bool = field(default=False, compare=False)
    plan: ImagePlan | None = None  # nnU-Net's, if data are prepared by one
    readers: int = 0  # whose labels each case has, if there are several
    probabilities: bool = False  # label files are 4-D

    @property
    def soft(self) -> "SoftLabels | None":
        """How labels with doubt are stored; None: each voxel has a class id."""
        return soft_labels(len(self.values), self.readers, self.probabilities)

    @property
    def label_values(self) -> tuple[int, ...]:
        """The values that the channels of a label file stand for; one of them if it is a label map."""
        return tuple(sorted({*self.values, *dict(self.joined)})) if self.probabilities else self.values[:1]

    @property
    def ignore_id(self) -> int | None:
        """Returns the class id of the ignore label, if there is one."""
        return len(self.values) - 1 if self.has_ignore else None

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` reads."""
        own = asdict(replace(self, plan=None)) | {"plan": self.plan.to_json() if self.plan else None}
        added = {"plan": None, "readers": 0, "probabilities": False}  # omitted where earlier versions had none
        return {name: value for name, value in own.items() if name not in added or value != added[name]}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Recipe":
        """Returns the recipe that `to_json` wrote."""
        intensities = tuple(None if one is None else Intensity(**one) for one in value["intensities"])
        lists = {key: tuple(value[key]) for key in ("modalities", "schemes", "values")}
        spacing, crop_to = (value.get(key) and tuple(value[key]) for key in ("spacing", "crop_to"))
        joined = tuple((int(a), int(b)) for a, b in value.get("joined", ()))
        whole = {"intensities": intensities, "spacing": spacing, "crop_to": crop_to, "joined": joined}
        whole["plan"] = ImagePlan.from_json(value["plan"]) if value.get("plan") else None
        recipe = Recipe(**{**value, **lists, **whole})
        recipe._refuse_damaged()
        return recipe

    def _refuse_damaged(self) -> None:
        """Raises ValueError for what no preparation decides: other data than the trained ones would come of it."""
        known = SCHEMES if self.plan else _SCHEMES
        wrong = [scheme for scheme in self.schemes if scheme not in known]
        lacking = [s for s, one in zip(self.schemes, self.intensities) if s in ("ct", "clip") and one is None]
        sizes, counts = self.spacing, {len(self.modalities), len(self.schemes), len(self.intensities)}
        numbers = [number for one in self.intensities if one for number in (one.low, one.high, one.mean, one.std)]
        named = all(isinstance(name, str) for name in self.modalities)
        if not named or wrong or lacking or len(counts) > 1 or not all(_is_finite(number) for number in numbers):
            raise ValueError(
                f"the recipe normalises {self.modalities} by {self.schemes} and {self.intensities}: it is damaged"
            )
        if sizes is not None and not (len(sizes) == 3 and all(_is_finite(size) and size > 0 for size in sizes)):
            raise ValueError(f"the recipe has the spacing {sizes}, and not three sizes in mm: it is damaged")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value))


def schemes_of(modalities: Sequence[str]) -> tuple[str, ...]:
    """Returns how to normalise each modality: its name decides, as in nnU-Net; "clip a:b" is our own."""
    known = {"ct": "ct", "nonorm": "none"}
    return tuple("clip" if _CLIP.match(name) else known.get(name.lower(), "zscore") for name in modalities)


def _clipped(name: str, dataset: Dataset) -> Intensity | None:
    """Returns the intensity that maps a to b onto 0 to 1, for a modality named "clip a:b"; None for other names."""
    if not _CLIP.match(name):
        return None
    try:
        low, high = (float(part) for part in name.split(maxsplit=1)[1].split(":"))
    except (IndexError, ValueError):
        low = high = 0.0
    if not -np.inf < low < high < np.inf:
        raise DataError(dataset.root, f"modality {name!r} gives no range; give two numbers, as in clip -160:240")
    return Intensity(low, high, low, high - low)


def needs_survey(dataset: Dataset, settings: PrepareSettings) -> bool:
    """Returns whether the recipe depends on the content of the files."""
    return settings.spacing == "median" or not SURVEYED.isdisjoint(_schemes(dataset, settings))


def _schemes(dataset: Dataset, settings: PrepareSettings) -> tuple[str, ...]:
    """Returns how to normalise each modality."""
    if settings.plan is not None:
        if len(settings.plan.schemes) != len(dataset.modalities):
            raise DataError(
                dataset.root,
                f"has {len(dataset.modalities)} channels ({', '.join(dataset.modalities)}), and nnU-Net's plan "
                f"normalises {len(settings.plan.schemes)}: take data with as many, or add --prepare own",
            )
        return settings.plan.schemes
    by_name = schemes_of(dataset.modalities)
    return by_name if settings.normalise == BY_NAME else (BY_VOLUME,) * len(by_name)


def draft_recipe(dataset: Dataset, settings: PrepareSettings) -> Recipe:
    """Returns the recipe without the values that need a survey."""
    schemes = _schemes(dataset, settings)
    ignore = () if dataset.ignore_label is None else (dataset.ignore_label,)
    return Recipe(
        modalities=dataset.modalities,
        schemes=schemes,
        intensities=tuple(
            _clipped(name, dataset) if scheme == "clip" else None for name, scheme in zip(dataset.modalities, schemes)
        ),
        spacing=None if isinstance(settings.spacing, str) else settings.spacing,
        values=(*dataset.labels.values(), *ignore),
        has_ignore=bool(ignore),
        locations=settings.locations,
        joined=tuple(sorted(dataset.joined.items())),
        crop_to=settings.crop_to,
        cut_labels=settings.cut_labels,
        plan=settings.plan,
        readers=len(dataset.readers),
        probabilities=dataset.probabilities,
    )


def generator(*key: str | int) -> np.random.Generator:
    """Returns a random generator that depends on the key alone, not on order or process."""
    return np.random.default_rng([zlib.crc32(str(part).encode()) for part in key])
