"""The U-Nets that ``--network`` names, from a Config.

A new one is one entry of ``UNETS`` and one function that makes it.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.unets.architecture import Architecture, Three, three
from seqpar.decoders.unets.nnunet import FEATURES, architecture_of_stages, network, topology
from seqpar.decoders.unets.published import HOU_LEVELS, MEDNEXT, SQUEEZE, distmis, hou, lamp, mednext
from seqpar.decoders.unets.unet import UNet
from seqpar.models.cell_network import RECOMPUTED, VolumeNet
from seqpar.models.network_family import NetworkFamily
from seqpar.parallel.mesh import Group
from seqpar.settings.config import Config
from seqpar.settings.network_settings import is_nnunet
from seqpar.text import format_sides, quantity

Make = Callable[[Config, int, int, Group | None, Group | None], UNet]  # channels, outputs, then groups of batch norm
SPLIT_SAMPLES = ("swap", "auto", "nogather")  # modes in which what a rank computes on is a sample by itself
STAGES = "133:111 333:122 333:222"


def norm_groups(config: Config, group: Group, data: Group | None) -> tuple[Group | None, Group | None]:
    """Returns the ranks that hold other samples of the batch, in other groups and in this one: for batch norm."""
    others = data if data is not None and data.size > 1 else None
    return others, group if config.mode in SPLIT_SAMPLES and group.size > 1 else None


class VolumeNetwork(NetworkFamily):
    """A U-Net on boxes of the image; ``make``: makes it from a config."""

    attends, recomputed, usual_batch = False, RECOMPUTED, 2
    smaller = dict.fromkeys(("tokens", "decoder", "transient", "optimizer"), "a smaller --features or --tile")

    def __init__(self, make: Make) -> None:
        self.make = make

    def pinned(self, config: Config, spacing: Sequence[float] = ()) -> Config:
        """Returns the config whose ``--stages`` are those of its tile, where the tile would choose them.

        With a ``spacing``, they are chosen anew for the tile and these sizes of a voxel.
        """
        if not is_nnunet(config) or (config.stages and not spacing):
            return config
        return replace(config, stages=format_stages(Stages(*topology(config.tile, spacing or (1, 1, 1)))))

    def build(
        self, config: Config, in_channels: int, num_outputs: int, group: Group, data: Group | None, has_regions: bool
    ) -> VolumeNet:
        """Returns the network; its batch norm runs over all ranks that hold other samples."""
        unet = self.make(config, in_channels, num_outputs, *norm_groups(config, group, data))
        mode = choose_mode(config.mode, group)
        return VolumeNet(unet, config.tile, mode, config.split, config.grad_checkpoint)

    def unit(self, config: Config) -> tuple[int, ...]:
        """Returns the total stride."""
        return self._architecture(config).unit

    def refuse_tile(self, config: Config) -> None:
        """Raises ValueError for a tile that is no multiple of the total stride, with the nearest that is."""
        self._architecture(config).refuse_extents(config.tile)

    def has_batch_norm(self, config: Config) -> bool:
        return self._architecture(config).style.norm == "batch"

    def refuse_batch(self, config: Config, num_groups: int) -> None:
        """Raises ValueError where batch norm would get a single value of each channel in the coarsest stage."""
        architecture = self._architecture(config)
        points = math.prod(side // scale for side, scale in zip(config.tile, architecture.scales[-1]))
        style = architecture.style
        if style.norm == "batch" and not style.length and points * config.batch * num_groups == 1:
            tile = format_sides(config.tile)
            raise ValueError(
                f"--tile {tile} with --batch 1 leaves one value of each channel in the coarsest stage of "
                f"{config.network}, which batch norm cannot norm: use --batch 2, or a larger --tile than {tile}"
            )

    def _architecture(self, config: Config) -> Architecture:
        return _architecture(self.make, config.network, config.tile, config.features, config.stages, config.norm)

    def num_alike(self, config: Config) -> int:
        """Returns 0: no cells are alike."""
        return 0

    def describe(self, config: Config) -> str:
        """Returns the network's name and its first width."""
        features = f" from {config.features} features" if config.features else ""
        norm = f" with {config.norm} norm" if config.norm != "own" else ""
        return config.network + features + norm

    def describe_tile(self, config: Config) -> str:
        """Returns what stays on one rank."""
        unit = self.unit(config)
        count = math.prod(side // step for side, step in zip(config.tile, unit))
        return f"{quantity(count, 'cube')} of {'x'.join(map(str, unit))} voxels"


@lru_cache(maxsize=64)
def _architecture(
    make: Make, network: str, tile: tuple[int, ...], features: int, stages: str, norm: str
) -> Architecture:
    config = Config(network=network, tile=tile, features=features, stages=stages, norm=norm)
    state = torch.get_rng_state()
    with torch.device("meta"):
        architecture = make(config, 1, 2, None, None).architecture
    torch.set_rng_state(state)
    return architecture


class Stages(NamedTuple):
    """What ``--stages`` names of each stage: kernel and stride, and maybe features and convolutions (or blocks)."""

    kernels: tuple[Three, ...]
    strides: tuple[Three, ...]
    features: tuple[int, ...] = ()
    encoder: tuple[int, ...] = ()
    decoder: tuple[int, ...] = ()  # the finest level first, one fewer than there are stages


def parse_stages(text: str) -> Stages:
    """Returns stages such as "133:111 333:122": kernel and stride, a digit per direction.

    Features, convolutions on the way down and on the way up may follow: "133:111:32:2:2 333:122:64:2". The last
    stage has none on the way up.
    """
    pattern = r"([1-9]{3}):([1-9]{3})((?::[1-9]\d*){0,3})"
    stages = [re.fullmatch(pattern, stage) for stage in text.replace(",", " ").split()]
    if None in stages or len(stages) < 2:
        raise ValueError(f"--stages {text!r}: give kernel and stride of each of several stages, such as {STAGES!r}")
    kernels, strides, others = zip(*(stage.groups() for stage in stages if stage))
    more = [[int(number) for number in other.split(":")[1:]] for other in others]
    widest = max(map(len, more))
    if any(len(numbers) != widest for numbers in more[:-1]) or len(more[-1]) != min(widest, 2):
        raise ValueError(
            f"--stages {text!r}: features and convolutions are those of every stage, as in '133:111:32:2:2 "
            "333:122:64:2'; the last one alone has none on the way up"
        )
    columns = [tuple(numbers[at] for numbers in more if len(numbers) > at) for at in range(3)]
    return Stages(
        tuple(three(list(map(int, k))) for k in kernels), tuple(three(list(map(int, s))) for s in strides), *columns
    )


def format_stages(stages: Stages) -> str:
    """Returns stages as ``parse_stages`` reads them."""
    shapes = zip(stages.kernels, stages.strides)
    texts = [[*("".join(map(str, sides)) for sides in shape)] for shape in shapes]
    for column in stages[2:]:
        for stage, number in zip(texts, column):
            stage.append(str(number))
    return " ".join(map(":".join, texts))


def _nnunet(residual: bool) -> Make:
    def make(config: Config, in_channels: int, num_outputs: int, data: Group | None, peers: Group | None) -> UNet:
        stages = parse_stages(config.stages) if config.stages else Stages(*topology(config.tile))
        if stages.features and config.features:
            raise ValueError(f"--features {config.features}: --stages names the features of each stage; remove it")
        kernels, strides, features, encoder, decoder = stages
        architecture = architecture_of_stages(
            in_channels, num_outputs, kernels, strides, residual, config.features or FEATURES
        )
        if features:
            architecture = replace(architecture, features=features, stem=features[0] if residual else 0)
        if encoder:
            architecture = replace(architecture, encoder=encoder)
        if decoder:
            architecture = replace(architecture, decoder=decoder[::-1])
        norm = norm_named(config, architecture.style.norm)
        architecture = replace(architecture, style=replace(architecture.style, norm=norm, data=data, peers=peers))
        return network(architecture, config.deep_supervision)

    return make


def norm_named(config: Config, own: str) -> str:
    """Returns the norm that ``--norm`` names, the network's ``own`` by default."""
    return own if config.norm == "own" else config.norm


def _hou(dims: int) -> Make:
    def make(config: Config, in_channels: int, num_outputs: int, data: Group | None, peers: Group | None) -> UNet:
        longest = max(config.tile[:dims])
        resolution = min((side for side in HOU_LEVELS if side >= longest), default=max(HOU_LEVELS))
        norm = norm_named(config, "batch")
        return hou(in_channels, num_outputs, resolution, config.features, data, peers, norm, config.dropout, dims)

    return make


def _distmis(variant: str) -> Make:
    def make(config: Config, in_channels: int, num_outputs: int, data: Group | None, peers: Group | None) -> UNet:
        norm = norm_named(config, "")
        return distmis(in_channels, num_outputs, config.tile[-1], variant, config.features or 8, data, peers, norm)

    return make


def _lamp(squeeze: int) -> Make:
    def make(config: Config, in_channels: int, num_outputs: int, data: Group | None, peers: Group | None) -> UNet:
        norm = norm_named(config, "batch")
        return lamp(in_channels, num_outputs, config.features or 32, data, peers, squeeze, norm)

    return make


def _mednext(size: str, kernel: int) -> Make:
    def make(config: Config, in_channels: int, num_outputs: int, data: Group | None, peers: Group | None) -> UNet:
        sizes = size, kernel, config.features or FEATURES, config.deep_supervision
        return mednext(in_channels, num_outputs, *sizes, data, peers, norm_named(config, "instance"))

    return make


UNETS = {
    "nnunet-plain": VolumeNetwork(_nnunet(False)),
    "nnunet-resenc": VolumeNetwork(_nnunet(True)),
    "unet-hou": VolumeNetwork(_hou(3)),
    "unet-hou-2d": VolumeNetwork(_hou(2)),
    "unet-distmis": VolumeNetwork(_distmis("code")),
    "unet-distmis-text": VolumeNetwork(_distmis("text")),
    "unet-lamp": VolumeNetwork(_lamp(0)),
    "se-unet-lamp": VolumeNetwork(_lamp(SQUEEZE)),
    **{f"mednext-{size}": VolumeNetwork(_mednext(size, 3)) for size in MEDNEXT},
    **{f"mednext-{size}-k5": VolumeNetwork(_mednext(size, 5)) for size in MEDNEXT},
}
