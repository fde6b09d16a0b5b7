"""Runs over a pipe: the losses, scores and files of one process, in any shape, killed and resumed in others."""

import json
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

import seqpar
from seqpar.pipeline.schedule import Act
from seqpar.report.record import read_record
from seqpar.report.run_page import main_settings
from seqpar.runs.journal import read_metrics
from seqpar.training import pipeline_gradients
from seqpar.weights.weight_files import read_weights
from tests.support.folders import nnunet
from tests.support.marks import long_case
from tests.support.training_runs import Launch, at, die, farthest, losses, scores, signalled, status, trained, weights

RUN = """
    --preset debug --tile 16 --workers 0 --augment none --batch 1 --accumulate 2 --iterations 3 --epochs 2
    --val-every 1 --val-overlap 0 --lr 0.01 --clip 0.5 --device cpu --precision fp64 --mode halo
"""
HOU = "--network unet-hou --features 2"
UNETR = "--decoder unetr --patch 8 --embed-dim 12 --heads 2 --depth 3 --decoder-width 4 --dropout 0.1 --epochs 1"


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("pipe")
    nnunet(root / "Dataset001_Tiny", cases=5)
    return [*RUN.split(), "--data", str(root / "Dataset001_Tiny"), "--cache", str(root / "cache")]


@pytest.fixture(scope="module")
def hou(flags, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hou") / "run"
    trained(1, [*flags, *HOU.split()], out)
    return out


@pytest.fixture(scope="module")
def unetr(flags, tmp_path_factory) -> dict[int, Path]:
    """Returns runs of one process with one tile and with two in a micro-batch."""
    outs = {batch: tmp_path_factory.mktemp("unetr") / "run" for batch in (1, 2)}
    for batch, out in outs.items():
        trained(1, [*flags, *UNETR.split(), "--batch", str(batch)], out)
    return outs


def apart(run: Path, other: Path) -> float:
    ours, theirs = (read_weights(one / "model.safetensors") for one in (run, other))
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp(min=1e-3)) for n in theirs)


def test_a_run_over_two_places_has_all_bits_of_one_process(flags, hou, tmp_path) -> None:
    """Every message is announced on the way, which changes nothing."""
    launch = trained(2, [*flags, *HOU.split(), "--pipe", "2", "--debug-collectives"], tmp_path / "run")
    assert losses(tmp_path / "run") == losses(hou) and scores(tmp_path / "run") == scores(hou)
    assert weights(tmp_path / "run") == weights(hou)
    said = launch.said(0)
    assert "data 1 x pipe 2 x seq 1" in said and "a stop request waits for the end of a step" in said
    assert "--placement auto" in said and "GiB of weights, states and activations" in said
    layout = json.loads((tmp_path / "run" / "config.json").read_text())["layout"]
    assert layout["pipe"] == 2 and layout["stages"]["cuts"][-1] > 2 and set(layout["stages"]["places"]) == {0, 1}
    logits = [
        seqpar.load_run(str(run))(torch.ones(1, 1, 16, 16, 16, dtype=torch.float64)) for run in (tmp_path / "run", hou)
    ]
    assert torch.equal(*logits), "who predicts knows no pipe"
    shown = main_settings(read_record(tmp_path / "run"))
    assert (
        shown["ranks"] == "2 = data 1 × pipe 2 × seq 1, mode halo"
        and "pipe of 2: stage 0 = cells 0-" in shown["stages"]
    )
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        if row["kind"] == "train":
            assert len(row["stage_s"]) == len(row["stage_peak_mem_mb"]) == 2
            assert all(key.startswith("stage") and 0 < of < 60 for key, of in row["stage_s"].items())
            assert all(10 < size < 1e5 for size in row["stage_peak_mem_mb"].values())


def print_order(rank: int) -> None:
    """Prints the forwards and backwards of a rank's step, and after each step the bytes that it has sent."""
    original, add = pipeline_gradients.PipeGradients.__init__, pipeline_gradients.PipeGradients.add

    def wrapped(self, *of):
        original(self, *of)
        print("order", "".join("BF"[event.is_forward] for event in self.engine.events if isinstance(event, Act)))

    def counted(self, *of):
        before = Counter(self.mesh.pipe.traffic), Counter(self.mesh.stage.traffic)
        result = add(self, *of)
        sent = [dict(group.traffic - past) for group, past in zip((self.mesh.pipe, self.mesh.stage), before)]
        print("sent", json.dumps(sent))
        return result

    pipeline_gradients.PipeGradients.__init__, pipeline_gradients.PipeGradients.add = wrapped, counted


def bytes_sent(launch: Launch, rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """Returns what a rank sent in the last step, in its pipe and to the ranks of its stage, by kind."""
    line = [line for line in launch.said(rank).splitlines() if line.startswith("sent ")][-1]
    return tuple(json.loads(line[5:]))


@pytest.mark.parametrize(
    ("world", "batch", "more", "places", "order"),
    [
        (4, 1, "--pipe 2 --seqpar 2", None, ""),
        (4, 2, "--pipe 2 --batch 1 --pipe-schedule gpipe --placement 3", [0, 1], "order FFBB"),
        long_case(4, 2, "--pipe 2 --seqpar 2 --mode swap --batch 2 --placement rings", [0, 1, 0], ""),
        (3, 1, "--pipe 3 --mode gather --placement equal", [0, 1, 2], "order FBFB"),
    ],
)
def test_shapes_and_modes_have_the_losses_scores_and_weights_of_one_process(
    flags, unetr, tmp_path, world, batch, more, places, order
) -> None:
    """With dropout, whose draws belong to tokens. The second is data 2 x pipe 2."""
    out = tmp_path / "run"
    launch = trained(world, [*flags, *UNETR.split(), *more.split()], out, hook=print_order)
    alone = unetr[batch]
    assert farthest(losses(out), losses(alone)) < 1e-9
    assert scores(out) == scores(alone) and apart(out, alone) < 1e-8
    stages = json.loads((out / "config.json").read_text())["layout"]["stages"]
    assert places in (None, stages["places"]) and order in launch.said(world - 1)
    if "--placement 3" in more:
        assert stages["cuts"][:2] == [0, 3]
        (forth, own), (back, other) = (bytes_sent(launch, rank) for rank in (0, 1))
        assert forth.keys() == {"activations"} and back.keys() == {"activation gradients"}
        assert forth["activations"] == back["activation gradients"] > 0 == forth["activations"] % (2 * 8 * 12 * 8)
        whole = sum(8 * tensor.numel() for tensor in read_weights(out / "model.safetensors").values())
        assert own["gradients"] + other["gradients"] == pytest.approx(whole, abs=32), "half there, half back"


@pytest.mark.started
def test_a_run_killed_in_each_stage_goes_on_in_other_shapes(flags, hou, tmp_path) -> None:
    """Killed in the first stage of two, in the second of 2 places x 2 parts, told to leave three; then one process.

    Groups beside groups, and all three together: below.
    """
    out, again = tmp_path / "run", [*flags, *HOU.split(), "--resume"]
    first = [*flags, *HOU.split(), "--pipe", "2", "--checkpoint-minutes", "1e-9", "--placement", "equal"]
    with Launch(2, first, out, at(pipeline_gradients.PipeGradients, "add", 0, die, call=3)) as killed:
        assert killed.wait() == [-9, 1], killed.said()
    shape = ["--pipe", "2", "--seqpar", "2", "--checkpoint-minutes", "1e-9"]
    with Launch(4, [*again, *shape], out, at(pipeline_gradients.PipeGradients, "add", 3, die, call=2)) as killed:
        codes = killed.wait()
        assert codes[3] == -9 and set(codes[:3]) == {1}, killed.said()
        assert "as the run began" in killed.said(0), "cuts stay with the number of places"
    leave = at(pipeline_gradients.PipeGradients, "add", 2, signalled(signal.SIGTERM), call=1)
    trained(3, [*again, "--pipe", "3", "--seqpar", "1", "--placement", "auto"], out, expect=75, hook=leave)
    assert status(out)["state"] == "preempted" and 4 <= status(out)["step"] == len(losses(out)) < 6
    trained(1, [*again, "--pipe", "1"], out)
    assert farthest(losses(out), losses(hou)) < 1e-9 and apart(out, hou) < 1e-8


@pytest.mark.started
def test_a_run_killed_on_eight_ranks_goes_on_in_other_shapes(flags, tmp_path) -> None:
    """Killed on 2 groups x 2 places x 2 parts, on 2 groups x 2 places and on 3 places x 2 parts; then two parts."""
    kept = [text for n, text in enumerate(flags) if "--accumulate" not in (text, flags[n - 1])]
    line = [*kept, *UNETR.split(), "--iterations", "6", "--checkpoint-minutes", "1e-9"]
    out, alone = tmp_path / "run", tmp_path / "alone"
    trained(1, [*line, "--accumulate", "2"], alone)
    shapes = [
        (8, 7, "--pipe 2 --seqpar 2 --placement equal"),
        (4, 2, "--pipe 2 --seqpar 1 --resume"),
        (6, 5, "--pipe 3 --seqpar 2 --placement auto --resume"),
    ]
    for world, lost, shape in shapes:
        with Launch(
            world, [*line, *shape.split()], out, at(pipeline_gradients.PipeGradients, "add", lost, die, call=2)
        ) as killed:
            codes = killed.wait()
            assert codes[lost] == -9 and set(codes) == {1, -9}, killed.said()
            assert world != 4 or "as the run began" in killed.said(0)
    trained(2, [*line, "--pipe", "1", "--seqpar", "2", "--resume"], out)
    assert farthest(losses(out), losses(alone)) < 1e-9 and apart(out, alone) < 1e-8


def test_a_loss_that_is_not_finite_ends_all_places_at_one_step(flags, tmp_path) -> None:
    def spoil(rank: int) -> None:
        original = pipeline_gradients.average_gradients

        def wrapped(parameters, stage):
            original(parameters, stage)
            if rank == 0:
                next(p for p in parameters if p.grad is not None).grad.fill_(float("nan"))

        pipeline_gradients.average_gradients = wrapped

    with Launch(2, [*flags, *HOU.split(), "--pipe", "2"], tmp_path / "run", spoil) as launch:
        assert launch.wait() == [5, 5], launch.said()
    assert losses(tmp_path / "run") == [] and status(tmp_path / "run")["code"] == 5


def test_the_first_ranks_costs_are_everybodys(flags, tmp_path) -> None:
    """Ranks that measure other costs would not agree on the timetable."""
    from seqpar.training import stage_choice

    def differ(rank: int) -> None:
        original = stage_choice._measure

        def wrapped(*of):
            costs, link = original(*of)
            return (costs if rank == 0 else costs[::-1]), link * (1 + rank)

        stage_choice._measure = wrapped

    run = [*flags, *HOU.split(), "--pipe", "2", "--placement", "cuts", "--epochs", "1"]
    trained(2, run, tmp_path / "run", hook=differ)


def test_each_lesson_of_a_curriculum_is_placed_by_the_costs_of_its_tile(flags, tmp_path) -> None:
    lessons = ["--curriculum", "8:1:1,16:1:1", "--iterations", "1", "--val-every", "9"]
    line = [text for n, text in enumerate(flags) if not {text, flags[n - 1]} & {"--tile", "--batch", "--epochs"}]
    launch = trained(2, [*line, *HOU.split(), *lessons, "--pipe", "2"], tmp_path / "run")
    said = launch.said(0)
    assert said.count("(--placement auto)") == said.count("a step should take") == 2 and "as the run began" not in said
