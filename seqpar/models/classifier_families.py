"""The networks that ``--network`` names for classes of volumes, from a Config."""

import math
from collections.abc import Sequence

from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.resattnet import BLOCKS, FEATURES, ResAttNet, refuse_cut
from seqpar.models.cell_network import RECOMPUTED
from seqpar.models.classifier import TokenClassifier, VolumeClassifier
from seqpar.models.network_family import NetworkFamily
from seqpar.models.transformer_families import VisionTransformer, make_encoder
from seqpar.models.unet_families import norm_groups
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Group
from seqpar.settings.config import Config
from seqpar.text import quantity

UNIT = (8, 8, 8)  # voxels: sides are padded to multiples; the network itself takes any, and boxes that it can halve


def refuse_parts(config: Config) -> None:
    """Refuses a mode in which each rank would give its own part a class."""
    if config.mode == "nogather":
        raise ValueError("--mode nogather: a class is of a whole volume, not of its parts: use gather, halo or swap")


class TokenClassification(VisionTransformer):
    """An encoder of tokens, which are pooled."""

    smaller = {**VisionTransformer.smaller, "decoder": "a smaller --tile", "transient": "a smaller --tile"}

    def build(
        self, config: Config, in_channels: int, num_outputs: int, group: Group, data: Group | None, has_regions: bool
    ) -> TokenClassifier:
        """Returns the network."""
        self.refuse_tile(config)
        encoder = make_encoder(config, in_channels, group)
        return TokenClassifier(encoder, num_outputs, choose_mode(config.mode, group), config.pooling)

    def refuse_tile(self, config: Config) -> None:
        """Raises ValueError for a mode without whole volumes, and for a class token that would be rotated."""
        refuse_parts(config)
        if config.pooling == "token" and "rope" in config.positions:
            raise ValueError(
                f"--pooling token with --positions {config.positions}: a class token has no position to rotate it by: "
                "use --pooling mean, or --positions learned or sincos"
            )

    def describe(self, config: Config) -> str:
        """Returns the encoder's sizes, and how its tokens are pooled."""
        how = "mean of the tokens" if config.pooling == "mean" else "class token"
        blocks, heads = quantity(config.depth, "block"), quantity(config.heads, "head")
        return f"{blocks} x {config.embed_dim}, {heads}; {how}"


class ResidualAttention(NetworkFamily):
    """A 3D-ResAttNet on boxes of the image; ``layers``: 18 or 34; ``variant``: see ``ResAttNet``."""

    attends, recomputed, usual_batch = False, RECOMPUTED, 2
    smaller = dict.fromkeys(("tokens", "decoder", "transient", "optimizer"), "a smaller --features or --tile")

    def __init__(self, layers: int, variant: str = "few attentions") -> None:
        self.layers, self.variant = layers, variant

    def build(
        self, config: Config, in_channels: int, num_outputs: int, group: Group, data: Group | None, has_regions: bool
    ) -> VolumeClassifier:
        """Returns the network; its batch norm runs over all ranks that hold other samples."""
        self.refuse_tile(config)
        groups = norm_groups(config, group, data)
        features = config.features or FEATURES
        network = ResAttNet(in_channels, num_outputs, BLOCKS[self.layers], features, *groups, self.variant)
        mode = choose_mode(config.mode, group)
        return VolumeClassifier(network, config.tile, UNIT, mode, config.split, config.grad_checkpoint)

    def unit(self, config: Config) -> tuple[int, ...]:
        """Returns what a rank's box is made of."""
        return UNIT

    def refuse_tile(self, config: Config) -> None:
        """Raises ValueError for boxes that leave a rank without a voxel in the last stage.

        With auto too, whatever the batch: a case that is validated or predicted alone is cut into boxes.
        """
        refuse_parts(config)
        if config.mode not in ("halo", "auto") or config.seqpar == 1:
            return
        try:
            cuts = Layout.of(config.tile, UNIT, config.seqpar, config.split).boxed().voxel_cuts(UNIT)
            refuse_cut(cuts, self.variant)
        except ValueError as error:
            whole = ", which auto takes for a case alone; or --mode swap" if config.mode == "auto" else ""
            raise ValueError(f"{error}{whole}") from None

    def has_batch_norm(self, config: Config) -> bool:
        return True

    def refuse_batch(self, config: Config, num_groups: int) -> None:
        """Raises ValueError where batch norm would get a single value of each channel in the last stage."""
        if math.prod(-(-side // 32) for side in config.tile) * config.batch * num_groups == 1:
            raise ValueError(
                f"--tile {_spelled(config.tile)} with --batch 1 leaves one value of each channel in the last stage of "
                f"{config.network}, which batch norm cannot norm: use --batch 2, or a --tile of more than 32"
            )

    def num_alike(self, config: Config) -> int:
        """Returns 0: no cells are alike."""
        return 0

    def describe(self, config: Config) -> str:
        """Returns the network's name and its first width."""
        return f"{config.network} from {config.features or FEATURES} features"

    def describe_tile(self, config: Config) -> str:
        """Returns the cubes that are spread over ranks."""
        count = math.prod(-(-side // step) for side, step in zip(config.tile, UNIT))
        return f"{quantity(count, 'cube')} of {_spelled(UNIT)} voxels"


def _spelled(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))


CLASSIFIERS: dict[str, NetworkFamily] = {
    "vit": TokenClassification(),
    "resattnet18": ResidualAttention(18),
    "resattnet34": ResidualAttention(34),
    "resattnet18-text": ResidualAttention(18, "text"),
    "resattnet34-text": ResidualAttention(34, "text"),
}
