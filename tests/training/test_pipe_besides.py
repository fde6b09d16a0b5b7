"""What else a run may do, over a pipe: lessons, bf16, compiled blocks, five folds. All have the bits of one process."""

import os
import signal
from pathlib import Path

import pytest
from torch._dynamo.utils import counters

from seqpar.runs.fold_folder import write_flags
from seqpar.runs.run_folder import read_config
from seqpar.training import pipeline_gradients, trainer
from tests.support.folders import write_json
from tests.support.training_runs import Launch, at, losses, scores, signalled, status, trained, weights
from tests.training.test_compile import NO_COMPILER
from tests.training.test_folds import forking

PIPE = ("--pipe", "2", "--placement", "equal")
OF_LESSONS = {"--batch", "--tile", "--epochs"}
COMPILED = "--compile --depth 2 --batch 1 --iterations 2 --epochs 1 --val-cases 1"
LESSONS = "--curriculum 8:2:1x2,16:1:1 --patch 4 --decoder unetr --precision bf16 --val-cases 1 --clip 0.5"


@pytest.mark.started
def test_lessons_in_bf16_left_over_a_pipe_have_all_bits_of_one_process(flags: list[str], tmp_path: Path) -> None:
    """Told to leave in the first lesson, which has two micro-batches a step; positions are resized for the second."""
    kept = [text for n, text in enumerate(flags) if not {text, flags[n - 1]} & OF_LESSONS]
    line, one, two = [*kept, *LESSONS.split()], tmp_path / "one", tmp_path / "two"
    trained(1, line, one)
    leave = at(pipeline_gradients.PipeGradients, "add", 1, signalled(signal.SIGTERM))
    left = trained(2, [*line, *PIPE], two, 75, leave).said(0)
    assert "tile 8x8x8, 1 x 2 a group" in left and 1 <= status(two)["step"] < 4
    goes_on = trained(2, ["--resume"], two).said(0)
    assert "as the run began" in goes_on and "pos_embed: resized from 2x2x2 to 4x4x4" in goes_on
    assert losses(two) == losses(one) and scores(two) == scores(one) and weights(two) == weights(one)
    content = read_config(two)
    assert content["config"]["curriculum"] == "8x8x8:2:1x2,16x16x16:1:1x1"
    assert content["layout"]["global_batches"] == [2, 1]


def test_five_folds_over_a_pipe_are_those_of_one_process(flags: list[str], tmp_path: Path) -> None:
    """The first three have finished already."""
    line, out = [*flags, "--epochs", "1", "--val-cases", "1"], tmp_path / "five"
    write_flags(out, [*line, *PIPE])
    for fold in range(3):
        write_json(out / f"fold{fold}" / "config.json", {})
        write_json(out / f"fold{fold}" / "status.json", {"state": "finished"})
    ended = trained(2, ["--fold", "all5", "--resume"], out, hook=forking)
    assert status(out)["state"] == "finished", ended.said()
    for fold in (3, 4):
        assert read_config(out / f"fold{fold}")["layout"]["pipe"] == 2
        trained(1, [*line, "--fold", str(fold)], tmp_path / f"alone{fold}")
        assert weights(out / f"fold{fold}") == weights(tmp_path / f"alone{fold}")


@pytest.mark.started
@pytest.mark.skipif(NO_COMPILER, reason="torch compiles for the CPU with a C++ compiler, and there is none ($CXX, g++)")
def test_a_compiled_run_over_a_pipe_has_all_bits_of_one_process(flags: list[str], tmp_path: Path) -> None:
    """A block on each of two places; validation has both blocks on every rank."""
    line = [*flags, *COMPILED.split()]

    def hook(rank: int) -> None:
        os.environ |= {
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"kernels{rank}"),
        }
        note = tmp_path / f"graphs{rank}"
        at(trainer.Trainer, "_finish", rank, lambda: note.write_text(str(counters["stats"]["unique_graphs"])))(rank)

    for world, more in ((1, []), (2, ["--pipe", "2", "--placement", "2"])):
        with Launch(world, [*line, *more], tmp_path / str(world), hook) as launch:
            assert launch.wait(timeout=600) == [0] * world, launch.said()
        for rank in range(world):
            assert int((tmp_path / f"graphs{rank}").read_text()) > 0, "nothing was compiled"
    assert losses(tmp_path / "2") == losses(tmp_path / "1") and weights(tmp_path / "2") == weights(tmp_path / "1")
