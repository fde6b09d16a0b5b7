"""Over a pipe, what is refused, and what holds a run up is named by its stage."""

import math
import os
import shlex
import time
from dataclasses import replace

import pytest

from seqpar.cli import train
from seqpar.cluster.exit_codes import TooLittleMemory
from seqpar.models.build import NETWORKS
from seqpar.parallel.launcher import read_launcher
from seqpar.pipeline.placement import CellCost, Pipe, StagePlace
from seqpar.pipeline.stages import StageMap
from seqpar.planner.feasibility import check_feasible
from seqpar.planner.pipeline_printer import warn_no_overlap
from seqpar.settings.checks import check
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.settings.rules import refuse_settings_without_effect
from seqpar.training import pipeline_gradients
from seqpar.training.pipeline_gradients import most_by_stage
from seqpar.training.run_request import read_request
from seqpar.training.stage_choice import _kept, _placed
from seqpar.training.step_times import SKIPPED, WINDOW, SlowRankDetector
from tests.support.messages import refused_with
from tests.support.training_runs import Launch, at, status

BAD = {
    "--pipe 2 --shard-weights": "--shard-weights with --pipe: each rank holds the weights of its stages alone",
    "--pipe 2 --placement 3,7": "2 cuts make 3 stages, but --pipe 2 needs 1: give these, or --placement auto",
    "--pipe 3 --placement 3": "1 cut makes 2 stages, but --pipe 3 needs 2: give these, or --placement auto",
    "--pipe 2 --placement best": "choose auto, cuts, rings, gabra, by-size, equal, or the cells",
    "--pipe 0": "--pipe: 0 must be a number of ranks, at least 1",
    "--placement equal": "--placement would do nothing: --pipe is 1",
    "--pipe-schedule gpipe": "--pipe-schedule would do nothing: --pipe is 1",
    "--pipe 2 --objective paper": "--objective would do nothing: --placement auto has one objective",
    "--pipe 8 --depth 2": "--pipe 8: the network has 7 cells, and each place needs one: use a smaller --pipe",
    "--pipe 5 --depth 2 --placement rings": "has 9 stages, and the network has 7 cells: use a smaller --pipe",
    "--pipe 2 --depth 2 --placement 7": "the network has 7 cells: give ascending numbers below that",
}


@pytest.mark.parametrize("text", BAD)
def test_what_cannot_work_over_a_pipe_is_refused(text: str) -> None:
    with refused_with(BAD[text]):
        _, config, names = parse(shlex.split(text), "debug")
        refuse_settings_without_effect(config, names)
        check(config, tuple(NETWORKS))
        check_feasible(config)


def test_a_size_that_is_open_is_refused_over_a_pipe() -> None:
    with pytest.raises(ValueError, match="--seqpar auto with --pipe"):
        read_request(["--pipe", "2", "--seqpar", "auto", "--preset", "debug"], read_launcher({}))


def test_a_dry_run_names_stages_placement_and_bubble(flags, capsys) -> None:
    assert train.act([*flags, "--pipe", "2", "--seqpar", "2", "--placement", "1", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "would run on 4 ranks = data 1 x pipe 2 x seq 2; nothing was written" in said
    assert "stages pipe of 2: stage 0 = cells 0-0 at place 0, stage 1 = cells 1-" in said
    assert "ranks of the pipe wait for" in said and "GiB of weights, states and activations" in said
    assert "global batch 2 tiles = 1 group x batch 2 x accumulate 1" in said and "nothing overlaps" in said


def test_micro_batches_are_another_name_of_accumulate() -> None:
    assert parse(["--micro-batches", "8"], "debug")[1].accumulate == 8


def test_one_micro_batch_is_said_to_overlap_with_nothing() -> None:
    (line,) = warn_no_overlap(parse(["--pipe", "2"], "debug")[1])
    assert "nothing overlaps" in line and "--seqpar and --mode halo" in line
    assert warn_no_overlap(parse(["--pipe", "2", "--accumulate", "2"], "debug")[1]) == []


def test_a_rank_is_slow_by_the_others_of_its_stage() -> None:
    roles = ["stage 0", "stage 0", "stage 1", "stage 1", "stage 1", "stage 0"]
    for own, expected in (([1.0, 1.1, 5.0, 5.2, 4.9, 1.0], []), ([1.0, 1.0, 5.0, 5.2, 9.0, 2.0], [4, 5])):
        judge = SlowRankDetector(["node"] * 6, roles)
        reported = [slow for _ in range(SKIPPED + WINDOW) for slow in judge.note(own)]
        assert [slow.rank for slow in reported] == expected
    assert "rank 4 on node (stage 1) takes 1.7 x as long as the others of its stage" in str(reported[0])


def test_the_journal_has_the_most_of_each_stage() -> None:
    roles, every = ["stage 0", "stage 1", "stage 0", "stage 1"], [[1.0, 10.0], [2.0, 5.0], [3.0, 8.0], [1.0, 6.0]]
    assert most_by_stage(roles, every, ("s", "mb")) == {
        "s": {"stage 0": 3.0, "stage 1": 2.0},
        "mb": {"stage 0": 10.0, "stage 1": 6.0},
    }
    assert most_by_stage((), every, ("s", "mb")) == {}


@pytest.mark.parametrize(
    ("flag", "value", "other"),
    [("placement", "equal", "by-size"), ("placement", "1", "gabra"), ("placement", "rings", "cuts")],
)
def test_placements_differ(flag: str, value: str, other: str) -> None:
    assert placed(**{flag: value}) != placed(**{flag: other})


def test_an_objective_is_what_gabra_looks_for() -> None:
    assert placed(placement="gabra", objective="paper") != placed(placement="gabra", objective="makespan")


def placed(memory: float = math.inf, **settings: str) -> StageMap:
    """Returns the stages of five cells by their settings."""
    return _placed(replace(Config(), pipe=2, accumulate=4, **settings), line_of_cells(memory))


def line_of_cells(memory: float = math.inf) -> Pipe:
    """Returns five cells in a line for two places, of which the first ones take long and the last ones hold much."""
    costs = [CellCost(forward, 2 * forward, 10, held, 1) for forward, held in ((9, 1), (5, 1), (3, 2), (2, 90), (1, 9))]
    return Pipe(tuple((cell - 1,) for cell in range(5)), (4,), costs, (StagePlace(memory=memory),) * 2, 4)


def test_a_run_that_goes_on_keeps_its_stages_where_places_have_the_memory() -> None:
    recorded = {"cuts": [0, 3, 5], "places": [0, 1]}
    kept = _kept(line_of_cells(), recorded)
    assert kept is not None and kept.cuts == (0, 3, 5) and kept.places == (0, 1)
    assert _kept(line_of_cells(memory=50.0), recorded) is None
    assert _kept(line_of_cells(), {"cuts": [0, 1, 3, 5], "places": [0, 1, 2]}) is None
    assert _kept(line_of_cells(), {}) is None


def test_places_without_the_memory_for_their_stages_are_refused() -> None:
    for way, words in (("equal", "the ranks of the pipe need .* MiB that are free"), ("auto", "no placement of 5")):
        with pytest.raises(TooLittleMemory, match=f"--placement {way}: {words}"):
            placed(memory=50.0, placement=way)
    assert placed(memory=1000.0, placement="equal") == placed(placement="equal")


def leave_late() -> None:
    time.sleep(8)
    os._exit(7)


def test_a_rank_that_stops_is_named_with_its_stage(flags, tmp_path) -> None:
    hang = at(pipeline_gradients, "losses_of_step", 1, leave_late, call=2)
    line = "--pipe 2 --accumulate 2 --placement equal --timeout 4"
    with Launch(2, [*flags, *line.split()], tmp_path / "run", hang) as run:
        codes, said = run.wait(), run.said()
    assert codes == [1, 7], said
    ended = status(tmp_path / "run")
    assert "rank 1 (" in ended["why"] and ", stage 1) stays at pipeline_gradients.py" in ended["why"], ended
    assert "rank 0 in activation" in ended["why"] and "of the pipe group of ranks 0, 1" in ended["why"]
