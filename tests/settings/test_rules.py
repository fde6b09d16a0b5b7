"""The declarations of settings: for which tasks and networks they apply, when they act, what a preset sets."""

import itertools
from dataclasses import replace

import pytest

from seqpar.models.build import NETWORK_NAMES, family_of
from seqpar.parallel.mesh import Group
from seqpar.settings.command_line import naming_preset, parse
from seqpar.settings.config import SETTINGS, Config
from seqpar.settings.field import TASKS, Circumstances
from seqpar.settings.presets import PRESETS
from seqpar.settings.rules import (
    describe_settings_without_effect,
    refuse_settings_without_effect,
    setting_applies,
    why_without_effect,
)
from seqpar.sweeps.planned_run import PlannedRun, config_of

TOKENS = """
encoder patch embed_dim heads mlp_ratio mlp qkv_bias attention_norm positions dropout drop_path layer_scale layer_decay
attention keep_kv heads_per_chunk mlp_chunks compile
"""
NNUNET = "features norm stages deep_supervision plans"
# which of the settings that single networks have each network has
OF_NETWORKS = {
    ("segment", "vit", "plain"): f"{TOKENS} stem depth window decoder skips decoder_width output_bias",
    ("segment", "vit", "hierarchical"): f"{TOKENS} stage_depths window decoder decoder_width output_bias",
    ("segment", "nnunet-plain", "plain"): NNUNET,
    ("segment", "nnunet-resenc", "plain"): NNUNET,
    ("segment", "unet-hou", "plain"): "features norm dropout",
    ("segment", "se-unet-lamp", "plain"): "features norm",
    ("segment", "mednext-s", "plain"): "features norm deep_supervision",
    ("classify", "vit", "plain"): f"{TOKENS} depth pooling",
    ("classify", "resattnet18", "plain"): "features",
    ("pretrain", "vit", "plain"): f"{TOKENS} depth mask_ratio rebuild_blocks rebuild_width normalised_targets",
}
NOT_OF_CLASSES = """
targets foreground foreground_by
foreground_shift synthesis synthesis_per phantoms curriculum dice dice_background batch_dice
val_overlap val_window val_mirror prepare plans join_labels force dice_smooth
"""
NOT_OF_PRETRAINING = """
mode targets foreground foreground_by cuda_graph
foreground_shift synthesis synthesis_per plans loss loss_weights class_weights
focal_gamma dice dice_smooth dice_background batch_dice val_overlap val_window val_mirror prepare join_labels force
"""
NOT_OF = {"segment": "", "classify": NOT_OF_CLASSES, "pretrain": NOT_OF_PRETRAINING}


@pytest.mark.parametrize("case", OF_NETWORKS)
def test_each_network_has_its_settings_and_each_task_its_own(case):
    task, network, encoder = case
    config = Config(task=task, network=network, encoder=encoder)
    special = {name for names in OF_NETWORKS.values() for name in names.split()}
    for name in SETTINGS:
        has = name not in NOT_OF[task].split() and (name not in special or name in OF_NETWORKS[case].split())
        assert setting_applies(config, name) == has, name


def test_a_network_reads_those_of_its_settings_that_apply_and_no_others():
    """The declarations are made without looking at how networks are built, and agree with it."""
    read = set()

    class Watched(Config):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    own = [name for name, one in SETTINGS.items() if one.section == "network" and name != "network"]
    small = {"tile": (32, 32, 32), "embed_dim": 24, "heads": 2, "depth": 3, "features": 4, "patch": (8, 8, 8)}
    for (task, network, encoder), _ in OF_NETWORKS.items():
        if task == "pretrain":
            continue  # it makes a second config of the first, and so reads all
        config = Watched(task=task, network=network, encoder=encoder, **small)
        read.clear()
        family_of(config).build(config, 1, 2, Group("seq"), None, False)
        unread = {"plans", "encoder", "skips", "stages", "stage_depths", "depth", "layer_decay"}
        used = read & set(own)
        applies = {name for name in own if setting_applies(config, name)}
        depends = {"depth", "stage_depths", "skips", "encoder", "window"}  # read by what networks share
        assert used - depends <= applies, (network, used - applies)
        assert applies - unread <= used, (network, applies - used)


def test_what_does_nothing_is_refused_by_name_and_reason():
    for line, error in {
        "--stages 133:111,333:222": "--network vit with --encoder plain does not have it, only nnunet-plain and",
        "--network nnunet-plain --no-output-bias": "--network nnunet-plain does not have it, only vit: remove it",
        "--task classify --dice squared": "--dice would do nothing: --task classify does not use it: remove it",
        "--task pretrain --mode halo": "--mode would do nothing: --task pretrain does not use it",
        "--encoder hierarchical --depth 3": "--encoder hierarchical does not have it, only vit with --encoder plain",
        "--decay-epochs 2": "--decay-epochs would do nothing: --schedule cosine has no steps: remove it",
        "--network nnunet-plain --features 4 --stages 133:111:32:2:2,333:222:64:2": "--stages names the features",
    }.items():
        _, config, typed = parse(line.split(), "debug")
        with pytest.raises(ValueError, match=error):
            refuse_settings_without_effect(config, typed)


def test_what_does_nothing_here_alone_is_a_note():
    line = ["--split", "ordered", "--mode", "halo", "--precision", "tf32", "--deterministic"]
    _, config, typed = parse(line, "debug")
    here = Circumstances(seqpar=1, has_gpu=False)
    assert describe_settings_without_effect(config, typed, here) == (
        "--split ordered, --mode halo: no effect with --seqpar 1; "
        "--precision tf32, --deterministic: no effect without a GPU"
    )
    assert describe_settings_without_effect(config, typed, Circumstances(seqpar=2, has_gpu=True)) == ""
    _, config, typed = parse(["--targets", "labels", "--dice-background"], "debug")
    here = Circumstances(declares_regions=False, learns_regions=True)
    assert describe_settings_without_effect(config, typed, here) == (
        "--targets labels: no effect because the data declare no regions; "
        "--dice-background: no effect because the outputs are regions, without a background"
    )


def test_a_presets_value_gives_way_to_flags_that_contradict_it():
    stages = "133:111:4:1:1 333:222:8:1"
    settings = {"network": "nnunet-plain", "stages": stages, "tile": (16, 16, 16)}
    assert PRESETS["debug"]().features and config_of(PlannedRun("a", "debug", settings)).features == 0
    assert config_of(PlannedRun("a", "debug", {**settings, "stages": "133:111 333:222"})).features == 8, (
        "none are named"
    )
    with pytest.raises(ValueError, match="--features would do nothing: --stages names the features of each stage"):
        config_of(PlannedRun("a", "debug", {**settings, "features": 8}))
    weights = {"lamp": PRESETS["lamp"]().loss_weights, "focal": ()}
    assert weights["lamp"] and parse(["--loss", "ce"], "lamp")[1].loss_weights == ()
    assert parse(["--lr", "1"], "lamp")[1].loss_weights == weights["lamp"]
    assert parse(["--optimizer", "adamw"], "modern")[1].betas and not parse(["--optimizer", "sgd"], "modern")[1].betas


def test_an_error_says_which_of_the_settings_that_it_names_are_the_presets():
    with pytest.raises(ValueError, match=r"lessons of --curriculum .*\(--preset lamp sets --curriculum 64:300:16,128"):
        config_of(PlannedRun("a", "lamp", {"tile": (64, 64, 64)}))
    with pytest.raises(ValueError, match="remove it$"), naming_preset("debug", {"skips"}):
        raise ValueError("--skips would do nothing: remove it")


ONE_FLAG = {
    "loss": "ce", "optimizer": "sgd", "schedule": "constant", "decoder": "primus", "positions": "rope",
    "network": "unet-lamp", "augment": "none", "foreground": 0.0, "synthesis": 0.5, "epochs": 1, "batch": 3,
    "targets": "labels", "mode": "gather", "weight_decay": 0.0, "heads": 1, "encoder": "hierarchical",
    "stages": "133:111:4:1:1 333:222:8:1", "window": 2, "seqpar": 2, "seed": 3, "crop_to": (9, 9, 9),
    "curriculum": "32:1:2,64:1:2",
}  # fmt: skip


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"auto"}))
def test_nobody_is_told_to_remove_what_a_preset_sets(preset):
    """With any one flag, an error either names that flag, or says which of those that it names are the preset's."""
    start, usual = PRESETS[preset](), Config()
    for name, value in ONE_FLAG.items():
        _, config, typed = parse(PlannedRun("a", preset, {name: value}).flags, preset)
        try:
            with naming_preset(preset, typed):
                refuse_settings_without_effect(config, typed)
        except ValueError as error:
            assert str(error).startswith(f"--{name.replace('_', '-')} would do nothing"), error
        for other in SETTINGS:
            own = SETTINGS[other]
            if own.gives_way and other not in typed and getattr(config, other) != getattr(usual, other):
                assert why_without_effect(config, other) == "" or not setting_applies(config, other), (name, other)
        assert start == PRESETS[preset]()


def test_every_declaration_is_complete():
    sections = [own.section for own in SETTINGS.values()]
    assert [key for key, _ in itertools.groupby(sections)] == list(dict.fromkeys(sections)), "a section stands together"
    config = replace(Config(), curriculum="8:2,whole:3")
    for name, own in SETTINGS.items():
        assert set(own.tasks) <= set(TASKS) and own.tasks and own.help and bool(own.acts_when) == bool(own.why), name
        assert not isinstance(own.why, str) or own.why.format_map(vars(config)) or not own.why
    assert 22 <= sum(own.common for own in SETTINGS.values()) <= 29
    assert all(family_of(Config(task=t, network=n)) for t, n, _ in OF_NETWORKS) and NETWORK_NAMES
