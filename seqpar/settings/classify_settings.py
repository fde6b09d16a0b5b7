"""What a preset becomes where volumes have one class each, and the settings that then do nothing."""

from collections.abc import Collection
from dataclasses import replace

from seqpar.settings.config import Config
from seqpar.text import flag_name

# of labels of voxels, their tiles and losses
_OF_LABELS = (
    "targets",
    "foreground",
    "foreground_by",
    "synthesis",
    "synthesis_per",
    "phantoms",
    "curriculum",
    "dice",
    "dice_background",
    "batch_dice",
    "output_bias",
    "val_overlap",
    "val_window",
    "plans",
    "join_labels",
    "force",
    "dice_smooth",
)
LOSSES = ("ce", "focal")  # those whose terms are means over labels


def preset_for_task(start: Config, task: str, preset: str) -> Config:
    """Returns a preset's settings for a task: for classes cross-entropy, and a tile that holds every volume.

    Raises ValueError for a preset that is made for labels of voxels alone.
    """
    if task != "classify":
        return start
    if preset in ("auto", "nnunet", "lamp", "distmis"):
        why = "it is made for labels of voxels"
        if preset == "auto":
            why = "it plans tiles, and volumes that have one class each are taken whole"
        raise ValueError(f"--preset {preset} with --task classify: {why}: use resattnet, modern, laptop or debug")
    usual = Config()
    own = {name: getattr(usual, name) for name in _OF_LABELS} | {"foreground": 0.0}
    return replace(start, **own, task="classify", tile=(), loss="ce", loss_weights=(), deep_supervision=False)


def refuse_idle_for_classes(config: Config, names: Collection[str]) -> None:
    """Refuses settings on the command line (``names``) that do nothing where volumes have one class each."""
    for name in sorted(set(_OF_LABELS) & set(names)) if config.task == "classify" else ():
        raise ValueError(f"--{flag_name(name)} would do nothing: --task classify has no labels of voxels: leave it out")
