"""The check of memory takes little memory itself, however large the tile."""

import multiprocessing
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seqpar.cluster.host_memory import Memory
from seqpar.planner.memory_check import _shortage
from seqpar.settings import presets
from seqpar.settings.config import Config

MIB, GIB = 2**20, 2**30
MARGIN = 600 * MIB  # of addresses; the numbers of the tokens of a cube of 4096 voxels would take 1 GiB
HUGE = (4096,) * 3
DEBUG = replace(presets.debug(), tile=HUGE, device="cpu", batch=1, mode="halo", attention="gather-kv")


def _limited(config: Config, answer: Any) -> None:
    addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (addresses + MARGIN, addresses + MARGIN))
    ranks = config.seqpar
    try:
        answer.send(_shortage(config, ["host"] * ranks, [Memory(8 * GIB, 64 * GIB)] * ranks, 4, 4))
    except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
        answer.send(repr(error))


@pytest.mark.parametrize(
    "config",
    [
        DEBUG,
        replace(DEBUG, seqpar=8, split="ordered"),
        replace(DEBUG, seqpar=8, mode="swap", batch=8),
        replace(DEBUG, positions="sincos", dropout=0.1),
        replace(DEBUG, encoder="hierarchical", window=8, seqpar=2),
        replace(presets.mae_debug(), tile=HUGE, device="cpu", batch=1, attention="gather-kv", seqpar=2),
    ],
    ids=["one rank", "boxes", "samples", "sines", "windows", "masked"],
)
def test_the_check_of_a_huge_tile_lists_no_tokens(config: Config) -> None:
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    child = fork.Process(target=_limited, args=(config, writer))
    child.start()
    writer.close()
    why = reader.recv()
    child.join()
    assert why.startswith("too little memory for the first step: a rank needs"), why
