"""The READMEs are true: their shell and Python blocks run; files, functions and links that they name exist."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nibabel
import pytest
import torch

from tests.support.folders import nnunet
from tests.support.nnunet_networks import Reference, configuration, plans_of, write_results
from tests.support.pages import CLUSTER, PAGES, ROOT, blocks, readme_commands
from tests.support.ranks import relative
from tests.support.scripts import run_script
from tests.support.training_runs import TINY

RESULTS = "nnUNetTrainer__nnUNetPlans__3d_fullres"
MAKE = ("make train", "make test")  # run by .ci/run, in a fresh clone


EXACT = "import torch\ntorch.set_default_dtype(torch.float64)\n"
WRAPPED = "DistributedDataParallel(net, process_group=mesh.world.handle)"
COMMANDS = readme_commands()
HERE = [line for line in COMMANDS if not line.startswith((*CLUSTER, *MAKE))]


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
    """A folder in which README's commands find what they name: the acts, a data set, images and labels, a launcher."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "launch").symlink_to(ROOT / "launch")
    data = nnunet(folder / "Dataset001_BrainTumour", cases=5)
    for kind in ("images", "labels"):
        (data / f"{kind}Ts").symlink_to(data / f"{kind}Tr")
    write_trained(folder / RESULTS)
    (folder / "bin").mkdir()
    srun = folder / "bin" / "srun"  # srun -n N python SCRIPT …
    srun.write_text('#!/bin/bash\nn=$2; shift 3\nexec torchrun --nproc-per-node "$n" "$@"\n')
    srun.chmod(0o755)
    return folder


def short(line: str) -> str:
    """Returns a command with fewer ranks and steps and smaller sizes, but the same flags and files."""
    line = line.replace("srun -n 16", "srun -n 2").replace("--seqpar 8", "--seqpar 2")
    line = line.replace("--nproc-per-node 4", "--nproc-per-node 2").replace("--seqpar 4", "--seqpar 2")
    if "plan.py" in line:
        line += " --seqpar 4"  # one size instead of twelve
    if "--preset nnunet" in line and "train" in line:
        own = "planned" if "--weights" in line else "by-data"  # of other spacings
        line += f" --cache {own} --workers 0 --augment none --iterations 2 --epochs 1 --val-overlap 0 --device cpu"
    elif "--curriculum" in line:  # of a network that knows fewer flags
        lessons = "--curriculum 32:1:2,64:1:1,whole:1:2"  # whole is 32 here
        line = re.sub(r"--curriculum \S+", lessons, line) + " --preset debug --features 2 --cache cache --workers 0"
        line += " --augment none --iterations 1 --val-overlap 0 --device cpu"
    elif re.search(r"train\.py|seqpar-train", line):
        line += " --cache cache " + " ".join(TINY.split())
    return line


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    env = {**os.environ, "PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def test_the_blocks_are_those_that_are_run_somewhere() -> None:
    """Here, in .ci/run, or, where they hand in jobs, by tests/slurm on a real Slurm."""
    ci, slurm = (ROOT / ".ci" / "run").read_text(), (ROOT / "tests" / "slurm" / "jobs_on_slurm.py").read_text()
    assert len(HERE) >= 7 and len(HERE) + len(MAKE) < len(COMMANDS)
    assert all(re.search(rf"^{command}$", ci, re.M) for command in MAKE)
    assert "readme_commands(" in slurm
    assert set(COMMANDS) - set(HERE) == {*MAKE, *readme_commands(*CLUSTER)}


@pytest.mark.parametrize("line", HERE)
def test_each_command_runs(line: str, place: Path) -> None:
    """In the order of the pages: later ones use what earlier ones wrote."""
    done = run(["bash", "-c", short(line)], place)
    allowed = (0, 1) if "doctor.py" in line else (0,)  # it may find a fault of this machine
    assert done.returncode in allowed and "Traceback" not in done.stderr, done.stdout + done.stderr


def test_the_example_of_one_process_runs() -> None:
    example, _ = blocks(ROOT / "README.md", "python")
    code = f"import torch\n{example}assert encoder(torch.randn(1, 4, 96, 96, 96)).shape == (1, 216, 96)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_the_loop_on_two_ranks_is_that_of_one_process(place: Path) -> None:
    _, loop = blocks(ROOT / "README.md", "python")
    assert len(loop.splitlines()) <= 25
    save = "\ntorch.save(net.state_dict(), f'{mesh.world.size}.pt') if mesh.is_first else None\n"
    assert "start(seqpar=2)" in loop and WRAPPED in loop
    alone = loop.replace("start(seqpar=2)", "start()").replace(WRAPPED, "net")
    (place / "loop.py").write_text(f"{EXACT}{loop}{save}")
    done = run(["torchrun", "--standalone", "--nproc-per-node", "2", "loop.py"], place)
    assert done.returncode == 0, done.stdout + done.stderr
    run_script(1, f"{EXACT}{alone}{save}", place)
    one, two = (torch.load(place / f"{size}.pt", weights_only=True) for size in (1, 2))
    assert one.keys() == two.keys()
    assert max(relative(two[name], one[name]) for name in one) < 1e-10


RECIPES = ["every rank has all features", "a decoder on boxes", "MONAI's UNETR"]


@pytest.mark.parametrize("number", range(3), ids=RECIPES)
def test_each_recipe_of_a_loop_on_two_ranks_is_that_of_one_process(number: int, tmp_path: Path) -> None:
    code = blocks(ROOT / "seqpar" / "README.md", "python")[number]
    if "monai" in code:
        pytest.importorskip("monai.networks.nets")  # here, not in every rank
    alone = code.replace("seqpar=2", "seqpar=1").replace(WRAPPED, "net")
    assert "DistributedDataParallel(net" in code and ("seqpar=2" in code) == (alone != code)
    one, two = weights_of(1, alone, tmp_path), weights_of(2, code, tmp_path)
    assert one.keys() == two.keys() and any("encoder.blocks" in name for name in one)
    assert max(relative(two[name], one[name]) for name in one) < 1e-10
    if "monai" in code:  # its own net, with its own encoder
        own = weights_of(1, re.sub(r"net\.vit = .*", "pass", alone), tmp_path)
        decoder = [name for name in own if not name.startswith("vit.")]
        assert len(decoder) > 20 and max(relative(one[name], own[name]) for name in decoder) < 1e-10


def weights_of(world: int, script: str, folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights that a script trains in float64 on so many ranks."""
    save = "import os\nif os.environ['RANK'] == '0':\n    torch.save(net.state_dict(), 'weights.pt')\n"
    run_script(world, f"{EXACT}{script}{save}", folder)
    weights: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return weights


def test_the_recipe_of_prediction_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the run that README's commands have trained."""
    monkeypatch.chdir(place)
    first = sorted((place / "Dataset001_BrainTumour" / "imagesTs").iterdir())[0]
    shutil.copy(first, "scan.nii.gz")
    (recipe,) = (code for code in blocks(ROOT / "seqpar" / "README.md", "python") if "import Predictor" in code)
    exec(recipe, {})
    image, labels = nibabel.load("scan.nii.gz"), nibabel.load("labels.nii.gz")
    assert labels.shape == image.shape and (labels.affine == image.affine).all()


def named(page: Path) -> list[tuple[str, str]]:
    """Returns each file that a page names with what it says is in it, and files named without."""
    text = " ".join(page.read_text().split())
    return re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_functions_that_are_named_exist(page: Path) -> None:
    for path in re.findall(r"`((?:seqpar|decoders|launch|tests)/[\w/.]*)`", page.read_text()):
        assert (ROOT / path).exists(), path
    for path, name in named(page):
        scope: ast.AST = ast.parse((ROOT / path).read_text())
        for step in name.split("."):
            inside = {getattr(node, "name", ""): node for node in ast.iter_child_nodes(scope)}
            assert step in inside, f"{path} has no {name}"
            scope = inside[step]


def test_the_trip_of_a_tile_names_each_hop() -> None:
    assert len(named(ROOT / "seqpar" / "README.md")) >= 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def test_the_readme_is_short() -> None:
    """130 lines, and two to six for each kind of work that came later."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160
