"""Programs and controls on a pretended GPU: what surrounds kernels is torch's own, the kernels are the CPU's."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from seqpar.parallel.launcher import ALLOCATOR
from tests.pretended_gpu.build import is_pretended

if not is_pretended(os.environ):
    pytest.skip("these tests run on pretended GPUs: make test-gpu", allow_module_level=True)

Run = Callable[..., subprocess.CompletedProcess[str]]
MIB = 2**20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a function that runs Python with this number of pretended GPUs, and checks its exit code."""
    folder = tmp_path_factory.mktemp("pretended")
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}

    def run(arguments: Sequence[str], code: int = 0, gpus: int = 1, **more: str) -> subprocess.CompletedProcess[str]:
        of_process = {**env, "PRETENDED_GPUS": str(gpus), **more}
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], env=of_process, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


# ---- controls: what a GPU would not forgive must fail here too, and nothing else ----

COPY = """
import torch
x = torch.ones(1000).pin_memory()
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    y = x.to("cuda", non_blocking=True)
{wait}
assert (y + 1).sum().item() == 2000
"""
MIXED = "import torch; torch.ones(3, device='cuda') + torch.ones(3{where})"
SENT = """
import torch
import torch.distributed as dist
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
out, x = torch.empty(2, 3, device="cuda"), torch.ones(3, 2, device="cuda").t()
dist.all_gather_into_tensor(out, x{order})
assert out.sum().item() == 6
dist.destroy_process_group()
"""
UNKNOWN = "import torch; torch.sparse_coo_tensor([[0, 0]], [1.0, 1.0]).cuda(){to}.coalesce()"


@pytest.mark.parametrize(
    ("script", "right", "says"),
    [
        (COPY, {"wait": "torch.cuda.current_stream().wait_stream(stream)"}, "CUDASanitizerErrors"),
        (MIXED, {"where": ", device='cuda'"}, "Expected all tensors to be on the same device"),
        (SENT, {"order": ".contiguous()"}, "Tensors must be contiguous"),
        (UNKNOWN, {"to": ".cpu()"}, "no CPU kernel stands in for"),
    ],
    ids=["read before the copy", "mixed devices", "not contiguous for NCCL", "kernel without a stand-in"],
)
def test_what_a_gpu_would_not_forgive_fails(script: str, right: dict[str, str], says: str, run: Run) -> None:
    sanitizer, code = ("1", 1) if script is COPY else ("0", -6 if script is UNKNOWN else 1)
    run(["-c", script.format(**right)], PRETENDED_SANITIZER=sanitizer)
    wrong = run(["-c", script.format(**dict.fromkeys(right, ""))], code, PRETENDED_SANITIZER=sanitizer)
    assert says in wrong.stderr, wrong.stderr


# ---- what is only seen around the kernels ----

LOADER = """
import torch
from dataclasses import replace
from tests.support.cases import load, noise_source
from tests.support.ranks import alone_mesh
mesh = replace(alone_mesh(), device=torch.device("cuda", 0))
with load(mesh, noise_source(), steps=range(40), workers=0) as loader:
    for step in range(40):
        micro = next(loader)
        loader.begin_next()
        if step in (3, 39):
            print(torch.cuda.memory_reserved())
"""


def test_a_loader_keeps_no_more_memory_after_40_steps_than_after_4(run: Run) -> None:
    early, late = map(int, run(["-c", LOADER]).stdout.split())
    assert 0 < early == late, (early, late)


SEGMENTS = """
import os, sys
import seqpar.cli
assert "torch" not in sys.modules
import torch
from seqpar.cluster.rank_facts import settings_in_force
torch.ones(1, device="cuda")
print(settings_in_force(torch.device("cuda", 0)))
"""


def test_programs_get_segments_that_grow(run: Run) -> None:
    assert "{'expandable segments': 'on'}" in run(["-c", SEGMENTS]).stdout
    other = run(["-c", SEGMENTS], **dict.fromkeys(ALLOCATOR, "expandable_segments:False"))
    assert "{'expandable segments': 'off'}" in other.stdout


# ---- programs ----


@pytest.fixture(scope="module")
def data(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    run(["-m", "seqpar.cli.phantom", "--out", folder, "--layout", "nnunet", "--cases", "5", "--size", "40", "44", "40"])
    (inside,) = folder.iterdir()
    return inside


def train(run: Run, out: Path, *flags: object, gpus: int = 1, code: int = 0) -> list[dict]:
    """Trains for a few steps on a GPU; returns the rows that the run recorded."""
    line = ["-m", "seqpar.cli.train", "--device", "cuda", "--out", out, *flags]
    run(line, code, gpus)
    return [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]


SMALL = ("--preset", "debug", "--iterations", "3", "--val-overlap", "0")


def losses(rows: list[dict]) -> list[float]:
    return [row["loss"] for row in rows if row["kind"] == "train"]


def test_a_run_is_trained_resumed_and_predicts(run: Run, data: Path, tmp_path: Path) -> None:
    first = train(run, tmp_path / "run", *SMALL, "--data", data, "--epochs", "1")
    resumed = train(run, tmp_path / "run", "--resume", "--epochs", "2")
    assert losses(first) and losses(resumed)[: len(losses(first))] == losses(first)
    assert len(losses(resumed)) == 2 * len(losses(first))
    line = ["-m", "seqpar.cli.predict", tmp_path / "run", "-i", data / "imagesTr", "-o", tmp_path / "labels"]
    run([*line, "--device", "cuda"])
    assert len(list((tmp_path / "labels").glob("*.nii.gz"))) == 5


def test_two_ranks_learn_as_one_does(run: Run, data: Path, tmp_path: Path) -> None:
    one = train(run, tmp_path / "one", *SMALL, "--data", data)
    two = train(run, tmp_path / "two", *SMALL, "--data", data, "--seqpar", "2", gpus=2)
    assert losses(one) and losses(two) == pytest.approx(losses(one), rel=1e-4)


DOCTOR = """
from seqpar.cluster import convolution_speed, link_speed
convolution_speed.ON_GPU, link_speed.GPU_SIDE = convolution_speed.ON_CPU, link_speed.CPU_SIDE
from seqpar.cli.doctor import main
main()
"""


def test_the_doctor_finds_nothing_wrong(run: Run) -> None:
    """With a CPU's sizes: of those of a GPU, products of matrices alone would take minutes."""
    said = run(["-c", DOCTOR, "--device", "cuda"]).stdout
    assert "pretended NVIDIA H100" in said and "expandable segments on" in said and "0 errors" in said
