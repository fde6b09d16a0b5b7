"""What a U-Net is made of: its stages, and how its layers look. Numbers and names alone; nothing is built here."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from seqpar.parallel.mesh import Group

Three = tuple[int, int, int]
Ints = tuple[int, ...]
ONE: Three = (1, 1, 1)
BLOCKS = ("plain", "residual", "bottleneck")
NORMS = ("instance", "batch", "group", "last axis", "none")
ACTIVATIONS = ("leaky_relu", "relu", "gelu")
DOWNS = ("stride", "max")
UPS = ("transposed", "nearest", "trilinear")
INITS = ("kaiming", "truncated")


def three(value: int | Sequence[int]) -> Three:
    """Returns one number per direction."""
    w, d, h = (value,) * 3 if isinstance(value, int) else value
    return int(w), int(d), int(h)


@dataclass(frozen=True)
class Style:
    """How all layers of a network look.

    - ``norm``: "instance", "batch", "group", "none", or "last axis": batch norm that takes the last axis for channels
    - ``eps``, ``momentum``, ``num_groups``: of the norm
    - ``length``: of the image's last axis, for the norm over it
    - ``activation``: "leaky_relu" with its ``slope``, "relu" or "gelu"
    - ``bias``: of convolutions that a norm follows; ``up_bias``: of transposed ones
    - ``init``: of kernels, "kaiming" or "truncated" (normal, standard deviation 0.05)
    - ``data``: ranks that hold other tiles of the batch; batch norm runs over them too
    - ``peers``: ranks that hold other whole samples of the batch where volumes are not cut into boxes
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
    data: Group | None = None
    peers: Group | None = None

    def __post_init__(self) -> None:
        _refuse_unknown("norm", self.norm, NORMS)
        _refuse_unknown("activation", self.activation, ACTIVATIONS)
        _refuse_unknown("init", self.init, INITS)
        if self.norm == "last axis" and self.length < 1:
            raise ValueError("a norm over the last axis needs the axis's length")

    @property
    def leak(self) -> float | None:
        """By how much the activation multiplies values below 0; None: it does something else to them."""
        return {"leaky_relu": self.slope, "relu": 0.0}.get(self.activation)


@dataclass(frozen=True)
class Architecture:
    """A U-Net: stages from the finest to the coarsest, each with a skip to the same level of the way up.

    - ``features``, ``kernels``, ``strides``: of each stage; a stage begins with its stride, or with pooling
    - ``encoder``: convolutions of each stage, or residual blocks
    - ``decoder``: convolutions of each level on the way up, the coarsest first
    - ``block``: "plain", "residual" (two convolutions and a shortcut) or "bottleneck" (1x1x1, kernel, 1x1x1)
    - ``narrow``: inner channels of each stage's bottleneck blocks
    - ``stem``: channels of a convolution before the first stage; 0: there is none
    - ``down``: "stride", or "max": max-pooling by the stride before the stage
    - ``up``: "transposed", or upsampling "nearest" or "trilinear" behind a 1x1x1 convolution
    - ``up_kernel``: of transposed convolutions; 0: as large as the stride
    - ``heads``: levels with a convolution to logits, the finest first; ``head_kernel``: its size
    - ``squeeze``: squeeze-excite reduces channels so many times, in each residual block or behind each stage and
      level of plain convolutions; 0: there is none
    - ``bare_last``: the last of several convolutions of a stage has no norm and no activation
    - ``merge``: where a skip joins, a 1x1x1 convolution to as many channels as the level below has follows
    - ``tail``: channels at the image's resolution, where the first stage has a stride; 0: it has none
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

    def __post_init__(self) -> None:
        _refuse_unknown("block", self.block, BLOCKS)
        _refuse_unknown("down", self.down, DOWNS)
        _refuse_unknown("up", self.up, UPS)
        stages = len(self.features)
        if stages < 2:
            raise ValueError(f"a U-Net of {stages} stage has no skip: give at least 2")
        self._refuse_lengths(stages)
        even = [kernel for kernel in self.kernels if any(side % 2 == 0 for side in kernel)]
        if even:
            raise ValueError(f"kernel {even[0]}: even kernels would shift the volume: use odd ones")
        if (max(self.strides[0]) > 1) != (self.tail > 0):
            raise ValueError(
                f"first stride {self.strides[0]} and tail {self.tail}: a first stage that strides needs a tail"
            )
        if not 1 <= self.heads < stages:
            raise ValueError(f"heads {self.heads}: {stages} stages have 1 to {stages - 1}")
        if self.tail and self.heads > 1:
            raise ValueError(f"heads {self.heads}: a network whose first stage strides has one, behind its tail")

    def _refuse_lengths(self, stages: int) -> None:
        lengths = {"kernels": stages, "strides": stages, "encoder": stages, "decoder": stages - 1}
        if self.block == "bottleneck":
            lengths["narrow"] = stages
        for name, length in lengths.items():
            if len(getattr(self, name)) != length:
                raise ValueError(f"{name} {getattr(self, name)}: {stages} stages need {length}")
        counts = (self.in_channels, self.num_outputs, *self.features, *self.encoder, *self.decoder)
        if min(*counts, *itertools.chain(*self.strides, *self.kernels)) < 1:
            raise ValueError("channels, features, strides, kernels and numbers of convolutions must be positive")

    @property
    def scales(self) -> tuple[Three, ...]:
        """How many voxels a point of each stage covers, per direction."""
        steps = itertools.accumulate(self.strides, lambda a, b: (a[0] * b[0], a[1] * b[1], a[2] * b[2]))
        return tuple(steps)

    @property
    def unit(self) -> Three:
        """What the sides of an image must be multiples of: the total stride, the whole last axis for a norm over it."""
        w, d, h = self.scales[-1]
        return (w, d, self.style.length) if self.style.norm == "last axis" else (w, d, h)

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
        """Returns an architecture whose stages have their own numbers, or share one; unless given, strides are 2."""
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
        """Raises ValueError for an image with sides that this network cannot halve as often as it has to."""
        if any(side % unit for side, unit in zip(extents, self.unit)) or self._has_other_length(extents):
            nearest = [max(unit, round(side / unit) * unit) for side, unit in zip(extents, self.unit)]
            if self.style.norm == "last axis":
                nearest[-1] = self.style.length
            raise ValueError(
                f"an image of {_by(extents)} voxels does not fit a network of total stride {_by(self.scales[-1])}"
                + (f" and last axis {self.style.length}" if self.style.norm == "last axis" else "")
                + f": the nearest that does is --tile {' '.join(map(str, nearest))}"
            )
        if (
            math.prod(side // scale for side, scale in zip(extents, self.scales[-1])) == 1
            and self.style.norm == "instance"
        ):
            raise ValueError(
                f"an image of {_by(extents)} voxels is one point in the coarsest stage, which instance norm cannot "
                f"norm: use a larger --tile than {' '.join(map(str, extents))}"
            )

    def refuse_cut(self, edges: Sequence[Sequence[int]]) -> None:
        """Raises ValueError for boxes that this network cannot work on: a norm over the last axis needs it whole."""
        if self.style.norm == "last axis" and len(edges[-1]) > 2:
            raise ValueError(f"the last axis is cut at {tuple(edges[-1])}, but a norm over it needs it whole")

    def _has_other_length(self, extents: Sequence[int]) -> bool:
        return self.style.norm == "last axis" and extents[-1] != self.style.length


def _by(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))


def _refuse_unknown(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} {value!r}: choose one of {', '.join(known)}")
