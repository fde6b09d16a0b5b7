"""The pages that people read, and the commands in them."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "launch/README.md",
        "seqpar/README.md",
        "launch/slurm/README.md",
        "CONTRIBUTING.md",
        "docs/how-to/pytorch-tools.md",
    )
]
CLUSTER = ("sbatch", "launch/slurm/chain.sh")  # these hand in jobs
MAKE = ("make train", "make test")  # run by .ci/run, in a fresh clone


def blocks(page: Path, language: str) -> list[str]:
    """Returns a page's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


def shown_commands(page: Path, words: str) -> list[str]:
    """Returns the lines of a page that contain ``words``, each with the indented lines that continue it."""
    lines = re.sub(r"\n    (?=\S)", " ", page.read_text()).splitlines()
    return [line for line in lines if words in line]


def readme_commands(*starts: str) -> list[str]:
    """Returns the commands in the pages' shell blocks, without comments, that begin with one of ``starts`` (or all)."""
    every = [line for page in PAGES[:3] for block in blocks(page, "bash") for line in block.splitlines()]
    commands = [shlex.join(words) for words in (shlex.split(line, comments=True) for line in every) if words]
    return [command for command in commands if not starts or command.startswith(starts)]


COMMANDS = readme_commands()
HERE = [line for line in COMMANDS if not line.startswith((*CLUSTER, *MAKE))]  # run by .ci/commands
