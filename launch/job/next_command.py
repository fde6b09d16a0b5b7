"""The command that usually comes next, as a person here would type it."""

import os
import shlex
import sys


def next_command(act: str, *arguments: object) -> str:
    """Returns the line that starts an act: a console script where this one was started by one, else its file."""
    started = os.path.basename(sys.argv[0])
    if started.startswith("seqpar-"):
        words = [f"seqpar-{act}"]
    else:
        beside = os.path.join(os.path.dirname(sys.argv[0]), f"{act}.py")
        words = ["python", beside if os.path.exists(beside) else f"launch/{act}.py"]
    return shlex.join([*words, *map(str, arguments)])
