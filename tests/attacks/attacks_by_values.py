"""Attacks with values: flags, files and tables whose content is wrong, too large or meaningless."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqpar.weights.weight_files import load_torch, read_weights, write_weights
from tests.attacks.attack import TINY, Attack
from tests.support.folders import image_array, label_array, nnunet, save, write_json
from tests.support.pages import ROOT
from tests.support.predictions import make_run

RESULTS = ROOT / "tests" / "golden" / "nnunet" / "model"


def _results(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Returns what makes an nnU-Net results folder, changed, and an image."""

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
            "nnU-Net's plans with a spacing that makes a tiny image huge",
            _plans(spacing=[0.02, 0.02, 0.02]),
            ("images/a_0000.nii.gz", "the plan's spacing (0.02, 0.02, 0.02) would make ", " voxels ("),
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


def _weights(change: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Path], None]:
    """Returns what makes a data set, and weights of a run's network with one tensor changed, or with none at all."""

    def make(here: Path) -> None:
        nnunet(here / "D", 5)
        state = read_weights(make_run(here / "run") / "model.safetensors")
        name = "encoder.norm.weight"
        write_weights(here / "w.safetensors", {**state, name: change(state[name])} if change else {})

    return make


WEIGHTS = [
    Attack(
        name,
        types=f"train {TINY} --data D --cache cache --weights w.safetensors",
        code=3,
        says=f"w.safetensors: {words}",
        make=_weights(change),
    )
    for name, change, words in (
        ("weights that are whole numbers", torch.Tensor.int, "its tensor encoder.norm.weight is of type int32"),
        ("weights that are booleans", torch.Tensor.bool, "its tensor encoder.norm.weight is of type bool"),
        ("weights that are NaN", lambda w: w * math.nan, "its tensor encoder.norm.weight has NaN or infinite values"),
        ("weights that are infinite", lambda w: w / 0, "its tensor encoder.norm.weight has NaN or infinite values"),
        ("a file without weights", None, "holds no tensors"),
    )
]


def _tables(truth: str, given: str, end: str = "\n") -> Callable[[Path], None]:
    """Returns what makes a table of true classes and one of predicted ones, a line each."""

    def make(here: Path) -> None:
        (here / "p").mkdir()
        (here / "labels.csv").write_text(f"case,class\na,ill\n{truth}\n")
        (here / "p" / "predictions.csv").write_text(f"case,class,p(healthy),p(ill)\na,ill,0.1,0.9\n{given}{end}")

    return make


CLASSES = [
    Attack(name, types="evaluate labels.csv p", code=3, says=words, make=_tables(truth, given))
    for name, truth, given, words in (
        (
            "a predicted class without a probability",
            "b,ill",
            "b,odd,0.2,0.8",
            "p/predictions.csv: case b has the class odd, and the probabilities are of healthy, ill",
        ),
        (
            "a predicted class that is not the most probable one",
            "b,ill",
            "b,healthy,0.2,0.8",
            "p/predictions.csv: case b has the class healthy, and ill is more probable",
        ),
        ("a true class nan", "b,nan", "b,ill,0.2,0.8", "labels.csv: line 3, case b, has the class 'nan'"),
        ("a true class that is empty", "b,", "b,ill,0.2,0.8", "labels.csv: line 3, case b, has no class"),
        ("a true class with a bell", "b,i\all", "b,ill,0.2,0.8", "labels.csv: line 3, case b, has the class 'i"),
    )
]
CLASSES += [
    Attack(
        "a table of predictions without its last digits",
        types="evaluate labels.csv p",
        code=3,
        says="p/predictions.csv: ends within a line, as if it had been cut off: copy or predict it again, or add a",
        make=_tables("b,ill", "b,ill,0.2,0.7999", end=""),
    ),
]


def _empty(here: Path) -> None:
    nnunet(here / "D", 1)
    for n in range(5000):
        (here / "D" / "imagesTr" / f"e_{n:04d}_0000.nii.gz").touch()
        (here / "D" / "labelsTr" / f"e_{n:04d}.nii.gz").touch()


def _prepared_none(here: Path, said: str) -> None:
    assert not list(here.glob("cache/cases/*"))


def _one_slice(here: Path) -> None:
    """Makes cases of a single slice; the held-out one shows no class."""
    nnunet(here / "D", 5)
    for n in range(5):
        save(here / "D" / "imagesTr" / f"c_{n:03d}_0000.nii.gz", image_array(n)[:, :, 4:5])
        label = label_array((1,) if n else ())
        save(here / "D" / "labelsTr" / f"c_{n:03d}.nii.gz", label[:, :, 4:5])


def _other_shape(here: Path) -> None:
    nnunet(here / "D", 5)
    save(here / "D" / "labelsTr" / "c_003.nii.gz", label_array(shape=(14, 12, 11)))


DATA = [
    Attack(
        "train on single slices, whose held-out case shows no class",
        types=f"train {TINY} --data D --cache cache --out run --epochs 1 --iterations 1 --decoder plain --depth 1",
        code=0,
        says="finished: no mean Dice, as no validated case has a class to score",
        make=_one_slice,
        slow=True,
    ),
    *(
        Attack(
            f"{program} on 10,000 empty files",
            types=f"{line} --workers 2",
            code=3,
            says="D/imagesTr/e_0000_0000.nii.gz: is empty (0 bytes); copy it again",
            make=_empty,
            after=_prepared_none,
            slow=True,
        )
        for program, line in (
            ("train", f"train {TINY.replace('--workers 0', '')} --data D --cache cache"),
            ("a dry run", "train --preset auto --dry-run --device cpu --data D"),
        )
    ),
    *(
        Attack(
            f"{name} on an image and a label of different shapes",
            types=f"{line} --workers 0",
            code=3,
            says=("D/labelsTr/c_003.nii.gz: does not match", "its shape is (14, 12, 11)", "draw it on the image again"),
            make=_other_shape,
        )
        for name, line in (
            ("a dry run", "train --preset auto --dry-run --device cpu --data D"),
            ("prepare", "prepare D --out cache"),
            ("a check", "prepare D --out cache --check"),
        )
    ),
]


SHEARED = np.eye(4)
SHEARED[0, 1] = 1  # as of a gantry tilted by 45 degrees: slanted voxels of 1 mm³ with sides of 1, 1.41 and 1 mm


def _tempered(value: float) -> Callable[[Path], None]:
    """Returns what makes an image, and a run with this temperature."""

    def make(here: Path) -> None:
        make_run(here / "run")
        save(here / "I" / "a_0000.nii.gz", image_array(0))
        write_json(here / "run" / "window.json", {"dice": {"sliding": 0.5}, "temperatures": {"sliding": value}})

    return make


def _probabilities(content: bytes) -> Callable[[Path], None]:
    """Returns what makes true and predicted label maps, and a file of probabilities with this content."""

    def make(here: Path) -> None:
        nnunet(here / "D", 1)
        for folder in ("T", "out"):
            save(here / folder / "a.nii.gz", label_array())
        for name in ("plans.json", "dataset.json"):
            write_json(here / "out" / "npz" / name, {"labels": {"background": 0, "tumour": 1}})
        (here / "out" / "npz" / "a.npz").write_bytes(content)

    return make


def _not_upright(here: Path, said: str) -> None:
    assert json.loads((here / "x.json").read_text())["mean"]["1"]["TrueVolumeMl"] == pytest.approx(0.032)


DATA += [
    Attack(
        "volumes of slanted voxels",
        types="evaluate T P --regions x=1 --json x.json --csv x.csv",
        code=0,
        says="1 case, 1 class: mean Dice 1.0000",
        make=lambda here: [save(here / folder / "a.nii.gz", label_array(), SHEARED) for folder in "TP"],
        after=_not_upright,
    ),
    *(
        Attack(
            f"a temperature of {value} in a run",
            types="predict run -i I -o out --npz --temperature run",
            code=3,
            says=f"run/window.json: is damaged (a temperature is {value}): remove it, and name --window yourself",
            make=_tempered(value),
        )
        for value in (math.nan, math.inf, 0.0, -1.0)
    ),
    *(
        Attack(
            f"probabilities that are {what}",
            types="evaluate T out --calibration --dataset D --json x.json --csv x.csv",
            code=3,
            says="out/npz/a.npz: cannot be read as probabilities (",
            make=_probabilities(content),
        )
        for what, content in (("an empty file", b""), ("an array of another kind", b"\x93NUMPY" + bytes(9)))
    ),
]


def _made_nothing(here: Path, said: str) -> None:
    assert not list(here.iterdir())


HUGE = "1000000000000"

ATTACKS = [
    *DATA,
    *(
        Attack(
            f"{program} with a trillion ranks",
            types=f"{program} {line} --seqpar {HUGE}",
            make=lambda here: (nnunet(here / "D", 5), make_run(here / "run")),
            code=2,
            says=words,
        )
        for program, line, words in (
            ("train", TINY, f"--seqpar: {HUGE} must be a number of ranks, at most 100000"),
            ("predict", "run -i D -o out", (f"--seqpar {HUGE} is more than the 8 tokens", "4: use a smaller --seqpar")),
            ("doctor", "--device cpu", f"--seqpar {HUGE}: it must be in [1, 100000]"),
        )
    ),
    *(
        Attack(
            f"{program} --spacing {size}{more}",
            types=f"{program} {TINY} --data D --cache cache --spacing {size},{size},{size}{more}",
            make=lambda here: nnunet(here / "D", 5),
            code=3,
            says=("D/imagesTr/c_000_0000.nii.gz: --spacing", words),
        )
        for size, words in (
            ("1e-9", "voxels ("),
            ("1e9", "would make less than one voxel of its 14x12x10; give smaller sizes in mm"),
        )
        for program, more in (("train", ""), ("train", " --dry-run"), ("pretrain", " --dry-run"))
    ),
    *WEIGHTS,
    *CLASSES,
    Attack(
        "a phantom of a trillion voxels a side",
        types=f"phantom --out P --size {HUGE} {HUGE} {HUGE}",
        code=2,
        says="a phantom's size must be three numbers of voxels, each 16 to 2048",
        after=_made_nothing,
    ),
    Attack("a seed beyond 64 bits", types="train --seed 99999999999999999999", code=2, says="--seed 9999"),
    *[
        Attack(
            f"{program} {flag} {value}",
            types=f"{program} {line} {flag} {value}",
            code=2,
            says=f"{flag} {value}: {words}",
        )
        for program, line, flag, value, words in (
            ("train", TINY, "--time-limit", "0", "it must be above 0"),
            ("train", f"{TINY} --dry-run", "--time-limit", "0:00:00", "it must be above 0"),
            ("pretrain", "--preset debug --device cpu", "--time-limit", "0.0", "it must be above 0"),
            ("train", TINY, "--workers", "100000", "it must be in [0, 256]"),
            ("tune", "--space lr=1,2", "--time-limit", "0", "it must be above 0"),
            ("tune", "--space lr=1,2", "--devices", "0", "it must be in [1, 100000]"),
            ("tune", "--space lr=1,2 --ray x:1", "--ray-nodes", "0", "it must be in [1, 100000]"),
            ("train", TINY, "--phantoms", HUGE, "it must be in [1, 100000]"),
            ("train", TINY, "--tile", HUGE, "it must be in [1, 65536]"),
            ("train", TINY, "--depth", HUGE, "it must be in [1, 1000]"),
            ("train", TINY, "--embed-dim", HUGE, "it must be in [1, 65536]"),
            ("train", TINY, "--mlp-ratio", "1e+30", "it must be above 0 and at most 1000"),
            ("train", TINY, "--decoder-width", HUGE, "it must be in [1, 65536]"),
            ("train", TINY, "--global-batch", HUGE, "it must be in [0, 1000000]"),
            ("pretrain", "--preset mae-debug --device cpu", "--rebuild-width", HUGE, "it must be in [0, 65536]"),
            ("train", TINY, "--lr", "1e+300", "it must be above 0 and at most 1e+30"),
            ("train", TINY, "--weight-decay", "inf", "it must be in [0, 1e+30]"),
            ("train", TINY, "--layer-scale", "1e+300", "it must be in [0, 1e+30]"),
            ("train", f"{TINY} --seqpar 2", "--start-timeout", "1e+30", "it must be above 0 and at most 31536000"),
            ("train", TINY, "--epochs", HUGE, "it must be at least 1 and at most 1000000000"),
            ("train", TINY, "--accumulate", HUGE, "it must be at least 1 and at most 1000000000"),
            ("plan", "", "--ranks", HUGE, "it must be in [1, 1000000]"),
            ("plan", "", "--memory", "1e+30", "it must be in [1, 1000000]"),
            ("plan", "--predict", "--volume", f"{HUGE} 1 1", "it must be in [1, 65536]"),
            ("phantom", "--out P", "--cases", HUGE, "give at most 100000"),
            ("phantom", "--out P", "--workers", HUGE, "it must be in [1, 256]"),
            ("prepare", "D", "--workers", HUGE, "it must be in [0, 256]"),
            ("evaluate", "T P", "--workers", HUGE, "it must be in [1, 256]"),
            ("doctor", "", "--time-limit", "inf", "it must be at least 5 seconds, and at most a day"),
            ("figures", "5 --plan", "--seeds", HUGE, "it must be in [1, 1000]"),
            ("figures", "5 --plan", "--groups", HUGE, "it must be in [1, 100000]"),
            ("bench", "plan", "--turns", HUGE, "it must be in [1, 1000]"),
            ("tune", "--space lr=log:1:2", "--samples", HUGE, "it must be in [1, 100000]"),
            ("tune", "--space lr=1,2", "--devices", HUGE, "it must be in [1, 100000]"),
            ("tune", "--space lr=1,2", "--devices-per-run", HUGE, "give a number of devices, 1 to 100000, or all"),
            ("tune", "--space lr=1,2", "--ray", "nonsense", "give the HOST:PORT"),
            ("tune", "--space lr=1,2", "--ray", "ray://x:1", "give the HOST:PORT"),
        )
    ],
    *PLANS,
    *(
        Attack(
            f"a tile of {side} voxels a side",
            types=f"train {TINY.replace('--tile 16', f'--tile {side}')} --batch 1",
            code=4,
            says="too little memory for the first step: a rank needs",
            within_mb=200,
            slow=True,
        )
        for side in (2048, 4096)
    ),
]
