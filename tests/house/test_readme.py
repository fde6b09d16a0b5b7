"""The READMEs are true: their shell and Python blocks run; files, functions and links that they name exist."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.folders import nnunet
from tests.support.pages import CLUSTER, PAGES, ROOT, blocks, readme_commands
from tests.support.ranks import relative
from tests.support.training_runs import TINY

MAKE = ("make train", "make test")  # run by .ci/run, in a fresh clone


COMMANDS = readme_commands()
HERE = [line for line in COMMANDS if not line.startswith((*CLUSTER, *MAKE))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which README's commands find what they name: the acts, a data set, images and labels, a launcher."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "launch").symlink_to(ROOT / "launch")
    data = nnunet(folder / "Dataset001_BrainTumour", cases=5)
    for kind in ("images", "labels"):
        (data / f"{kind}Ts").symlink_to(data / f"{kind}Tr")
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
    if "train.py" in line:
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
    wrapped = "DistributedDataParallel(net, process_group=mesh.world.handle)"
    assert "start(seqpar=2)" in loop and wrapped in loop
    alone = loop.replace("start(seqpar=2)", "start()").replace(wrapped, "net")
    for name, code in (("loop", loop), ("alone", alone)):
        (place / f"{name}.py").write_text(f"import torch\ntorch.set_default_dtype(torch.float64)\n{code}{save}")
    for command in ([sys.executable, "alone.py"], ["torchrun", "--standalone", "--nproc-per-node", "2", "loop.py"]):
        done = run(command, place)
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = (torch.load(place / f"{size}.pt", weights_only=True) for size in (1, 2))
    assert one.keys() == two.keys()
    assert max(relative(two[name], one[name]) for name in one) < 1e-10


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
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
