"""Attacks with values: flags, files and tables whose content is wrong, too large or meaningless."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from seqpar.weights.weight_files import load_torch
from tests.attacks.attack import TINY, Attack
from tests.support.folders import image_array, save, write_json
from tests.support.pages import ROOT

RESULTS = ROOT / "tests" / "golden" / "nnunet" / "model"


def _results(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Returns what makes a results folder of nnU-Net's, changed, and an image."""

    def make(here: Path) -> None:
        shutil.copytree(RESULTS, here / "model")
        for channel in range(2):
            save(here / "images" / f"a_{channel:04d}.nii.gz", image_array(channel))
        change(here / "model")

    return make


def _plans(**values: Any) -> Callable[[Path], object]:
    """Returns what changes keys of a configuration, or of its network, in plans.json."""

    def change(model: Path) -> None:
        content = json.loads((model / "plans.json").read_text())
        own = content["configurations"]["3d_fullres"]
        arguments = own["architecture"]["arch_kwargs"]
        for key, value in values.items():
            (arguments if key in arguments else own)[key] = value
        write_json(model / "plans.json", content)

    return change


def _labels(model: Path) -> None:
    content = json.loads((model / "dataset.json").read_text())
    write_json(model / "dataset.json", {**content, "labels": {"background": 0, "a": "one", "b": 2}})


def _mirror_axes(model: Path) -> None:
    for path in model.glob("fold_*/*.pth"):
        content = load_torch(path)
        torch.save({**content, "inference_allowed_mirroring_axes": (0, 7)}, path)


PLANS = [
    Attack(
        name,
        types="predict model -i images -o out",
        code=3,
        says=words,
        make=_results(change),
    )
    for name, change, words in (
        (
            "nnU-Net's plans with a spacing of 0",
            _plans(spacing=[0, 1, 1]),
            ("model/plans.json", "spacing of configuration 3d_fullres is [0, 1, 1] (it must be above 0)"),
        ),
        (
            "nnU-Net's plans with a spacing that is no number",
            _plans(spacing=["a", 1, 1]),
            ("model/plans.json", "spacing of configuration 3d_fullres is ['a', 1, 1]"),
        ),
        (
            "nnU-Net's plans with a patch of 0",
            _plans(patch_size=[0, 8, 8]),
            ("model/plans.json", "patch_size of configuration 3d_fullres is [0, 8, 8]"),
        ),
        (
            "nnU-Net's plans with kernel_sizes as text",
            _plans(kernel_sizes="333"),
            ("model/plans.json", "kernel_sizes '333': whole numbers are needed"),
        ),
        ("nnU-Net's labels that are no numbers", _labels, ("model/dataset.json", "labels contain 'one'")),
        (
            "nnU-Net's mirror axes out of range",
            _mirror_axes,
            ("checkpoint_final.pth", "inference_allowed_mirroring_axes are (0, 7); 0, 1 and 2 are"),
        ),
        (
            "nnU-Net's results without plans.json",
            lambda model: (model / "plans.json").unlink(),
            "model/plans.json: is missing",
        ),
        (
            "nnU-Net's results without dataset.json",
            lambda model: (model / "dataset.json").unlink(),
            "model/dataset.json: is missing",
        ),
    )
]

ATTACKS = [
    Attack("a seed beyond 64 bits", types="train --seed 99999999999999999999", code=2, says="--seed 9999"),
    *PLANS,
    *(
        Attack(
            f"a tile of {side} voxels a side",
            types=f"train {TINY.replace('--tile 16', f'--tile {side}')} --batch 1",
            code=4,
            says="too little memory for the first step: a rank needs",
            within_mb=200,
        )
        for side in (2048, 4096)
    ),
]
