"""Writes one HTML page about a run, to open and to send: ``python launch/report.py RUN``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError
from seqpar.launch.evaluation.summary_files import write_output
from seqpar.launch.job.exit_codes import DATA, run
from seqpar.launch.reporting.images import find_images
from seqpar.launch.reporting.page import page
from seqpar.launch.reporting.record import CaseScores, read_record, read_scores, score_folders
from seqpar.launch.reporting.viewer import load_worst, section
from seqpar.launch.runs.stale_status import warn_if_killed
from seqpar.launch.settings.command_line import Parser


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code; what a run lacks is noted in the page, faults of two given folders are errors too."""
    options = _parse(arguments)
    warn_if_killed(options.run)
    record, gaps = read_record(options.run), list[str]()
    scored: CaseScores | None = None
    if options.truth is not None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        scored = score_folders(options.truth, options.prediction, record.labels, min(8, cores))
    else:
        try:
            scored = read_scores(options.run)
        except DataError as error:
            gaps.append(f"There are no scores of single cases: {error}.")
    neurological = bool(record.config.get("neurological") if options.neurological is None else options.neurological)
    cases, volumes, shown = "<p>No case is shown.</p>", dict[str, Any](), list[Any]()
    if scored and options.cases:
        images = find_images(record, options.images, options.truth, gaps)
        shown = load_worst(record, scored, options.cases, images, gaps)
    if scored and shown:
        cases, volumes = section(record, scored, shown, neurological)
    write_output(options.out, page(record, scored, cases, volumes, gaps))
    faults = scored.faults if scored and options.truth is not None else ()
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr, flush=True)
    size = options.out.stat().st_size / 1e6
    print(f"{options.out}: {len(shown)} cases shown, {size:.1f} MB", flush=True)
    return DATA if faults else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the command line, checked."""
    parser = Parser("report", description="Writes one HTML page about a run, to open and to send.")
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder that train wrote")
    add("--truth", type=Path, metavar="PATH", help="data set or folder of true label maps to score and show, with "
        "--prediction (default: the run's own validation)")  # fmt: skip
    add("--prediction", type=Path, metavar="FOLDER", help="predicted label maps, named as the cases of --truth")
    add("--images", type=Path, metavar="FOLDER", help="images of the cases, of all modalities, such as imagesTs "
        "(default: those of the data set that --truth names, else the run's prepared data)")  # fmt: skip
    add("--neurological", action=argparse.BooleanOptionalAction,
        help="show the patient's left on the left; --no-neurological: on the right, as radiologists do "
        "(default: as the run's pictures)")  # fmt: skip
    add("--cases", type=int, default=6, metavar="CASES", help="cases to show, the worst first (%(default)s)")
    add("--out", type=Path, metavar="FILE", help="page to write (default: report.html in RUN)")
    options = parser.parse_args(arguments)
    if (options.truth is None) != (options.prediction is None):
        raise ValueError("--truth and --prediction belong together: give both, or neither")
    if options.cases < 0:
        raise ValueError(f"--cases is {options.cases}: 0 or more are needed")
    if options.images is not None and not options.cases:
        raise ValueError("--images would do nothing: --cases 0 shows no case; leave one of both out")
    options.out = options.out or options.run / "report.html"
    if options.out.is_dir():
        raise ValueError(f"--out {options.out} is a folder: name a file")
    return options


def main() -> None:
    """Ends the process with the act's exit code."""
    sys.exit(run(act))


if __name__ == "__main__":
    main()
