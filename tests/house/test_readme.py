"""The pages are true: their shell and Python blocks run; files and functions that they name exist."""

import ast
import importlib
import re
import shlex
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from seqpar.settings.parser import Parser
from tests.support.marks import long_case
from tests.support.pages import CLUSTER, COMMANDS, HERE, MAKE, PAGES, ROOT, SHOWN, blocks, readme_commands
from tests.support.programs import PROGRAMS
from tests.support.ranks import relative
from tests.support.scripts import run_script

EXACT = "import torch\ntorch.set_default_dtype(torch.float64)\n"
WRAPPED = "DistributedDataParallel(net, process_group=mesh.world.handle)"


def test_the_blocks_are_those_that_are_run_somewhere() -> None:
    """By .ci/commands, by .ci/run, or, where they hand in jobs, by tests/slurm on a real Slurm."""
    ci, slurm = (ROOT / ".ci" / "run").read_text(), (ROOT / "tests" / "slurm" / "jobs_on_slurm.py").read_text()
    step = (ROOT / "tests" / "house" / "commands_of_pages.py").read_text()
    assert len(HERE) >= 15 and len(HERE) + len(MAKE) < len(COMMANDS)
    lanes = shlex.split(ci[ci.index("\nlanes ") :])
    assert all(f"\n{command}\n" in ci or command in lanes for command in MAKE) and ".ci/commands" in lanes
    assert '@pytest.mark.parametrize("line", HERE)' in step and "readme_commands(" in slurm
    assert set(COMMANDS) - set(HERE) == {*MAKE, *readme_commands(*CLUSTER)}


class Understood(Exception):
    """A command's flags were taken by its act."""


def begin(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls the act of a command; raises Understood once its command line has been parsed."""
    words = shlex.split(line)
    if words[0] in ("srun", "torchrun"):  # srun -n RANKS python PROGRAM, torchrun --nproc-per-node RANKS PROGRAM
        words = ["python", *words[next(n for n, word in enumerate(words) if word.endswith(".py")) :]]
    name, arguments = (
        (Path(words[1]).stem, words[2:]) if words[0] == "python" else (words[0].partition("-")[2], words[1:])
    )
    parse_args = Parser.parse_args

    def stop(parser: Parser, *of: Any) -> NoReturn:
        parse_args(parser, *of)
        raise Understood

    monkeypatch.setattr(Parser, "parse_args", stop)
    importlib.import_module(PROGRAMS[name]).act(arguments)


@pytest.mark.parametrize("line", [*HERE, *SHOWN])
def test_the_act_of_each_command_takes_its_flags_as_written(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """HERE runs too, shortened, in .ci/commands; what is only shown is checked by this test alone."""
    line = line.replace("--fold all5", "--fold 0")  # which starts five such lines
    with pytest.raises(Understood):
        begin(line, monkeypatch)
    with pytest.raises(ValueError, match="--no-such-flag"):
        begin(f"{line} --no-such-flag", monkeypatch)


@pytest.mark.started
def test_the_loop_on_two_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    (loop,) = blocks(ROOT / "README.md", "python")
    assert len(loop.splitlines()) <= 25
    assert "init_mesh(seq=2)" in loop
    alone = loop.replace("init_mesh(seq=2)", "init_mesh()")
    one, two = weights_of(1, alone, tmp_path), weights_of(2, loop, tmp_path)
    assert one.keys() == two.keys()
    assert max(relative(two[name], one[name]) for name in one) < 1e-10


RECIPES = {
    "each step by itself": ("your-own-loop", 0),
    "every rank has all features": ("your-own-loop", 1),
    "a decoder on boxes": ("your-own-decoder", 0),
    "MONAI's UNETR": ("your-own-decoder", 1),
}


@pytest.mark.parametrize(
    ("page", "number"), [long_case(*at) if "MONAI" in name else at for name, at in RECIPES.items()], ids=[*RECIPES]
)
def test_each_recipe_of_a_loop_on_two_ranks_is_that_of_one_process(page: str, number: int, tmp_path: Path) -> None:
    code = blocks(ROOT / "docs" / "how-to" / f"{page}.md", "python")[number]
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


def test_each_loop_of_training_prints_its_loss() -> None:
    code = [block for page in PAGES for kind in ("python", "diff") for block in blocks(page, kind)]
    loops = [block for block in code if "optimizer.step()" in block]
    assert len(loops) >= 10
    assert not [block for block in loops if not re.search(r"print\(.*loss\.item\(\)", block)]


def weights_of(world: int, script: str, folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights that a script trains in float64 on so many ranks."""
    save = "import os\nif os.environ['RANK'] == '0':\n    torch.save(net.state_dict(), 'weights.pt')\n"
    run_script(world, f"{EXACT}{script}{save}", folder)
    weights: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return weights


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
    assert len(named(ROOT / "docs" / "explanation" / "how-a-tile-flows.md")) >= 30
