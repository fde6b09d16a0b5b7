"""Presets: named sets of settings."""

from collections.abc import Callable
from dataclasses import replace

import torch

from seqpar.settings.config import SETTINGS, Config


def paper() -> Config:
    """Returns the settings of the paper: ViT-B, tile 96, Adam, soft Dice + cross-entropy, fp32.

    What it leaves open, and what is taken here, is in docs/explanation/presets-paper.md.
    """
    return Config(
        augment="paper",
        interpolation="cubic",
        fold="90:10",
        foreground=0.0,
        targets="labels",
        attention="gather-kv",
        output_bias=False,
        dice="squared",
        dice_background=True,
        epochs=400,
    )


def modern() -> Config:
    """Returns a current recipe for plain transformers on 3D images."""
    return Config(
        augment="full",
        fold="90:10",
        foreground_shift=True,
        patch=(8, 8, 8),
        decoder="unetr",
        decoder_width=16,
        positions="rope",
        drop_path=0.2,
        layer_scale=0.1,
        epochs=400,
        optimizer="adamw",
        lr=3e-4,
        betas=(0.9, 0.98),
        weight_decay=0.05,
        warmup=10,
        clip=1.0,
        precision="bf16",
    )


def laptop() -> Config:
    """Returns settings for a run of a few minutes on two CPU cores."""
    return Config(
        foreground_shift=True,
        mode="auto",
        tile=(48, 48, 48),
        patch=(8, 8, 8),
        depth=3,
        embed_dim=96,
        heads=4,
        decoder="unetr",
        decoder_width=8,
        features=8,
        batch=2,
        batch_dice=True,
        epochs=9,
        iterations=50,
        lr=2e-3,
        warmup=1,
        clip=1.0,
        val_every=3,
        workers=1,
    )


def debug() -> Config:
    """Returns settings for fifty steps in well under a minute, to try things out."""
    return replace(
        laptop(),
        tile=(32, 32, 32),
        depth=2,
        embed_dim=48,
        batch_dice=False,
        foreground=1.0,
        epochs=1,
        iterations=50,
        warmup=0,
        phantoms=6,
        val_every=1,
        val_overlap=0.25,
        workers=0,
    )


def auto() -> Config:
    """Returns what --preset auto begins with here, before data and memory decide: modern with a GPU, else laptop."""
    return PRESETS[start_of_auto(torch.cuda.is_available())]()


def start_of_auto(on_gpu: bool) -> str:
    """Returns the preset whose settings --preset auto takes where neither data nor memory decide."""
    return "modern" if on_gpu else "laptop"


def nnunet() -> Config:
    """Returns nnU-Net's recipe for its U-Nets; spacing, tile and batch follow from the data and the memory."""
    return Config(
        spacing="median",
        augment="full",
        foreground_by="count",
        mode="auto",
        tile=(128, 128, 128),
        network="nnunet-plain",
        deep_supervision=True,
        output_bias=False,  # of its transformers, with --network vit
        batch=2,
        epochs=1000,
        iterations=250,
        optimizer="sgd",
        lr=1e-2,
        betas=(0.99,),
        weight_decay=3e-5,
        decay_all=True,
        schedule="poly-epochs",
        clip=12.0,
        val_every=50,
    )


def lamp() -> Config:
    """Returns LAMP's training: its U-Net of 32 features, RMSProp, small tiles first, a loss that is masked by the data.

    Its epochs are passes over 261 cases; with its batches all three of its lessons have as many steps, 78,300.
    """
    return Config(
        augment="lamp",
        mode="auto",
        network="unet-lamp",
        curriculum="64:300:16,128:300:4,whole:300:1",
        epochs=900,
        iterations=261,
        optimizer="rmsprop",
        lr=1e-3,
        schedule="constant",
        loss="dice-focal",
        loss_weights=(1.0, 0.5),
        dice_background=True,
        grad_checkpoint="full",
        val_every=10,
    )


def distmis() -> Config:
    """Returns DistMIS's training: whole tumours in whole volumes of MSD's brains, its U-Net as it was run.

    Its epochs are passes over the 338 cases of its training part, 2 a step; ``--scale-lr`` has 1e-4 for each replica.
    """
    return Config(
        fold="70:15:15",
        join_labels="tumour=1,2,3",
        crop_to=(240, 240, 152),
        normalise="volume",
        targets="sigmoids",
        augment="none",
        foreground=0.0,
        mode="auto",
        tile=(240, 240, 152),
        network="unet-distmis",
        batch=2,
        epochs=250,
        iterations=169,
        lr=1e-4,
        scale_lr=True,
        schedule="constant",
        loss="dice",
        dice_smooth=0.01,
        batch_dice=True,
    )


def hou() -> Config:
    """Returns the training of Hou et al.: its U-Net, Adafactor, Dice of lesions, and fake ones in half of the volumes.

    Tiles have 64 voxels along each side, its smallest resolution; the network grows with ``--tile``. Its baseline of
    slices is ``--network unet-hou-2d --tile 512 512 5``. How often its rate falls and how long it trains are its
    release's.
    """
    return Config(
        augment="flips",
        synthesis=0.5,
        synthesis_per="volume",
        foreground=0.0,
        mode="auto",
        tile=(64, 64, 64),
        network="unet-hou",
        dropout=0.5,
        batch=16,
        global_batch=16,
        epochs=1000,
        iterations=500,
        optimizer="adafactor",
        lr=3e-3,
        schedule="step",
        decay_epochs=40,
        decay_factor=0.3,
        loss="lesion-dice-ce",
        loss_weights=(0.45, 0.45, 0.1),
        precision="bf16",
        val_every=10,
    )


def resattnet() -> Config:
    """Returns the published training of 3D-ResAttNet: 50 epochs of SGD, batch 6, cross-entropy, 1e-4 down to 1e-6.

    What it leaves open, and is taken here: no augmentation, no momentum, the first of five folds, 100 steps an epoch
    (its two tasks have 789 and 404 volumes), three equal parts of the run at 1e-4, 1e-5 and 1e-6.
    """
    return Config(
        task="classify",
        network="resattnet18-text",
        augment="none",
        mode="auto",
        tile=(),
        foreground=0.0,
        batch=6,
        epochs=50,
        iterations=100,
        optimizer="sgd",
        lr=1e-4,
        betas=(0.0,),
        schedule="step",
        decay_epochs=17,
        loss="ce",
        val_every=5,
    )


def mae() -> Config:
    """Returns the usual pretraining of Primus-M as a masked autoencoder: three quarters of a tile of 160 hidden."""
    return Config(
        task="pretrain",
        spacing="1,1,1",
        fold="90:10",
        foreground=0.0,
        tile=(160, 160, 160),
        patch=(8, 8, 8),
        depth=16,
        embed_dim=864,
        heads=12,
        mlp="swiglu",
        mlp_ratio=8 / 3,
        attention_norm=True,
        positions="learned+rope",
        drop_path=0.2,
        layer_scale=0.1,
        batch=2,
        global_batch=8,
        epochs=1000,
        iterations=250,
        optimizer="adamw",
        lr=3e-4,
        betas=(0.9, 0.98),
        weight_decay=0.05,
        decay_all=True,
        schedule="poly",
        warmup=50,
        clip=1.0,
        precision="bf16",
        val_every=50,
    )


def mae_laptop() -> Config:
    """Returns a pretraining of the encoder of laptop, of a few minutes on two CPU cores."""
    return replace(
        laptop(),
        task="pretrain",
        mode="gather",
        batch_dice=False,
        foreground=0.0,
        foreground_shift=False,
        batch=4,
        epochs=10,
        val_every=5,
    )


def mae_debug() -> Config:
    """Returns fifty steps of pretraining the encoder of debug."""
    return replace(debug(), task="pretrain", mode="gather", foreground=0.0, foreground_shift=False, batch=4)


PRESETS: dict[str, Callable[[], Config]] = {
    preset.__name__.replace("_", "-"): preset
    for preset in (
        paper,
        laptop,
        debug,
        modern,
        auto,
        nnunet,
        lamp,
        distmis,
        hou,
        resattnet,
        mae,
        mae_laptop,
        mae_debug,
    )
}
FROM_DATA = ("auto", "nnunet")  # data and memory decide spacing, tile and batch, if no flag does


def preset_for_task(start: Config, task: str, preset: str) -> Config:
    """Returns a preset's settings for a task: for classes cross-entropy, and a tile that holds every volume.

    Raises ValueError for a preset that is made for labels of voxels alone.
    """
    if task != "classify":
        return start
    if preset in ("auto", "nnunet", "lamp", "distmis", "hou"):
        why = "it is made for labels of voxels"
        if preset == "auto":
            why = "it plans tiles, and volumes that have one class each are taken whole"
        raise ValueError(f"--preset {preset} with --task classify: {why}: use resattnet, modern, laptop or debug")
    usual = Config()
    unused = {name: getattr(usual, name) for name, own in SETTINGS.items() if task not in own.tasks}
    own = {**unused, "foreground": 0.0}
    return replace(start, **own, task="classify", tile=(), loss="ce", loss_weights=())
