"""The U-Nets of Hou et al., DistMIS, LAMP and MedNeXt, each according to its paper or its released code."""

from dataclasses import replace

from seqpar.decoders.unets.architecture import ONE, Architecture, Ints, Style
from seqpar.decoders.unets.unet import UNet
from seqpar.parallel.mesh import AnyGroup, Group

HOU_LEVELS = {64: 3, 128: 4, 256: 5, 512: 6}
HOU_SLAB = 5  # slices that their two-dimensional network sees
LAMP_MOST_FEATURES = 1024
SQUEEZE = 16  # reduction factor of squeeze-excite, as in its paper
MEDNEXT: dict[str, tuple[Ints, Ints]] = {  # blocks and expansion of each stage, and of the level of its resolution
    "s": ((2, 2, 2, 2, 2), (2, 2, 2, 2, 2)),
    "b": ((2, 2, 2, 2, 2), (2, 3, 4, 4, 4)),
    "m": ((3, 4, 4, 4, 4), (2, 3, 4, 4, 4)),
    "l": ((3, 4, 8, 8, 8), (3, 4, 8, 8, 8)),
}


def hou(
    in_channels: int,
    num_outputs: int,
    resolution: int = 64,
    features: int = 0,
    data: Group | None = None,
    peers: Group | None = None,
    norm: str = "batch",
    dropout: float = 0.0,
    dims: int = 3,
    group: AnyGroup | None = None,
) -> UNet:
    """Returns the U-Net of Hou et al. for images of 64, 128, 256 or 512 voxels per side.

    Each level has four convolutions and max pooling. The first of three levels has 256 features, doubled at each
    further one; larger images have levels of 128, 64 and 32 before it. Batch norm over all ranks and leaky ReLU with
    slope 0.1 follow the released code.

    - ``dims``: 2 gives their two-dimensional network, which computes each slice of the last axis from five: they are
      the channels of its first convolution, here one of 3x3x5; all others are 3x3x1. Slices beyond the image are zeros
    - ``dropout``: as in ``Style``; 0.5 in the released code
    - ``features``: of the first level; 0: as published
    - ``data``, ``peers``, ``norm``: see ``Style``
    - ``group``: as in ``UNet``
    """
    if resolution not in HOU_LEVELS:
        raise ValueError(f"resolution {resolution}: choose one of {', '.join(map(str, HOU_LEVELS))}")
    levels = HOU_LEVELS[resolution]
    first = features or 256 >> (levels - 3)
    if dims not in (2, 3):
        raise ValueError(f"dims={dims}: choose 2 or 3")
    style = Style(norm, eps=1e-6, slope=0.1, bias=False, up_bias=False, dropout=dropout, data=data, peers=peers)
    widths = [first << level for level in range(levels)]
    sizes: dict[str, object] = {}
    if dims == 2:
        sizes = {"kernels": [(3, 3, 1)] * levels, "strides": [ONE, *[(2, 2, 1)] * (levels - 1)]}
        sizes["first_kernel"] = (3, 3, HOU_SLAB)
    return UNet(
        Architecture.of(in_channels, num_outputs, widths, encoder=4, decoder=4, style=style, down="max", **sizes),  # type: ignore[arg-type]
        group=group,
    )


def distmis(
    in_channels: int,
    num_outputs: int,
    length: int = 152,
    variant: str = "code",
    features: int = 8,
    data: Group | None = None,
    peers: Group | None = None,
    norm: str = "",
    group: AnyGroup | None = None,
) -> UNet:
    """Returns DistMIS's U-Net: four levels of two convolutions, batch norm and ReLU; 8 features, doubled at each level.

    ``variant`` "text" is the paper's; "code" is the one that was run: transposed convolutions and the last convolution
    have kernels of 3, and norms take the last axis as channels, so that this axis cannot be cut and images of another
    length need another network. A transposed convolution of kernel 3 pads on the other side than theirs: mirror kernels
    and image to get their function.

    - ``length``: of the image's last axis; only used by the "code" variant
    - ``data``, ``peers``: see ``Style``
    - ``norm``: as in ``Style``, instead of the variant's own. "group" is also that of the code: as many groups of
      positions along the last axis as the coarsest level has positions, 19 of 152; in "text", 8 groups of channels
    - ``group``: as in ``UNet``
    """
    if variant not in ("code", "text"):
        raise ValueError(f"variant {variant!r}: choose 'code' or 'text'")
    if variant == "code" and (length < 8 or length % 8):
        raise ValueError(f"length {length} of the last axis: it is halved three times, so use a multiple of 8")
    is_code = variant == "code"
    of_last_axis = is_code and norm in ("", "group")
    style = Style(
        norm or "batch",
        eps=1e-3,
        momentum=0.1,  # Keras's 0.9
        num_groups=length // 8 if of_last_axis else 8,
        length=length if of_last_axis else 0,
        activation="relu",
        init="truncated",
        data=data,
        peers=peers,
    )
    up, head = (3, 3) if is_code else (0, 1)
    widths = [features << level for level in range(4)]
    return UNet(
        Architecture.of(in_channels, num_outputs, widths, style=style, down="max", up_kernel=up, head_kernel=head),
        group=group,
    )


def lamp(
    in_channels: int,
    num_outputs: int,
    features: int = 32,
    data: Group | None = None,
    peers: Group | None = None,
    squeeze: int = 0,
    norm: str = "batch",
    group: AnyGroup | None = None,
) -> UNet:
    """Returns LAMP's U-Net of 32, 64 or 128 features: 22.9, 91.6 or 214.3 million parameters.

    It starts with a stride, so that five strides lead to the coarsest of five stages; the last convolution of a stage
    has no norm.

    - ``data``, ``peers``, ``norm``: see ``Style``
    - ``group``: as in ``UNet``
    - ``squeeze``: ``SQUEEZE`` gives our reading of LAMP's squeeze-excite U-Net, which was not released: a
      squeeze-excite block with this reduction factor after the convolutions of each stage, down and up; 0: none
    """
    return UNet(
        Architecture.of(
            in_channels,
            num_outputs,
            [min(features << stage, LAMP_MOST_FEATURES) for stage in range(5)],
            strides=(2,) * 5,
            encoder=(1, 2, 2, 2, 2),
            style=Style(norm, bias=False, data=data, peers=peers),
            head_kernel=3,
            squeeze=squeeze,
            bare_last=True,
            merge=True,
            tail=max(1, min(features // 2, 32)),
        ),
        group=group,
    )


def mednext(
    in_channels: int,
    num_outputs: int,
    size: str = "s",
    kernel: int = 3,
    features: int = 32,
    deep_supervision: bool = False,
    data: Group | None = None,
    peers: Group | None = None,
    norm: str = "instance",
    group: AnyGroup | None = None,
) -> UNet:
    """Returns MedNeXt's first version, of five stages of ConvNeXt blocks, initialized as its package does.

    - ``size``: "s", "b", "m" or "l"
    - ``kernel``: side of the kernels, 3 or 5 as published
    - ``features``: of the first stage, doubled at each further one
    - ``deep_supervision``: train the logits of all five levels; without it, the network has no other heads
    - ``data``, ``peers``, ``norm``: see ``Style``; the published norm is "instance", a group norm of one channel each
    - ``group``: as in ``UNet``
    """
    if size not in MEDNEXT:
        raise ValueError(f"size {size!r}: choose one of {', '.join(MEDNEXT)}")
    architecture = mednext_architecture(in_channels, num_outputs, *MEDNEXT[size], kernel, features, deep_supervision)
    architecture = replace(architecture, style=replace(architecture.style, norm=norm, data=data, peers=peers))
    return UNet(architecture, architecture.heads, group)


def mednext_architecture(
    in_channels: int,
    num_outputs: int,
    blocks: Ints,
    expansion: Ints,
    kernel: int = 3,
    features: int = 32,
    deep_supervision: bool = False,
) -> Architecture:
    """Returns the architecture of a MedNeXt with these blocks and this expansion of each stage."""
    return Architecture.of(
        in_channels,
        num_outputs,
        [features << stage for stage in range(len(blocks))],
        kernel,
        encoder=blocks,
        decoder=blocks[-2::-1],
        style=Style(activation="gelu", init="torch"),
        block="mednext",
        expansion=expansion,
        heads=len(blocks) if deep_supervision else 1,
    )
