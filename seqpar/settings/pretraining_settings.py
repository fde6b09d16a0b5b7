"""The settings of a run that hides tokens and rebuilds them."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from seqpar.settings.field import AT_LEAST_1, INSIDE_0_1, NOT_NEGATIVE, setting

_network = partial(setting, topic="network")
_training = partial(setting, topic="training")
MASKED = frozenset(["mask_ratio", "rebuild_blocks", "rebuild_width", "normalised_targets"])
# of labels, and of what is done with them
_OF_LABELS = frozenset(
    ["mode", "targets", "foreground", "foreground_by", "synthesis", "synthesis_per", "output_bias", "plans"]
    + ["loss", "loss_weights", "class_weights", "focal_gamma", "dice", "dice_smooth", "dice_background", "batch_dice"]
    + ["val_overlap", "val_window", "join_labels", "force"]
)


@dataclass(frozen=True)
class PretrainSettings:
    """What ``--task pretrain`` hides, and what rebuilds it; a part of ``Config``."""

    rebuild_blocks: int = _network(
        2, "pretrain: blocks that rebuild what is hidden", bounds=AT_LEAST_1, metavar="BLOCKS"
    )
    rebuild_width: int = _network(
        0, "pretrain: width of their tokens; 0: the encoder's", bounds=NOT_NEGATIVE, metavar="CHANNELS"
    )
    mask_ratio: float = _training(
        0.75, "pretrain: share of a tile's tokens that is hidden", bounds=INSIDE_0_1, metavar="SHARE"
    )
    normalised_targets: bool = _training(False, "pretrain: rebuild patches less their mean, over their deviation")


def idle_in_pretraining(task: str, names: Collection[str]) -> list[str]:
    """Returns those of the settings ``names`` that do nothing where nothing is labelled."""
    return sorted(_OF_LABELS & set(names)) if task == "pretrain" else []
