"""Presets: named sets of settings."""

from collections.abc import Callable
from dataclasses import replace

import torch

from seqpar.launch.settings.config import Config


def paper() -> Config:
    """Returns the settings of the paper: ViT-B, tile 96, Adam, soft Dice + cross-entropy, fp32.

    What it leaves open, and what is taken here, stands in seqpar/README.md.
    """
    return Config(
        augment="paper",
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
        output_bias=False,
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


PRESETS: dict[str, Callable[[], Config]] = {
    preset.__name__: preset for preset in (paper, laptop, debug, modern, auto, nnunet)
}
FROM_DATA = ("auto", "nnunet")  # data and memory decide spacing, tile and batch, if no flag does
