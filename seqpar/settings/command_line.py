"""The command line of a run, generated from the declarations of its settings."""

import argparse
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_type_hints

import torch

from seqpar.data.addresses import absolute
from seqpar.settings.checks import check_values, settings_in
from seqpar.settings.config import SETTINGS, Config
from seqpar.settings.curriculum import parse_curriculum
from seqpar.settings.field import Declaration
from seqpar.settings.network_settings import with_decoder_of_stages
from seqpar.settings.parallel_settings import AUTO
from seqpar.settings.parser import HelpInTwoSizes, Parser
from seqpar.settings.presets import PRESETS, preset_for_task, start_of_auto
from seqpar.settings.rules import as_typed
from seqpar.text import flag_name, quantity

_ACCUMULATE = ("--accumulate", "--micro-batches")


MOST_RANKS = 100_000


def parse(
    arguments: Sequence[str],
    default_preset: str,
    networks: Collection[str] = (),
    others: Sequence[str] = (),
    on_gpu: bool | None = None,
) -> tuple[str, Config, set[str]]:
    """Returns the preset's name, the config, and the names of the settings that the command line has.

    - ``networks``: the names of all networks, to list them and to refuse others; () to take any
    - ``others``: flags of the same command that are no settings
    - ``on_gpu``: whether the run is for a GPU; None: for one if there is one, unless --device says otherwise
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
    if lessons := parse_curriculum(values.get("curriculum", "")):
        values.setdefault("epochs", sum(lesson.epochs for lesson in lessons))
    values = with_decoder_of_stages(values, start.decoder)
    for name in ("tile", "patch"):
        if len(values.get(name, ())) == 1:
            values[name] *= 3
    if values.get("weights"):
        values["weights"] = absolute(values["weights"])  # the run may be resumed from another folder
    config = _drop_contradicted(start, values)
    check_values(config, networks, values.keys() - {"seqpar"})  # before anything counts with them
    return preset, config, set(parsed)


def _drop_contradicted(start: Config, values: dict[str, Any]) -> Config:
    """Returns a preset's settings with those of the command line; values of the preset that contradict them go."""
    config, usual = replace(start, **values), Config()
    dropped = [n for n, own in SETTINGS.items() if n not in values and own.gives_way and own.gives_way(start, config)]
    return replace(config, **{name: getattr(usual, name) for name in dropped})


@contextmanager
def naming_preset(preset: str, typed: Collection[str]) -> Iterator[None]:
    """Adds to a ValueError which of the settings that it names are the preset's, and not on the command line."""
    try:
        yield
    except ValueError as error:
        start, usual = PRESETS[preset](), Config()
        own = [name for name in settings_in(str(error)) if name not in typed]
        values = {name: getattr(start, name) for name in own if getattr(start, name) != getattr(usual, name)}
        if values:
            shown = ", ".join(map(as_typed, values, values.values()))
            error.args = (f"{error} (--preset {preset} sets {shown})",)
        raise


def _refuse_two_names(arguments: Sequence[str]) -> None:
    """Refuses a setting by both of its names: the second would override the first."""
    typed = {argument.partition("=")[0] for argument in arguments}
    if typed.issuperset(_ACCUMULATE):
        raise ValueError(f"{' and '.join(_ACCUMULATE)} are two names of one setting: remove one")


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


def _parser(default_preset: str, networks: Collection[str], everything: bool = False) -> Parser:
    """Returns the parser of all settings; its help shows ``everything``, or the flags that most people need."""
    also = "" if everything else " --help all lists every flag, such as those of optimizers and losses."
    parser = Parser(
        "train",
        usage="%(prog)s [--data FOLDER] [--out FOLDER] [any flag below]",
        description="Trains a sequence-parallel network; without --data on built-in phantom brains.",
        epilog=f"Defaults are in brackets.{also} Exit codes: 0 finished, 75 left early and resumable; "
        "2 usage, 3 data, 4 memory, 5 a loss that is not finite, 6 run folder in use: status.json says why.",
        add_help=False,
    )
    parser.lists_all = "--help all"
    full = None if everything else lambda: _parser(default_preset, networks, everything=True)
    parser.add_argument("-h", "--help", action=HelpInTwoSizes, full=full, help="show these; all: every flag")
    listed = ", ".join(PRESETS)
    preset_help = f"named settings to start from: {listed} ({default_preset})"
    parser.add_argument("--preset", choices=list(PRESETS), metavar="NAME", help=preset_help)
    sections: dict[str, argparse._ArgumentGroup] = {}
    hints, shown = get_type_hints(Config), PRESETS[default_preset]()
    for name, own in SETTINGS.items():
        if own.section not in sections:
            sections[own.section] = parser.add_argument_group(own.section)
        choices = tuple(networks) if name == "network" else own.choices
        options = _argument(name, own, hints[name], getattr(shown, name), choices)
        if not everything and not own.common:
            options["help"] = argparse.SUPPRESS
        flags = _ACCUMULATE if name == "accumulate" else [f"--{flag_name(name)}"]
        sections[own.section].add_argument(*flags, dest=name, default=argparse.SUPPRESS, **options)
    return parser


def _argument(name: str, own: Declaration, kind: Any, default: Any, choices: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of ``add_argument`` for a setting; ``kind``: its type; ``choices``: its values, if few."""
    text = own.help.replace("%", "%%")
    if choices and own.metavar:  # too many to stand next to the flag
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
        options["type"] = {"seqpar": ranks_or_auto, "pipe": _ranks}.get(name, kind)
    if choices:
        options["choices"] = choices
    return options | {"metavar": own.metavar or None}


def ranks_or_auto(text: str) -> int:
    """Returns a number of ranks, AUTO for "auto"."""
    return AUTO if text == "auto" else _ranks(text, ", or auto")


def _ranks(text: str, or_else: str = "") -> int:
    """Returns a number of ranks: others are divided by it before a config is checked."""
    number = int(text) if re.fullmatch(r"[+-]?\d+", text) else 0
    if not 1 <= number <= MOST_RANKS:
        bound = f"at most {MOST_RANKS}" if number > 1 else "at least 1"
        raise argparse.ArgumentTypeError(f"{text} must be a number of ranks, {bound}{or_else}")
    return number


def shortened_warmup(config: Config, names: set[str]) -> tuple[Config, str]:
    """Returns the config with a warm-up that leaves an epoch, and a line that says so; "" where it did already.

    ``names``: the settings on the command line; a warm-up among them is not changed.
    """
    if "warmup" in names or config.warmup < max(config.epochs, 1):
        return config, ""
    epochs = max(config.epochs, 1) - 1
    line = f"--warmup {epochs} instead of the preset's {config.warmup}: the run has {quantity(config.epochs, 'epoch')}"
    return replace(config, warmup=epochs), line
