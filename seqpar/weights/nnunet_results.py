"""An nnU-Net results folder, ``TRAINER__PLANS__CONFIGURATION``: plans.json, dataset.json, checkpoints of folds."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError
from seqpar.data.files import read_json
from seqpar.data.formats.nnunet_plans import NnunetDeclaration, NnunetPlan, declaration_of, plan_of
from seqpar.decoders.unets.architecture import Architecture
from seqpar.decoders.unets.nnunet import of_plan
from seqpar.settings.run_settings import UNKNOWN_TRAINERS
from seqpar.weights.weight_files import State, checkpoint_of, unwrap

PRETRAINING = "nnssl_adaptation_plan"  # an entry that nnssl's checkpoints have besides
PLANS, DATASET, CHECKPOINT = "plans.json", "dataset.json", "checkpoint_final.pth"
RESULTS, TRAINER, PLANS_NAME = "nnUNet_results", "nnUNetTrainer", "nnUNetPlans"
TAKE, REFUSE = UNKNOWN_TRAINERS
# What names of nnU-Net's own trainers say, where their network is the plan's or a Primus: epochs, augmentation, loss.
_WORDS = (
    r"\d+epochs?|NoMirroring|onlyMirror01|\d+ep|NoDA|noDA|DA5|Segord0|ord0|DAOrd0|DASegOrd0|CELoss|DiceLoss|DiceCELoss|"
    r"noSmooth|Topk10Loss|DiceTopK10Loss|LS01|Vanilla|R?Adam|Adan|CosAnneal|\d+en\d|[nN]oDeepSupervision|Benchmark|"
    r"noDataLoading|warmup|SeqPar|probabilisticOversampling|\d{3}|lr"
)
_TRAINER = re.compile(rf"nnUNetTrainer(_?({_WORDS}))*|nnUNet_Primus(_|V[23])[SBML]_Trainer(_BS8(_2e4)?)?")


@dataclass(frozen=True)
class FoldCheckpoint:
    """A checkpoint: its weights, and the axes (0 to 2, as transposed) along which it may be flipped in prediction.

    - ``trainer``: the class that trained it
    """

    path: Path
    weights: State
    mirror: tuple[int, ...]
    trainer: str

    @property
    def unknown_trainer(self) -> str:
        """The trainer, if it is none of nnU-Net's own whose network is the plan's: it may have built another one."""
        return "" if _TRAINER.fullmatch(self.trainer) else self.trainer


@dataclass(frozen=True)
class NnunetResults:
    """A results folder: the plan and data that its networks predict with, and the folds that were read.

    - ``architecture``: of the plan's U-Net; None if the folds are Primus
    - ``changed``: what these say otherwise than the checkpoints, by name
    """

    path: Path
    plan: NnunetPlan
    declaration: NnunetDeclaration
    architecture: Architecture | None
    folds: tuple[FoldCheckpoint, ...]
    changed: tuple[str, ...] = ()

    @property
    def changes_line(self) -> str:
        """A line on what the folder's plans and data set say otherwise than those in its checkpoints; "" if nothing."""
        if not self.changed:
            return ""
        return (
            f"warning: {self.path}: {PLANS} and {DATASET} are not those that the networks were trained with, which are "
            f"in their checkpoints: {', '.join(self.changed)} differ; the files are followed, as nnU-Net does"
        )

    @property
    def trainer_line(self) -> str:
        """A line on trainers that are unknown, of networks whose weights fit; "" if there are none."""
        names = dict.fromkeys(fold.unknown_trainer for fold in self.folds if fold.unknown_trainer)
        if not names:
            return ""
        return (
            f"{self.path}: trained by {', '.join(names)}, which is not one of nnU-Net's own trainers; all tensors fit "
            "the plan's network, so it is used (activations have no tensors: they are the plan's)"
        )

    def refuse_unknown_trainers(self) -> None:
        """Raises DataError if a fold's trainer is none of nnU-Net's own whose network is the plan's."""
        for fold in self.folds:
            if fold.unknown_trainer:
                raise DataError(
                    fold.path, f"was trained by {fold.unknown_trainer}, which is not one of nnU-Net's own trainers, "
                    f"and --trainer-unknown is {REFUSE}; {TAKE} uses it if its tensors fit the plan's network"
                )  # fmt: skip


def is_results(path: str | Path) -> bool:
    """Returns whether a folder is such a results folder, by the files in it; raises DataError if it lacks one of them
    next to checkpoints of folds.
    """
    missing = [name for name in (PLANS, DATASET) if not (Path(path) / name).is_file()]
    if missing and any(Path(path).glob("fold_*/checkpoint_*.pth")):
        raise DataError(Path(path) / missing[0], "is missing; copy it from nnU-Net's results folder too")
    return not missing


def find_results(dataset: str, configuration: str, trainer: str, plans: str) -> Path:
    """Returns the results folder of an nnU-Net network, under $nnUNet_results; ``dataset``: number or name."""
    place = os.environ.get(RESULTS)
    if not place:
        raise ValueError(f"-d {dataset}: {RESULTS} is not set: export it as for nnU-Net, or name the results folder")
    pattern = f"Dataset{int(dataset):03d}_*" if dataset.isdecimal() else dataset
    folders = [folder for folder in sorted(Path(place).glob(pattern)) if folder.is_dir()]
    if len(folders) != 1:
        found = "no folder matches" if not folders else f"{len(folders)} folders match"
        raise DataError(
            place, f"-d {dataset}: {found} {pattern} in ${RESULTS}, and one must: train it there, or name its folder"
        )
    folder = folders[0] / f"{trainer}__{plans}__{configuration}"
    if not folder.is_dir():
        there = ", ".join(sorted(other.name for other in folders[0].glob("*__*__*"))) or "none"
        raise DataError(folder, f"does not exist; name another by -c, -tr and -p: there are {there}")
    return folder


def fold_files(folder: str | Path, folds: Sequence[str] = (), checkpoint: str = CHECKPOINT) -> list[Path]:
    """Returns the checkpoint of each fold.

    - ``folds``: "0" to "4", or "all"; none: all numbered folds that are there, else "all"
    - ``checkpoint``: the file's name in each fold's folder
    """
    folder = Path(folder)
    there = sorted(path.name for path in folder.glob("fold_*") if (path / checkpoint).is_file())
    numbered = [name for name in there if re.fullmatch(r"fold_\d+", name)]
    names = [f"fold_{fold}" for fold in folds] or numbered or [name for name in there if name == "fold_all"]
    if not names or (missing := [name for name in names if name not in there]):
        lacking = f"has no {missing[0]}/{checkpoint}" if names else f"holds no fold_0/{checkpoint}"
        have = ", ".join(name.removeprefix("fold_") for name in there) or "none"
        raise DataError(folder, f"{lacking}; folds with that file: {have}")
    return [folder / name / checkpoint for name in names]


def read_results(folder: str | Path, files: Sequence[Path]) -> NnunetResults:
    """Reads the plans of a results folder and the checkpoints ``files`` of its folds; runs nothing of them."""
    folder = Path(folder)
    checkpoints = [_checkpoint(path) for path in files]
    names = [checkpoint["init_args"]["configuration"] for checkpoint in checkpoints]
    if len(set(names)) > 1:
        raise DataError(files[-1], f"is of configuration {names[-1]}, {files[0]} of {names[0]}: give folds of one")
    plans, dataset = _content(folder / PLANS), _content(folder / DATASET)
    return _results(folder, plans, dataset, dict(zip(files, checkpoints)), folder / PLANS)


def read_checkpoint(path: str | Path) -> NnunetResults:
    """Reads one checkpoint by itself, with the plans that it was trained with, which are in it."""
    checkpoint = _checkpoint(Path(path))
    settings = checkpoint["init_args"]
    return _results(Path(path), settings["plans"], settings["dataset_json"], {Path(path): checkpoint}, Path(path))


def is_checkpoint(content: Mapping[str, Any]) -> bool:
    """Returns whether a file's content is one of nnU-Net's checkpoints."""
    return "network_weights" in content and "trainer_name" in content


def holds_unet(content: Mapping[str, Any]) -> bool:
    """Returns whether a file's content is an nnU-Net checkpoint with the U-Net of its plans.

    Pretrainings of nnssl's, what is written as one here, and a Primus that nnU-Net trained have the same entries.
    """
    return is_checkpoint(content) and PRETRAINING not in content and not is_primus(unwrap(content))


def holds_primus(content: Mapping[str, Any]) -> bool:
    """Returns whether a file's content is an nnU-Net checkpoint with a Primus, which its trainer built, and plans."""
    arguments = content.get("init_args")
    planned = isinstance(arguments, Mapping) and {"plans", "configuration"} <= arguments.keys()
    return planned and is_checkpoint(content) and PRETRAINING not in content and is_primus(unwrap(content))


def is_primus(state: Mapping[str, Any]) -> bool:
    """Returns whether a state dict has the names of Primus."""
    return any(name.startswith("eva.") for name in state)


def _results(
    path: Path, plans: Mapping[str, Any], dataset: Mapping[str, Any], checkpoints: Mapping[Path, Mapping[str, Any]],
    plans_path: Path,
) -> NnunetResults:  # fmt: skip
    plan = plan_of(plans, next(iter(checkpoints.values()))["init_args"]["configuration"], plans_path)
    declaration = declaration_of(dataset, plans_path.with_name(DATASET) if plans_path.name == PLANS else plans_path)
    if len(plan.schemes) != len(declaration.channels):
        raise DataError(
            plans_path, f"normalises {len(plan.schemes)} channels, and {len(declaration.channels)} are declared "
            f"({', '.join(declaration.channels)}): take plans and {DATASET} of one training"
        )  # fmt: skip
    folds = tuple(
        FoldCheckpoint(
            file,
            unwrap(checkpoint, file),
            tuple(checkpoint.get("inference_allowed_mirroring_axes") or ()),
            str(checkpoint["trainer_name"]),
        )
        for file, checkpoint in checkpoints.items()
    )
    names = dict.fromkeys(name for file in checkpoints.items() for name in _changed(plan, declaration, *file))
    architecture = None
    if not is_primus(folds[0].weights):  # which its trainer built, whatever the plans say
        try:
            architecture = of_plan(
                plan.network_class, plan.network_arguments, len(declaration.channels), declaration.num_outputs
            )
            architecture.refuse_extents(plan.patch_size)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(plans_path, f"its network cannot be built: {error}") from error
    return NnunetResults(path, plan, declaration, architecture, folds, tuple(names))


def _changed(plan: NnunetPlan, declaration: NnunetDeclaration, file: Path, checkpoint: Mapping[str, Any]) -> list[str]:
    """Returns what a plan and a declaration say otherwise than those that a checkpoint was trained with, by name."""
    trained = checkpoint["init_args"]
    try:
        own = plan_of(trained["plans"], plan.configuration, file), declaration_of(trained["dataset_json"], file)
    except (DataError, TypeError, AttributeError):
        return []  # of a version that reads otherwise

    def said(plan: NnunetPlan, declaration: NnunetDeclaration) -> dict[str, Any]:
        regions = list(declaration.regions.items())  # whose order is that of the outputs
        return {**vars(plan), **vars(declaration), "regions": regions, "batch_size": 0, "batch_dice": False}

    now, before = said(plan, declaration), said(*own)
    return [name for name in now if now[name] != before[name]]


def _checkpoint(path: Path) -> Mapping[str, Any]:
    """Returns a checkpoint's content."""
    content = checkpoint_of(path, mapped=True)
    if not is_checkpoint(content) or not isinstance(content.get("init_args"), Mapping):
        raise DataError(path, "is no checkpoint of nnU-Net v2 (network_weights, trainer_name and init_args are needed)")
    if lacking := {"plans", "dataset_json", "configuration"} - set(content["init_args"]):
        raise DataError(path, f"its init_args lack {', '.join(sorted(lacking))}; give a checkpoint of nnU-Net v2")
    axes = content.get("inference_allowed_mirroring_axes")
    if axes is not None and (not isinstance(axes, (list, tuple)) or not all(axis in (0, 1, 2) for axis in axes)):
        raise DataError(path, f"its inference_allowed_mirroring_axes are {axes!r}; 0, 1 and 2 are the axes of an image")
    return content


def _content(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise DataError(path, f"holds a {type(content).__name__}; an object is needed")
    return content
