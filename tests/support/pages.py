"""The pages that people read, and the commands in them.

Commands in a block marked ``bash`` run in CI, in the order of the pages. Those marked ``sh`` need data, machines or
time that CI lacks: only their flags are parsed.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "README.md"
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
Row = dict[str, str]  # of a table, by column
CLUSTER = ("sbatch", "launch/slurm/chain.sh")  # these hand in jobs
MAKE = ("make train", "make test")  # run by .ci/run, in a fresh clone


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yields the file that each relative link of a page names, and its anchor or ""."""
    for target in LINK.findall(without_code(page.read_text())):
        if "://" not in target and not target.startswith("mailto:"):
            name, _, anchor = target.partition("#")
            yield (page.parent / name).resolve() if name else page, anchor


def without_code(text: str) -> str:
    """Returns a page's text without fenced blocks."""
    return re.sub(r"^( *)(```+).*?^\1\2 *$", "", text, flags=re.S | re.M)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table_rows(text: str) -> list[Row]:
    """Returns the rows of all Markdown tables of a text, in order."""
    rows, columns = [], list[str]()
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = _cells(line)
            assert set(lines[number + 1]) <= set("|-: "), "a table has a line below its head"
        elif set(line) - set("|-: "):
            rows.append(dict(zip(columns, _cells(line))))
    return rows


def _pages() -> list[Path]:
    """Returns the pages in the order in which a reader of the index meets them, the front page first."""
    linked = [path for path, _ in links(INDEX) if path.suffix == ".md" and path.is_file()]
    others = [ROOT / "launch" / "slurm" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages = dict.fromkeys([ROOT / "README.md", INDEX, *linked, *others])
    return [page for page in pages if page.name != "LOG.md"]


PAGES = _pages()


def blocks(page: Path, language: str) -> list[str]:
    """Returns a page's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


def page(name: str) -> Path:
    """Returns a page of the manual, such as ``how-to/sweeps``."""
    return ROOT / "docs" / f"{name}.md"


def shown_commands(page: Path, words: str) -> list[str]:
    """Returns the lines of a page that contain ``words``, each with the indented lines that continue it."""
    lines = re.sub(r" ?\\?\n    (?=\S)", " ", page.read_text()).splitlines()
    return [line for line in lines if words in line]


def commands(language: str) -> list[str]:
    """Returns the commands in all pages' blocks of a language, without comments, each once."""
    every = [block.replace("\\\n", " ") for page in PAGES for block in blocks(page, language)]
    split = [shlex.split(line, comments=True) for block in every for line in block.splitlines()]
    return list(dict.fromkeys(shlex.join(words) for words in split if words))


def readme_commands(*starts: str) -> list[str]:
    """Returns the commands that CI runs and that begin with one of ``starts`` (or all)."""
    return [command for command in commands("bash") if not starts or command.startswith(starts)]


COMMANDS = readme_commands()
HERE = [line for line in COMMANDS if not line.startswith((*CLUSTER, *MAKE))]  # run by .ci/commands
SHOWN = [line for line in commands("sh") if re.match(r"seqpar-|python launch/|(torchrun|srun) .* launch/", line)]
