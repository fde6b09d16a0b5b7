"""nnU-Net's networks, PlainConvUNet and ResidualEncoderUNet: planned for a tile as its planner does, or read from a
plan.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from seqpar.decoders.unets.architecture import Architecture, Style, Three, three
from seqpar.decoders.unets.unet import UNet
from seqpar.decoders.unets.unet_blocks import ResidualBlock
from seqpar.parallel.mesh import AnyGroup

FEATURES, MOST_FEATURES = 32, 320
RESIDUAL_BLOCKS = (1, 3, 4, 6, 6, 6, 6, 6, 6, 6)  # per stage of the encoder
CLASSES = {"PlainConvUNet": "plain", "ResidualEncoderUNet": "residual"}
BLOCKS = {"BasicBlockD": "residual", "BottleneckD": "bottleneck"}
_SMALLEST = 4  # minimum side of the coarsest stage
_READ = (  # known keys of a plan's arch_kwargs; deep supervision concerns training, not the network
    "n_stages features_per_stage kernel_sizes strides n_conv_per_stage_decoder conv_op conv_bias norm_op "
    "norm_op_kwargs nonlin nonlin_kwargs deep_supervision"
)
_NUMBERS = (
    "n_stages", "features_per_stage", "kernel_sizes", "strides", "n_conv_per_stage_decoder", "n_conv_per_stage",
    "n_blocks_per_stage", "bottleneck_channels", "stem_channels",
)  # fmt: skip
_READ_OF = {
    "plain": frozenset([*_READ.split(), "n_conv_per_stage"]),
    "residual": frozenset([*_READ.split(), "n_blocks_per_stage", "block", "bottleneck_channels", "stem_channels"]),
}


def topology(tile: Sequence[int], spacing: Sequence[float] = (1, 1, 1)) -> tuple[tuple[Three, ...], tuple[Three, ...]]:
    """Returns the kernels and strides of each stage for a tile, as nnU-Net's planner chooses them.

    An axis is halved while its side stays at least 4 and its voxels are less than twice as long as the shortest ones; a
    single remaining axis, while its side is at least 12. Kernels are 1 along axes with longer voxels until the other
    axes have caught up, and 3 in the last stage.
    """
    sides, sizes = list(tile), list(spacing)
    kernel, kernels, strides = [1, 1, 1], list[Three](), [three(1)]
    while True:
        large = [at for at, side in enumerate(sides) if side >= 2 * _SMALLEST]
        shortest = min((sizes[at] for at in large), default=0.0)
        halved = [at for at in large if sizes[at] < 2 * shortest]
        if not halved or (len(halved) == 1 and sides[halved[0]] < 3 * _SMALLEST):
            break
        kernel = [3 if k == 3 or size < 2 * min(sizes) else 1 for k, size in zip(kernel, sizes)]
        kernels.append(three(kernel))
        strides.append(three([2 if at in halved else 1 for at in range(3)]))
        for at in halved:
            sides[at], sizes[at] = -(-sides[at] // 2), sizes[at] * 2
    if len(strides) == 1:
        raise ValueError(f"tile={tuple(tile)} cannot be halved: nnU-Net's networks need tile=8 or more")
    return (*kernels, three(3)), tuple(strides)


def architecture_of_stages(
    in_channels: int,
    num_outputs: int,
    kernels: Sequence[Three],
    strides: Sequence[Three],
    residual: bool = False,
    features: int = FEATURES,
) -> Architecture:
    """Returns the architecture with these stages; ``features`` double at each, up to ten times the first."""
    stages = len(strides)
    most = MOST_FEATURES * features // FEATURES if features > FEATURES else MOST_FEATURES
    return Architecture(
        in_channels,
        num_outputs,
        tuple(min(features << stage, most) for stage in range(stages)),
        tuple(kernels),
        tuple(strides),
        RESIDUAL_BLOCKS[:stages] if residual else (2,) * stages,
        (1 if residual else 2,) * (stages - 1),
        block="residual" if residual else "plain",
        stem=features if residual else 0,
        heads=stages - 1,
    )


def nnunet(
    in_channels: int,
    num_outputs: int,
    tile: int | Sequence[int] = 128,
    spacing: Sequence[float] = (1, 1, 1),
    features: int = FEATURES,
    deep_supervision: bool = False,
    residual: bool = False,
    group: AnyGroup | None = None,
) -> UNet:
    """Returns nnU-Net's network as planned for a tile and its voxel spacing.

    - ``features``: of the first stage
    - ``residual``: the ResidualEncoderUNet rather than the PlainConvUNet
    - ``group``: as in ``UNet``
    """
    stages = topology(three(tile), spacing)
    architecture = architecture_of_stages(in_channels, num_outputs, *stages, residual, features)
    return network(architecture, deep_supervision, group)


def network(architecture: Architecture, deep_supervision: bool = False, group: AnyGroup | None = None) -> UNet:
    """Returns nnU-Net's network of an architecture; deep supervision trains the logits of all levels but the coarsest.

    Residual blocks start as their shortcut: the last norm of each is initialized to 0.
    """
    net = UNet(architecture, max(1, architecture.heads - 1) if deep_supervision else 1, group)
    for block in net.modules():
        if isinstance(block, ResidualBlock):
            block.begin_as_shortcut()
    return net


def of_plan(class_name: str, arguments: Mapping[str, Any], in_channels: int, num_outputs: int) -> Architecture:
    """Returns the architecture of a plan; raises ValueError for options that are not supported.

    - ``class_name``: the plan's ``network_class_name``; only the part after the last dot is used
    - ``arguments``: the plan's ``arch_kwargs``
    """
    name = class_name.rsplit(".", 1)[-1]
    if name not in CLASSES:
        raise ValueError(f"the plan's network {class_name} is not supported: only {' and '.join(CLASSES)} are")
    _refuse_unread(name, arguments, _READ_OF[CLASSES[name]])
    for key, value in arguments.items():
        if key in _NUMBERS and value is not None and not _holds_numbers(value):
            raise ValueError(f"the plan's {name} has {key} {value!r}: whole numbers are needed")
    stages, residual = int(arguments["n_stages"]), CLASSES[name] == "residual"

    def each(key: str, count: int = stages) -> list[Any]:
        value = arguments[key]
        return list(value) if isinstance(value, (list, tuple)) else [value] * count

    for key, built in (("conv_op", ("Conv3d",)), ("block", tuple(BLOCKS))):
        if (named := arguments.get(key)) and _last_name(named) not in built:
            raise ValueError(f"the plan's {name} has {key} {named}, which is not supported: use {' or '.join(built)}")
    block = BLOCKS[_last_name(arguments.get("block") or "BasicBlockD")] if residual else "plain"
    narrow = block == "bottleneck"  # nnU-Net's plain residual blocks ignore bottleneck_channels too
    if narrow and not arguments.get("bottleneck_channels"):
        raise ValueError(f"the plan's {name} has block {arguments['block']} without bottleneck_channels")
    return Architecture(
        in_channels,
        num_outputs,
        tuple(each("features_per_stage")),
        tuple(three(kernel) for kernel in each("kernel_sizes")),
        tuple(three(stride) for stride in each("strides")),
        tuple(each("n_blocks_per_stage" if residual else "n_conv_per_stage")),
        tuple(each("n_conv_per_stage_decoder", stages - 1)),
        _style(arguments),
        block=block,
        narrow=tuple(each("bottleneck_channels")) if narrow else (),
        stem=(arguments.get("stem_channels") or each("features_per_stage")[0]) if residual else 0,
        heads=stages - 1,
    )


def _holds_numbers(value: Any) -> bool:
    """Returns whether a value is a whole number, or a list of them or of such lists."""
    return type(value) is int or isinstance(value, (list, tuple)) and all(map(_holds_numbers, value))


def _refuse_unread(whose: str, arguments: Mapping[str, Any], read: frozenset[str]) -> None:
    """Raises ValueError for options that a plan enables and nothing here supports."""
    for name, value in arguments.items():
        if value and name not in read:
            raise ValueError(f"the plan's {whose} has {name} {value}, which is not supported")


def _last_name(class_name: Any) -> str:
    return str(class_name).rsplit(".", 1)[-1].rstrip("'>")


def _style(arguments: Mapping[str, Any]) -> Style:
    """Returns the style of a plan's layers: instance or batch norm, leaky ReLU."""
    norm, activation = (_last_name(arguments.get(key)) for key in ("norm_op", "nonlin"))
    norms = {"InstanceNorm3d": "instance", "BatchNorm3d": "batch"}
    if norm not in norms or activation != "LeakyReLU":
        raise ValueError(
            f"the plan has norm {norm} and activation {activation}: only {', '.join(norms)} and LeakyReLU are supported"
        )
    options, slope = arguments.get("norm_op_kwargs") or {}, arguments.get("nonlin_kwargs") or {}
    tracks = "track_running_stats"
    if bool(options.get(tracks, norm == "BatchNorm3d")) != (norm == "BatchNorm3d"):
        raise ValueError(f"the plan's {norm} has {tracks} {options[tracks]}, which is not supported")
    _refuse_unread(norm, options, frozenset({"eps", "momentum", "affine", tracks}))
    _refuse_unread(activation, slope, frozenset({"negative_slope", "inplace"}))
    if not options.get("affine", norm == "BatchNorm3d"):
        raise ValueError(f"the plan's {norm} has no weights (affine is false), which is not supported")
    return Style(
        norms[norm],
        eps=options.get("eps", 1e-5),
        momentum=options.get("momentum", 0.1),
        slope=slope.get("negative_slope", 0.01),
        bias=bool(arguments["conv_bias"]),
        up_bias=bool(arguments["conv_bias"]),
    )
