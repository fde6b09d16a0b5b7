"""A kind of network: what the house asks of it before it is built, from the settings alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from seqpar.models.network import Network
from seqpar.parallel.mesh import Group
from seqpar.settings.config import Config


class Layers(NamedTuple):
    """Attention layers that are alike: ``depth`` of them; ``sizes``: how many tokens of a tile each rank has there."""

    depth: int
    sizes: tuple[int, ...]
    heads: int
    width: int


class NetworkFamily(ABC):
    """Networks that are built and planned alike.

    - ``attends``: whether it has attention, for which ranks choose a strategy
    - ``recomputed``: what backward can compute again, as ``--grad-checkpoint`` names it
    - ``usual_batch``: tiles of a sequence group where nothing is set; 0: by memory
    - ``smaller``: what to change where a part of the memory is too much, by the part's name
    """

    attends: bool
    recomputed: tuple[str, ...]
    usual_batch: int
    smaller: Mapping[str, str]

    @abstractmethod
    def build(
        self, config: Config, in_channels: int, num_outputs: int, group: Group, data: Group | None, has_regions: bool
    ) -> Network:
        """Returns the network; for the arguments see ``models.build.build``."""

    @abstractmethod
    def unit(self, config: Config) -> tuple[int, ...]:
        """Returns the voxels per direction that stay on one rank: the layout's patch."""

    def attention_layers(self, config: Config) -> tuple[Layers, ...]:
        """Returns the attention layers; () for a network that has none."""
        return ()

    def has_batch_norm(self, config: Config) -> bool:
        """Returns whether what a tile becomes in training depends on the other tiles of its micro-batch."""
        return False

    def pinned(self, config: Config, spacing: Sequence[float] = ()) -> Config:
        """Returns the config whose network is, for every tile, the one that it is for the config's.

        ``spacing``: the sizes of a voxel, for which the network is chosen anew where it follows from them.
        """
        return config

    def refuse_tile(self, config: Config) -> None:  # noqa: B027  most take any tile of whole units
        """Raises ValueError for a tile that the network cannot take, where ``unit`` does not say enough."""

    def refuse_batch(self, config: Config, num_groups: int) -> None:  # noqa: B027  most take any batch
        """Raises ValueError for a batch that cannot be trained on; ``num_groups``: sequence groups that share it."""

    @abstractmethod
    def num_alike(self, config: Config) -> int:
        """Returns how many blocks are alike, as many as ``--depth`` says; 0 where it says nothing."""

    @abstractmethod
    def describe(self, config: Config) -> str:
        """Returns the network's settings in a line."""

    @abstractmethod
    def describe_tile(self, config: Config) -> str:
        """Returns what a tile is made of."""
