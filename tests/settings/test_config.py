"""Settings: presets, impossible combinations, and every flag with what changes when it is given."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seqpar.environment import Launcher
from seqpar.launch.job.stop_request import Stopper
from seqpar.launch.models.build import build
from seqpar.launch.models.optimizer import learning_rate, make_optimizer
from seqpar.launch.planning.batch_size import choose_batch, keep_global_batch
from seqpar.launch.planning.feasibility import refuse
from seqpar.launch.runs.run_folder import Status, describe_run
from seqpar.launch.settings.command_line import continued, parse, refuse_idle
from seqpar.launch.settings.config import Config, seconds
from seqpar.launch.settings.presets import PRESETS
from seqpar.launch.training import request
from seqpar.launch.training import trainer as training
from seqpar.launch.training.data import open_data
from seqpar.launch.training.setup import first_lines
from seqpar.mesh import Group
from seqpar.rendezvous import pick_device
from tests.support.folders import nnunet, write_json
from tests.support.training_runs import tiny_data

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return tiny_data(tmp_path_factory.mktemp("config"))


def config_of(flags: list[str], *more: str) -> Config:
    return choose_batch(parse([*flags, *more], "debug")[1])


def net_of(config: Config):
    return build(config, 1, 2, Group("seq", tuple(range(config.seqpar))), "meta")


def trainer_of(config: Config, mesh, folder):
    material = open_data(config, True)
    net = build(config, material.num_channels, material.num_outputs, mesh.seq)
    return training.Trainer(config, mesh, material, net, Status(folder), describe_run(config, "", {}, {}))


def rates(config: Config) -> list[float]:
    return [learning_rate(config, step) for step in range(config.steps)]


def group_of(config: Config) -> dict:
    return make_optimizer(config, net_of(config)).param_groups[0]


def shapes(config: Config) -> list[tuple]:
    return [tuple(p.shape) for p in net_of(config).parameters()]


def attention_of(config: Config) -> list[str]:
    return [str(value) for _, value in sorted(vars(net_of(config).encoder.blocks[0].attn).items()) if _plain(value)]


def _plain(value: object) -> bool:
    return value is None or type(value).__name__ in ("bool", "int", "str", "Strategy")


def shapes_of(material) -> list[tuple]:
    return [case.label.shape for case in material.dataset.cases.values()]


def drops(config: Config) -> list[float]:
    return [value for m in net_of(config).modules() for key, value in vars(m).items() if key == "dropout"]


def windows_of(trainer) -> list:
    from seqpar.launch.training import validation

    seen = []

    def stop(nets, image, sliding, mesh):
        seen.append(sliding)
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(validation, "sliding_window", stop)
        with pytest.raises(InterruptedError):
            trainer.validation.run(trainer.net, trainer.journal, _Calm())
    return seen


def phantom_cases(config: Config) -> list[int]:
    from seqpar.data.phantom import builtin

    made = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(builtin, "write_phantom", lambda out, cases, *of: made.append(cases))
        with tempfile.TemporaryDirectory() as cache:
            patched.setenv("SEQPAR_CACHE", cache)
            builtin.phantom(config.phantoms, True)
    return made


def tile_of(config: Config) -> torch.Tensor:
    from seqpar.data.sampling.tiles import TileKey

    return torch.from_numpy(open_data(config, True).tiles.draw(TileKey(config.seed, 0, 0)).image)


# flag -> how it is given (beside the tiny run), and what is looked at. Those with "run" are seen by whole runs.
ACTS = {
    "data": ("--data {other} --cache {cache}", lambda c: len(open_data(c, True).dataset.ids)),
    "cache": ("--cache {other}", lambda c: str(open_data(c, True).dataset.path)),
    "spacing": ("--spacing 3,3,3 --cache {other}", lambda c: shapes_of(open_data(c, True))),
    "fold": ("--fold 1", lambda c: open_data(c, True).held_out_ids),
    "phantoms": ("--phantoms 9", phantom_cases),
    "augment": ("--augment full", lambda c: tile_of(c).tolist()),
    "synthesis": ("--foreground 1 --synthesis 1", lambda c: tile_of(c).tolist()),
    "foreground": ("--foreground 0.5", lambda c: open_data(c, True).tiles.foreground),
    "attention": ("--seqpar 2 --attention ulysses", attention_of),
    "keep_kv": ("--seqpar 2 --keep-kv", attention_of),
    "heads_per_chunk": ("--seqpar 2 --heads-per-chunk 1", attention_of),
    "seqpar": ("--seqpar 2", lambda c: net_of(c).encoder.layout.counts),
    "split": ("--split ordered --seqpar 2", lambda c: net_of(c).encoder.layout.split),
    "mode": ("--mode halo", lambda c: net_of(c).mode.name),
    "tile": ("--tile 24", lambda c: net_of(c).encoder.layout.num_tokens),
    "patch": ("--patch 4", lambda c: net_of(c).encoder.layout.num_tokens),
    "decoder": ("--decoder unetr", lambda c: type(net_of(c).decoder)),
    "depth": ("--depth 2", lambda c: len(net_of(c).encoder.blocks)),
    "embed_dim": ("--embed-dim 24", shapes),
    "heads": ("--heads 3", lambda c: net_of(c).encoder.blocks[0].attn.num_heads),
    "mlp_ratio": ("--mlp-ratio 2", shapes),
    "mlp": ("--mlp swiglu", lambda c: type(net_of(c).encoder.blocks[0].mlp)),
    "qkv_bias": ("--no-qkv-bias", lambda c: len(shapes(c))),
    "attention_norm": ("--attention-norm", lambda c: len(shapes(c))),
    "positions": ("--positions rope", lambda c: len(shapes(c))),
    "skips": ("--decoder unetr --depth 6 --patch 8 --skips paper", lambda c: net_of(c).taps),
    "dropout": ("--dropout 0.5", drops),
    "drop_path": ("--drop-path 0.5 --depth 2", lambda c: [b.drop_path for b in net_of(c).encoder.blocks]),
    "layer_scale": ("--layer-scale 0.1", lambda c: len(shapes(c))),
    "decoder_width": ("--decoder-width 8", shapes),
    "batch": ("--batch 1", lambda c: keep_global_batch(c, 4, 1).accumulate),
    "accumulate": ("--accumulate 2", lambda c: c.batch * c.accumulate),
    "epochs": ("--epochs 4", lambda c: c.steps),
    "iterations": ("--iterations 3", lambda c: c.steps),
    "lr": ("--lr 0.02", rates),
    "optimizer": ("--optimizer sgd", lambda c: type(make_optimizer(c, net_of(c)))),
    "weight_decay": ("--weight-decay 0.1", lambda c: group_of(c)["weight_decay"]),
    "betas": ("--betas 0.8 0.9", lambda c: group_of(c)["betas"]),
    "schedule": ("--schedule constant", rates),
    "warmup": ("--warmup 1", rates),
    "time_limit": ("--time-limit 1:00:00", lambda c: seconds(c.time_limit)),
    "seed": ("--seed 5", lambda c: tile_of(c).tolist()),
}
# Seen in the trainer that a config makes.
TRAINER = {
    "precision": ("--precision fp64", lambda t: next(t.net.parameters()).dtype),
    "batch_dice": ("--batch-dice", lambda t: t.loss.batch_dice),
    "val_cases": ("--fold all --val-cases 2", lambda t: len(t.validation.ids)),
    "val_overlap": ("--val-overlap 0.5", lambda t: windows_of(t)),
    "grad_checkpoint": ("--grad-checkpoint full", lambda t: t.net.encoder.blocks[0].recompute),
    "mlp_chunks": ("--mlp-chunks 2", lambda t: t.net.encoder.blocks[0].mlp_chunks),
    "compile": ("--compile", lambda t: t.net.encoder.blocks[0].mlp._compiled_call_impl is None),
}
# Seen elsewhere: tests/test_training.py and the tests below.
ELSEWHERE = {
    "out": "test_what_people_watch", "workers": "test_workers_die_with_a_killed_trainer",
    "clip": "test_clipping_bounds_what_the_optimiser_sees", "val_every": "test_validation_comes_as_often_as_told",
    "weights": "test_weights_are_taken", "resume": "test_a_run_that_had_to_leave_goes_on_to_the_same_bits",
    "checkpoint_minutes": "test_a_run_that_loses_a_rank_at_every_moment_in_turn_ends_with_the_same_bits",
    "shard_weights": "test_sharded_weights_become_what_replicated_ones_become",
    "measured": "test_attention_is_chosen_by_measured_links",
    "device": "test_the_device_is_the_told_one", "dry_run": "test_a_dry_run_writes_nothing",
    "tensorboard": "test_tensorboard_gets_the_journals_numbers",
    "start_timeout": "test_a_rank_that_does_not_start_is_named",
    "timeout": "test_a_rank_that_stops_ends_the_run_by_name",
    "debug_collectives": "test_checked_ranks_that_differ_are_named",
}  # fmt: skip


def test_every_flag_has_a_row():
    rows = [*ACTS, *TRAINER, *ELSEWHERE]
    assert sorted(rows) == sorted(f.name for f in dataclasses.fields(Config))
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert all(f"def {name}(" in tests for name in ELSEWHERE.values())


@pytest.mark.parametrize("name", ACTS)
def test_the_flag_acts(flags, tmp_path, name):
    given, look = ACTS[name]
    if "{other}" in given:
        nnunet(tmp_path / "Dataset002_Other", cases=6)
        other = tmp_path / ("Dataset002_Other" if name == "data" else "cache")
        given = given.format(other=other, cache=tmp_path / "cache")
    more = given.split()
    own = [f"--{name.replace('_', '-')}", f"--no-{name.replace('_', '-')}"]
    at = next(i for i, text in enumerate(more) if text in own)
    rest = more[:at] if name != "split" else more[2:]
    if name in ("drop_path",):
        rest = more[2:]
    assert look(config_of(flags, *more)) != look(config_of(flags, *rest))


def test_full_augmentation_keeps_zero_background_where_scores_are_of_what_is_not_zero(flags, tmp_path):
    def kept(*more: str) -> bool:
        config = config_of(flags, *more)
        return open_data(config, True).tiles.augmentation.keep_background

    assert kept("--augment", "full") and not kept("--augment", "light")
    ct = nnunet(tmp_path / "D", cases=5, channels=("CT",))
    assert not kept("--augment", "full", "--data", str(ct), "--cache", str(tmp_path / "c"))


def test_a_synthesis_that_the_labels_do_not_allow_is_refused_before_ranks_meet(flags, tmp_path):
    other = nnunet(tmp_path / "D", cases=5, labels={"background": 0, "hippocampus": 1})
    config = config_of([*flags, "--data", str(other), "--cache", str(tmp_path / "c"), "--synthesis", "0.5"])
    with pytest.raises(ValueError, match="--synthesis 0.5: the labels of D"):
        open_data(config, True)


def test_a_data_sets_own_folds_may_be_more_than_five(tmp_path):
    root, names = nnunet(tmp_path / "D", cases=7), [f"c_{n:03d}" for n in range(7)]
    splits = [{"train": [name for name in names if name != held], "val": [held]} for held in names]
    write_json(root / "splits_final.json", splits)
    config = config_of(["--data", str(root), "--fold", "6"])
    refuse(config)
    assert open_data(config, True).held_out_ids == ("c_006",)
    with pytest.raises(ValueError, match="fold is 7; there are folds 0 to 6"):
        open_data(replace(config, fold="7"), True)


@pytest.mark.parametrize("name", TRAINER)
def test_the_flag_acts_on_the_trainer(flags, tmp_path, alone, name):
    given, look = TRAINER[name]
    with_it = look(trainer_of(config_of(flags, *given.split()), alone, tmp_path))
    assert with_it != look(trainer_of(config_of(flags), alone, tmp_path))


def test_clipping_bounds_what_the_optimiser_sees(flags, tmp_path, alone):
    from seqpar.data.sampling.loader import Loader

    norms = []
    for clip in ("0", "0.001"):
        trainer = trainer_of(config_of(flags, "--clip", clip), alone, tmp_path)
        net = trainer.net
        trainer.optimizer.step = lambda: norms.append(
            math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters()))
        )
        tiles = trainer.data.tiles
        with Loader(tiles, net.encoder.layout, alone, batch=2, steps=range(1), workers=0) as loader:
            row, _ = trainer._step([next(loader)], _Calm())
        assert row["grad_norm"] > 0.01
    assert norms[0] > 0.01 and norms[1] == pytest.approx(0.001, rel=1e-2)


class _Calm:
    def should_leave(self) -> bool:
        return False


def test_validation_comes_as_often_as_told(flags, tmp_path, alone, monkeypatch):
    steps = []
    trainer = trainer_of(config_of(flags, *["--val-every", "2", "--epochs", "5"]), alone, tmp_path)
    trainer.journal = training.Journal(tmp_path, False, 0)
    monkeypatch.setattr(trainer.validation, "run", lambda *of, **more: steps.append(trainer.progress.step))
    for step in range(1, 11):
        trainer.progress.step = step
        if step % 2 == 0:
            trainer._end_epoch(_Calm())
    assert steps == [4, 8, 10]


@pytest.mark.parametrize("origin", ["seqpar", "MONAI"])
def test_weights_are_taken(flags, tmp_path, origin):
    from seqpar import export_monai, write_weights
    from seqpar.launch.weights.pretrained import start_from

    more = ["--decoder", "unetr", "--patch", "16", "--depth", "12"] if origin == "MONAI" else []
    more += ["--tile", "32"] if origin == "MONAI" else []
    source = build(config_of(flags, *more, "--seed", "9"), 1, 2, Group("seq"))
    file = tmp_path / "weights"
    if origin == "seqpar":
        write_weights(file, source)
    else:
        torch.save({"state_dict": export_monai(source)}, file)
    config = config_of(flags, *more, "--weights", str(file))
    net = build(config, 1, 2, Group("seq"))
    told = start_from(net, config)
    assert f"({origin})" in told
    for name, tensor in source.encoder.state_dict().items():
        assert torch.equal(net.encoder.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match="do not fit the encoder.*--depth"):
        start_from(build(replace(config, embed_dim=24), 1, 2, Group("seq")), replace(config, embed_dim=24))


def test_the_device_is_the_told_one():
    assert pick_device(Launcher("alone"), "cpu").type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="use --device cpu"):
            pick_device(Launcher("alone"), "cuda")


def test_tensorboard_gets_the_journals_numbers(flags, tmp_path, monkeypatch, capsys):
    import sys
    import types

    seen = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            seen.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            seen.append((name, value, step))

        def close(self) -> None:
            seen.append("closed")

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    journal = training.Journal(tmp_path, True, 3, tensorboard=True)
    journal.record("train", 3, epoch=1, loss=0.5)
    journal.record("val", 4, dice={"WT": 0.8, "ET": None})
    journal.close()
    assert seen == [(str(tmp_path / "tensorboard"), 3), ("train/loss", 0.5, 3), ("val/dice/WT", 0.8, 4), "closed"]
    monkeypatch.setattr(Writer, "add_scalar", lambda *of: (_ for _ in ()).throw(OSError(28, "No space left")))
    monkeypatch.setattr(Writer, "close", lambda self: self.add_scalar())
    full = training.Journal(tmp_path, True, 3, tensorboard=True)
    full.record("train", 3, loss=0.5)
    full.close()
    assert "cannot be written (No space left); training goes on" in capsys.readouterr().out
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'seqpar\[tensorboard\]'"):
        refuse(config_of(flags, "--tensorboard"))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_run_and_survives_json(preset):
    config = choose_batch(parse(["--preset", preset], "debug")[1])
    refuse(config)
    assert Config.from_dict(json.loads(config.to_json())) == config
    refuse(choose_batch(replace(config, seqpar=4, batch=0, patch=4)))


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
    "--seqpar 64": "--seqpar 8 or fewer",
    "--seqpar 3 --split ordered --mode nogather": "needs boxes",
    "--seqpar 4 --mode swap": "use --batch 4",
    "--positions rope --heads 3": "fewer --heads",
    "--mode best": "choose one of",
    "--decoder best": "choose one of",
    "--epochs 0": "at least 1",
    "--warmup 3": "use --warmup 2",
    "--lr 0": "above 0",
    "--lr nan": "above 0",
    "--clip nan": "must not be negative",
    "--drop-path 1": r"\[0, 1\)",
    "--betas 0.9": "two numbers",
    "--fold first": "choose a fold.s number",
    "--synthesis 2": r"\[0, 1\]; 0.5",
    "--spacing 1,1": "three sizes above 0",
    "--spacing best": "give source, median, or",
    "--time-limit soon": "give minutes",
    "--checkpoint-minutes 0": "above 0",
    "--weights nowhere": "no such file",
    "--skips paper": "would do nothing",
    "--measured x": "would do nothing",
    "--phantoms 9": "would do nothing",
    "--decoder primus --decoder-width 9": "would do nothing",
    "--grad-checkpoint some": "invalid choice",
    "--mlp-chunks 0": "at least 1",
    "--mlp-chunks 99": "choose 1 to 8",
    "--speed 9": "unrecognized arguments: --speed 9",
    "--epoch 9": "unrecognized arguments",
    "--depth two": "invalid int value",
}


@pytest.mark.parametrize("given", IMPOSSIBLE)
def test_what_cannot_work_is_refused_with_the_nearest_that_does(flags, given):
    with pytest.raises(ValueError, match=IMPOSSIBLE[given]):
        _, config, names = parse([*flags, *given.split()], "debug")
        refuse_idle(config, names - {"decoder_width"} if "primus" not in given else names)
        refuse(choose_batch(config))


def test_a_run_that_goes_on_keeps_its_network_and_takes_new_wishes(flags):
    saved = config_of(flags)
    _, now, given = parse(["--out", "x", "--resume", "--epochs", "9", "--workers", "3"], "laptop")
    found = continued(saved, now, given - {"resume"})
    assert (found.epochs, found.workers, found.depth, found.resume) == (9, 3, saved.depth, True)
    _, now, given = parse(["--out", "x", "--resume", "--depth", "7"], "laptop")
    with pytest.raises(ValueError, match="--depth cannot change .* --weights x/model.safetensors"):
        continued(saved, now, given)


def test_a_fine_tuned_run_goes_on_with_the_line_that_began_it_and_without_the_file(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.safetensors").touch()
    line = [*flags, "--weights", "w.safetensors"]
    saved = config_of(line)
    refuse(saved)
    monkeypatch.chdir("/")
    (tmp_path / "w.safetensors").unlink()
    for weights, fits in (("w.safetensors", False), (str(tmp_path / "w.safetensors"), True)):
        _, now, given = parse([*flags, "--weights", weights, "--resume"], "debug")
        if fits:
            found = continued(saved, now, given - {"resume"})
            refuse_idle(found, given)
            refuse(found)
        else:
            with pytest.raises(ValueError, match="--weights /w.safetensors would do nothing: .* began from /"):
                continued(saved, now, given - {"resume"})
    with pytest.raises(ValueError, match="began without: leave one of both out"):
        continued(config_of(flags), now, given - {"resume"})


def test_another_preset_is_refused_in_a_run_that_goes_on_and_its_flags_are_judged_by_the_run(tmp_path):
    def order(line: str):
        return request.read_request([*line.split(), "--out", str(tmp_path)], Launcher("alone"))

    began = order("--preset paper --depth 12 --batch 2")
    write_json(tmp_path / "config.json", describe_run(began.config, began.preset, {}, {"data": 1}))
    assert order("--preset paper --depth 12 --resume").config.depth == 12
    with pytest.raises(ValueError, match="--preset debug: the run in .* goes on as it began, paper"):
        order("--preset debug --resume")
    with pytest.raises(ValueError, match="--skips would do nothing: --decoder plain"):
        order("--skips monai --resume")  # the default preset here has another decoder


@pytest.mark.parametrize(("groups", "expected"), [(1, (2, 4)), (2, (2, 2)), (4, (2, 1)), (8, (1, 1))])
def test_the_global_batch_is_kept_on_other_ranks(groups, expected):
    found = keep_global_batch(replace(PRESETS["debug"](), batch=2, accumulate=1), 8, groups)
    assert (found.batch, found.accumulate) == expected


WISHES = {"--batch 1": (1, 8), "--batch 8": (8, 1), "--accumulate 4": (2, 4), "--batch 0": (2, 4)}


@pytest.mark.parametrize("wish", WISHES)
def test_a_run_goes_on_with_another_batch_or_accumulation_that_makes_its_tiles_a_step(tmp_path, wish):
    config = replace(PRESETS["debug"](), batch=2, out=str(tmp_path))
    write_json(tmp_path / "config.json", describe_run(config, "debug", {}, {"data": 4}))
    order = request.read_request(["--resume", "--out", str(tmp_path), *wish.split()], Launcher("alone"))
    assert (order.config.batch, order.config.accumulate) == WISHES[wish]
    line = first_lines(order, Launcher("alone"))
    assert f"{WISHES[wish][0]} tile" in line and (f"{WISHES[wish][1]} times a step" in line) == (WISHES[wish][1] > 1)


def test_one_that_does_not_is_refused_with_those_that_do():
    config = replace(PRESETS["debug"](), batch=2)
    with pytest.raises(ValueError, match=r"--batch 3: the run has 4 .*: use --batch 1 --accumulate 4, --batch 2 --acc"):
        keep_global_batch(config, 8, 2, {"batch": 3})
    with pytest.raises(ValueError, match="--batch 2 --accumulate 4: the run has 4 tiles"):
        keep_global_batch(config, 8, 2, {"batch": 2, "accumulate": 4})
    with pytest.raises(ValueError, match="keep --accumulate 1"):
        keep_global_batch(replace(config, batch_dice=True), 4, 2, {"batch": 1, "accumulate": 2})


def test_a_global_batch_that_cannot_be_kept_is_refused():
    with pytest.raises(ValueError, match="so many groups: 1, 2, 4"):
        keep_global_batch(PRESETS["debug"](), 4, 3)
    with pytest.raises(ValueError, match="--batch-dice"):
        keep_global_batch(replace(PRESETS["debug"](), batch=2, batch_dice=True), 4, 1)


def test_help_is_read_in_a_minute(capsys):
    with pytest.raises(SystemExit) as left:
        parse(["--help"], "laptop")
    said = capsys.readouterr().out
    assert left.value.code == 0
    assert len(said.splitlines()) < 130 and max(map(len, said.splitlines())) <= 110
    assert "--seqpar N" in said and "(laptop)" in said and "75 left early and resumable" in said


def test_time_limits_and_slurms_durations():
    from seqpar.launch.job.stop_request import slurm_duration

    assert [seconds(text) for text in ("", "110", "1:50:00", "2-00:00:01")] == [math.inf, 6600, 6600, 172801]
    assert [slurm_duration(text) for text in ("1-02:03:04", "5:06", "UNLIMITED", "")] == [93784, 306, None, None]


def test_slurms_end_time_is_seen(monkeypatch):
    import signal
    import time

    monkeypatch.setattr(signal, "signal", lambda *of: None)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 30))
    assert Stopper(math.inf).own_reason() == "time limit", "30 s are less than the margin"
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))
    assert not Stopper(math.inf).own_reason()


def test_a_local_launcher_passes_on_the_code_that_says_most(tmp_path):
    from seqpar.launch.job.local_ranks import _wait

    def codes(*texts: str) -> int:
        return _wait([subprocess.Popen(["/bin/sh", "-c", text]) for text in texts], grace_s=0.3)

    assert codes("exit 0", "exit 0") == 0
    assert codes("exit 1", "exit 4") == 4
    assert codes("exit 75", "exit 75") == 75
    assert codes("kill -9 $$", "exec sleep 60") == 137


def test_advice_on_memory_changes_no_result_where_something_else_helps():
    from seqpar.launch.training.failure import save_memory

    config = replace(PRESETS["debug"](), batch=4, accumulate=2)
    assert save_memory(config) == "use --batch 2 --accumulate 4"
    pooled = replace(config, batch_dice=True)
    assert save_memory(pooled) == "use --grad-checkpoint full, or a larger --seqpar"
    assert save_memory(replace(pooled, grad_checkpoint="full")).startswith("use --shard-weights, a larger --seqpar")


def test_ranks_wait_for_the_phantom_that_the_first_one_makes(tmp_path, monkeypatch):
    """In a fresh cache the others ask before anything is there."""
    from seqpar.data.phantom import builtin

    def make(out, cases, settings, workers, progress):
        time.sleep(1)
        (out / "made").touch()
        progress(cases, cases)

    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin, "write_phantom", make)
    config = config_of([])
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        folder = builtin.phantom(config.phantoms, False)
        os._exit(0 if (folder / "made").exists() else 1)
    time.sleep(0.5)
    builtin.phantom(config.phantoms, True)
    _, code = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(code) == 0
