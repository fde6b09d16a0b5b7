"""Runs the tutorials of the manual and keeps what they print: ``python -m tests.support.tutorials [NAME ...]``.

A tutorial is a page of docs/tutorials. It is followed from top to bottom in an empty folder: a ``python`` block is
saved under the name with which the line before it ends, and the commands of a ``console`` block are typed. Below each
command is what it prints, where a line ``…`` stands for any number of lines. A picture in the folder NAME is the file
of that path in the folder in which the tutorial ran.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.pages import ROOT

TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = sorted(TUTORIALS.glob("*.md"))
BLOCK = re.compile(r"`([\w.]+)`:\n\n```python\n(.*?)^```$|^```console\n(.*?)^```$", re.S | re.M)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
TIMES = re.compile(r"\d+:\d\d left|[\d,.]+ (?:tokens/s|voxels/s|s|GB)\b|-[0-9a-f]{8}\b")  # and hashes of paths
UNDERWAY = re.compile(r" █*·+ ")  # progress that a terminal overwrites
GAP = "…"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # two tutorials run side by side on two cores


@dataclass
class Step:
    """A command, the lines that its page shows below it, and those that it printed."""

    command: str
    kept: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)


def steps_of(console: str) -> list[Step]:
    """Returns the commands of a console block; a backslash at the end of a line continues it."""
    steps, continued = list[Step](), False
    for line in console.splitlines():
        if continued:
            steps[-1].command += f"\n{line}"
        elif line.startswith("$ "):
            steps.append(Step(line[2:]))
        else:
            steps[-1].kept.append(line)
        continued = line.endswith("\\") and not steps[-1].kept
    return steps


def follow(page: Path, folder: Path) -> tuple[str, list[Step]]:
    """Follows a tutorial in a folder; returns its text as it should be, and its steps."""
    every = list[Step]()

    def do(found: re.Match[str]) -> str:
        name, code, console = found.groups()
        if name:
            (folder / name).write_text(code)
            return found[0]
        steps = steps_of(console)
        for step in steps:
            step.printed = run(step.command, folder)
        every.extend(steps)
        return "```console\n" + "".join(map(shown, steps)) + "```"

    return BLOCK.sub(do, page.read_text()), every


def run(command: str, folder: Path) -> list[str]:
    """Returns the lines that a command leaves on a terminal; raises RuntimeError if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "SEQPAR_CACHE"}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**environment, "PATH": path, "PYTHONPATH": str(ROOT), **ONE_THREAD},
        text=True, timeout=900, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command}\nended with code {done.returncode}:\n{done.stdout}")
    lines = [line.rstrip().replace(f"{folder}/", "") for line in done.stdout.splitlines()]
    return [line for line in lines if not UNDERWAY.search(line)]


def shown(step: Step) -> str:
    """Returns a command with what it printed now, shortened where the page shortens it."""
    lines = aligned(step.kept, step.printed, lambda one, other: NUMBER.sub("0", one) == NUMBER.sub("0", other))
    return "".join(f"{line}\n" for line in [f"$ {step.command}", *(step.printed if lines is None else lines)])


def aligned(kept: list[str], printed: list[str], equal: Callable[[str, str], bool]) -> list[str] | None:
    """Returns what was printed in place of the kept lines, gaps as they are; None if the lines differ."""
    if not kept:
        return None if printed else []
    if kept[0] == GAP:
        for start in range(len(printed) + 1):
            rest = aligned(kept[1:], printed[start:], equal)
            if rest is not None:
                return [GAP, *rest]
        return None
    if not printed or not equal(kept[0], printed[0]):
        return None
    rest = aligned(kept[1:], printed[1:], equal)
    return None if rest is None else [printed[0], *rest]


def near(kept: str, printed: str) -> bool:
    """Tells whether words and whole numbers are equal, and fractions within 0.1 or 10 %; times may be any."""
    kept, printed = TIMES.sub(GAP, kept), TIMES.sub(GAP, printed)
    pairs = list(zip(NUMBER.findall(kept), NUMBER.findall(printed)))
    return NUMBER.sub("0", kept) == NUMBER.sub("0", printed) and all(
        one == other or ("." in one and abs(float(one) - float(other)) <= max(0.1, 0.1 * abs(float(one))))
        for one, other in pairs
    )


def differences(steps: list[Step]) -> list[str]:
    """Returns the commands that did not print what their page shows, with what they printed."""
    wrong = [step for step in steps if aligned(step.kept, step.printed, near) is None]
    return ["\n".join([f"$ {step.command}", *step.printed, "instead of", *step.kept]) for step in wrong]


def pictures(page: Path) -> dict[Path, Path]:
    """Returns the pictures that a tutorial draws, each with its path in the folder in which the tutorial runs."""
    names = [name for name in PICTURE.findall(page.read_text()) if name.startswith(f"{page.stem}/")]
    return {page.parent / name: Path(name).relative_to(page.stem) for name in names}


def keep(page: Path) -> None:
    """Follows a tutorial and writes what it printed and drew into the manual."""
    with tempfile.TemporaryDirectory() as folder:
        text, _ = follow(page, Path(folder))
        page.write_text(text)
        for kept, drawn in pictures(page).items():
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(folder) / drawn, kept)


if __name__ == "__main__":
    for page in PAGES:
        if page.stem in sys.argv[1:] or not sys.argv[1:]:
            keep(page)
            print(page.relative_to(ROOT))
