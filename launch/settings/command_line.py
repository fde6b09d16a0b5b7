"""The command line of a run, made from the settings; a flag that could not act is refused."""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn, get_type_hints

from seqpar.launch.settings.config import AUTO, Config, dashed
from seqpar.launch.settings.presets import PRESETS

# What a run's weights and optimiser states depend on: these stay when it is continued.
_FIXED = ("tile", "patch", "optimizer", "spacing")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists all)")


def parse(arguments: Sequence[str], default_preset: str) -> tuple[str, Config, set[str]]:
    """Returns the preset's name, the config, and the names that were given on the command line."""
    given = vars(_parser(default_preset).parse_args(list(arguments)))
    preset = given.pop("preset", None) or default_preset
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if len(values.get("tile", ())) == 1:
        values["tile"] *= 3
    if values.get("weights"):
        values["weights"] = os.path.abspath(values["weights"])  # a run may go on from another folder
    return preset, replace(PRESETS[preset](), **values), set(values)


def _parser(default_preset: str) -> Parser:
    parser = Parser(
        "train",
        usage="train [--preset NAME] [--seqpar N] [--patch N] [--data FOLDER] [--out FOLDER] [any flag below]",
        description="Trains a sequence-parallel segmentation network; without --data on built-in phantom brains.",
        epilog="Numbers in brackets are the default here. It ends with 0 finished, 75 left early and resumable; "
        "else 2 usage, 3 data, 4 memory, 5 a loss that is no number: status.json says why.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    parser.add_argument("--preset", choices=list(PRESETS), help=f"where the settings start ({default_preset})")
    topics: dict[str, argparse._ArgumentGroup] = {}
    hints, shown = get_type_hints(Config), PRESETS[default_preset]()
    for f in dataclasses.fields(Config):
        topic = f.metadata["topic"]
        if topic not in topics:
            topics[topic] = parser.add_argument_group(topic)
        described = _argument(f, hints[f.name], getattr(shown, f.name))
        topics[topic].add_argument(f"--{dashed(f.name)}", dest=f.name, default=argparse.SUPPRESS, **described)
    return parser


def _argument(f: dataclasses.Field, kind: Any, default: Any) -> dict[str, Any]:
    text = f.metadata["help"].replace("%", "%%")
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction, "help": f"{text} ({'yes' if default else 'no'})"}
    if default not in ("", ()):
        told = " ".join(map(str, default)) if isinstance(default, tuple) else default
        text = f"{text} ({told})"
    described: dict[str, Any] = {"help": text}
    if kind in (tuple[int, ...], tuple[float, ...]):
        described |= {"nargs": "+", "type": int if kind == tuple[int, ...] else float}
    else:
        described["type"] = _size if f.name == "seqpar" else kind
    if f.metadata["choices"]:
        described["choices"] = f.metadata["choices"]
    else:
        described["metavar"] = {int: "N", _size: "N", float: "X"}.get(described["type"], "NAME")
    return described


def _size(text: str) -> int:
    """Returns a number of ranks; "auto" is left open."""
    if text == "auto":
        return AUTO
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1, or auto")
    return number


def refuse_idle(config: Config, given: set[str]) -> None:
    """Refuses flags that were given and could not act; ``config`` is the one that will run."""
    open_ = config.seqpar == AUTO or not config.batch or (config.seqpar > 1 and config.attention == "auto")
    for name, acts, why in (
        ("phantoms", not config.data, "--data is there: leave one of both out"),
        ("skips", config.decoder == "unetr", f"--decoder {config.decoder} takes no skips: leave it out"),
        ("decoder_width", config.decoder != "primus", "--decoder primus finds its width itself: leave it out"),
        ("measured", open_, "size, batch and attention are given, so that nothing is chosen by it: leave it out"),
    ):
        if name in given and not acts:
            raise ValueError(f"--{dashed(name)} would do nothing: {why}")


def continued(saved: Config, now: Config, given: set[str]) -> Config:
    """Returns the settings of a run that goes on: the saved ones, with what the command line says now."""
    fixed = [f.name for f in dataclasses.fields(Config) if f.metadata["topic"] == "network" or f.name in _FIXED]
    for name in fixed:
        if name in given and getattr(now, name) != getattr(saved, name):
            raise ValueError(
                f"--{dashed(name)} cannot change in a run that goes on ({getattr(saved, name)} so far): leave it out, "
                f"or begin another run with --weights {now.out}/model.safetensors"
            )
    if "weights" in given and now.weights != (saved.weights and os.path.abspath(saved.weights)):
        began = f"from {saved.weights}" if saved.weights else "without"
        raise ValueError(
            f"--weights {now.weights} would do nothing: --resume goes on with the run's own weights, which began "
            f"{began}: leave one of both out, or name another --out"
        )
    return replace(saved, **{name: getattr(now, name) for name in given}, resume=True, dry_run=now.dry_run)
