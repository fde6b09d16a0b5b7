"""Every flag acts: what changes when it is given."""

import dataclasses
import tempfile
from pathlib import Path

import pytest
import torch

from seqpar.models.build import build_loss
from seqpar.optimization.optimizers import make_optimizer
from seqpar.optimization.schedules import learning_rate
from seqpar.planner.batch_size import hold_global_batch, keep_global_batch
from seqpar.settings.config import Config
from seqpar.settings.data_settings import prepare_settings
from seqpar.tasks.segment.data import open_data
from seqpar.text import parse_duration
from tests.support.configs import NoStop, config_of, net_of, trainer_of
from tests.support.folders import nnunet

ROOT = Path(__file__).parents[2]


def rates(config: Config) -> list[float]:
    return [learning_rate(config.schedule_options, step) for step in range(config.steps)]


def group_of(config: Config) -> dict:
    return make_optimizer(net_of(config), config.optimizer_options).param_groups[0]


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
    from seqpar.tasks.segment import validation

    seen = []

    def stop(nets, image, sliding, *more):
        seen.append(sliding)
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(validation, "sliding_window", stop)
        with pytest.raises(InterruptedError):
            trainer.validation.run(trainer.net, trainer.journal, NoStop())
    return seen


def pictures_of(trainer) -> list:
    from seqpar.tasks.segment import validation

    seen = []
    trainer.validation.ids = trainer.validation.ids[:1]
    trainer.journal.active = True
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(validation, "draw_cases", lambda *of: seen.append(of[-1]))
        trainer.validation.run(trainer.net, trainer.journal, NoStop())
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
    "train_cases": ("--train-cases 2", lambda c: open_data(c, True).train_ids),
    "join_labels": ("--join-labels all=1 --cache {other}", lambda c: open_data(c, True).dataset.labels),
    "crop_to": ("--crop-to 9 9 8 --cache {other}", lambda c: shapes_of(open_data(c, True))),
    "force": ("--crop-to 4 9 8 --force", lambda c: prepare_settings(c).cut_labels),
    "normalise": ("--normalise volume --cache {other}", lambda c: open_data(c, True).dataset.recipe.schemes),
    "phantoms": ("--phantoms 9", phantom_cases),
    "augment": ("--augment full", lambda c: tile_of(c).tolist()),
    "interpolation": ("--augment full --interpolation cubic", lambda c: open_data(c, True).tiles.augmentation.order),
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
    "network": ("--network nnunet-plain", shapes),
    "features": ("--network nnunet-plain --features 4", shapes),
    "norm": ("--network nnunet-plain --norm group", lambda c: {type(m) for m in net_of(c).modules()}),
    "stages": ("--network nnunet-plain --stages 133:111,333:222", lambda c: net_of(c).layout.patch),
    "deep_supervision": ("--network nnunet-plain --tile 32 --deep-supervision", lambda c: len(net_of(c).unet.outputs)),
    "decoder": ("--decoder unetr", lambda c: type(net_of(c).decoder)),
    "encoder": ("--encoder hierarchical", lambda c: len(net_of(c).encoder.merges)),
    "stage_depths": ("--encoder hierarchical --stage-depths 1 2", lambda c: len(net_of(c).encoder.blocks)),
    "window": ("--window 2", lambda c: net_of(c).encoder.window),
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
    "global_batch": ("--global-batch 8", lambda c: c.global_batch and hold_global_batch(c, 2).accumulate),
    "epochs": ("--epochs 4", lambda c: c.steps),
    "iterations": ("--iterations 3", lambda c: c.steps),
    "lr": ("--lr 0.02", rates),
    "optimizer": ("--optimizer sgd", lambda c: type(make_optimizer(net_of(c), c.optimizer_options))),
    "weight_decay": ("--weight-decay 0.1", lambda c: group_of(c)["weight_decay"]),
    "decay_all": ("--weight-decay 0.1 --decay-all", lambda c: len(group_of(c)["params"])),
    "betas": ("--betas 0.8 0.9", lambda c: group_of(c)["betas"]),
    "amsgrad": ("--amsgrad", lambda c: group_of(c)["amsgrad"]),
    "mask_ratio": ("--task pretrain --mask-ratio 0.5", lambda c: net_of(c).ratio),
    "rebuild_blocks": ("--task pretrain --rebuild-blocks 1", lambda c: len(net_of(c).rebuilder.vit.blocks)),
    "rebuild_width": ("--task pretrain --rebuild-width 24", shapes),
    "normalised_targets": ("--task pretrain --normalised-targets", lambda c: build_loss(c).normalised),
    "layer_decay": ("--layer-decay 0.75", lambda c: len(make_optimizer(net_of(c), c.optimizer_options).param_groups)),
    "schedule": ("--schedule constant", rates),
    "cycle_epochs": ("--schedule cyclic --cycle-epochs 2", rates),
    "warmup": ("--warmup 1", rates),
    "time_limit": ("--time-limit 1:00:00", lambda c: parse_duration(c.time_limit)),
    "seed": ("--seed 5", lambda c: tile_of(c).tolist()),
}
# Seen in the trainer that a config makes.
TRAINER = {
    "precision": ("--precision fp64", lambda t: next(t.net.parameters()).dtype),
    "loss": ("--loss focal", lambda t: list(t.loss.weights)),
    "loss_weights": ("--loss-weights 0.9 0.1", lambda t: t.loss.weights),
    "class_weights": ("--class-weights 1 2", lambda t: t.loss.class_weights),
    "focal_gamma": ("--loss focal --focal-gamma 3", lambda t: getattr(t.loss.terms[0], "gamma", 2.0)),
    "dice": ("--dice squared", lambda t: t.loss.terms[0].squared),
    "dice_smooth": ("--dice-smooth 0.1", lambda t: t.loss.terms[0].smooth),
    "dice_background": ("--dice-background", lambda t: t.loss.terms[0].background),
    "batch_dice": ("--batch-dice", lambda t: t.loss.terms[0].batch),
    "foreground_shift": ("--no-foreground-shift", lambda t: t._loader().source.shifted),
    "foreground_by": ("--foreground-by count", lambda t: t._loader().source.step_tiles),
    "val_cases": ("--fold all --val-cases 2", lambda t: len(t.validation.ids)),
    "val_window": ("--val-window both", lambda t: t.validation.windows),
    "val_mirror": ("--val-mirror WH", lambda t: windows_of(t)),
    "val_overlap": ("--val-overlap 0.5", lambda t: windows_of(t)),
    "neurological": ("--neurological", pictures_of),
    "grad_checkpoint": ("--grad-checkpoint full", lambda t: t.net.encoder.blocks[0].recompute),
    "mlp_chunks": ("--mlp-chunks 2", lambda t: t.net.encoder.blocks[0].mlp_chunks),
    "compile": ("--compile", lambda t: t.net.encoder.blocks[0].mlp._compiled_call_impl is None),
}
# Seen elsewhere: tests/test_training.py and the tests below.
ELSEWHERE = {
    "task": "test_a_run_ends_with_a_table_of_held_out_classes",
    "pooling": "test_a_class_token_is_a_token_more",
    "targets": "test_exclusive_labels_are_learned_by_a_softmax_and_tiles_are_drawn_anywhere",
    "synthesis_per": "test_the_volume_synthesis_of_a_run_is_the_one_that_the_flag_names",
    "curriculum": "test_lessons_are_one_run_in_one_folder",
    "decay_epochs": "test_step_decay_is_torchs", "decay_factor": "test_step_decay_is_torchs",
    "scale_lr": "test_the_rate_grows_with_the_ranks_and_an_epoch_keeps_its_tiles",
    "output_bias": "test_biases_of_the_outputs_are_torchs_own", "out": "test_what_people_watch",
    "prepare": "test_prepare_chooses_between_the_plans_way_and_our_own",
    "plans": "test_flags_win_over_plans_and_contradictions_are_refused",
    "workers": "test_workers_die_with_a_killed_trainer",
    "again": "test_make_train_again_continues_what_was_interrupted_and_else_takes_the_next_folder",
    "patience": "test_a_run_that_becomes_no_better_ends_as_finished",
    "clip": "test_clipping_bounds_what_the_optimizer_sees", "val_every": "test_validation_comes_as_often_as_told",
    "weights": "test_weights_are_taken",
    "token_order": "test_weights_of_either_order_of_tokens_give_the_output_that_they_were_trained_to_give",
    "stem": "test_training_starts_from_a_primus_with_a_stem_and_names_the_flag",
    "trainer_unknown": "test_weights_by_a_trainer_of_another_name_are_taken_with_a_line_or_refused",
    "resume": "test_a_run_that_had_to_leave_goes_on_to_the_same_bits",
    "checkpoint_minutes": "test_a_run_that_loses_a_rank_at_every_moment_in_turn_ends_with_the_same_bits",
    "shard_weights": "test_sharded_weights_become_what_replicated_ones_become",
    "measured": "test_attention_is_chosen_by_measured_links",
    "cuda_graph": "test_micro_batches_of_replays_have_the_gradients_of_the_network",
    "deterministic": "test_each_precision_is_one_arithmetic_of_products_and_convolutions",
    "device": "test_the_device_is_the_told_one", "dry_run": "test_a_dry_run_writes_nothing",
    "take_over": "test_on_a_shared_disk_take_over_is_needed_and_whoever_loses_the_folder_leaves_it_alone",
    "tensorboard": "test_tensorboard_gets_the_journals_numbers_and_pictures",
    "tracker": "test_a_tracker_gets_the_runs_numbers_and_pictures_and_goes_on_after_resume",
    "pipe": "test_a_run_over_two_places_has_all_bits_of_one_process",
    "pipe_schedule": "test_shapes_and_modes_have_the_losses_scores_and_weights_of_one_process",
    "placement": "test_placements_differ",
    "objective": "test_an_objective_is_what_gabra_looks_for",
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
    line, look = ACTS[name]
    if "{other}" in line:
        nnunet(tmp_path / "Dataset002_Other", cases=6)
        other = tmp_path / ("Dataset002_Other" if name == "data" else "cache")
        line = line.format(other=other, cache=tmp_path / "cache")
    more = line.split()
    own = [f"--{name.replace('_', '-')}", f"--no-{name.replace('_', '-')}"]
    at = next(i for i, text in enumerate(more) if text in own)
    rest = more[:at] if name != "split" else more[2:]
    if name in ("drop_path",):
        rest = more[2:]
    assert look(config_of(flags, *more)) != look(config_of(flags, *rest))


@pytest.mark.parametrize("name", TRAINER)
def test_the_flag_acts_on_the_trainer(flags, tmp_path, alone, name):
    line, look = TRAINER[name]
    with_it = look(trainer_of(config_of(flags, *line.split()), alone, tmp_path))
    assert with_it != look(trainer_of(config_of(flags), alone, tmp_path))
