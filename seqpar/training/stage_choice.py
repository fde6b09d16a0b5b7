"""Which stages a run over a pipe has: recorded, asked for, or placed by costs that are measured here."""

import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch

from seqpar.cluster.devices import MIB
from seqpar.cluster.exit_codes import TooLittleMemory
from seqpar.models.network import Network
from seqpar.parallel.consensus import broadcast_text, max_over_ranks
from seqpar.parallel.mesh import Group, Mesh
from seqpar.parallel.messages import post
from seqpar.pipeline.named_placements import place_cells
from seqpar.pipeline.placement import CellCost, Pipe, StagePlace
from seqpar.pipeline.stages import StageMap
from seqpar.planner.counted_cells import bytes_of_optimizer, costs_of
from seqpar.planner.memory_check import free_shares
from seqpar.planner.pipeline_printer import describe_stages, describe_step, warn_no_overlap
from seqpar.settings.config import Config

PROBE_BYTES = 4 << 20
MUCH = 1.25  # times as much free memory as at another place


def choose_stages(config: Config, mesh: Mesh, net: Network, recorded: Mapping[str, Any]) -> tuple[StageMap, list[str]]:
    """Returns the stages, the same on all ranks, and lines that say which and why.

    - ``net``: whole, with the run's precision and on the run's device
    - ``recorded``: the ``stages`` in config.json of a resumed run, which it keeps with as many places if these
      have the memory
    """
    staged = net.staged()
    costs, seconds_per_byte = broadcast_costs(mesh, *_measure(config, mesh, net))
    at_once = bytes_of_optimizer(config, mesh.device.type == "cuda").at_once
    work = (costs, _places(mesh), config.accumulate, config.pipe_schedule, seconds_per_byte, at_once)
    pipe = Pipe(staged.takes, staged.outputs, *work)
    stages, why = _kept(pipe, recorded), "as the run began"
    if stages is None:
        stages, why = _placed(config, pipe), f"--placement {config.placement}"
    return stages, [describe_stages(stages, why), describe_step(pipe, stages), *warn_no_overlap(config)]


def _kept(pipe: Pipe, recorded: Mapping[str, Any]) -> StageMap | None:
    """Returns the recorded stages, None where their number of places or the memory of a place is another."""
    if not recorded or max(recorded["places"]) + 1 != len(pipe.places):
        return None
    stages = StageMap(pipe.takes, pipe.outputs, tuple(recorded["cuts"]), tuple(recorded["places"]))
    return stages if pipe.fits(stages) else None


def _placed(config: Config, pipe: Pipe) -> StageMap:
    """Returns the stages of ``--placement``; raises ``TooLittleMemory`` where a place cannot hold its own."""
    try:
        stages = place_cells(config.placement, pipe, config.objective)
    except ValueError as error:
        roomy = replace(pipe, places=(StagePlace(),) * len(pipe.places))
        place_cells(config.placement, roomy, config.objective)  # it may be no matter of memory
        raise TooLittleMemory(f"--placement {config.placement}: {error}") from None
    if not pipe.fits(stages):
        pairs = zip(pipe.memory(stages), pipe.places)
        rows = [f"{needed / MIB:.1f} of {place.memory / MIB:.1f} MiB" for needed, place in pairs]
        raise TooLittleMemory(
            f"--placement {config.placement}: the ranks of the pipe need {', '.join(rows)} that are free: use "
            "--placement auto, a larger --pipe or a smaller --batch"
        )
    return stages


def _places(mesh: Mesh) -> tuple[StagePlace, ...]:
    """Returns the places with the memory that is free there, on the tightest of their ranks.

    Places that differ little are alike, as many that are not alike take long to choose from.
    """
    shares = list(zip(free_shares(mesh), mesh.places))
    least = [min(share for share, at in shares if at == place) for place in range(mesh.pipe.size)]
    alike = max(least) < MUCH * min(least)
    return tuple(StagePlace(memory=min(least) if alike else free) for free in least)


def _measure(config: Config, mesh: Mesh, net: Network) -> tuple[list[CellCost], float]:
    """Returns each cell's cost on this rank, and the seconds of a byte from place to place."""

    def around() -> AbstractContextManager[None]:
        is_half = config.precision == "bf16"
        return torch.autocast(mesh.device.type, torch.bfloat16) if is_half else nullcontext()

    costs = costs_of(config, net, mesh.data, around, device=mesh.device, on_gpu=mesh.device.type == "cuda")
    return costs, seconds_per_byte(mesh.pipe, mesh.device)


def seconds_per_byte(pipe: Group, device: torch.device) -> float:
    """Returns how long a byte takes from each place to the next one, and back to the first: the least of three."""
    outgoing = torch.zeros(PROBE_BYTES // 4, device=device)
    incoming, seconds = torch.empty_like(outgoing), list[float]()
    for _ in range(3):
        max_over_ranks(0, pipe)
        began = time.perf_counter()
        following, before = (pipe.index + 1) % pipe.size, (pipe.index - 1) % pipe.size
        post({following: outgoing}, {before: incoming}, pipe, "probe").wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds) / PROBE_BYTES


def broadcast_costs(mesh: Mesh, costs: list[CellCost], seconds_per_byte: float) -> tuple[list[CellCost], float]:
    """Returns the first rank's figures: with others, ranks would not agree on the timetable."""
    text = json.dumps([[asdict(cost) for cost in costs], seconds_per_byte])
    every, link = json.loads(broadcast_text(text, 0, mesh.world))
    return [CellCost(**values) for values in every], link
