"""--help of every act: each option says what it does, what its value is, and which values there are."""

import argparse
import importlib
import re

import pytest

from seqpar.decoders.modes.named_modes import MODES
from seqpar.decoders.named_decoders import DECODERS
from seqpar.models.build import NETWORKS
from seqpar.settings.config import SETTINGS
from seqpar.settings.parser import Parser
from seqpar.text import flag_name
from tests.support.programs import PROGRAMS

SWITCHES = (argparse._StoreTrueAction, argparse.BooleanOptionalAction, argparse._HelpAction)


@pytest.fixture(scope="module", params=sorted(PROGRAMS))
def parser(request) -> argparse.ArgumentParser:
    """Returns the parser of an act that was asked for --help."""
    asked: list[argparse.ArgumentParser] = []

    def catch(parser: argparse.ArgumentParser, file: object = None) -> None:
        asked.append(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "print_help", catch)
        with pytest.raises(SystemExit) as left:
            importlib.import_module(PROGRAMS[request.param]).act(["--help", *["all"] * (request.param == "train")])
    assert left.value.code == 0 and asked[0].prog == f"seqpar-{request.param}"
    return asked[0]


def entry(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Returns what --help prints of one argument, in a line."""
    formatter = parser._get_formatter()
    formatter.add_argument(action)
    return " ".join(formatter.format_help().split())


def test_each_argument_says_what_it_does_what_its_value_is_and_which_values_there_are(parser) -> None:
    assert isinstance(parser, Parser) and len(parser._actions) > 3
    for action in parser._actions:
        name = action.option_strings[-1] if action.option_strings else action.dest
        words = action.help.split() if action.help and action.help != argparse.SUPPRESS else []
        assert words, f"{name} has no help"
        if isinstance(action, SWITCHES):
            continue
        metavars = [action.metavar] if isinstance(action.metavar, str) else list(action.metavar or ())
        assert action.choices or metavars, f"{name}: say what its value is"
        assert not {"N", "X", "TEXT"} & set(metavars) or name == "--licence", f"{name} {metavars} says nothing"
        shown = entry(parser, action)
        assert all(re.search(rf"(?<![\w-]){re.escape(str(choice))}(?![\w-])", shown) for choice in action.choices or ())


def test_help_is_short_and_in_the_width_of_a_terminal(parser, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    lines = parser.format_help().splitlines()
    assert len(lines) < (230 if parser.prog == "seqpar-train" else 60) and max(map(len, lines)) <= 110
    assert "``" not in parser.format_help()


def test_train_shows_networks_decoders_and_modes_its_preset_and_its_exit_codes(capsys, monkeypatch) -> None:
    from seqpar.cli import train

    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        train.act(["--help", "all"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80, "a terminal is narrower"
    text = " ".join(text.split())
    for name, names in (("--decoder", DECODERS), ("--mode", MODES)):
        assert f"{name} {{{','.join(names)}}}" in text
    here = text[text.index(" --network NAME ") :]
    assert all(choice in here[:400] for choice in NETWORKS)
    assert "--seqpar RANKS" in text and "(laptop)" in text and "75 left early and resumable" in text


def test_train_shows_few_flags_in_sections_and_names_where_all_are(capsys) -> None:
    def shown(*more: str) -> str:
        with pytest.raises(SystemExit) as left:
            importlib.import_module(PROGRAMS["train"]).act(["--help", *more])
        assert left.value.code == 0
        return capsys.readouterr().out

    def flags(text: str) -> set[str]:
        return set(re.findall(r"^  (--[a-z][a-z-]*)", text, re.MULTILINE))

    short, full = shown(), shown("all")
    assert 22 <= len(flags(short)) <= 30 and flags(short) < flags(full)
    assert "--help all lists every flag" in " ".join(short.split()) and "--amsgrad" in full
    assert {f"--{flag_name(name)}" for name in SETTINGS} - {"--accumulate"} <= flags(full)
    sections = [own.section for own in SETTINGS.values()]
    headings = [heading for heading in re.findall(r"^([a-z ]+):$", full, re.MULTILINE) if heading in sections]
    assert headings == list(dict.fromkeys(sections)), "each section is shown once, in the order of Config"
    assert {own.section for own in SETTINGS.values() if own.common} == {h for h in headings if f"\n{h}:\n" in short}
