"""What is said of the stages of a run over a pipe, before it trains and in a dry run."""

from seqpar.cluster.devices import GIB
from seqpar.pipeline.placement import Pipe
from seqpar.pipeline.stages import StageMap
from seqpar.settings.config import Config


def describe_stages(stages: StageMap, why: str) -> str:
    """Returns which cells each stage has, where it lies, and why."""
    every = [(stages.cells(stage), place) for stage, place in enumerate(stages.places)]
    runs = [f"stage {number} = cells {own[0]}-{own[-1]} at place {place}" for number, (own, place) in enumerate(every)]
    return f"pipe of {stages.num_places}: {', '.join(runs)} ({why}); leaving waits for the end of a step"


def describe_step(pipe: Pipe, stages: StageMap) -> str:
    """Returns how long the simulated step of a placement takes, how much of it is waiting, and what places hold."""
    timetable, alone = pipe.timetable(stages), pipe.micros * sum(cost.seconds for cost in pipe.costs)
    sizes = ", ".join(f"{size / GIB:.2g}" for size in pipe.memory(stages))
    return (
        f"a step should take {timetable.seconds:.3g} s without data and updates, {alone:.3g} s on one rank; ranks of "
        f"the pipe wait for {timetable.bubble:.0%} of it; they hold {sizes} GiB of weights, states and values"
    )


def no_overlap(config: Config) -> list[str]:
    """Returns a line where a step has too few micro-batches for stages to work at the same time."""
    if config.accumulate > 1:
        return []
    return [
        "--accumulate 1: stages work one after the other, each rank with the memory of its own, and nothing overlaps: "
        "with --seqpar and --mode halo in place of --pipe all ranks work on the tile at the same time"
    ]
