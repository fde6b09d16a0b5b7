"""Writes the generated pages and pictures of docs from the code: ``python -m tests.support.reference_pages``."""

import argparse
import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import seqpar
from seqpar.models.build import NETWORK_NAMES
from seqpar.settings.config import SETTINGS, Config
from seqpar.settings.field import TASKS, Declaration
from seqpar.settings.presets import FROM_DATA, PRESETS
from seqpar.settings.rules import as_typed
from seqpar.text import flag_name
from tests.support.manual_pictures import pictures
from tests.support.pages import ROOT
from tests.support.programs import COMMANDS, LABORATORY, PROGRAMS

PAGES, PICTURES = ROOT / "docs" / "reference", ROOT / "docs" / "pictures"
COMMAND = "python -m tests.support.reference_pages"
WIDTH = 100
LIKE_TRAIN = ("figures", "plan", "pretrain", "tune")

# ---- flags.md ----


def flags_page() -> str:
    """Returns the page of all flags of all programs."""
    about = f"""# Flags

Look here for the flags of a program, what they do and their defaults.

The tables hold what `--help` prints; `{COMMAND}` writes this page.
An installed package has the programs as `seqpar-train` and so on, a checkout as `launch/train.py` and so on.
`bench` and `figures` are in a checkout only.
The [glossary](../glossary.md) explains words such as tile, rank and group.
"""
    programs = ["train", *sorted(COMMANDS.keys() - {"train"}), *sorted(LABORATORY)]
    contents = "Programs: " + " · ".join(f"[{name}](#{name})" for name in programs)
    presets = "[What each preset sets](#presets)"
    return "\n".join([about, f"{contents}\n", f"{presets}\n", *_train(), *_presets(), *map(_program, programs[1:])])


def _train() -> Iterator[str]:
    yield "## train\n"
    yield (
        "Defaults are those without a preset; `--preset NAME` changes many of them ([presets](#presets)). "
        "`--no-amsgrad` turns a switch such as `--amsgrad` off.\n\n"
        "*For* names the tasks and networks that have the flag; others refuse it. A flag that is *fixed* cannot change "
        "when a run resumes.\n"
    )
    for section in dict.fromkeys(own.section for own in SETTINGS.values()):
        yield f"### {section}\n"
        rows = [_setting(name, own) for name, own in SETTINGS.items() if own.section == section]
        yield _table(("flag", "default", "what it does", "for"), rows)


def _setting(name: str, own: Declaration) -> tuple[str, ...]:
    """Returns the cells of a setting's row."""
    default = getattr(Config(), name)
    is_switch = isinstance(default, bool)
    names = ["--accumulate", "--micro-batches"] if name == "accumulate" else [f"--{flag_name(name)}"]
    flag = " or ".join(f"`{one}`" for one in names) + (f" `{own.metavar}`" if own.metavar else "")
    choices = NETWORK_NAMES if name == "network" else own.choices
    what = own.help + _one_of(choices)
    shown = ("yes" if default else "no") if is_switch else as_typed(name, default).partition(" ")[2]
    where = [] if own.tasks == TASKS else [", ".join(own.tasks)]
    where += [own.networks.text] if own.networks else []
    return flag, f"`{shown}`" if shown else "", what, "; ".join(where + ["*fixed*"] * bool(own.fixed))


def _presets() -> Iterator[str]:
    yield "## presets\n"
    decided = " and ".join(f"`{name}`" for name in FROM_DATA)
    yield (
        f"`train --preset NAME` starts from these settings; flags on the command line override them. With {decided}, "
        "data and memory decide spacing, tile and batch; `auto` starts from `modern` with a GPU, else from `laptop`.\n"
    )
    usual, rows = Config(), list[tuple[str, ...]]()
    for preset, make in PRESETS.items():
        if preset != "auto":
            own = make()
            flags = [
                as_typed(name, getattr(own, name)) for name in SETTINGS if getattr(own, name) != getattr(usual, name)
            ]
            rows.append((f"`{preset}`", " ".join(f"`{flag.strip()}`" for flag in flags if flag.strip() != "--tile")))
    yield _table(("preset", "flags"), rows)


def _program(name: str) -> str:
    """Returns the section of a program other than train."""
    parser = parser_of(name)
    formatter = parser._get_formatter()
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        flags = [flag for flag in action.option_strings if not flag.startswith("--no-")]
        value = _value(action)
        shown = " or ".join(f"`{flag}`" for flag in flags) + f" `{value}`" * bool(value and flags)
        what = formatter._expand_help(action) + _one_of(action.choices or ())
        rows.append((shown or f"`{value}`", what))
    about = " ".join((parser.description or "").split())
    also = " It takes the flags of [train](#train) too." if name in LIKE_TRAIN else ""
    return f"## {name}\n\n{about}{also}\n\n{_table(('flag', 'what it does'), rows)}"


def _one_of(choices: Iterable[Any]) -> str:
    """Returns a sentence with the values that a flag takes; "" if they are not few."""
    listed = ", ".join(f"`{choice}`" for choice in choices)
    return f". One of {listed}" if listed else ""


def _value(action: argparse.Action) -> str:
    """Returns what stands for the value of an argument; "" for a switch."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction) or not (words := action.metavar):
        return ""
    value = " ".join(words) if isinstance(words, tuple) else words
    return f"{value} …" if action.nargs in ("+", "*") else f"[{value}]" if action.nargs == "?" else value


def parser_of(program: str) -> argparse.ArgumentParser:
    """Returns the parser of a program, which it shows when it is asked for --help."""
    asked: list[argparse.ArgumentParser] = []
    catch = mock.patch.object(argparse.ArgumentParser, "print_help", lambda self, file=None: asked.append(self))
    with catch, suppress(SystemExit):
        importlib.import_module(PROGRAMS[program]).act(["--help"])
    return asked[0]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("<", "\\<") for cell in line) + " |\n" for line in lines
    )


# ---- api.md ----

TOPICS = {
    "Start ranks": "init_mesh start as_group Layout BoxGrid",
    "Networks": "UNETR UNet convert SegmentationNet compile_blocks",
    "Parts of a network": "SeqParViT ParallelAttention AttentionOptions DropoutKey choose_mode PlainDecoder "
    "UnetrDecoder PrimusDecoder",
    "Train": "ParallelModel DiceCE make_loss LossGroups",
    "Predict": "predict Predictor load_run",
    "Weights": (
        "load_monai export_monai load_nnunet export_nnunet load_mednext export_mednext load_primus export_primus "
        "read_weights write_weights"
    ),
}
FOLDERS = ("attention", "decoders", "losses", "spatial", "vit")


def api_page() -> str:
    """Returns the page of all names that ``import seqpar`` offers."""
    about = f"""# API

Look here for the classes and functions that `import seqpar` offers, with their arguments.

The text is that of the docstrings, which `help(seqpar.NAME)` prints; `{COMMAND}` writes this
page. Loops that use them: [a loop of your own](../how-to/your-own-loop.md),
[with the tools of PyTorch and MONAI](../how-to/pytorch-tools.md).
In shapes, `b` is batch, `c` channels, `W D H` voxels, `n` tokens, `e` embedding, `k` classes; `/s` marks what is spread
over the ranks that share a tile.
"""
    parts = [about]
    for topic, names in TOPICS.items():
        parts.append(f"## {topic}\n")
        parts += [_entry(name, getattr(seqpar, name)) for name in names.split()]
    parts.append("## Building blocks\n")
    for folder in FOLDERS:
        module: ModuleType = getattr(seqpar, folder)
        parts.append(f"### seqpar.{folder}\n\n{as_markdown(module.__doc__ or '')}\n")
    return "\n".join(parts)


def _entry(name: str, offered: Callable[..., Any]) -> str:
    """Returns the section of a class, with its public methods, or of a function."""
    text = [f"### {name}\n", _signature(name, offered), as_markdown(inspect.getdoc(offered) or ""), ""]
    if inspect.isclass(offered):
        for method, made in vars(offered).items():
            of_class = isinstance(made, (classmethod, staticmethod))
            function = made.__func__ if of_class else made
            if not method.startswith("_") and inspect.isfunction(function) and function.__doc__:
                shown = f"{name}.{method}" if of_class else f".{method}"
                text += [_signature(shown, function), as_markdown(inspect.getdoc(function) or ""), ""]
    return "\n".join(text)


def _signature(name: str, offered: Callable[..., Any]) -> str:
    """Returns a fenced line, or an argument a line where it is long, with the annotations as they are written."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(offered))).body
    returned = ""
    if isinstance(node, ast.ClassDef):
        makers = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        written = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
        arguments = _arguments(makers[0].args) if makers else written if hasattr(offered, "__annotations__") else []
    else:
        assert isinstance(node, ast.FunctionDef)
        arguments = _arguments(node.args)
        returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{name}({', '.join(arguments)}){returned}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returned}"
    return f"```py\n{line}\n```\n"


def _arguments(args: ast.arguments) -> list[str]:
    """Returns the arguments of a function as they are written, without self and cls."""
    pieces, depth = [""], 0
    for letter in ast.unparse(args):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    own = [piece.strip() for piece in pieces if piece.strip() not in ("self", "cls", "")]
    return [re.sub(r"^(\w+: [^=]+)=", r"\1 = ", piece) for piece in own]


def as_markdown(docstring: str) -> str:
    """Returns a docstring with its literals, arguments and code as Markdown has them."""
    lines, inside, code = list[str](), False, False
    for line in inspect.cleandoc(docstring).splitlines():
        indent, bare = len(line) - len(line.lstrip()), line.strip()
        if code and bare and not indent:
            while lines and not lines[-1]:
                lines.pop()
            lines += ["```", ""]
            code = False
        if code:
            lines += [line[4:]] if bare or lines[-1] != "```py" else []
            continue
        if bare in ("Args:", "Attributes:"):
            inside = True
            lines += ["", ""] if lines and lines[-1] else [""]
            lines[-1:] = [f"{'Arguments' if bare == 'Args:' else 'Attributes'}:", ""]
            continue
        inside = inside and (indent > 0 or not bare)
        if bare.endswith("::"):
            lines += [bare[:-1], "", "```py"]
            code = True
        elif inside and indent == 4:
            lines.append(f"- {bare}")
        elif inside and indent > 4:
            lines.append(f"  {bare}")
        else:
            lines.append(line)
    if code:
        lines.append("```")
    text = re.sub(r"``(.+?)``", r"`\1`", "\n".join(lines))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?<=[^\n])\n(?=- )(?<!\n- )", "\n", text)).strip()


def written() -> dict[Path, str]:
    """Returns the text of each generated page and picture."""
    drawn = {PICTURES / name: text for name, text in pictures().items()}
    return {PAGES / "flags.md": flags_page(), PAGES / "api.md": api_page(), **drawn}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "launch"))  # where tests find the laboratory's programs
    for page, text in written().items():
        page.write_text(text)
        print(page.relative_to(ROOT))
