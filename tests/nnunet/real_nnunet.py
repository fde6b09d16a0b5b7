"""Generated data sets on which the real nnU-Net plans, trains for a few iterations and validates, on a CPU."""

import importlib
import itertools
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

STAGES, FEATURES, ITERATIONS = 3, (6, 8, 10), 8
PLAIN, REGIONS = "Dataset101_Plain", "Dataset102_Regions"
PLANS = {PLAIN: "nnUNetPlans", REGIONS: "nnUNetResEncUNetMPlans"}
PATCHES = {PLAIN: (12, 32, 32), REGIONS: (24, 24, 24)}  # in nnU-Net's axes; smaller than the cases


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
    os.environ |= {"nnUNet_def_n_proc": "1", "nnUNet_compile": "f"}


def fork_pools() -> None:
    """Lets nnU-Net's pools of processes be forked: most of the time of short work is else spent on imports."""
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore


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


class Killed(BaseException):
    """Ends a training after its first epoch."""


def use_small_trainers(out: Path, ends: bool) -> Any:
    """Lets nnU-Net's command make trainers of two epochs of five iterations, for CPUs; returns its module.

    - ``out``: file to which the first rank adds the losses; next to it, as .pth, are the weights that it begins with
    - ``ends``: end the training after the first epoch, as if it had been killed
    """
    let_torchvision_load()
    import torch
    from nnunetv2.run import run_training as command

    set_float_sums()
    os.environ |= {"nnUNet_n_proc_DA": "0"}
    torch.set_num_threads(1)
    make = command.__dict__.setdefault("theirs", command.get_trainer_from_args)
    cpu = torch.device("cpu")

    def small(*arguments: Any, **named: Any) -> Any:
        trainer = make(*arguments, **(named | {"device": cpu}))
        trainer.device, trainer.grad_scaler, trainer.save_every = cpu, None, 1
        trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 2, 5, 1
        losses, step, end = list[float](), trainer.train_step, trainer.on_epoch_end

        def recorded(batch: dict[str, Any]) -> dict[str, Any]:
            if not out.exists() and not losses and trainer.local_rank == 0:
                torch.save(trainer.network.state_dict(), out.with_suffix(".pth"))
            result = step(batch)
            losses.append(float(result["loss"]))
            return result  # type: ignore[no-any-return]

        def ended() -> None:
            end()
            if trainer.local_rank == 0:
                said = json.loads(out.read_text())["losses"] if out.exists() else []
                out.write_text(json.dumps({"losses": said + losses, "folder": trainer.output_folder}))
                losses.clear()
            if ends:
                raise Killed

        trainer.train_step, trainer.on_epoch_end = recorded, ended
        torch.manual_seed(0)
        np.random.seed(0)
        return trainer

    command.get_trainer_from_args = small
    return command


def train_by_command(name: str, trainer: str, out: Path, part: str) -> None:
    """Trains on fold 1 as nnUNetv2_train does, with its validation: "whole", or "continue", which is --c, or "begin",
    which ends after an epoch.
    """
    command = use_small_trainers(out, part == "begin")
    with suppress(Killed):
        command.run_training(name, "3d_fullres", 1, trainer, PLANS[name], continue_training=part == "continue")


def train_on(root: Path, name: str, model: Path, out: Path) -> None:
    """Trains an epoch on fold 2 from what was handed back, by -pretrained_weights and the plans that came with it."""
    from nnunetv2.experiment_planning import plan_and_preprocess_api as api

    plans = json.loads((model / "plans.json").read_text())["plans_name"]
    (root / "nnUNet_preprocessed" / name / f"{plans}.json").write_text((model / "plans.json").read_text())
    os.environ |= {"nnUNet_n_proc_DA": "1"}  # as preprocessing needs it
    api.preprocess([int(name[7:10])], plans, ["3d_fullres"], [1])
    trainer, _, _ = model.name.partition("__")
    command = use_small_trainers(out, True)
    with suppress(Killed):
        weights = str(model / "fold_0" / "checkpoint_final.pth")
        command.run_training(name, "3d_fullres", 2, trainer, plans, pretrained_weights=weights)


def begin_by_num_gpus(rank: int, name: str, trainer: str, out: Path) -> None:
    """What -num_gpus 2 starts on each rank, with gloo instead of NCCL, up to the end of an epoch."""
    command = use_small_trainers(out, True)
    import torch

    command.setup_ddp = lambda rank, world_size: torch.distributed.init_process_group(
        "gloo", None, None, world_size, rank
    )
    torch.cuda.set_device = lambda device: None
    try:
        command.run_ddp(rank, name, "3d_fullres", 1, trainer, PLANS[name], False, False, False, None, False, False, 2)
    except Killed:
        torch.distributed.barrier()


def start_num_gpus(*arguments: Any) -> None:
    """Starts two ranks as nnU-Net does."""
    import torch

    with socket.socket() as free:
        free.bind(("", 0))
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    torch.multiprocessing.spawn(begin_by_num_gpus, arguments, nprocs=2)


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
    let_torchvision_load()
    import torch
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    set_float_sums(sums == "float")
    predictor = nnUNetPredictor(perform_everything_on_device=False, device=torch.device("cpu"))
    predictor.initialize_from_trained_model_folder(str(model), (0,), "checkpoint_final.pth")
    out.mkdir()
    predictor.predict_from_files_sequential(str(images), str(out), save_probabilities=False)
    return out


def set_float_sums(on: bool = True) -> None:
    """Lets nnU-Net add up windows in float32, as is done here, in place of half precision."""
    import nnunetv2.inference.predict_from_raw_data as predictions
    import torch

    class Torch:
        half = torch.float32 if on else torch.half

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    predictions.torch = Torch()


def find_best(root: Path, name: str, trainers: Sequence[str], out: Path) -> None:
    """Lets nnU-Net compare trainers over three folds, and each two together; writes their Dice and which is best."""
    from nnunetv2.evaluation.find_best_configuration import find_best_configuration

    models = [{"plans": "nnUNetPlans", "configuration": "3d_fullres", "trainer": trainer} for trainer in trainers]
    told = find_best_configuration(name, models, folds=(0, 1, 2), num_processes=1)
    best = told["best_model_or_ensemble"]
    chosen = [model["trainer"] for model in best["selected_model_or_models"]]
    content = {
        "dice": list(told["all_results"].values()), "best": chosen,
        "after": best["result_on_crossval_post_pp"],
    }  # fmt: skip
    out.write_text(json.dumps(content))


def act(root: Path, what: str, *words: str) -> None:
    """Does one of: ours PROGRAM ARGUMENTS; train NAME; losses NAME TRAINER OUT PART; num_gpus NAME TRAINER OUT;
    on NAME MODEL OUT;
    predict MODEL IMAGES OUT SUMS; ensemble A B OUT; postprocessing PREDICTIONS TRUTH PLANS DATASET;
    best NAME TRAINERS OUT; fingerprints OUT.
    """
    if what == "train":
        make_dataset(root / "nnUNet_raw", words[0])
        plan_and_train(root, words[0])
    elif what == "losses":
        train_by_command(words[0], words[1], Path(words[2]), words[3])
    elif what == "num_gpus":
        start_num_gpus(words[0], words[1], Path(words[2]))
    elif what == "on":
        train_on(root, words[0], Path(words[1]), Path(words[2]))
    elif what == "ours":
        from seqpar.data.preparation import recipe_survey

        recipe_survey.SAMPLED_VOXELS = 60_000  # as above
        assert importlib.import_module(f"seqpar.cli.{words[0]}").act(words[1:]) == 0, words
    elif what == "ensemble":
        from nnunetv2.ensembling.ensemble import ensemble_folders

        ensemble_folders([*words[:2]], words[2], num_processes=1)
    elif what == "postprocessing":
        from nnunetv2.postprocessing.remove_connected_components import determine_postprocessing

        determine_postprocessing(*words, num_processes=1)
    elif what == "best":
        find_best(root, words[0], words[1].split(), Path(words[2]))
    elif what == "fingerprints":
        from tests.nnunet.fingerprints import write_told

        write_told(root, Path(words[0]))
    else:
        predicted(*map(Path, words[:3]), *words[3:])


def act_all(root: Path, line: Sequence[str]) -> None:
    """Does all of ACT WORDS + ACT WORDS + ... in this process, with nnU-Net's folders in ``root``."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "nnunetv2"]:
        del sys.modules[name]  # it reads the variables when it is imported
    set_paths(root)
    fork_pools()
    for between, words in itertools.groupby(line, "+".__eq__):
        if not between:
            act(root, *words)


def import_libraries() -> None:
    """Imports what nnU-Net imports, and nnU-Net, so that forked processes need not: that takes several seconds each."""
    let_torchvision_load()
    for name in (
        "nnunetv2.experiment_planning.plan_and_preprocess_api", "nnunetv2.run.run_training", "seqpar.cli.train",
        "nnunetv2.evaluation.find_best_configuration", "dynamic_network_architectures.architectures.primus",
    ):  # fmt: skip
        importlib.import_module(name)


if __name__ == "__main__":  # ROOT ACT WORDS + ACT WORDS + ...
    act_all(Path(sys.argv[1]), sys.argv[2:])
