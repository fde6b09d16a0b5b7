"""A parser of command lines whose errors are one line, with the flag nearest to an unknown one."""

import argparse
import difflib
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from seqpar.settings.field import Bounds
from seqpar.text import flag_name

# flags of nnU-Net's, by the command here: what to do in their place
_OF_NNUNET = {
    "predict": {
        "--disable_tta": "use --mirror none",
        "--save_probabilities": "use --npz",
        "--continue_prediction": "use --continue",
        "-step_size": "use --overlap, which is 1 minus the step",
        "-device": "use --device",
        "-chk": "use --checkpoint",
    },
    "train": {
        "--c": "use --resume",
        "--val": "use predict and evaluate",
        "-num_gpus": "use --seqpar, or torchrun for more data at once",
        "-pretrained_weights": "use --weights",
        "-device": "use --device",
        "-p": "use --plans",
    },
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a user's: one line, with the flag nearest to an unknown one.

    - ``act``: what is started
    - ``options``: argparse's own

    ``others``: flags of the same command that another parser takes; ``lists_all``: the flag that lists all.
    """

    others: Sequence[str] = ()
    lists_all = "--help"

    def __init__(self, act: str, **options: Any) -> None:
        usual: dict[str, Any] = {"allow_abbrev": False, "formatter_class": _HelpLines}
        super().__init__(f"seqpar-{act}", **usual | options)
        self._of_nnunet = _OF_NNUNET.get(act, {})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses as argparse does, but refuses empty words, since Path("") is the current folder and --data "" no data,
        and flags of nnU-Net's, with what to use instead.
        """
        words = list(sys.argv[1:] if args is None else args)
        for before, word in zip(["", *words], words):
            flag, equals, value = word.partition("=")
            if flag in self._of_nnunet:
                raise ValueError(f"{flag} is a flag of nnU-Net's: {self._of_nnunet[flag]}")
            if not word or (word.startswith("--") and equals and not value):
                what = flag or (before if before.startswith("-") else f"the argument after {before or self.prog}")
                raise ValueError(f"{what} is empty: give it a value or remove it; is a shell variable not set?")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}{self._nearest(message)} ({self.lists_all} lists all)")

    def _nearest(self, message: str) -> str:
        """Returns the flags nearest to those that a message calls unrecognized, "" if it calls none so."""
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        typed = [word.partition("=")[0] for word in words.split() if word.startswith("--")] if is_unknown else []
        known = [*self._option_string_actions, *self.others]
        pairs = [(word, near) for word in typed for near in difflib.get_close_matches(word, known, 1)]
        return "".join(f"; nearest to {word} is {near}" for word, near in pairs)


def check_numbers(options: argparse.Namespace, **bounds: Bounds) -> None:
    """Raises ValueError for a number, or one of several, that is out of the bounds of its name; None passes."""
    for name, own in bounds.items():
        value = getattr(options, name)
        values = value if isinstance(value, list) else [value]
        if value is not None and not all(map(own.allows, values)):
            raise ValueError(f"--{flag_name(name)} {' '.join(map(str, values))}: {own.text}")


class _HelpLines(argparse.HelpFormatter):
    """Lines of --help, as wide as the terminal, in which no name is broken at its dashes."""

    def __init__(self, prog: str) -> None:
        width = min(110, shutil.get_terminal_size((110, 24)).columns)
        super().__init__(prog, max_help_position=34, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class HelpInTwoSizes(argparse.Action):
    """``--help`` prints the flags that most people need, ``--help all`` those of the parser that ``full`` makes."""

    def __init__(self, option_strings: Sequence[str], dest: str, full: Callable[[], Parser] | None, **options: Any):
        self.full = full
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", choices=("all",), metavar="all", **options)

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        (self.full() if values and self.full else parser).print_help()
        parser.exit()
