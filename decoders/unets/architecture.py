"""The architecture of a U-Net as numbers and names: its stages and the style of its layers."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from seqpar.parallel.layout import refuse_no_count
from seqpar.parallel.mesh import Group

Three = tuple[int, int, int]
Ints = tuple[int, ...]
ONE: Three = (1, 1, 1)
BLOCKS = ("plain", "residual", "bottleneck", "mednext")
NORMS = ("instance", "batch", "group", "none")
ACTIVATIONS = ("leaky_relu", "relu", "gelu")
DOWNS = ("stride", "max")
UPS = ("transposed", "nearest", "trilinear")
INITS = ("kaiming", "truncated", "torch")


def three(value: int | Sequence[int]) -> Three:
    """Returns three numbers, one per axis."""
    w, d, h = (value,) * 3 if isinstance(value, int) else value
    return int(w), int(d), int(h)


@dataclass(frozen=True)
class Style:
    """The style of a network's layers.

    - ``norm``: "instance", "batch", "group" or "none"
    - ``eps``, ``momentum``, ``num_groups``: of the norm
    - ``length``: of the image's last axis, if norms take its positions as channels; 0: they norm the channels
    - ``activation``: "leaky_relu" with its ``slope``, "relu" or "gelu"
    - ``bias``: whether convolutions before a norm have a bias
    - ``up_bias``: whether transposed convolutions have a bias
    - ``init``: of kernels, "kaiming" or "truncated" (normal, standard deviation 0.05; Glorot's for transposed ones);
      "torch": that of torch's modules
    - ``dropout``: share of activations dropped after convolutions but the first, and after transposed ones
    - ``data``: ranks that hold other tiles of the batch, which batch norm includes
    - ``peers``: ranks that hold other whole samples of the batch, if volumes are not split into boxes
    """

    norm: str = "instance"
    eps: float = 1e-5
    momentum: float = 0.1
    num_groups: int = 8
    length: int = 0
    activation: str = "leaky_relu"
    slope: float = 0.01
    bias: bool = True
    up_bias: bool = True
    init: str = "kaiming"
    dropout: float = 0.0
    data: Group | None = None
    peers: Group | None = None

    def __post_init__(self) -> None:
        _refuse_unknown("norm", self.norm, NORMS)
        _refuse_unknown("activation", self.activation, ACTIVATIONS)
        _refuse_unknown("init", self.init, INITS)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout:g}: give a share of at least 0 and below 1")
        if self.length and self.norm not in ("batch", "group"):
            raise ValueError(f"length={self.length}: only batch and group norm take the last axis, not {self.norm!r}")

    @property
    def leak(self) -> float | None:
        """The factor that the activation applies to values below 0; None if it is not linear there."""
        return {"leaky_relu": self.slope, "relu": 0.0}.get(self.activation)


@dataclass(frozen=True)
class Architecture:
    """A U-Net: stages from the finest to the coarsest, each with a skip to the same level of the way up.

    - ``features``, ``kernels``, ``strides``: of each stage; a stage starts with its stride, or with pooling
    - ``first_kernel``: of the convolution that takes the image; None: its stage's
    - ``encoder``: number of convolutions, or of residual blocks, of each stage
    - ``decoder``: number of convolutions of each level on the way up, the coarsest first
    - ``block``: "plain", "residual" (two convolutions and a shortcut), "bottleneck" (1x1x1, kernel, 1x1x1), or
      "mednext", MedNeXt's (kernel of each channel, 1x1x1, 1x1x1), which also change the resolution and add the skips
    - ``narrow``: inner channels of each stage's bottleneck blocks
    - ``expansion``: inner channels over outer ones, of each stage's and level's MedNeXt blocks
    - ``stem``: channels of a convolution before the first stage; 0: none
    - ``down``: "stride", or "max": max pooling by the stride before the stage
    - ``up``: "transposed", or "nearest" or "trilinear" upsampling after a 1x1x1 convolution
    - ``up_kernel``: kernel size of transposed convolutions; 0: equal to the stride
    - ``heads``: number of levels with a convolution to logits, starting with the finest
    - ``head_kernel``: kernel size of these convolutions
    - ``squeeze``: reduction factor of squeeze-excite, in each residual block or after each stage and level of plain
      convolutions; 0: none
    - ``bare_last``: if a stage has several convolutions, the last one has no norm and no activation
    - ``merge``: each skip is followed by a 1x1x1 convolution to the number of channels of the level below
    - ``tail``: channels at the image's resolution, if the first stage has a stride; 0: no tail
    """

    in_channels: int
    num_outputs: int
    features: Ints
    kernels: tuple[Three, ...]
    strides: tuple[Three, ...]
    encoder: Ints
    decoder: Ints
    style: Style = field(default_factory=Style)
    block: str = "plain"
    narrow: Ints = ()
    expansion: Ints = ()
    stem: int = 0
    down: str = "stride"
    up: str = "transposed"
    up_kernel: int = 0
    heads: int = 1
    head_kernel: int = 1
    squeeze: int = 0
    bare_last: bool = False
    merge: bool = False
    tail: int = 0
    first_kernel: Three | None = None

    def __post_init__(self) -> None:
        refuse_no_count(in_channels=self.in_channels, num_outputs=self.num_outputs)
        for width in self.features:
            refuse_no_count(features=width)
        _refuse_unknown("block", self.block, BLOCKS)
        _refuse_unknown("down", self.down, DOWNS)
        _refuse_unknown("up", self.up, UPS)
        stages = len(self.features)
        if stages < 2:
            raise ValueError(f"a U-Net needs at least 2 stages, got {stages}")
        self._refuse_lengths(stages)
        kernels = (*self.kernels, self.first_kernel or ONE)
        even = [kernel for kernel in kernels if any(side % 2 == 0 for side in kernel)]
        if even:
            raise ValueError(f"kernel {even[0]}: even kernels would shift the volume; use odd ones")
        if (max(self.strides[0]) > 1) != (self.tail > 0):
            raise ValueError(
                f"first stride {self.strides[0]} and tail {self.tail}: a first stage with a stride needs a tail, "
                "and no other does"
            )
        most_heads = stages if self.block == "mednext" else stages - 1
        if not 1 <= self.heads <= most_heads:
            raise ValueError(f"heads {self.heads}: {stages} stages can have 1 to {most_heads}")
        if self.tail and self.heads > 1:
            raise ValueError(f"heads {self.heads}: a network with a tail has a single head")

    def _refuse_lengths(self, stages: int) -> None:
        lengths = {"kernels": stages, "strides": stages, "encoder": stages, "decoder": stages - 1}
        if self.block == "bottleneck":
            lengths["narrow"] = stages
        if self.block == "mednext":
            lengths["expansion"] = stages
        for name, length in lengths.items():
            if len(getattr(self, name)) != length:
                raise ValueError(f"{name} {getattr(self, name)}: {stages} stages need {length}")
        counts = (self.in_channels, self.num_outputs, *self.features, *self.encoder, *self.decoder)
        if min(*counts, *itertools.chain(*self.strides, *self.kernels)) < 1:
            raise ValueError("channels, features, strides, kernels and numbers of convolutions must be positive")

    @property
    def scales(self) -> tuple[Three, ...]:
        """Voxels per point of each stage, per axis."""
        steps = itertools.accumulate(self.strides, lambda a, b: (a[0] * b[0], a[1] * b[1], a[2] * b[2]))
        return tuple(steps)

    @property
    def unit(self) -> Three:
        """What an image's sides must be multiples of: the total stride, or the whole last axis for a norm over it."""
        w, d, h = self.scales[-1]
        return w, d, self.style.length or h

    @classmethod
    def of(
        cls,
        in_channels: int,
        num_outputs: int,
        features: Sequence[int],
        kernels: int | Sequence[int | Sequence[int]] = 3,
        strides: Sequence[int | Sequence[int]] = (),
        encoder: int | Sequence[int] = 2,
        decoder: int | Sequence[int] = 2,
        **more: object,
    ) -> "Architecture":
        """Returns an architecture; a single number applies to all stages, and strides are 2 by default."""
        stages = len(features)
        sizes = [kernels] * stages if isinstance(kernels, int) else kernels
        steps = strides or (1, *[2] * (stages - 1))
        return cls(
            in_channels,
            num_outputs,
            tuple(features),
            tuple(map(three, sizes)),
            tuple(map(three, steps)),
            (encoder,) * stages if isinstance(encoder, int) else tuple(encoder),
            (decoder,) * (stages - 1) if isinstance(decoder, int) else tuple(decoder),
            **more,  # type: ignore[arg-type]
        )

    def refuse_extents(self, extents: Sequence[int]) -> None:
        """Raises ValueError for an image whose sides do not fit the network's strides."""
        if any(side % unit for side, unit in zip(extents, self.unit)) or self._has_other_length(extents):
            nearest = [max(unit, round(side / unit) * unit) for side, unit in zip(extents, self.unit)]
            if self.style.length:
                nearest[-1] = self.style.length
            raise ValueError(
                f"an image of {_by(extents)} voxels does not fit a network of total stride {_by(self.scales[-1])}"
                + (f" and last axis {self.style.length}" if self.style.length else "")
                + f": the nearest that fits is tile={tuple(nearest)}"
            )
        if (
            math.prod(side // scale for side, scale in zip(extents, self.scales[-1])) == 1
            and self.style.norm == "instance"
        ):
            raise ValueError(
                f"an image of {_by(extents)} voxels is a single point in the coarsest stage, on which instance norm is "
                f"undefined: use a larger `tile` than {' '.join(map(str, extents))}"
            )

    def refuse_cut(self, edges: Sequence[Sequence[int]]) -> None:
        """Raises ValueError for boxes that cut the last axis, if the norm needs it whole."""
        if self.style.length and len(edges[-1]) > 2:
            raise ValueError(f"the last axis is cut at {tuple(edges[-1])}, but the norms over it need it whole")

    def _has_other_length(self, extents: Sequence[int]) -> bool:
        return bool(self.style.length) and extents[-1] != self.style.length


def _by(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))


def _refuse_unknown(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} {value!r}: choose one of {', '.join(known)}")
