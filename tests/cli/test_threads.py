"""Programs set what torch reads once before it is imported, unless the user has: its threads and a GPU's memory.

And they collect no garbage while they import.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from seqpar.cli import CHOSEN, set_threads
from seqpar.cluster.host_memory import cores_here

ROOT = Path(__file__).parents[2]


RANK = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("env", "wait", "threads"),
    [
        ({}, "passive", "12"),
        ({"OMP_WAIT_POLICY": "active"}, "active", "12"),
        ({"OMP_NUM_THREADS": "3"}, "passive", "3"),
        (RANK, "passive", "3"),
        ({"RANK": "1"}, "passive", "12"),  # which the program refuses in words
        ({"OMP_NUM_THREADS": "12", CHOSEN: "12", **MPI}, "passive", "6"),
        ({"OMP_NUM_THREADS": "4", CHOSEN: "12"}, "passive", "4"),  # set between two programs
    ],
)
def test_what_the_user_set_stays_and_ranks_share_the_cores(env, wait, threads):
    env = dict(env)
    set_threads(env, 12)
    assert (env["OMP_WAIT_POLICY"], env["OMP_NUM_THREADS"]) == (wait, threads)


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", None), ("150000 100000", 2), ("50000 100000", 1)])
@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_bounds_the_cores(version, quota, cores, tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n" if version == 2 else "4:cpu,cpuacct:/a/b\n")
    group = tmp_path / "sys/fs/cgroup" / ("a" if version == 2 else "cpu/a")
    group.mkdir(parents=True)
    if version == 2:
        (group / "cpu.max").write_text(f"{quota}\n")
    else:
        limit, period = quota.replace("max", "-1").split()
        (group / "cpu.cfs_quota_us").write_text(f"{limit}\n")
        (group / "cpu.cfs_period_us").write_text(f"{period}\n")
    allowed = len(os.sched_getaffinity(0))
    assert cores_here(tmp_path) == min(allowed, cores or allowed)


# Prints what is set when each program imports torch, and ends its process there.
WHEN_TORCH_COMES = """
import gc, importlib.util, json, os, runpy, sys
from seqpar.parallel.launcher import ALLOCATOR  # without torch, which the next line shows
assert "torch" not in sys.modules

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            sys.meta_path.insert(0, self)
            spec.loader.exec_module = tell
            return spec

def tell(module):
    names = "OMP_WAIT_POLICY", "MPLBACKEND", *ALLOCATOR
    print(json.dumps([program, gc.isenabled(), *map(os.environ.get, names)]), flush=True)
    os._exit(0)

sys.meta_path.insert(0, Finder())
for program in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv = [program]
        sys.path.insert(0, os.path.dirname(program))
        runpy.run_path(program)
        os._exit(1)
    os.wait()
"""


def test_every_command_sets_them_before_torch_is_imported():
    commands = re.findall(r'^seqpar-\w+ = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(commands) > 9 and all(command.startswith("seqpar.cli.") for command in commands)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PYTORCH_"))}
    env["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # a notebook's, whose package may be missing
    programs = sorted(map(str, (ROOT / "launch").glob("*.py")))  # of which each command's imports its module first
    line = [sys.executable, "-c", WHEN_TORCH_COMES, *programs]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
    found = [json.loads(row) for row in done.stdout.splitlines()]
    assert {name for name, *_ in found} >= {name for name in programs if Path(name).stem != "phantom"}, done.stderr
    for name, collects, policy, drawn, *allocator in found:
        assert (policy, drawn) == ("passive", "agg"), name
        assert collects == (Path(name).stem in ("bench", "figures")), name  # of the laboratory
        assert torch.version.hip or sorted(map(str, allocator)) == ["None", "expandable_segments:True"], name


def test_garbage_is_collected_once_a_program_runs():
    act = "lambda arguments: print(gc.isenabled(), gc.get_freeze_count() > 1000)"
    start = "import gc, sys; sys.argv = ['train.py']; import seqpar.cli; from seqpar.cluster import exit_codes"
    told = f"{start}; print(gc.isenabled()); exit_codes.run({act}, [])"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]
