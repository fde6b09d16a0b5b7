"""Curricula: how lessons are written, what each is, and what contradicts them."""

from dataclasses import replace

import pytest

from seqpar.cli import plan, train
from seqpar.cluster.exit_codes import USAGE, run
from seqpar.parallel.launcher import Launcher
from seqpar.planner import chooser, printer
from seqpar.settings.command_line import parse
from seqpar.settings.curriculum import LessonSpec, format_curriculum, in_micro_batches, is_same, parse_curriculum
from seqpar.settings.lessons import lesson_at, lessons_of
from seqpar.training.run_request import read_request

LINE = "--preset debug --device cpu"


def request_of(flags: list[str], more: str, world: int = 1):
    ranks = {"--batch", "--tile", "--epochs"}  # the tiny run's own, which a curriculum has in its place
    kept = [text for n, text in enumerate(flags) if not ({text, flags[n - 1]} & ranks)]
    return read_request([*kept, *more.split()], Launcher("test", 0, world))


def test_lessons_are_read_as_they_are_spelled():
    entries = parse_curriculum("64:4800, 128x128x64:1200:2,whole:300,whole=240x240x160:5:1")
    assert entries == (
        LessonSpec((64,) * 3, 4800), LessonSpec((128, 128, 64), 1200, 2), LessonSpec((), 300, 0, True),
        LessonSpec((240, 240, 160), 5, 1, True),
    )  # fmt: skip
    known = [LessonSpec((64,) * 3, 4800, 16), entries[1], entries[3]]
    assert format_curriculum(known) == "64x64x64:4800:16,128x128x64:1200:2,whole=240x240x160:5:1"
    assert list(parse_curriculum(format_curriculum(known))) == known
    assert parse_curriculum("") == ()
    assert parse_curriculum("64:300:4x2,whole:3:1") == (
        LessonSpec((64,) * 3, 300, 4, micros=2),
        LessonSpec((), 3, 1, True),
    )
    assert format_curriculum(parse_curriculum("64:300:4x2,whole:3:1,whole:2")) == "64x64x64:300:4x2,whole:3:1,whole:2"


def test_batches_are_dealt_out_to_as_many_micro_batches_as_they_divide_by():
    dealt = in_micro_batches("64:300:16,96:10:6,128:300:4,whole:300:1,whole:2", 4)
    assert [(entry.batch, entry.micros) for entry in parse_curriculum(dealt)] == [
        (4, 4),
        (2, 3),
        (1, 4),
        (1, 1),
        (0, 0),
    ]
    assert dealt.endswith("whole:300:1x1,whole:2")


def test_a_lesson_has_its_own_micro_batches_wherever_a_run_goes_on(flags):
    """What is saved amid a lesson names that lesson's number for ``--accumulate``."""
    request = request_of(flags, "--curriculum 8:1:1x4,16:1:2")
    assert request.config.curriculum == "8x8x8:1:1x4,16x16x16:1:2x1" and request.config.accumulate == 4
    assert [(o.config.batch, o.config.accumulate) for o in lessons_of(request.config)] == [(1, 4), (2, 1)]
    assert is_same("8:1:1x4,16:1:2", request.config.curriculum) and not is_same("8:1:4", "8x8x8:1:1x4")
    assert "tile 8x8x8, 1 x 4 a group" in printer.describe_lessons(request.config)
    with pytest.raises(ValueError, match="--accumulate would do nothing: the lessons"):
        request_of(flags, "--curriculum 8:1:1x4,16:1:2 --accumulate 2")


@pytest.mark.parametrize(
    "text",
    ["64", "64:x", "64:1:2:3", "64:1:2x", "64:1:x2", ",64:1", "64x64:1", "whole=:1", "half:3", ":4", "whole64:1"],
)
def test_what_is_no_lesson_is_named(text):
    with pytest.raises(ValueError, match=f"--curriculum {text}: .* is no lesson; needed is TILE:EPOCHS"):
        parse_curriculum(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [("70000:1", "sides 70000"), ("64:2000000000", "epochs 2000000000"), ("64:1:9000000", "batch 9000000")],
)
def test_a_number_that_no_flag_takes_is_named(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"--curriculum {text}: .* has the {what}; it must be at most"):
        parse_curriculum(text)


@pytest.mark.parametrize("text", ["64:0", "0:4", "64:4:0", "64:4:2x0", "64x0x64:1"])
def test_a_lesson_of_nothing_is_refused(text):
    with pytest.raises(ValueError, match="has a 0"):
        parse_curriculum(text)


def test_lessons_share_the_steps_of_a_run_and_begin_with_labelled_places():
    line = [*LINE.split(), "--curriculum", "16:2:4,32:3:2,whole=48x40x40:1:1", "--iterations", "5"]
    config = parse(line, "debug")[1]
    lessons = lessons_of(config)
    assert config.epochs == 6 and config.steps == 30
    assert [lesson.steps for lesson in lessons] == [range(10), range(10, 25), range(25, 30)]
    assert [lesson.config.tile for lesson in lessons] == [(16,) * 3, (32,) * 3, (48, 40, 40)]
    assert [lesson.config.batch for lesson in lessons] == [4, 2, 1]
    assert [lesson.foreground for lesson in lessons] == [1, 1, 0]
    last = parse([*LINE.split(), "--curriculum", "16:2:4,32:3:2", "--foreground", "0.25"], "debug")[1]
    assert [lesson.foreground for lesson in lessons_of(last)] == [1, 0.25]
    assert [lesson_at(config, step) for step in (0, 10, 11, 25, 26, 30, 99)] == [0, 0, 1, 1, 2, 2, 2]
    plain = parse(LINE.split(), "debug")[1]
    (lesson,) = lessons_of(plain)
    assert lesson.config == plain and lesson.steps == range(plain.steps) and lesson.foreground == plain.foreground


def test_whole_volumes_and_batches_are_filled_in_by_the_data(flags, monkeypatch):
    def choose(config, launcher, channels, outputs):
        assert (channels, outputs) == (1, 2)
        return replace(config, batch=config.batch or config.tile[0] // 4), {"batch_choice": ("it fits",)}

    monkeypatch.setattr(chooser, "choose_group_and_batch", choose)  # counting takes seconds, and has tests of its own
    request = request_of(flags, "--curriculum 8:1,whole:1 --patch 4")
    assert request.config.curriculum == "8x8x8:1:2,whole=12x8x8:1:3"
    assert [lesson.config.tile for lesson in request.lessons] == [(8, 8, 8), (12, 8, 8)]
    assert [lesson.config.batch for lesson in request.lessons] == [2, 3]
    assert request.choices["batch_choice_2"] == ("tile 12x8x8: it fits",)


def test_the_network_of_the_first_tile_is_that_of_all(flags):
    network = "--network nnunet-plain --features 2 --decoder-width 8".replace(" --decoder-width 8", "")
    own = ["--embed-dim", "--heads", "--depth", "--decoder-width", "--decoder", "--patch"]
    kept = [text for n, text in enumerate(flags) if not ({text, flags[n - 1]} & set(own))]
    request = request_of(kept, f"{network} --curriculum 16:1:1,64:1:1")
    assert request.config.stages and {lesson.config.stages for lesson in request.lessons} == {request.config.stages}
    with pytest.raises(ValueError, match=r"lesson of tile 17x17x17: .*17"):
        request_of(kept, f"{network} --curriculum 16:1:1,17:1:1")
    with pytest.raises(ValueError, match="unet-hou builds a different network for tile 128x128x128 than for 64x64x64"):
        request_of(kept, "--network unet-hou --features 2 --curriculum 64:1:1,128:1:1")


def test_the_global_batch_of_every_lesson_is_held(flags):
    request = request_of(flags, "--curriculum 8:1:4,16:1:2 --global-batch 8", world=2)
    assert [(o.config.batch, o.config.accumulate) for o in request.lessons] == [(4, 1), (2, 2)]
    assert "accumulate 2" in request.choices["global_batch"][0]
    for lessons in ("8:1:3,16:1:2", "8:1:4,16:1:2x1"):  # a batch that is not trained would be listed
        with pytest.raises(ValueError, match="--global-batch 8 is 4 tiles a step for each of 2 groups"):
            request_of(flags, f"--curriculum {lessons} --global-batch 8", world=2)


@pytest.mark.parametrize("more, name", [
    ("--tile 32", "tile"), ("--epochs 3", "epochs"), ("--batch 2", "batch"), ("--foreground 0.5", "foreground"),
])  # fmt: skip
def test_flags_that_contradict_a_curriculum_are_refused_by_name(capsys, more, name):
    line = [*LINE.split(), "--curriculum", "16:1:1,whole=32x32x32:1:1", *more.split()]
    assert run(train.act, line) == USAGE
    assert f"--{name} would do nothing:" in capsys.readouterr().err


def test_a_dry_run_plans_every_lesson_and_plan_refers_to_it(flags, capsys):
    ranks = {"--batch", "--tile", "--epochs"}
    kept = [text for n, text in enumerate(flags) if not ({text, flags[n - 1]} & ranks)]
    assert run(train.act, [*kept, "--curriculum", "8:3:2,whole:1:1", "--patch", "4", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("would run on 1 rank =") == said.count("  memory    ") == 2
    assert "curriculum of 2 lessons:" in said and "tile 8x8x8, 2 a group: steps 1 to 6, centred on labelled" in said
    assert "steps     6; global batch 2 tiles" in said and "steps     2; global batch 1 tile" in said
    assert run(plan.act, ["--curriculum", "8:3:2,whole:1:1"]) == USAGE
    assert "plan each lesson by itself" in capsys.readouterr().err
