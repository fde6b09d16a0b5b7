"""plan --pipe: what its cells cost, each way of placing them by its timetable, and what else the ranks could do."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqpar.cli import plan
from seqpar.cluster.devices import DEVICES
from seqpar.pipeline.gabra import is_feasible, loads_and_capacities, makespan, paper_objective
from seqpar.pipeline.named_placements import place_cells
from seqpar.pipeline.placement import CellCost, Pipe, StagePlace
from seqpar.planner.counted_cells import bytes_of_optimizer, count_cells, measure_here
from seqpar.planner.needs import RunToPlan
from seqpar.planner.pipeline_plan import (
    Cells,
    chosen,
    config_with_places,
    measure_or_count_cells,
    pipe_of,
    placements,
    plan_of,
)
from seqpar.planner.pipeline_printer import alternatives_without_pipe, describe_timetable
from seqpar.planner.step_counter import StepSetup, count_step
from seqpar.settings.checks import check
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config

ROOT = Path(__file__).parents[2]
A100 = DEVICES["a100"]
UNET = Config(network="nnunet-plain", tile=(16, 16, 32), features=4, stages="333:111 333:222", batch=1, accumulate=8)
RUN = RunToPlan(UNET, A100, channels=1, outputs=3)


def setup_of(config: Config) -> StepSetup:
    return StepSetup(config, 0, 1, 3, 1, True, A100.clock("fp32"))


@pytest.fixture(scope="module")
def cells() -> Cells:
    return measure_or_count_cells(RUN, UNET)


def test_cells_hold_and_take_together_what_a_step_does(cells: Cells) -> None:
    """Bytes exactly; seconds without adding gradients up, which no cell does."""
    step = count_step(setup_of(UNET))
    assert sum(cost.held for cost in cells.costs) == step.tokens + step.decoder
    state = step.weights + step.gradients + step.optimizer  # which has a counter of steps for each weight
    assert sum(cost.state for cost in cells.costs) == pytest.approx(state, rel=0.005)
    assert 0.8 < sum(cost.seconds for cost in cells.costs) / step.seconds.total() <= 1
    assert max(cost.moment for cost in cells.costs) == pytest.approx(step.transient, rel=0.1)


def test_seconds_are_measured_on_this_machine_where_a_rank_has_whole_tiles(cells: Cells) -> None:
    measured = measure_here(setup_of(UNET), A100.link(1))
    assert [replace(cost, forward=0.0, backward=0.0) for cost in measured] == [
        replace(cost, forward=0.0, backward=0.0) for cost in cells.costs
    ]
    assert all(cost.forward > 0 and cost.backward > 0 for cost in measured)
    assert measured[0].seconds > 10 * cells.costs[0].seconds, "a core is no A100"


def test_messages_in_a_cell_take_time_and_a_rank_holds_its_share(cells: Cells) -> None:
    halo = count_cells(setup_of(replace(UNET, seqpar=2, mode="halo")), A100.link(2))
    assert sum(cost.held for cost in halo) < 0.7 * sum(cost.held for cost in cells.costs)
    slow = count_cells(setup_of(replace(UNET, seqpar=2, mode="halo")), replace(A100.link(2), latency=1.0))
    assert min(b.forward - a.forward for a, b in zip(halo, slow) if "0" in str(a)) >= 0
    assert sum(cost.seconds for cost in slow) > sum(cost.seconds for cost in halo) + 1


@pytest.mark.parametrize(
    ("optimizer", "betas", "states"),
    [("adam", (), 3), ("rmsprop", (), 2), ("rmsprop", (0.9, 0.9), 3), ("sgd", (), 2), ("adafactor", (), 1.03)],
)
def test_optimizers_keep_their_own_states(optimizer: str, betas: tuple[float, ...], states: int) -> None:
    config = Config(optimizer=optimizer, betas=betas)
    assert bytes_of_optimizer(config, True).states == pytest.approx(states, abs=0.01)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_an_update_has_beside_weights_and_states_what_one_ranks_has(on_gpu: bool) -> None:
    """At once on a GPU, else in turn, at most twice the largest weight; a place that holds little is fullest then."""
    config = replace(UNET, optimizer="rmsprop")
    setup = replace(setup_of(config), on_gpu=on_gpu)
    costs, step = count_cells(setup, A100.link(1)), count_step(setup)
    together = sum if on_gpu else max
    assert 1 <= together(cost.update for cost in costs) / (step.peaks["update"] - step.input) < (1.1 if on_gpu else 1.5)
    pipe = Pipe(((-1,),), (0,), [CellCost(1, 1, 1, 3, 10, 4, 8)], (StagePlace(),), 2, updates_at_once=on_gpu)
    assert pipe.memory(pipe.stages([])) == [10 + max(3 + 4, 8)] and pipe.saved(pipe.stages([])) == [3]


def test_every_way_is_judged_by_its_timetable_and_trains_choice_is_taken(cells: Cells) -> None:
    config, ranks = config_with_places(RUN, UNET, 2)
    pipe = pipe_of(cells, config, A100.of(ranks))
    rows = list(placements(pipe, "3"))
    assert [(row.way, row.objective) for row in rows][-3:] == [("gabra", "makespan"), ("gabra", "paper"), ("3", "")]
    for row in rows:
        assert row.stages == place_cells(row.way, pipe, row.objective or "makespan")
        assert row.timetable == pipe.timetable(row.stages) and row.fits
    best = chosen(rows, config)
    assert place_cells("auto", pipe) == best.stages
    assert chosen(rows, replace(config, placement="gabra", objective="paper")) is rows[-2]
    assert chosen(rows, replace(config, placement="3")) is rows[-1] and rows[-1].flag == "3"
    p = plan_of(RUN, config, cells, pipe, best, ranks)
    assert p.memory["decoder"] + p.memory["transient"] + p.memory["weights"] * 4 == pytest.approx(
        max(best.held), rel=1e-3
    )
    assert p.seconds["computing"] + p.seconds["waiting"] == pytest.approx(best.seconds)


def test_the_papers_objective_is_one_number_for_the_planners_equal_devices(cells: Cells) -> None:
    """What the planner says of it, on the costs of which it says it."""
    config, ranks = config_with_places(RUN, UNET, 2)
    pipe = pipe_of(cells, config, A100.of(ranks))
    loads, capacities = (np.array(side) for side in loads_and_capacities(pipe))
    dice = np.random.default_rng(0)
    drawn = [dice.integers(2, size=len(loads)) for _ in range(400)]
    feasible = [allocation for allocation in drawn if is_feasible(allocation, loads, capacities)]
    values = {round(paper_objective(allocation, loads, capacities), 9) for allocation in feasible}
    assert len(feasible) > 5 and len(values) == 1
    assert len({round(makespan(allocation, loads, capacities), 9) for allocation in feasible}) > 5, "the control"
    said = " ".join(" ".join(describe_timetable(pipe)).split())
    assert f"GABRA's own objective is {values.pop():.4g} for every feasible allocation" in said
    unlike = replace(pipe, places=(pipe.places[0], replace(pipe.places[1], speed=2.0)))
    assert "GABRA" not in " ".join(describe_timetable(unlike))


def test_one_micro_batch_has_no_overlap_and_is_said_to_have_none(cells: Cells) -> None:
    config, ranks = config_with_places(RUN, replace(UNET, accumulate=1), 2)
    pipe = pipe_of(cells, config, A100.of(ranks))
    best = chosen(list(placements(pipe)), config)
    assert best.seconds >= sum(cost.seconds for cost in pipe.costs) and best.timetable.bubble >= 0.5
    assert "without overlap" in " ".join(describe_timetable(pipe))
    p = plan_of(RUN, config, cells, pipe, best, ranks)
    assert [(other.seqpar, other.mode, other.pipe) for other in alternatives_without_pipe(p)] == [(2, "halo", 1)]


def test_a_place_has_the_memory_of_the_device(cells: Cells) -> None:
    config, ranks = config_with_places(RUN, UNET, 2)
    whole = max(chosen(list(placements(pipe_of(cells, config, A100))), config).held)
    small = replace(A100, memory=A100.reserved_bytes + 0.9 * whole)
    rows = list(placements(pipe_of(cells, config, small)))
    assert not chosen(rows, config).fits or max(chosen(rows, config).held) < whole
    assert any("no placement" in row.why for row in rows) or not all(row.fits for row in rows)


def test_the_answer_has_cells_ways_others_and_a_command_for_train(capsys: pytest.CaptureFixture) -> None:
    line = (
        "--network nnunet-plain --tile 16 16 32 --features 4 --batch 1 --micro-batches 8 --channels 1 --preset laptop"
    )
    line += " --device a100 --pipe auto"
    assert plan.act([*shlex.split(line), "--stages", UNET.stages]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines()[:-1])) <= 100, "readable in 100 columns"
    for words in ("8 cells", "--placement", "cuts", "rings", "by-size", "equal", "gabra, makespan", "gabra, paper"):
        assert words in said, words
    assert (
        "equal stages would wait for 11%" in said and "global batch 8 tiles = 1 group x batch 1 x accumulate 8" in said
    )
    rows = [row for row in said.splitlines() if " group" in row and "--accumulate" in row]
    assert [("--pipe 2" in row, "--seqpar 2" in row, "--shard-weights" in row) for row in rows] == [
        (True, False, False), (False, True, False), (False, False, False), (False, False, True),
    ]  # fmt: skip
    command = shlex.split(said.strip().splitlines()[-1])
    assert command[:3] == ["torchrun", "--nproc-per-node", "2"]
    _, config, _ = parse(command[4:], "debug")
    check(config, ("nnunet-plain",))
    assert (config.pipe, config.accumulate) == (2, 8) and config.placement.isdigit() or config.placement == "rings"


def test_the_page_has_the_planners_figures(capsys: pytest.CaptureFixture) -> None:
    page = (ROOT / "docs" / "explanation" / "boxes-shards-stages.md").read_text()
    (flags,) = re.findall(r"`(--network unet-lamp [^`]*)`", page)
    assert plan.act(shlex.split(flags)) == 0
    said = capsys.readouterr().out
    rows = re.findall(r"^\| `(.*?)` \| (\S+) \| (\S+) \|$", page, re.M)
    assert len(rows) == 4
    for row in rows:
        assert any(line.split() == " ".join(row).split() for line in said.splitlines()), row
    times = [sum(map(float, line.split()[2:4])) for line in said.splitlines() if re.match(r" +\d+ \S+ ", line)]
    (share,) = re.findall(r"one takes (\d+) % of all", page)
    assert len(times) == 27 and round(100 * max(times) / sum(times)) == int(share)


def test_what_cannot_be_spread_is_refused() -> None:
    with pytest.raises(ValueError, match="--pipe 2 x --seqpar 1 does not divide 3 ranks"):
        config_with_places(replace(RUN, ranks=3), UNET, 2)
    with pytest.raises(ValueError, match="nothing fits: .* needs"):
        plan.act(
            ["--preset", "laptop", "--network", "nnunet-plain", "--stages", UNET.stages, "--tile", "32", "--pipe", "2",
             "--memory", "1", "--device", "a100"]
        )  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--predict", "--predict with --pipe: it knows no stages"),
        ("--largest-tile", "--largest-tile with --pipe: it knows no stages"),
        ("--seqpar auto", "--seqpar auto with --pipe: stages are planned for one size"),
    ],
)
def test_what_a_plan_of_stages_does_not_answer_is_refused(flag: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        plan.act(["--device", "a100", "--pipe", "2", *flag.split()])
