"""What a run over a pipe needs: its cells, where each way of placing them puts them, and the plan of a placement."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from seqpar.cluster.devices import Device
from seqpar.models.build import build_on_meta, layout_of
from seqpar.parallel.mesh import Group
from seqpar.pipeline.named_placements import PLACEMENTS, place_cells
from seqpar.pipeline.placement import CellCost, Pipe, StagePlace, pick_placement
from seqpar.pipeline.schedule import Timetable
from seqpar.pipeline.stages import StageMap, Takes
from seqpar.planner.counted_cells import bytes_of_optimizer, count_cells, measure_here
from seqpar.planner.feasibility import check_feasible
from seqpar.planner.needs import BUCKET, Plan, RunToPlan, plan_complete_config
from seqpar.planner.step_counter import StepSetup, count_step
from seqpar.settings.config import Config

# flags of train, in the order of the table
EVERY_WAY = (("cuts", ""), ("rings", ""), ("by-size", ""), ("equal", ""), ("gabra", "makespan"), ("gabra", "paper"))
SIZES = (2, 3, 4, 6, 8, 12, 16)  # places that --pipe auto looks at


@dataclass(frozen=True)
class Cells:
    """A network's cells: names, what each takes, and costs on one rank, of a CPU one core.

    ``channels``: of the image; ``source``: where the costs come from, in words.
    """

    names: tuple[str, ...]
    takes: Takes
    outputs: tuple[int, ...]
    costs: tuple[CellCost, ...]
    channels: int
    source: str


@dataclass(frozen=True)
class PlacementResult:
    """What a way of placing came to; ``why``: it found none.

    - ``way``, ``objective``: flags of train
    - ``sent``: bytes of a micro-batch between places, forward and back
    """

    way: str
    objective: str
    stages: StageMap | None = None
    timetable: Timetable | None = None
    held: tuple[int, ...] = ()
    sent: int = 0
    fits: bool = False
    why: str = ""

    @property
    def seconds(self) -> float:
        return self.timetable.seconds if self.timetable else math.inf

    @property
    def flag(self) -> str:
        """The value of ``--placement`` that gives these stages again: the cuts, where they say all."""
        assert self.stages is not None
        inner = self.stages.cuts[1:-1]
        in_order = self.stages.places == tuple(range(self.stages.num_places))
        return ",".join(map(str, inner)) if in_order else self.way


@dataclass(frozen=True)
class PlacementOptions:
    """A network spread over a pipe's places: every way of placing it, the best one, and its plan."""

    pipe: Pipe
    ways: list[PlacementResult]
    best: PlacementResult
    plan: Plan


def measure_or_count_cells(run: RunToPlan, config: Config, counted: bool = False) -> Cells:
    """Returns the cells of a config's network: measured on this CPU where a rank has whole tiles, else counted.

    ``counted``: whatever a rank has
    """
    device = run.device
    group = Group("seq", tuple(range(config.seqpar)))
    staged = build_on_meta(config, group, run.channels, run.outputs).staged()
    names = tuple(owned[0].removeprefix("unet.cells.").rstrip(".") for owned in staged.owns)
    setup = StepSetup(
        config,
        0,
        run.channels,
        run.outputs,
        1,
        device.on_gpu,
        replace(device, share_of_cores=1.0).clock(config.precision),
    )
    link = device.link(config.seqpar)
    if device.cores and config.seqpar == 1 and not counted:
        costs, source = measure_here(setup, link), "seconds measured here on one core, bytes counted"
    else:
        costs, source = count_cells(setup, link), f"counted; seconds by {device.name}: {device.source}"
    return Cells(names, staged.takes, staged.outputs, tuple(costs), run.channels, source)


def config_with_places(run: RunToPlan, config: Config, pipe: int) -> tuple[Config, int]:
    """Returns the config of so many places, and the ranks of the run; raises ValueError where it cannot run."""
    size = pipe * config.seqpar
    ranks = run.ranks or run.groups * size
    if ranks % size:
        raise ValueError(f"--pipe {pipe} x --seqpar {config.seqpar} does not divide {ranks} ranks")
    config = replace(config, pipe=pipe)
    check_feasible(config)
    return config, ranks


def pipe_of(cells: Cells, config: Config, device: Device) -> Pipe:
    """Returns the cells and equal places for them; ``device``: what each rank has."""
    share = device.share_of_cores if device.cores else 1.0
    costs = [replace(c, forward=c.forward / share, backward=c.backward / share) for c in cells.costs]
    memory = (device.memory - device.reserved_bytes) / (1 + device.fragmentation) - _input_bytes(cells, config)
    places = (StagePlace(memory=max(memory, 1.0)),) * config.pipe
    per_byte = 1 / device.link(config.pipe * config.seqpar).bandwidth
    at_once = bytes_of_optimizer(config, device.on_gpu).at_once
    return Pipe(cells.takes, cells.outputs, costs, places, config.accumulate, config.pipe_schedule, per_byte, at_once)


def spread_over(run: RunToPlan, config: Config, cells: Cells, size: int) -> PlacementOptions:
    """Returns the cells on ``size`` places; raises ValueError if that is impossible."""
    config, ranks = config_with_places(run, config, size)
    pipe = pipe_of(cells, config, run.device.of(ranks))
    ways = list(placements(pipe, config.placement))
    best = chosen(ways, config)
    return PlacementOptions(pipe, ways, best, plan_of(run, config, cells, pipe, best, ranks))


def plan_counted(run: RunToPlan, ranks: int) -> tuple[Plan, Pipe, PlacementResult]:
    """Returns the plan of a complete config's fullest place, by counted costs, with its pipe and its stages.

    Where no placement fits it is one that does not, as its memory tells.
    """
    config = run.config
    cells = measure_or_count_cells(run, config, counted=True)
    pipe = pipe_of(cells, config, run.device.of(ranks))
    try:
        stages = place_cells(config.placement, pipe, config.objective)
    except ValueError:
        pipe = replace(pipe, places=(StagePlace(),) * config.pipe)
        stages = place_cells(config.placement, pipe, config.objective)
    placed = PlacementResult(
        config.placement,
        config.objective,
        stages,
        pipe.timetable(stages),
        tuple(pipe.memory(stages)),
        fits=pipe.fits(stages),
    )
    return replace(plan_of(run, config, cells, pipe, placed, ranks), config=config), pipe, placed


def plan_run(run: RunToPlan, ranks: int) -> Plan:
    """Returns the plan of a complete config; over a pipe that of its fullest place."""
    return plan_counted(run, ranks)[0] if run.config.pipe > 1 else plan_complete_config(run, ranks)


def _input_bytes(cells: Cells, config: Config) -> float:
    """Returns the bytes of a rank's parts of the micro-batches of a step: images and labels."""
    layout = layout_of(config)
    voxels = config.batch * config.accumulate * max(layout.counts) * math.prod(layout.patch)
    return voxels * (cells.channels * (8 if config.precision == "fp64" else 4) + 1)


def placements(pipe: Pipe, placement: str = "auto") -> Iterator[PlacementResult]:
    """Yields what each way comes to, and what ``placement`` does if it is a list of cuts."""
    cuts = "" if placement in PLACEMENTS else placement
    for way, objective in (*EVERY_WAY, *([(cuts, "")] if cuts else [])):
        try:
            stages = place_cells(way, pipe, objective or "makespan")
        except ValueError as problem:
            yield PlacementResult(way, objective, why=str(problem))
            continue
        place_bytes = tuple(pipe.memory(stages))
        sent = 2 * sum(pipe.costs[crossing.value].output for crossing in stages.messages)
        yield PlacementResult(way, objective, stages, pipe.timetable(stages), place_bytes, sent, pipe.fits(stages))


def chosen(rows: Sequence[PlacementResult], config: Config) -> PlacementResult:
    """Returns the placement that train would take: what is asked for, or for "auto" the ``pick_placement`` that fits.

    GABRA's are taken only where they are asked for. Where none fits it is one that does not.
    """
    if config.placement == "auto":
        able = [row for row in rows if row.way != "gabra"]
    else:
        named = (config.placement, config.objective if config.placement == "gabra" else "")
        able = [row for row in rows if (row.way, row.objective) == named]
    there = [row for row in able if row.stages is not None]
    if not there:
        raise ValueError(able[0].why)
    able = [row for row in there if row.fits] or there
    return able[pick_placement([(row.seconds, max(row.held)) for row in able])]


def plan_of(run: RunToPlan, config: Config, cells: Cells, pipe: Pipe, placed: PlacementResult, ranks: int) -> Plan:
    """Returns the plan of a placement on its fullest place."""
    assert placed.stages is not None and placed.timetable is not None
    device = run.device.of(ranks)
    states = bytes_of_optimizer(config, device.on_gpu).states
    place = max(range(config.pipe), key=lambda p: placed.held[p])
    at_place = [[pipe.costs[cell] for cell in placed.stages.cells_at(p)] for p in range(config.pipe)]
    weights = [sum(cost.state for cost in own) / (1 + states) for own in at_place]
    saved = pipe.saved(placed.stages)[place]
    memory: dict[str, float] = {
        "weights": weights[place],
        "gradients": weights[place],
        "optimizer": (states - 1) * weights[place],
        "input": _input_bytes(cells, config),
        "tokens": 0.0,
        "decoder": saved,
        "transient": placed.held[place] - (1 + states) * weights[place] - saved,
    }
    memory["apart"] = device.reserved_bytes + device.fragmentation * sum(memory.values())
    computing = sum(placed.timetable.busy) / config.pipe
    seconds = {"computing": computing, "waiting": placed.timetable.seconds - computing}
    if run.timed:
        seconds["update"] = _update_seconds(run, config, device) * max(weights) / sum(weights)
    owners = ranks // config.pipe
    if owners > 1:
        link, rounds = device.link(ranks), -(-max(weights) // BUCKET)
        bytes_sent = 2 * (owners - 1) / owners * max(weights)
        seconds["summing"] = bytes_sent / link.bandwidth + rounds * 2 * (owners - 1) * link.latency
    config = replace(config, placement=placed.flag, objective=placed.objective or Config().objective)
    return Plan(config, device, ranks, memory, {"seq": 0.0, "world": 0.0}, seconds)


def _update_seconds(run: RunToPlan, config: Config, device: Device) -> float:
    """Returns the seconds in which one rank updates all weights."""
    clock = replace(device, measured_rate=None).clock(config.precision)  # convolutions are not asked for
    # of one small tile, batch norm may have a single value
    alone = replace(config, pipe=1, accumulate=1, seqpar=1, mode=Config().mode, batch=2)
    return count_step(StepSetup(alone, 0, run.channels, run.outputs, 1, device.on_gpu, clock)).update_seconds
