"""Generated data sets on which the real nnU-Net plans, trains for a few iterations and validates, on a CPU."""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

STAGES, FEATURES, ITERATIONS = 3, (6, 8, 10), 8
PLAIN, REGIONS = "Dataset101_Plain", "Dataset102_Regions"
PLANS = {PLAIN: "nnUNetPlans", REGIONS: "nnUNetResEncUNetMPlans"}
PATCHES = {PLAIN: (8, 24, 24), REGIONS: (16, 16, 16)}  # in nnU-Net's axes; smaller than the cases


def oblique(spacing: Sequence[float], flips: Sequence[int]) -> np.ndarray:
    """Returns an affine whose axes are turned by 0.2 and then flipped and exchanged: no reader's own orientation."""
    cos, sin = np.cos(0.2), np.sin(0.2)
    turn = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])[:, [1, 0, 2]]
    affine = np.eye(4)
    affine[:3, :3] = turn * np.array(spacing) * np.array(flips)
    affine[:3, 3] = 20, -30, 5
    return affine


def make_case(folder: Path, name: str, seed: int, channels: int, spacing: Sequence[float], large: bool) -> None:
    """Writes a case: an ellipsoid in another one, noise, and where ``large`` a wide border of zeros."""
    rng = np.random.default_rng(seed)
    shape = tuple(int(side) for side in rng.integers(30, 38, 3)) if large else (*rng.integers(36, 44, 2), 13)
    at = (np.indices(shape) / np.array(shape)[:, None, None, None] - 0.5) * 2
    middle = rng.uniform(-0.2, 0.2, 3)[:, None, None, None]
    outer, inner = (((at - middle) ** 2).sum(0) < radius**2 for radius in (0.45, 0.25))
    label = (outer + inner.astype(int)).astype(np.uint8)
    affine = oblique(spacing, (-1, 1, 1))
    for channel in range(channels):
        image = 300 + (150.0 - 40 * channel) * label + rng.normal(0, 50, shape)
        if large:
            image *= np.abs(at).max(0) < 0.75
        saved = nibabel.Nifti1Image(image.astype(np.int16), affine)
        nibabel.save(saved, folder / "imagesTr" / f"{name}_{channel:04d}.nii.gz")
    nibabel.save(nibabel.Nifti1Image(label, affine), folder / "labelsTr" / f"{name}.nii.gz")


def make_dataset(raw: Path, name: str, cases: int = 6) -> Path:
    """Writes one of the two data sets: labels with CT and MR on far slices, or regions inside a border of zeros."""
    folder, regions = raw / name, name == REGIONS
    for part in ("imagesTr", "labelsTr"):
        (folder / part).mkdir(parents=True)
    channels = ("T1",) if regions else ("CT", "T1")
    for number in range(cases):
        sizes = (1.1 + 0.1 * (number % 2), 0.9, 1.3) if regions else (0.8, 0.9, 3.2 + 0.3 * (number % 2))
        make_case(folder, f"case_{number:03d}", number + 10 * regions, len(channels), sizes, regions)
    labels: dict[str, Any] = {"background": 0, "outer": [1, 2] if regions else 1, "inner": 2}
    content: dict[str, Any] = {
        "channel_names": {str(n): channel for n, channel in enumerate(channels)},
        "labels": labels, "numTraining": cases, "file_ending": ".nii.gz",
    }  # fmt: skip
    if regions:
        content["regions_class_order"] = [1, 2]
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def set_paths(root: Path) -> None:
    """Sets nnU-Net's variables, which it reads when it is imported; call it before."""
    for name in ("raw", "preprocessed", "results"):
        os.environ[f"nnUNet_{name}"] = str(root / f"nnUNet_{name}")
        (root / f"nnUNet_{name}").mkdir(parents=True, exist_ok=True)
    os.environ |= {"nnUNet_def_n_proc": "2", "nnUNet_compile": "f"}


def plan_and_train(root: Path, name: str) -> Path:
    """Plans and trains with nnU-Net; returns the results folder. Network and patch are made small in its plans."""
    import torch
    from nnunetv2.experiment_planning import plan_and_preprocess_api as api
    from nnunetv2.experiment_planning.dataset_fingerprint.fingerprint_extractor import DatasetFingerprintExtractor
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    set_float_sums()
    os.environ |= {"nnUNet_n_proc_DA": "1"}
    number, preprocessed = int(name[7:10]), root / "nnUNet_preprocessed" / name
    extractor = DatasetFingerprintExtractor(number, 1)
    extractor.num_foreground_voxels_for_intensitystats = 60_000  # a few seconds in place of minutes
    extractor.run()
    planner = "nnUNetPlannerResEncM" if "ResEnc" in PLANS[name] else "ExperimentPlanner"
    api.plan_experiments([number], planner, 8)
    path = preprocessed / f"{PLANS[name]}.json"
    plans = json.loads(path.read_text())
    own = plans["configurations"]["3d_fullres"]
    own |= {"patch_size": list(PATCHES[name]), "batch_size": 2}
    arguments = own["architecture"]["arch_kwargs"]
    arguments |= {"n_stages": STAGES, "features_per_stage": list(FEATURES)}
    for key, count in {
        "kernel_sizes": STAGES, "strides": STAGES, "n_conv_per_stage": STAGES, "n_blocks_per_stage": STAGES,
        "n_conv_per_stage_decoder": STAGES - 1,
    }.items():  # fmt: skip
        if key in arguments:
            arguments[key] = arguments[key][:count]
    path.write_text(json.dumps(plans))
    api.preprocess([number], PLANS[name], ["3d_fullres"], [1])
    torch.manual_seed(0)
    np.random.seed(0)
    os.environ |= {"nnUNet_n_proc_DA": "0"}  # which planning refuses
    dataset = json.loads((preprocessed / "dataset.json").read_text())
    trainer = nnUNetTrainer(plans | {"continue_training": False}, "3d_fullres", 0, dataset, torch.device("cpu"))
    trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 1, ITERATIONS, 1
    trainer.run_training()
    trainer.perform_actual_validation()
    return Path(trainer.output_folder_base)


def ten_losses(name: str, trainer_name: str, out: Path) -> None:
    """Trains ten iterations on fold 1 with a trainer that nnU-Net finds, and validates; writes the losses."""
    import torch
    from nnunetv2.run.run_training import get_trainer_from_args

    let_torchvision_load()
    set_float_sums()
    os.environ |= {"nnUNet_n_proc_DA": "0"}
    torch.set_num_threads(1)
    trainer = get_trainer_from_args(name, "3d_fullres", 1, trainer_name, PLANS[name], device=torch.device("cpu"))
    trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 1, 10, 1
    torch.manual_seed(0)
    np.random.seed(0)
    losses, step = list[float](), trainer.train_step

    def recorded(batch: dict[str, Any]) -> dict[str, Any]:
        result = step(batch)
        losses.append(float(result["loss"]))
        return result

    trainer.train_step = recorded
    trainer.run_training()
    trainer.perform_actual_validation()
    if trainer.local_rank == 0:
        out.write_text(json.dumps({"losses": losses, "folder": trainer.output_folder}))


def primus(version: str, sides: tuple[int, ...]) -> Any:
    """Returns a small Primus of the package that nnU-Net takes it from, in float64, and its angles too."""
    import torch

    let_torchvision_load()
    import timm.layers.pos_embed_sincos as positions
    from dynamic_network_architectures.architectures import primus as package

    class Torch:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    positions.torch = Torch()
    torch.manual_seed(0)
    options = {"init_values": 0.1, "scale_attn_inner": True, "drop_path_rate": 0.0, "input_shape": sides}
    net = getattr(package, version)(2, 72, (8, 8, 8), 3, eva_depth=2, eva_numheads=4, **options).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return net


def let_torchvision_load() -> None:
    """Declares two operators of torchvision's, whose usual wheel does not load with a torch for CPUs alone.

    nnU-Net's search for trainers imports it.
    """
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        let_torchvision_load.library = library  # it declares while it lives


def predicted(model: Path, images: Path, out: Path, sums: str = "float") -> Path:
    """Predicts with nnU-Net from a results folder, with sums in float32 or as it has them; returns the label maps."""
    import torch
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    if sums == "float":
        set_float_sums()
    predictor = nnUNetPredictor(perform_everything_on_device=False, device=torch.device("cpu"))
    predictor.initialize_from_trained_model_folder(str(model), None, "checkpoint_final.pth")
    out.mkdir()
    predictor.predict_from_files_sequential(str(images), str(out), save_probabilities=False)
    return out


def set_float_sums() -> None:
    """Lets nnU-Net add up windows in float32, as is done here, in place of half precision."""
    import nnunetv2.inference.predict_from_raw_data as predictions
    import torch

    class Torch:
        half = torch.float32

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    predictions.torch = Torch()


if __name__ == "__main__":  # train ROOT NAME ...; predict ROOT MODEL IMAGES OUT SUMS; losses ROOT NAME TRAINER OUT
    act, root, *words = sys.argv[1:]
    set_paths(Path(root))
    if act == "predict":
        predicted(*map(Path, words[:3]), *words[3:])
    elif act == "losses":
        ten_losses(words[0], words[1], Path(words[2]))
    else:
        for name in words:
            make_dataset(Path(root) / "nnUNet_raw", name)
            plan_and_train(Path(root), name)
