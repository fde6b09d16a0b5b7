"""The generated pages of the manual are those of the code now, and lack no flag and no name."""

import argparse

import seqpar
from seqpar.settings.config import SETTINGS
from seqpar.text import flag_name
from tests.support.programs import PROGRAMS
from tests.support.reference_pages import COMMAND, FOLDERS, PAGES, PICTURES, as_markdown, parser_of, written


def test_generated_pages_and_pictures_are_those_of_the_code() -> None:
    files = written()
    assert {PAGES / "flags.md", PAGES / "api.md", *PICTURES.glob("*.svg")} == files.keys()
    outdated = [path.name for path, text in files.items() if path.read_text() != text]
    assert not outdated, f"the code has changed: run {COMMAND}, and commit these files"


def test_each_flag_of_each_program_has_a_row() -> None:
    sections = {part.partition("\n")[0]: part for part in (PAGES / "flags.md").read_text().split("\n## ")[1:]}
    assert sections.keys() - {"presets"} == PROGRAMS.keys()
    missing = [f"--{flag_name(name)}" for name in SETTINGS if f"`--{flag_name(name)}`" not in sections["train"]]
    for program in PROGRAMS.keys() - {"train"}:
        for action in parser_of(program)._actions:
            if action.option_strings and not isinstance(action, argparse._HelpAction):
                missing += [action.option_strings[0]] * (f"`{action.option_strings[0]}`" not in sections[program])
    assert missing == []


def test_each_public_name_has_a_section() -> None:
    headings = {line.removeprefix("### ") for line in (PAGES / "api.md").read_text().splitlines() if line[:4] == "### "}
    assert headings == {*seqpar.__all__} - {*FOLDERS} | {f"seqpar.{folder}" for folder in FOLDERS}


def test_docstrings_become_markdown() -> None:
    text = """Does ``it``.

    Args:
        ``width``: of it,
            in voxels.
        ``height``: of it.

    As in::

        it(1)
    """
    arguments = "Arguments:\n\n- `width`: of it,\n  in voxels.\n- `height`: of it."
    assert as_markdown(text) == f"Does `it`.\n\n{arguments}\n\nAs in:\n\n```py\nit(1)\n```"
