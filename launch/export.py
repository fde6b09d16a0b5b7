"""Packs a trained run into one file to hand on: ``python launch/export.py RUN OUT.zip``."""

import sys
from collections.abc import Sequence
from pathlib import Path

from seqpar.launch.job.exit_codes import run
from seqpar.launch.runs.archive import write_archive
from seqpar.launch.runs.run_folder import read_config, read_windows
from seqpar.launch.runs.stale_status import warn_if_killed
from seqpar.launch.runs.trained_run import find_weights, load_run, read_run
from seqpar.launch.settings.command_line import Parser


def act(arguments: Sequence[str]) -> int:
    """Writes the archive and prints what is in it; returns exit code 0."""
    parser = Parser("export", description="Packs a trained run into one file.")
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder that train wrote")
    add("out", type=Path, metavar="OUT.zip", help="archive to write; predict takes it in the place of a run folder")
    add("--checkpoint", default="best", metavar="WHICH", help="best (default), latest or a file of the run's weights")
    add("--licence", default="not stated", metavar="TEXT", help="licence of the weights, such as CC-BY-4.0")
    options = parser.parse_args(list(arguments))
    if options.out.suffix != ".zip":
        raise ValueError(f"{options.out}: the archive is a zip file; name it {options.out.name}.zip")
    warn_if_killed(options.run)
    weights = find_weights(read_run(options.run), options.checkpoint)
    load_run(options.run, str(weights))  # weights of another network would be found out by its user
    windows, whole_grid = read_windows(options.run)
    about = write_archive(options.out, read_config(options.run), weights, options.licence, windows, whole_grid)
    size = options.out.stat().st_size / 1e6
    print(f"{options.out}: {size:.1f} MB, weights {about['checkpoint']}, licence: {about['licence']}")
    print(f"next: {about['use']}")
    return 0


def main() -> None:
    """Ends the process with the act's exit code."""
    sys.exit(run(act))


if __name__ == "__main__":
    main()
