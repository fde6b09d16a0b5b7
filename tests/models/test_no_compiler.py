"""A training does without torch's compiler, whose import takes half as long as torch's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.training_runs import tiny_data

ROOT = Path(__file__).parents[2]
TRAINED = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from seqpar.cli import train
from seqpar.cluster.torch_setup import without_torch_compile

assert train.act(sys.argv[1:]) == 0
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with without_torch_compile():
    DistributedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
assert "torch._dynamo" not in sys.modules, "it was imported, or something of its stand-in is left"
with without_torch_compile():
    assert not hasattr(torch._dynamo, "__file__")
    assert torch._dynamo.utils.counters is not None and torch._dynamo.__file__, "asked for more, it comes"
torch.optim.Adam([torch.zeros(1)])
assert torch._dynamo.__file__ and torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
"""


@pytest.mark.started
def test_a_training_and_ddp_do_not_import_the_compiler(tmp_path: Path) -> None:
    flags = [*tiny_data(tmp_path), "--epochs", "1", "--out", str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TRAINED, *flags], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model.safetensors").exists()
