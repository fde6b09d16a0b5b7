"""The pages' commands run, as somebody would type them: a step of .ci of its own, since each starts new processes.

``tests/house/test_readme.py`` holds that each command is run here or by another step, and that its act knows its flags.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nibabel
import pytest

from tests.support.folders import nnunet
from tests.support.nnunet_networks import Reference, configuration, plans_of, write_results
from tests.support.pages import HERE, ROOT, blocks
from tests.support.training_runs import TINY

RESULTS = "nnUNetTrainer__nnUNetPlans__3d_fullres"


def write_trained(folder: Path) -> None:
    """Writes a results folder of nnU-Net's for the data set: one channel, two labels."""
    own = {
        **configuration("PlainConvUNet"),
        "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [True],
    }
    dataset = {"channel_names": {"0": "T1"}, "labels": {"background": 0, "tumour": 1}, "file_ending": ".nii.gz"}
    net = Reference(1, 2, own["architecture"]["arch_kwargs"])
    write_results(folder, [net], plans_of(own), dataset=dataset, inference_allowed_mirroring_axes=(2,))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands find what they name: the programs, a data set, images and labels, a launcher."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "launch").symlink_to(ROOT / "launch")
    data = nnunet(folder / "Dataset001_BrainTumour", cases=5)
    for kind in ("images", "labels"):
        (data / f"{kind}Ts").symlink_to(data / f"{kind}Tr")
    (folder / "SCANS").symlink_to(data / "imagesTr")
    write_trained(folder / RESULTS)
    (folder / "bin").mkdir()
    srun = folder / "bin" / "srun"  # srun -n N python SCRIPT …
    srun.write_text('#!/bin/bash\nn=$2; shift 3\nexec torchrun --nproc-per-node "$n" "$@"\n')
    srun.chmod(0o755)
    return folder


def program_of(line: str) -> str:
    """Returns the name of the program that a command calls."""
    return re.findall(r"(?:seqpar-|launch/)(\w+)", line)[0]


def short(line: str) -> str:
    """Returns a command with fewer ranks and steps and smaller sizes, but the same flags and files."""
    line = re.sub("(--seqpar|--nproc-per-node) [48]", r"\1 2", line.replace("srun -n 16", "srun -n 2"))
    program = program_of(line)
    cache = "cache" if "--data" in line else "phantoms-cache"  # a cache holds one data set
    if program == "plan":
        line += " --seqpar 4"  # one size instead of twelve
    elif program == "train" and "--preset nnunet" in line:
        own = "planned" if "--weights" in line else "by-data"  # of other spacings
        line += f" --cache {own} --workers 0 --augment none --iterations 2 --epochs 1 --val-overlap 0 --device cpu"
    elif "--curriculum" in line:  # of a network that knows fewer flags
        lessons = "--curriculum 32:1:2,64:1:1,whole:1:2"  # whole is 32 here
        line = re.sub(r"--curriculum \S+", lessons, line) + " --preset debug --features 2 --cache cache --workers 0"
        line += " --augment none --iterations 1 --val-overlap 0 --device cpu"
    elif program == "train" and "--task classify" in line:
        line += " --features 2 --cache classes-cache --workers 0 --augment none --iterations 2 --epochs 1 --device cpu"
    elif program == "phantom" and "dementia" in line:
        line = re.sub(r"--cases \d+", "--cases 6", line) + " --size 40 48 40"
    elif program == "pretrain":
        line = (
            re.sub(r"--preset mae(-laptop)?", "--preset mae-debug", line)
            + " --tile 16 --patch 8 --embed-dim 12 --heads 2 --depth 1"
        )
        line += f" --cache images-{cache} --workers 0 --augment none --iterations 2 --epochs 1 --fold all"
        line += " --device cpu"
    elif program == "train":
        line += f" --cache {cache} " + " ".join(TINY.split())
    return line


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    env = {**os.environ, "PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("line", HERE)
def test_each_command_runs(line: str, place: Path) -> None:
    """In the order of the pages: later ones use what earlier ones wrote."""
    done = run(["bash", "-c", short(line)], place)
    allowed = (0, 1) if program_of(line) == "doctor" else (0,)  # it may find a fault of this machine
    assert done.returncode in allowed and "Traceback" not in done.stderr, done.stdout + done.stderr


def test_the_recipe_of_prediction_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the run that the commands have trained."""
    monkeypatch.chdir(place)
    first = sorted((place / "Dataset001_BrainTumour" / "imagesTs").iterdir())[0]
    shutil.copy(first, "scan.nii.gz")
    (recipe,) = (code for code in blocks(ROOT / "docs/how-to/your-own-loop.md", "python") if "import Predictor" in code)
    exec(recipe, {})
    image, labels = nibabel.load("scan.nii.gz"), nibabel.load("labels.nii.gz")
    assert labels.shape == image.shape and (labels.affine == image.affine).all()


def test_torchrun_starts_the_loop(place: Path) -> None:
    """That its weights are those of one process is shown by ``test_readme.py``, which forks its ranks."""
    (place / "loop.py").write_text(blocks(ROOT / "README.md", "python")[0])
    done = run(["torchrun", "--standalone", "--nproc-per-node", "2", "loop.py"], place)
    assert done.returncode == 0, done.stdout + done.stderr
