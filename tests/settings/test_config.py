"""Settings: presets, impossible combinations, --help, times."""

import importlib
import json
import math
import signal
import time
from dataclasses import replace

import pytest

from seqpar.cluster.stop_request import StopRequest
from seqpar.planner.batch_size import choose_batch
from seqpar.planner.feasibility import check_feasible
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.settings.presets import PRESETS
from seqpar.settings.rules import refuse_settings_without_effect
from seqpar.text import parse_duration
from tests.support.messages import refused_with
from tests.support.programs import PROGRAMS


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_run_and_survives_json(preset):
    config = parse(["--preset", preset], "debug")[1]
    config = choose_batch(replace(config, tile=config.tile or (64, 64, 64)))  # () is for the data to say
    check_feasible(config)
    assert Config.from_dict(json.loads(config.to_json())) == config
    check_feasible(choose_batch(replace(config, seqpar=4, batch=0, patch=4)))


def test_the_papers_batch_is_32_and_fewer_at_smaller_patches():
    paper = PRESETS["paper"]()
    assert choose_batch(paper).batch == 32
    assert 1 <= choose_batch(replace(paper, patch=4)).batch < choose_batch(replace(paper, patch=8)).batch < 32
    assert choose_batch(replace(paper, patch=4, seqpar=4, mode="swap")).batch % 4 == 0


IMPOSSIBLE = {
    "--heads 5": "use --heads 4",
    "--patch 7": "use --patch 8",
    "--tile 30": "use --tile 32 32 32",
    "--tile 16 16": "one number, or three",
    "--seqpar 64": "--seqpar 8 or less",
    "--seqpar 3 --split ordered --mode nogather": "needs boxes",
    "--seqpar 4 --mode swap": "use --batch 4",
    "--positions rope --heads 3": "smaller --heads",
    "--mode best": "invalid choice: 'best' .*gather.*nogather.*halo.*swap.*auto",
    "--decoder best": "invalid choice: 'best' .*plain.*primus.*unetr",
    "--epochs 0": "at least 1",
    "--warmup 3": "use --warmup 2",
    "--lr 0": "above 0",
    "--lr nan": "above 0",
    "--clip nan": r"in \[0, 1e\+30\]",
    "--drop-path 1": r"\[0, 1\)",
    "--betas 0.9": r"two numbers in \[0, 1\), such as 0.9 0.999",
    "--optimizer rmsprop --betas 0.9": "two numbers in .* 0 0.99",
    "--optimizer adamw --betas 0.9 0.99 0.5": "--optimizer adamw takes 2 numbers, such as 0.9 0.999",
    "--optimizer sgd --betas 1": r"a number in \[0, 1\), such as 0.9",
    "--optimizer sgd --betas 0.9 0.99": "--betas would do nothing: --optimizer sgd takes one number, its momentum",
    "--optimizer adafactor --betas 0.9 0.99": "--optimizer adafactor takes none",
    "--optimizer adafactor --shard-weights": "looks at whole parameters",
    "--optimizer sgd --amsgrad": "--amsgrad would do nothing: only adam and adamw",
    "--schedule step": "needs --decay-epochs",
    "--decay-epochs 2": "--decay-epochs would do nothing: --schedule cosine has no steps",
    "--schedule step --decay-epochs 1 --decay-factor 0": "above 0",
    "--fold first": "give a fold.s number, such as 0; 90:10 .no other two shares.",
    "--synthesis 2": r"\[0, 1\]; 0.5",
    "--synthesis-per volume": "--synthesis-per would do nothing: --synthesis is 0",
    "--spacing 1,1": "three sizes above 0",
    "--spacing best": "give source, median, or",
    "--time-limit soon": "give minutes",
    "--time-limit 0": "it must be above 0",
    "--checkpoint-minutes 0": "above 0",
    "--weights nowhere": "no such file",
    "--skips paper": "would do nothing",
    "--measured x": "would do nothing",
    "--phantoms 9": "would do nothing",
    "--decoder primus --decoder-width 9": "would do nothing",
    "--interpolation cubic": "--interpolation would do nothing: --augment none",
    "--augment none+intensity-shift --interpolation cubic": "--augment none.intensity-shift deforms nothing",
    "--augment best --interpolation cubic": "--augment best: an augmentation is one of",
    "--loss best": "invalid choice",
    "--loss-weights 1": "expected 2, for dice and ce",
    "--class-weights 0 0": "not negative, and not all zero",
    "--loss-weights 0 0": "not all zero",
    "--loss focal --focal-gamma 0.5": "0, or at least 1",
    "--loss focal --loss-weights 2": "--loss-weights would do nothing: --loss focal has one term",
    "--loss focal --dice squared": "--dice would do nothing: --loss focal has no Dice",
    "--loss focal --dice-background": "--dice-background would do nothing: --loss focal has no term per class",
    "--loss focal --batch-dice": "--batch-dice would do nothing: --loss focal has no term per class",
    "--focal-gamma 2": "--focal-gamma would do nothing: --loss dice-ce has no focal term",
    "--grad-checkpoint some": "invalid choice",
    "--mlp-chunks 0": "at least 1",
    "--mlp-chunks 99": "choose 1 to 8",
    "--speed 9": "unrecognized arguments: --speed 9",
    "--epoch 9": "unrecognized arguments",
    "--depth two": "invalid int value",
}


@pytest.mark.parametrize("line", IMPOSSIBLE)
def test_what_cannot_work_is_refused_with_the_nearest_that_does(flags, line):
    with refused_with(IMPOSSIBLE[line]):
        _, config, names = parse([*flags, *line.split()], "debug")
        refuse_settings_without_effect(config, names - {"decoder_width"} if "primus" not in line else names)
        check_feasible(choose_batch(config))


UNKNOWN = {
    "train --epoch=9": "nearest to --epoch is --epochs",
    "plan --memroy 40 --ptch 4": "nearest to --memroy is --memory; nearest to --ptch is --patch",
    "predict RUN -i a -o b --checkpont last": "nearest to --checkpont is --checkpoint",
    "prepare DATA --chek": "nearest to --chek is --check",
    "evaluate a b --lesionwise": "nearest to --lesionwise is --lesion-wise",
    "report RUN --case 3": "nearest to --case is --cases",
    "phantom --out a --size 8 8 8 --sed 3": "nearest to --sed is --seed",
    "bench --writ": "nearest to --writ is --write",
    "doctor --time-limt 9": "nearest to --time-limt is --time-limit",
    "train --zzz": r"unrecognized arguments: --zzz \(--help",
}


@pytest.mark.parametrize("line", UNKNOWN)
def test_unknown_flags_get_the_nearest(line):
    name, *arguments = line.split()
    with pytest.raises(ValueError, match=UNKNOWN[line]):
        importlib.import_module(PROGRAMS[name]).act(arguments)


def test_time_limits_and_slurms_durations():
    from seqpar.cluster.stop_request import slurm_duration

    assert [parse_duration(text) for text in ("", "110", "1:50:00", "2-00:00:01")] == [math.inf, 6600, 6600, 172801]
    assert [slurm_duration(text) for text in ("1-02:03:04", "5:06", "UNLIMITED", "")] == [93784, 306, None, None]


def test_slurms_end_time_is_seen(monkeypatch):

    monkeypatch.setattr(signal, "signal", lambda *of: None)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 30))
    assert StopRequest(math.inf).own_reason() == "time limit", "30 s are less than the margin"
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))
    assert not StopRequest(math.inf).own_reason()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) - 60))
    assert not StopRequest(math.inf).own_reason(), "a screen that was opened in a job that has ended"


def test_advice_on_memory_changes_no_result_where_something_else_helps():
    from seqpar.training.failure import save_memory

    config = replace(PRESETS["debug"](), batch=4, accumulate=2)
    assert save_memory(config) == "use --batch 2 --accumulate 4"
    pooled = replace(config, batch_dice=True)
    assert save_memory(pooled) == "use --grad-checkpoint full, or a larger --seqpar"
    assert save_memory(replace(pooled, grad_checkpoint="full")).startswith("use --shard-weights, a larger --seqpar")
