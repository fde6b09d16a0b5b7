"""The command line of a run, generated from Config; flags without effect are refused."""

import argparse
import dataclasses
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, get_type_hints

import torch

from seqpar.data.sampling.augmentation import recipe_of
from seqpar.losses import has_class_terms
from seqpar.optimization.optimizers import OPTIMIZERS
from seqpar.settings.classify_settings import preset_for_task, refuse_idle_for_classes
from seqpar.settings.config import AUTO, Config
from seqpar.settings.curriculum import lessons_of, parse_curriculum
from seqpar.settings.network_settings import with_decoder_of_stages
from seqpar.settings.parser import Parser
from seqpar.settings.presets import PRESETS, start_of_auto
from seqpar.settings.pretraining_settings import idle_in_pretraining
from seqpar.text import flag_name, quantity

# How ranks share a tile.
_OF_GROUPS = ("split", "mode", "attention", "keep_kv", "heads_per_chunk")
_ACCUMULATE = ("--accumulate", "--micro-batches")


def parse(
    arguments: Sequence[str],
    default_preset: str,
    networks: Collection[str] = (),
    others: Sequence[str] = (),
    on_gpu: bool | None = None,
) -> tuple[str, Config, set[str]]:
    """Returns the preset's name, the config, and the names of the settings that the command line has.

    - ``networks``: the names of the networks that there are, to list them and to refuse others; () where any will do
    - ``others``: flags of the same command that are no settings
    - ``on_gpu``: whether the run is for a GPU; None: for one where there is one, unless --device says otherwise
    """
    _refuse_two_names(arguments)
    parser = _parser(default_preset, networks)
    parser.others = others
    parsed = vars(parser.parse_args(list(arguments)))
    preset = parsed.pop("preset", None) or default_preset
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in parsed.items()
    }
    on_gpu = wants_gpu(arguments) if on_gpu is None else on_gpu
    start = PRESETS[start_of_auto(on_gpu) if preset == "auto" else preset]()
    start = preset_for_task(start, values.get("task", start.task), preset)
    if len({values.get("optimizer", start.optimizer), start.optimizer} | {"adam", "adamw"}) > 2:
        values.setdefault("betas", ())  # a preset's are its optimizer's
    if entries := parse_curriculum(values.get("curriculum", "")):
        values.setdefault("epochs", sum(entry.epochs for entry in entries))
    values = with_decoder_of_stages(values, start.decoder)
    for name in ("tile", "patch"):
        if len(values.get(name, ())) == 1:
            values[name] *= 3
    if values.get("weights"):
        values["weights"] = os.path.abspath(values["weights"])  # the run may be resumed from another folder
    return preset, replace(start, **values), set(parsed)


def _refuse_two_names(arguments: Sequence[str]) -> None:
    """Refuses a setting by both of its names, of which the first would do nothing."""
    typed = {argument.partition("=")[0] for argument in arguments}
    if typed.issuperset(_ACCUMULATE):
        raise ValueError(f"{' and '.join(_ACCUMULATE)} are two names of one setting: leave one of both out")


def wants_gpu(arguments: Sequence[str]) -> bool:
    """Returns whether a command line trains on a GPU: there is one, and it does not say otherwise."""
    early = Parser("train", add_help=False)
    early.add_argument("--device", default="auto")
    return early.parse_known_args(list(arguments))[0].device != "cpu" and torch.cuda.is_available()


def default_preset(arguments: Sequence[str], on_gpu: bool) -> str:
    """Returns the preset of a command line that names none."""
    early = Parser("train", add_help=False)
    early.add_argument("--task", default="segment")
    pretrains = early.parse_known_args(list(arguments))[0].task == "pretrain"
    return {False: ("laptop", "paper"), True: ("mae-laptop", "mae")}[pretrains][on_gpu]


def _parser(default_preset: str, networks: Collection[str]) -> Parser:
    parser = Parser(
        "train",
        usage="%(prog)s [--data FOLDER] [--out FOLDER] [any flag below]",
        description="Trains a sequence-parallel network; without --data on built-in phantom brains.",
        epilog="Defaults here are in brackets. Exit codes: 0 finished, 75 left early and resumable; "
        "2 usage, 3 data, 4 memory, 5 a loss that is not finite, 6 run folder in use: status.json says why.",
    )
    listed = ", ".join(PRESETS)
    preset_help = f"named settings to start from: {listed} ({default_preset})"
    parser.add_argument("--preset", choices=list(PRESETS), metavar="NAME", help=preset_help)
    topics: dict[str, argparse._ArgumentGroup] = {}
    hints, shown = get_type_hints(Config), PRESETS[default_preset]()
    for f in dataclasses.fields(Config):
        topic = f.metadata["topic"]
        if topic not in topics:
            topics[topic] = parser.add_argument_group(topic)
        choices = tuple(networks) if f.name == "network" else f.metadata["choices"]
        options = _argument(f, hints[f.name], getattr(shown, f.name), choices)
        names = _ACCUMULATE if f.name == "accumulate" else [f"--{flag_name(f.name)}"]
        topics[topic].add_argument(*names, dest=f.name, default=argparse.SUPPRESS, **options)
    return parser


def _argument(f: dataclasses.Field, kind: Any, default: Any, choices: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of ``add_argument`` for a setting; ``kind``: its type; ``choices``: its values, if few."""
    text = f.metadata["help"].replace("%", "%%")
    if choices and f.metadata["metavar"]:  # too many to stand beside the flag
        text = f"{text}: {', '.join(choices)}"
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction, "help": f"{text} ({'yes' if default else 'no'})"}
    if default not in ("", ()):
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        text = f"{text} ({shown})"
    options: dict[str, Any] = {"help": text}
    if kind in (tuple[int, ...], tuple[float, ...]):
        options |= {"nargs": "+", "type": int if kind == tuple[int, ...] else float}
    else:
        options["type"] = {"seqpar": ranks_or_auto, "pipe": _ranks}.get(f.name, kind)
    if choices:
        options["choices"] = choices
    return options | {"metavar": f.metadata["metavar"] or None}


def ranks_or_auto(text: str) -> int:
    """Returns a number of ranks, AUTO for "auto"."""
    return AUTO if text == "auto" else _ranks(text, ", or auto")


def _ranks(text: str, or_else: str = "") -> int:
    """Returns a number of ranks: others are divided by it before a config is checked."""
    number = int(text) if re.fullmatch(r"[+-]?\d+", text) else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a number of ranks, at least 1{or_else}")
    return number


def shortened_warmup(config: Config, names: set[str]) -> tuple[Config, str]:
    """Returns the config with a warm-up that leaves an epoch, and a line that says so; "" where it did already.

    ``names``: the settings on the command line; a warm-up among them is not changed.
    """
    if "warmup" in names or config.warmup < max(config.epochs, 1):
        return config, ""
    epochs = max(config.epochs, 1) - 1
    line = f"--warmup: {epochs} of the preset's {quantity(config.warmup, 'epoch')}, as the run has {config.epochs}"
    return replace(config, warmup=epochs), line


def refuse_settings_without_effect(config: Config, names: set[str]) -> None:
    """Refuses settings on the command line (``names``) without effect on the run of ``config``."""
    kind = OPTIMIZERS[config.optimizer]
    takes = {0: "none: leave it out", 1: "one number, its momentum: give it alone"}.get(
        len(kind.betas), f"{len(kind.betas)} numbers, such as {' '.join(f'{beta:g}' for beta in kind.betas)}"
    )
    has_classes = has_class_terms(config.loss)
    terms, calls = config.loss_terms, f"--loss {config.loss} has no"
    is_open = config.seqpar == AUTO or not config.batch or (config.seqpar > 1 and config.attention == "auto")
    lessons = "the lessons of --curriculum have their own: leave it out"
    for name, acts, why in (
        ("tile", not config.curriculum, lessons),
        ("epochs", not config.curriculum, lessons),
        ("batch", not config.curriculum, lessons),
        ("accumulate", not any(entry.micros for entry in parse_curriculum(config.curriculum)), lessons),
        (
            "foreground",
            lessons_of(config)[-1].foreground == config.foreground,
            "a whole volume has one place: leave it out",
        ),
        ("phantoms", not config.data, "--data is there: leave one of both out"),
        ("skips", config.decoder == "unetr", f"--decoder {config.decoder} takes no skips: leave it out"),
        ("decoder_width", config.decoder != "primus", "--decoder primus finds its width itself: leave it out"),
        ("interpolation", _deforms(config.augment), f"--augment {config.augment} deforms nothing: leave it out"),
        ("force", bool(config.crop_to), "there is no --crop-to: leave it out"),
        ("synthesis_per", config.synthesis > 0, "--synthesis is 0: leave it out, or set that"),
        ("betas", len(config.betas) <= len(kind.betas), f"--optimizer {config.optimizer} takes {takes}"),
        ("decay_all", bool(config.weight_decay), "there is no --weight-decay: leave it out"),
        ("foreground_by", bool(config.foreground), "--foreground 0 centres no tile: leave it out"),
        ("amsgrad", kind.has_amsgrad or not config.amsgrad, "only adam and adamw have it: leave it out"),
        ("decay_epochs", config.schedule == "step", f"--schedule {config.schedule} has no steps: leave it out"),
        ("decay_factor", config.schedule == "step", f"--schedule {config.schedule} has no steps: leave it out"),
        ("loss_weights", len(terms) > 1, f"--loss {config.loss} has one term: leave it out"),
        ("dice", "dice" in terms, f"{calls} Dice: leave it out"),
        ("dice_smooth", "dice" in terms, f"{calls} Dice: leave it out"),
        ("cycle_epochs", config.schedule == "cyclic", f"--schedule {config.schedule} has no cycles: leave it out"),
        ("dice_background", has_classes, f"{calls} term per class: leave it out"),
        ("batch_dice", has_classes or not config.batch_dice, f"{calls} term per class: leave it out"),
        ("focal_gamma", "focal" in terms, f"{calls} focal term: leave it out"),
        ("take_over", bool(config.out), "nobody holds a new folder: leave it out, or name the folder with --out"),
        ("pipe_schedule", config.pipe > 1, "--pipe is 1: leave it out"),
        ("placement", config.pipe > 1, "--pipe is 1: leave it out"),
        ("objective", config.placement == "gabra", f"--placement {config.placement} has one objective: leave it out"),
        ("token_order", bool(config.weights), "there are no --weights: leave it out"),
        ("attention", not config.window, f"--window {config.window} fetches from neighbours: leave it out"),
        ("heads_per_chunk", not config.window, f"--window {config.window} takes all heads at once: leave it out"),
        ("measured", is_open, "size, batch and attention are given, so that nothing is chosen by it: leave it out"),
    ):
        if name in names and not acts:
            raise ValueError(f"--{flag_name(name)} would do nothing: {why}")
    refuse_idle_for_classes(config, names)
    for name in idle_in_pretraining(config.task, names):
        raise ValueError(f"--{flag_name(name)} would do nothing with --task {config.task}: leave it out")


def _deforms(augment: str) -> bool:
    """Returns whether the augmentation of that name interpolates; True for one that there is not, refused by name."""
    try:
        return recipe_of(augment).deforms
    except ValueError:
        return True


def idle_in_groups_of_one(config: Config, names: set[str]) -> str:
    """Returns a line on settings of the command line (``names``) that do nothing where no ranks share a tile.

    They are not refused, since a sweep over ``--seqpar`` begins there; "" where there is none.
    """
    idle = [f"--{flag_name(name)}" for name in _OF_GROUPS if name in names]
    return f"{', '.join(idle)}: no effect with --seqpar 1" if idle and config.seqpar == 1 else ""


def idle_on_a_cpu(config: Config, names: Collection[str], on_gpu: bool) -> str:
    """Returns a line on settings of the command line (``names``) that do nothing without a GPU; "" where none does."""
    idle = ["--precision tf32"] * (config.precision == "tf32") + ["--deterministic"] * config.deterministic
    typed = [text for text in idle if text.split()[0].removeprefix("--") in names]
    return f"{', '.join(typed)}: no effect without a GPU" if typed and not on_gpu else ""


def idle_with_data(names: Collection[str], declares_regions: bool, learns_regions: bool) -> str:
    """Returns a line on settings of the command line (``names``) that do nothing with the data; "" for none."""
    whys = {
        "targets": "" if declares_regions else "the data declare no regions",
        "dice_background": "the outputs are regions, of which none is background" if learns_regions else "",
    }
    return "; ".join(f"--{flag_name(name)}: no effect, as {why}" for name, why in whys.items() if why and name in names)
