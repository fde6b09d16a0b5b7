"""Runs of several lessons: interrupted anywhere they end with the same bits; positions are resized with the tile."""

import signal

import pytest
import torch
from torch import nn

from seqpar.data.sampling.tiles import TileKey
from seqpar.models.build import build_network
from seqpar.models.network import ResizePositions, resize_tensors
from seqpar.optimization.optimizers import make_optimizer
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group
from seqpar.runs.run_folder import read_config
from seqpar.runs.trained_run import load_run, read_run
from seqpar.settings.command_line import parse
from seqpar.tasks.segment import validation
from seqpar.tasks.segment.data import open_data
from seqpar.training import gradients, run
from seqpar.training.run_request import read_request
from seqpar.vit.tokens import resize_positions
from seqpar.weights import checkpoint
from seqpar.weights.checkpoint import Progress
from tests.support.training_runs import at, die, farthest, losses, scores, signalled, status, trained, weights

CURRICULUM = "8:1:2,12:1:1,whole:1:1"
OWN = {"--batch", "--tile", "--epochs"}


@pytest.fixture(scope="module")
def line(flags) -> list[str]:
    kept = [text for n, text in enumerate(flags) if not ({text, flags[n - 1]} & OWN)]
    return [*kept, "--patch", "4", "--curriculum", CURRICULUM]


@pytest.fixture(scope="module")
def undisturbed_lessons(line, tmp_path_factory):
    out = tmp_path_factory.mktemp("lessons") / "run"
    return out, trained(1, line, out).said()


def test_lessons_are_one_run_in_one_folder(undisturbed_lessons):
    out, said = undisturbed_lessons
    assert len(losses(out)) == 6 and status(out)["state"] == "finished" and status(out)["steps"] == 6
    assert [f"lesson {n} of 3: tile" in said for n in (1, 2, 3)] == [True] * 3
    assert said.count("encoder.pos_embed: resized from") == 2 and "from 3x3x3 to 3x2x2 tokens" in said
    content = read_config(out)
    assert content["config"]["curriculum"] == "8x8x8:1:2,12x12x12:1:1,whole=12x8x8:1:1"
    assert content["layout"]["global_batches"] == [2, 1, 1] and len(content["history"]) == 1
    rates = [row["lr"] for row in trainer_rows(out)]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.2 * rates[0]  # one schedule over all lessons
    net = load_run(out, "latest")
    assert net.encoder.pos_embed.shape[1] == 12


def trainer_rows(out):
    from seqpar.runs.journal import read_metrics

    return [row for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "train"]


def test_each_lesson_draws_tiles_of_its_size_in_its_places(line):
    request = read_request(line, Launcher("alone"))
    data = open_data(request.config, True)
    tiles = [run._tiles_of(lesson, data).tiles for lesson in request.lessons]
    assert [each.foreground for each in tiles] == [1, 1, 0]
    assert [each.tile_size for each in tiles] == [lesson.config.tile for lesson in request.lessons]
    assert tiles[0].draw(TileKey(0, 0, 0)).label.shape == (8, 8, 8)


@pytest.mark.parametrize("owner, name, call, step", [
    (gradients.Gradients, "_backward", 1, 1), (gradients.Gradients, "_backward", 2, 2),
    (gradients.Gradients, "_backward", 3, 3),
    (validation.SegmentationValidation, "_predict", 1, 2), (validation.SegmentationValidation, "_predict", 2, 4),
])  # fmt: skip
def test_a_run_left_in_any_lesson_or_between_two_ends_with_the_same_bits(
    line, undisturbed_lessons, tmp_path, owner, name, call, step
):
    trained(1, line, tmp_path / "run", 75, at(owner, name, 0, signalled(signal.SIGTERM), call))
    left = status(tmp_path / "run")
    assert left["state"] == "preempted" and left["step"] == step
    trained(1, [*line, "--resume"], tmp_path / "run")  # as a scheduler repeats the line
    assert weights(tmp_path / "run") == weights(undisturbed_lessons[0])
    assert losses(tmp_path / "run") == losses(undisturbed_lessons[0])
    assert scores(tmp_path / "run") == scores(undisturbed_lessons[0])


@pytest.mark.parametrize("call", [2, 3])
def test_a_run_killed_as_a_lesson_begins_ends_with_the_same_bits(line, undisturbed_lessons, tmp_path, call):
    trained(1, line, tmp_path / "run", -signal.SIGKILL, at(run, "make_trainer", 0, die, call=call))
    said = trained(1, ["--resume"], tmp_path / "run").said()
    assert f"lesson {call} of 3" in said
    assert weights(tmp_path / "run") == weights(undisturbed_lessons[0])


@pytest.mark.started
def test_lessons_that_go_on_with_two_ranks_and_weights_in_shards_become_what_one_process_makes(line, tmp_path):
    double = [*line, "--precision", "fp64", "--val-every", "0"]
    trained(1, double, tmp_path / "one")
    hook = at(torch.optim.Adam, "step", 0, signalled(signal.SIGTERM), call=2)
    trained(1, double, tmp_path / "two", 75, hook)
    trained(2, ["--resume", "--seqpar", "2", "--mode", "halo", "--shard-weights"], tmp_path / "two")
    assert farthest(losses(tmp_path / "two"), losses(tmp_path / "one")) < 1e-9


@pytest.mark.parametrize("optimizer", ["adam", "adafactor", "sgd"])
def test_positions_and_what_the_optimizer_holds_of_them_are_resized(tmp_path, optimizer):
    group = Group("seq", (0,))

    def made(tile: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        text = f"--tile {tile} --patch 8 --embed-dim 12 --heads 2 --depth 1 --decoder-width 4 --optimizer {optimizer}"
        config = parse(text.split(), "debug")[1]
        net = build_network(config, 1, 2, group)
        return net, make_optimizer(net, config.optimizer_options)

    net, optimiser = made(16)
    for _ in range(2):
        net(torch.randn(1, 1, 16, 16, 16)).square().mean().backward()
        optimiser.step()
    world = Group("world", (0,))
    path = checkpoint.save(tmp_path, net, optimiser, Progress(step=2), world)
    larger, its = made(24)
    resizing = larger.resized((16, 16, 16))
    assert resizing == {"encoder.pos_embed": ResizePositions((2, 2, 2), (3, 3, 3))} and not larger.resized((24, 24, 24))
    with pytest.raises(ValueError, match="encoder.pos_embed"):
        checkpoint.load(path, larger, its, 0)
    checkpoint.load(path, larger, its, 0, resizing)
    before, after = net.encoder.pos_embed, larger.encoder.pos_embed
    assert torch.equal(after, resize_positions(before, (2, 2, 2), (3, 3, 3)))
    entries = {"adam": ["exp_avg", "exp_avg_sq"], "adafactor": ["row_var"], "sgd": ["momentum_buffer"]}[optimizer]
    for entry in entries:
        old, new = optimiser.state[before][entry], its.state[after][entry]
        assert new.shape[1] == 27 and torch.equal(new, resize_positions(old, (2, 2, 2), (3, 3, 3)))
    assert all((new >= 0).all() for name, new in its.state[after].items() if "sq" in name or "var" in name)
    others = [name for name, value in optimiser.state[before].items() if name not in entries and value is not None]
    assert all(torch.equal(its.state[after][name], torch.as_tensor(optimiser.state[before][name])) for name in others)
    larger(torch.randn(1, 1, 24, 24, 24)).square().mean().backward()
    its.step()
    assert not torch.equal(after, resize_positions(before, (2, 2, 2), (3, 3, 3)))
    untouched = dict(resize_tensors([("encoder.norm.weight/exp_avg", torch.ones(8))], resizing))
    assert torch.equal(untouched["encoder.norm.weight/exp_avg"], torch.ones(8))


def test_a_curriculum_cannot_change_in_a_run_that_goes_on(line, undisturbed_lessons):
    for other in ("8:1:2,24:1:1", "8:1:2,24:1:2,whole:1:1", "8:2:2,24:1:1,whole:1:1", "8:1:2,24:1:1,16:1:1"):
        with pytest.raises(ValueError, match="--curriculum cannot change when a run resumes"):
            read_request(["--resume", "--curriculum", other, "--out", str(undisturbed_lessons[0])], Launcher("alone"))


def test_prediction_takes_the_tile_of_the_lesson_whose_weights_it_takes(line, undisturbed_lessons, tmp_path):
    """Window.json may be about weights that are gone, and checkpoints tell what is there."""
    (points := (folder := tmp_path / "run") / "checkpoints").mkdir(parents=True)
    began = undisturbed_lessons[0]
    for path in (*began.iterdir(), *(began / "checkpoints").glob("step-*")):
        if path.name != "checkpoints":
            (folder / path.relative_to(began)).symlink_to(path)
    steps = sorted(points.glob("step-*"))
    assert [path.name for path in steps] == ["step-00000004", "step-00000006"]
    for step, tile in ((4, (12, 12, 12)), (6, (12, 8, 8)), (2, (12, 8, 8))):  # the last one is not there
        (points / "best").write_text(f"step-{step:08d}")
        assert read_run(folder).config.tile == tile
    counts = {path.name: load_run(folder, str(path)).encoder.pos_embed.shape[1] for path in steps}
    assert counts["step-00000006"] == 12 and len(set(counts.values())) > 1
