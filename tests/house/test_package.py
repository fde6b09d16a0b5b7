"""The wheel holds one top-level name and the job scripts, and works in a clean environment; the README is true."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.programs import COMMANDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the files that git knows, because a build in place would leave its folders behind."""
    source = tmp_path_factory.mktemp("source")
    listing = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    files = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True)
    names = [name for name in files.stdout.decode().split("\0") if name and (ROOT / name).exists()]
    packed = subprocess.run(["tar", "-cf", "-", *names], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-xf", "-"], cwd=source, input=packed.stdout, check=True)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(target), "."]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_has_one_top_level_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"seqpar"}
    for folder in ("seqpar", "decoders"):
        for path in (ROOT / folder).rglob("*.py"):  # a folder without __init__.py would be left out
            inside = path.relative_to(ROOT).as_posix()
            assert (inside if inside.startswith("seqpar/") else f"seqpar/{inside}") in names, inside
    assert "seqpar/py.typed" in names and "seqpar/data/errors.py" in names
    for source, inside in (("seqpar/report/template", "report/template"), ("launch/slurm", "cluster/slurm")):
        assert {f"seqpar/{inside}/{path.name}" for path in (ROOT / source).iterdir()} <= set(names)


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an environment with nothing but the wheel, and the dependencies that are installed here."""
    return environment(tmp_path_factory.mktemp("environment"), str(wheel))


def environment(folder: Path, *what: str) -> Path:
    """Returns a new environment in which pip has installed ``what``, and which has the dependencies of this one."""
    venv.create(folder, with_pip=False)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", "--no-deps"]
    subprocess.run([*install, "--no-build-isolation", "--ignore-installed", *what], check=True, capture_output=True)
    return folder


def run_in(clean: Path, cwd: Path, *command: str | Path, **more: str) -> str:
    """Runs a command of the environment; returns its output."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PATH": f"{cwd}:{clean / 'bin'}:{env['PATH']}", "OMP_NUM_THREADS": "1", **more}
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_the_wheel_is_imported_in_a_clean_environment(clean: Path, tmp_path: Path) -> None:
    code = "import seqpar; from seqpar import SeqParViT; import seqpar.decoders.plain; print(seqpar.__file__)"
    assert run_in(clean, tmp_path, "python", "-c", code).startswith(str(clean))


RIGHT = """import seqpar
from seqpar import SeqParViT, DiceCE
net: SeqParViT = SeqParViT(1, 32, 8, embed_dim=24, depth=3, num_heads=2)
loss: DiceCE = seqpar.losses.DiceCE()
"""
WRONG = """import seqpar
seqpar.SeqParViT(1, 32, 8, depth="three")
seqpar.SeqParVit
"""


KINDS = {"mypy": ("[arg-type]", "[attr-defined]"), "pyright": ("(reportArgumentType)", "(reportAttributeAccessIssue)")}


@pytest.mark.started
@pytest.mark.parametrize("checker", KINDS)
@pytest.mark.parametrize("is_editable", [False, True], ids=["wheel", "editable"])
def test_type_checkers_see_the_types_of_an_installed_package(
    checker: str, is_editable: bool, clean: Path, source: Path, tmp_path: Path
) -> None:
    if checker == "pyright" and shutil.which(checker) is None:
        pytest.skip("pyright is not installed (pip install pyright[nodejs])")
    installed = environment(tmp_path / "environment", "-e", str(source)) if is_editable else clean
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    cached = ["--cache-dir", str(clean.parent / "mypy")]  # torch's types are read once for both
    check = [sys.executable, "-m", "mypy", *cached, "--python-executable", str(installed / "bin" / "python")]
    if checker == "pyright":
        check = ["pyright", "--pythonpath", str(installed / "bin" / "python")]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    said = subprocess.run(
        [*check, "right.py", "wrong.py"], cwd=tmp_path, capture_output=True, text=True, env=env
    ).stdout
    errors = [line for line in said.splitlines() if re.search(r"(: error:| - error:)", line)]
    assert [Path(line.strip().partition(":")[0]).name for line in errors] == ["wrong.py"] * 2, said
    assert all(kind in said for kind in KINDS[checker])


SRUN = """#!/bin/bash
while [ "$1" != bash ]; do shift; done
exec "$@"
"""


@pytest.mark.started
def test_job_scripts_of_the_wheel_train_and_its_templates_make_a_page(clean: Path, tmp_path: Path) -> None:
    """The scripts find the installed programs; a stand-in for srun starts the one rank."""
    said = run_in(clean, tmp_path, "seqpar-doctor", "--job-scripts", tmp_path)
    assert f"Wrote {tmp_path}/launch/slurm" in said
    folder = tmp_path / "launch" / "slurm"
    assert {path.name for path in folder.iterdir()} == {path.name for path in (ROOT / "launch" / "slurm").iterdir()}
    assert all(os.access(path, os.X_OK) for path in folder.glob("*.sh"))
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    slurm = {"SEQPAR_ENV": str(clean), "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}
    slurm |= {"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_LOCALID": "0"}
    flags = ["--preset", "debug", "--iterations", "2", "--epochs", "1", "--val-every", "0", "--device", "cpu"]
    run_in(clean, tmp_path, "bash", folder / "generic.sbatch", *flags, "--out", "run", **slurm)
    assert "finished" in (tmp_path / "run" / "status.json").read_text()
    assert (tmp_path / "run" / "jobs.txt").exists(), "link.sh knows that it is a training"
    run_in(clean, tmp_path, "seqpar-report", "run")
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()
    assert "steps" in run_in(clean, tmp_path, "seqpar-train", "--preset", "debug", "--dry-run", "--device", "cpu")


def test_every_act_has_a_console_script() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    scripts = dict(re.findall(r'^seqpar-(\w+) = "seqpar\.cli\.(\w+):main"', text, re.M))
    assert set(scripts) == set(scripts.values()) == COMMANDS.keys()


def test_the_readme_names_every_extra() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"^(\w+) = \[", text.partition("[project.optional-dependencies]")[2].partition("\n[")[0], re.M)
    assert len(extras) >= 6
    paragraph = next(part for part in (ROOT / "README.md").read_text().split("\n\n") if "Extras, as in" in part)
    assert [name for name in extras if f"`{name}`" not in paragraph] == []
