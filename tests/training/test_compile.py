"""A run with --compile trains, on the CPU too, and becomes what it becomes without."""

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from seqpar.cluster.torch_setup import missing_compiler
from seqpar.training import trainer
from tests.support.ranks import relative
from tests.support.training_runs import Launch, at, farthest, losses, trained

RUN = "--batch 1 --accumulate 2 --iterations 3 --epochs 1 --val-cases 1 --depth 2 --optimizer sgd"
NO_COMPILER = shutil.which(os.environ.get("CXX", "g++")) is None and os.environ.get("CI") != "true"


def test_a_compiler_that_is_not_there_is_named_before_the_network_is_compiled(flags: list[str], tmp_path: Path) -> None:
    def hook(rank: int) -> None:
        os.environ["CXX"] = "/nonexistent/g++"

    said = trained(1, [*flags, "--compile"], tmp_path / "run", expect=2, hook=hook).said()
    assert "--compile needs a compiler, and CXX=/nonexistent/g++ names none" in " ".join(said.split())
    assert missing_compiler(False, {"CXX": "env g++"}) is None  # it begins with a program that is there
    nowhere = missing_compiler(True, {"CC": "nonexistent-cc"})
    assert "CC=nonexistent-cc names none" in str(nowhere)


@pytest.mark.started
@pytest.mark.skipif(NO_COMPILER, reason="torch compiles for the CPU with a C++ compiler, and there is none ($CXX, g++)")
def test_a_compiled_run_is_the_uncompiled_one(flags: list[str], tmp_path: Path) -> None:
    """Losses of three steps and the weights after them, in float32; Adam would enlarge what is rounding."""
    graphs = tmp_path / "graphs"

    def hook(rank: int) -> None:
        counters.clear()  # of another test in this process
        os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
        at(trainer.Trainer, "_finish", 0, lambda: graphs.write_text(str(counters["stats"]["unique_graphs"])))(rank)

    compiled = {}
    for name, more in {"plain": [], "compiled": ["--compile"]}.items():
        with Launch(1, [*flags, *RUN.split(), *more], tmp_path / name, hook) as launch:
            assert launch.wait(timeout=600) == [0], launch.said()  # the compiler takes its time on a busy machine
        compiled[name] = int(graphs.read_text())
    assert compiled["plain"] == 0 and compiled["compiled"] > 0, "nothing was compiled"
    ours, theirs = (tmp_path / name for name in ("compiled", "plain"))
    assert len(losses(ours)) == 3 and farthest(losses(ours), losses(theirs)) < 1e-5
    weights = [load_file(out / "model.safetensors") for out in (ours, theirs)]
    assert weights[0].keys() == weights[1].keys(), "names of weights must not say how they were computed"
    for name, tensor in weights[1].items():
        assert relative(weights[0][name], tensor) < 1e-5, name
