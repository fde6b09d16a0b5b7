"""Reads plans.json and dataset.json, which nnU-Net stores with its networks, in their older forms too.

Axes are nnU-Net's: those of the file reversed (z y x), then transposed as the plans say.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from seqpar.data.errors import DataError
from seqpar.data.formats.dataset_json import modalities_of, whole_numbers

Read = TypeVar("Read")

SCHEMES = (
    "CTNormalization",
    "ZScoreNormalization",
    "NoNormalization",
    "RescaleTo01Normalization",
    "RGBTo01Normalization",
)
READERS = ("SimpleITKIO", "NibabelIO", "SimpleITKIOWithReorient", "NibabelIOWithReorient")
NONE = "no_resampling_hack"
BY_TORCH = "resample_torch_fornnunet"
RESAMPLINGS = ("resample_data_or_seg_to_shape", NONE, BY_TORCH)
# The only values of its arguments that are built here, which are those of nnU-Net's planners.
_TORCH_OPTIONS = {
    "memefficient_seg_resampling": False,
    "mode": "linear",
    "aniso_axis_mode": "nearest-exact",
    "separate_z_anisotropy_threshold": 3,
}


@dataclass(frozen=True)
class Resampling:
    """How volumes are resampled.

    - ``function``: one of ``RESAMPLINGS``
    - ``order``: of the spline (torch's is linear); ``order_z``: along an axis of much larger spacing, which is
      resampled separately
    - ``force_separate_z``: whether one axis is resampled separately; None: the spacing decides
    """

    function: str = RESAMPLINGS[0]
    order: int = 3
    order_z: int = 0
    force_separate_z: bool | None = None


@dataclass(frozen=True)
class ImagePlan:
    """How nnU-Net prepares images: the part of a plan that prepared data follow.

    - ``masked``: whether a channel's mean and standard deviation are those of its nonzero voxels
    - ``intensities``: mean, standard deviation and 0.5 and 99.5 percentiles of each channel's foreground
    - ``resampling``: of images; ``label_resampling``: of labels; ``logit_resampling``: of logits on their way back
    """

    spacing: tuple[float, ...]
    transpose_forward: tuple[int, ...]
    schemes: tuple[str, ...]
    masked: tuple[bool, ...]
    intensities: tuple[dict[str, float], ...]
    resampling: Resampling
    label_resampling: Resampling
    logit_resampling: Resampling
    reader: str

    @property
    def file_axes(self) -> tuple[int, ...]:
        """The axis of the network for each axis W D H of a file."""
        return tuple(self.transpose_forward.index(2 - axis) for axis in range(3))

    @property
    def turns(self) -> bool:
        """Whether volumes are turned to canonical axes before the axes are reversed."""
        return self.reader.endswith("WithReorient")

    @property
    def of_images(self) -> "ImagePlan":
        """This plan without its network."""
        return ImagePlan(**{own.name: getattr(self, own.name) for own in fields(ImagePlan)})

    @property
    def resamples(self) -> bool:
        """Whether images are resampled; else each keeps its spacing."""
        return self.resampling.function != NONE

    def spaced(self, spacing: str | Sequence[float]) -> "ImagePlan":
        """Returns this plan of images with another spacing: three sizes along W D H, or "source" for each its own."""
        if spacing == "source":
            steps = ("resampling", "label_resampling", "logit_resampling")
            return replace(self.of_images, **{name: replace(getattr(self, name), function=NONE) for name in steps})
        if isinstance(spacing, str):
            raise ValueError(f"--spacing {spacing}: nnU-Net's plan takes three sizes in mm, or source; give those")
        sizes = dict(zip(self.file_axes, spacing))
        return replace(self.of_images, spacing=tuple(sizes[axis] for axis in range(3)))

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` reads."""
        return asdict(self.of_images)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "ImagePlan":
        """Returns the plan that `to_json` wrote."""
        read: dict[str, Any] = {name: tuple(part) if isinstance(part, list) else part for name, part in value.items()}
        steps: dict[str, Any] = {
            name: Resampling(**part) for name, part in value.items() if name.endswith("resampling")
        }
        return ImagePlan(**{**read, **steps})


@dataclass(frozen=True)
class NnunetPlan(ImagePlan):
    """One configuration of nnU-Net's plans: how images are prepared, and the network's arguments."""

    configuration: str
    patch_size: tuple[int, ...]
    batch_size: int
    batch_dice: bool
    network_class: str
    network_arguments: Mapping[str, Any]


@dataclass(frozen=True)
class NnunetDeclaration:
    """What nnU-Net's dataset.json declares about channels and outputs.

    - ``labels``: name to value, background first, without the ignore label
    - ``regions``: the labels of each output if outputs are regions, else empty
    - ``regions_class_order``: the label that each region's voxels get
    """

    channels: tuple[str, ...]
    labels: dict[str, int]
    regions: dict[str, tuple[int, ...]]
    regions_class_order: tuple[int, ...]

    @property
    def num_outputs(self) -> int:
        """Returns how many outputs a network has."""
        return len(self.regions or self.labels)


def plan_of(plans: Mapping[str, Any], configuration: str, path: Path) -> NnunetPlan:
    """Returns a configuration of plans.json with what it inherits; raises DataError for options that are not supported.

    - ``path``: for messages
    """
    configurations = plans.get("configurations")
    if not isinstance(configurations, dict) or configuration not in configurations:
        names = ", ".join(configurations) if isinstance(configurations, dict) else "none"
        raise DataError(path, f"has no configuration {configuration!r}, only {names}; use plans of the same folder")
    own = _inherited(configurations, configuration, path)
    _refuse(own, configuration, path)

    def read(key: str, make: Callable[[Any], Read], source: Mapping[str, Any] = own, of: str = "") -> Read:
        value = source[key]
        try:
            return make(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            name = of or f"{key} of configuration {configuration}"
            raise DataError(path, f"{name} is {value!r} ({error}); copy the file again") from error

    try:
        old = "foreground_intensity_properties_by_modality"
        intensities = plans.get("foreground_intensity_properties_per_channel") or plans[old]
        network_class, arguments = _architecture(own, path)
        schemes = read("normalization_schemes", tuple[str, ...])
        plan = NnunetPlan(
            spacing=read("spacing", lambda sizes: tuple(map(_length, sizes))),
            transpose_forward=read("transpose_forward", lambda axes: tuple(map(int, axes)), plans, "transpose_forward"),
            schemes=schemes,
            masked=read("use_mask_for_norm", lambda masks: tuple(map(bool, masks))),
            intensities=tuple(
                read(str(n), partial(_intensity, scheme), intensities, f"the intensity of channel {n}")
                for n, scheme in enumerate(schemes)
            ),
            resampling=_resampling(own, "data"),
            label_resampling=_resampling(own, "seg"),
            logit_resampling=_resampling(own, "probabilities"),
            reader=str(plans["image_reader_writer"]),
            configuration=configuration,
            patch_size=read("patch_size", lambda sides: tuple(map(_count, sides))),
            batch_size=read("batch_size", _count),
            batch_dice=bool(own["batch_dice"]),
            network_class=network_class,
            network_arguments=arguments,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(path, f"lacks what configuration {configuration} needs ({error}); copy it again") from error
    _refuse_unknown(plan, path)
    return plan


def _length(value: Any) -> float:
    if not 0 < float(value) < math.inf:
        raise ValueError("it must be above 0")
    return float(value)


def _count(value: Any) -> int:
    if int(value) != value or value < 1:
        raise ValueError("it must be a whole number above 0")
    return int(value)


def _intensity(scheme: str, known: Mapping[str, Any]) -> dict[str, float]:
    """Returns the statistics of a channel, which one scheme reads."""
    names = ("mean", "std", "percentile_00_5", "percentile_99_5") if scheme == SCHEMES[0] else ()
    if not all(math.isfinite(known[name]) for name in names):
        raise ValueError(f"{', '.join(names)} must be finite numbers")
    if names and (known[names[1]] < 0 or known[names[2]] > known[names[3]]):
        raise ValueError(f"{names[1]} must be 0 or more, and {names[2]} at most {names[3]}")
    return dict(known)


def patch_size_of(plans: Mapping[str, Any], configuration: str) -> tuple[int, ...]:
    """Returns the patch size of a configuration without checking the rest of the plans."""
    own = _inherited(plans["configurations"], configuration, Path("plans"))
    return tuple(map(int, own["patch_size"]))


def declaration_of(content: Mapping[str, Any], path: Path) -> NnunetDeclaration:
    """Returns what dataset.json declares; ``path``: for messages."""
    declared = content.get("labels")
    if not isinstance(declared, dict) or "background" not in declared:
        raise DataError(path, f'labels is {declared!r}; it must look like {{"background": 0, "tumour": 1}}')
    members = {name: whole_numbers(value, path) for name, value in declared.items() if name != "ignore"}
    values = sorted({value for many in members.values() for value in many})
    if values != list(range(len(values))):
        raise DataError(path, f"its labels have the values {values}; nnU-Net numbers them from 0 without gaps")
    single = {many[0]: name for name, many in reversed(members.items()) if len(many) == 1}
    labels = {single.get(value, f"label {value}"): value for value in values}
    channels = modalities_of(dict(content), path)
    if not any(isinstance(value, list) and len(value) > 1 for value in declared.values()):
        return NnunetDeclaration(channels, labels, {}, ())
    regions = {name: many for name, many in members.items() if set(many) != {0}}
    order = content.get("regions_class_order")
    if not isinstance(order, list) or len(order) != len(regions) or not all(value in values for value in order):
        raise DataError(path, f"regions_class_order is {order!r}; give a label for each of {', '.join(regions)}")
    return NnunetDeclaration(channels, labels, regions, tuple(map(int, order)))


def _inherited(configurations: Mapping[str, Any], name: str, path: Path, seen: Sequence[str] = ()) -> dict[str, Any]:
    if name not in configurations or name in seen:
        raise DataError(path, f"a configuration inherits from {name!r}, which is missing or inherits from it in turn")
    own = configurations[name]
    if not isinstance(own, Mapping):
        raise DataError(path, f"configuration {name} is {own!r}; an object with its settings is needed")
    parent = own.get("inherits_from")
    return {**(_inherited(configurations, parent, path, (*seen, name)) if parent else {}), **own}


def _refuse(own: Mapping[str, Any], name: str, path: Path) -> None:
    if own.get("previous_stage"):
        raise DataError(
            path, f"configuration {name} is the second stage of a cascade (previous_stage {own['previous_stage']}), "
            "which also takes the first stage's labels and is not supported; use 3d_fullres or 3d_lowres"
        )  # fmt: skip
    for key, options in own.items():
        if own.get(key.removesuffix("_kwargs")) == BY_TORCH and isinstance(options, Mapping):
            for option, value in _TORCH_OPTIONS.items():
                if options.get(option, value) != value:
                    raise DataError(path, f"{key} has {option} {options[option]!r}; supported: {value!r}")
    if isinstance(own.get("patch_size"), list) and len(own["patch_size"]) == 2:
        raise DataError(path, f"configuration {name} is 2d (patch {own['patch_size']}); only 3d networks are supported")


def _refuse_unknown(plan: NnunetPlan, path: Path) -> None:
    """Raises DataError for options of the plans that are not supported."""
    steps = (plan.resampling, plan.label_resampling, plan.logit_resampling)
    for name, used, known in (
        ("normalization_schemes", plan.schemes, SCHEMES),
        ("image_reader_writer", (plan.reader,), READERS),
        ("resampling_fn", tuple(step.function for step in steps), RESAMPLINGS),
        ("force_separate_z", tuple(str(step.force_separate_z) for step in steps), ("None", "False")),
        ("order of resampling_fn_data", (plan.resampling.order,), range(6)),
        ("order of resampling_fn_probabilities", (plan.logit_resampling.order,), (1,)),
        ("order of resampling_fn_seg", (plan.label_resampling.order,), (0, 1)),
        ("order_z", tuple(step.order_z for step in steps), (0,)),
    ):
        if unknown := [value for value in used if value not in known]:
            raise DataError(path, f"{name} is {unknown[0]}; supported: {', '.join(map(str, known))}")
    if len(plan.masked) != len(plan.schemes):
        raise DataError(path, f"has {len(plan.schemes)} normalization_schemes but {len(plan.masked)} use_mask_for_norm")
    if sorted(plan.transpose_forward) != [0, 1, 2] or len(plan.spacing) != 3 or len(plan.patch_size) != 3:
        raise DataError(
            path, f"transpose_forward {plan.transpose_forward}, spacing {plan.spacing} and patch_size "
            f"{plan.patch_size} do not have three axes; copy the file again"
        )  # fmt: skip


def _resampling(own: Mapping[str, Any], what: str) -> Resampling:
    function = own.get(f"resampling_fn_{what}", RESAMPLINGS[0])
    options = own.get(f"resampling_fn_{what}_kwargs") or {}
    default = 3 if what == "data" else 1
    try:
        order, order_z = options.get("order", default), options.get("order_z", 0)
        if int(order) != order or int(order_z) != order_z:
            raise ValueError("an order is no whole number")
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"resampling_fn_{what}_kwargs is {options!r}") from error
    return Resampling(str(function), int(order), int(order_z), options.get("force_separate_z"))


def _architecture(own: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """Returns the network's class name and arguments; older plans have them as separate keys."""
    if "architecture" in own:
        return str(own["architecture"]["network_class_name"]), dict(own["architecture"]["arch_kwargs"])
    name = str(own["UNet_class_name"])
    kernels, strides = own["conv_kernel_sizes"], own["pool_op_kernel_sizes"]
    base, most = int(own["UNet_base_num_features"]), int(own["unet_max_num_features"])
    if len(kernels) < 2 or len(kernels) != len(strides):
        counts = f"{len(kernels)} conv_kernel_sizes but {len(strides)} pool_op_kernel_sizes"
        raise DataError(path, f"has {counts}; copy the file again")
    return name, {
        "n_stages": len(kernels),
        "features_per_stage": [min(base << stage, most) for stage in range(len(kernels))],
        "kernel_sizes": kernels,
        "strides": strides,
        "n_blocks_per_stage" if "Residual" in name else "n_conv_per_stage": own["n_conv_per_stage_encoder"],
        "n_conv_per_stage_decoder": own["n_conv_per_stage_decoder"],
        "conv_bias": True,
        "norm_op": "InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "nonlin": "LeakyReLU",
    }
