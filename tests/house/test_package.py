"""The wheel holds one top-level name and the job scripts, and works in a clean environment; the README is true."""

import os
import re
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy of the files that git knows (a build in place would leave its folders behind)."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listing = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    files = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True)
    names = [name for name in files.stdout.decode().split("\0") if name and (ROOT / name).exists()]
    packed = subprocess.run(["tar", "-cf", "-", *names], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-xf", "-"], cwd=source, input=packed.stdout, check=True)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(target), "."]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_has_one_top_level_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    installed = [name for name in names if ".dist-info/" not in name and ".data/data/share/seqpar/" not in name]
    assert {name.split("/")[0] for name in installed} == {"seqpar"}
    for folder in ("seqpar", "decoders"):
        for path in (ROOT / folder).rglob("*.py"):  # a folder without __init__.py would be left out
            inside = path.relative_to(ROOT).as_posix()
            assert (inside if inside.startswith("seqpar/") else f"seqpar/{inside}") in names, inside
    assert "seqpar/py.typed" in names and "seqpar/data/errors.py" in names
    assert {f"seqpar/report/template/{path.name}" for path in (ROOT / "seqpar/report/template").iterdir()} <= set(names)
    scripts = {name.rpartition("/share/seqpar/slurm/")[2] for name in names}
    assert {path.name for path in (ROOT / "launch" / "slurm").iterdir()} <= scripts


def test_the_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    python = tmp_path / "bin" / "python"
    site = next((tmp_path / "lib").glob("python*/site-packages"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # torch is there already
    code = "import seqpar; from seqpar import SeqParViT; import seqpar.decoders.plain; print(seqpar.__file__)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stderr
    assert str(site) in process.stdout


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
