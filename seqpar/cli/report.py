"""Writes an HTML page about a run, or one that compares several: ``python launch/report.py RUN …``."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from seqpar.cluster.exit_codes import DATA, run
from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import place_in_data
from seqpar.prediction.prediction_folder import warn_if_predicting
from seqpar.report.record import read_record
from seqpar.report.several_runs import Compare, page_of_several
from seqpar.report.sweep_page import page_of_sweep
from seqpar.runs.run_status import warn_if_killed, warn_of_lost
from seqpar.runs.sweep_folder import holds_sweep
from seqpar.scores.class_scores import TABLE
from seqpar.scores.summary_files import write_output
from seqpar.settings.parser import Parser
from seqpar.tasks.lookup import TASKS

_MARK = b"""content="default-src 'none'; style-src 'unsafe-inline'"""  # in each page that report has ever written


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code; the page names what a run lacks; faults of two given folders are also errors."""
    options, compare = _parse(arguments), {name: task.compare for name, task in TASKS.items()}
    if holds_sweep(options.runs[0]):
        write_output(options.out, page_of_sweep(options.runs[0], compare))
        print(f"{options.out}: the sweep in {options.runs[0]}", flush=True)
        return 0
    warn_if_killed(*options.runs)
    if len(options.runs) > 1:
        return _compare(options, compare)
    warn_if_predicting(*[options.prediction] * bool(options.prediction))
    record = read_record(options.runs[0])
    warn_of_lost(record.weights)
    made = TASKS[record.network_settings.task].page(options, record)
    write_output(options.out, made.text)
    print(f"{options.out}: {made.what}{options.out.stat().st_size / 1e6:.1f} MB", flush=True)
    for note in made.notes:
        print(note, flush=True)
    for fault in made.faults:
        print(f"error: {fault}", file=sys.stderr, flush=True)
    return DATA if made.faults else 0


def _compare(options: argparse.Namespace, compare: Mapping[str, Compare]) -> int:
    """Writes the page about several runs; returns the exit code."""
    records = [read_record(folder) for folder in options.runs]
    warn_of_lost(*(record.weights for record in records))
    text, scored = page_of_several(records, compare)
    write_output(options.out, text)
    print(f"{options.out}: {len(records)} runs compared, {scored} with scores of their cases", flush=True)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the command line, checked."""
    about = "Writes an HTML page about a run, or one that compares several; the file holds all it needs."
    parser = Parser("report", description=about)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN",
        help="run folder that train wrote, several to compare them, or the folder of a sweep")  # fmt: skip
    add("--truth", type=Path, metavar="PATH", help="data set or folder of true label maps to score and show, with "
        "--prediction (default: the run's own validation)")  # fmt: skip
    add("--prediction", type=Path, metavar="FOLDER", help="predicted label maps, named as the cases of --truth; "
        "without --truth the page shows them and their volumes")  # fmt: skip
    add("--common", action="store_true", help="score only the cases that --truth and --prediction share, and do not "
        "mention others")  # fmt: skip
    add("--images", type=Path, metavar="FOLDER", help="images of the cases, of all modalities, such as imagesTs "
        "(default: those of the data set that --truth is or is part of, else the run's prepared images, if "
        "--prediction was made from the same files)")  # fmt: skip
    add("--neurological", action=argparse.BooleanOptionalAction,
        help="show the patient's left on the left; --no-neurological: on the right, as radiologists do "
        "(default: as the run's pictures)")  # fmt: skip
    add("--positive", metavar="CLASS", help="class whose ROC curve is drawn (default: of two classes the one that is "
        "not called healthy, normal or 0; of more, all)")  # fmt: skip
    add("--cases", type=int, metavar="CASES", help="cases to show, the worst first (6)")
    add("--out", type=Path, metavar="FILE", help="page to write (default: RUN/report.html; with --prediction "
        "RUN/report-FOLDER.html, with --truth too RUN/scores-FOLDER.html; of several runs comparison.html in the "
        "first)")  # fmt: skip
    options = parser.parse_args(arguments)
    sweeps = [str(run) for run in options.runs if holds_sweep(run)]
    if sweeps and len(options.runs) > 1:
        raise ValueError(f"{sweeps[0]} is a sweep, which has a page of its own: name it alone")
    if len(options.runs) > 1 or sweeps:
        shown = {"truth": options.truth, "prediction": options.prediction, "images": options.images}
        shown |= {"neurological": options.neurological, "cases": options.cases, "positive": options.positive}
        shown |= {"common": options.common or None}
        for name in (name for name, value in shown.items() if value is not None):
            named = f"{sweeps[0]} is a sweep" if sweeps else f"{len(options.runs)} were named"
            raise ValueError(f"--{name} shows the cases of one run, and {named}: leave out --{name}, or name one run")
    options.cases = 6 if options.cases is None else options.cases
    if options.prediction is not None and options.prediction.name == TABLE:  # as evaluate takes it
        options.prediction = options.prediction.parent
    if options.truth is not None and options.prediction is None:
        raise ValueError(f"--truth {options.truth} needs the predictions to score: add --prediction")
    if options.common and options.truth is None:
        raise ValueError("--common would do nothing without --truth and --prediction: remove it")
    if options.cases < 0:
        raise ValueError(f"--cases is {options.cases}: 0 or more are needed")
    if options.images is not None and not options.cases:
        raise ValueError("--images would do nothing: --cases 0 shows no case; leave one of both out")
    options.out = options.out or options.runs[0] / _usual_name(options)
    if options.out.is_dir():
        raise ValueError(f"--out {options.out} is a folder: name a file")
    if kept := place_in_data(options.out.parent):
        raise DataError(options.out.parent, f"{kept}, which report never writes into; name another file by --out")
    if options.out.suffix not in (".html", ".htm"):  # it would replace what else has that name
        raise ValueError(f"--out {options.out}: a report is an HTML page; name it {options.out.name}.html")
    if options.out.is_file() and (start := options.out.read_bytes()[:1000]) and _MARK not in start:
        raise DataError(options.out, "is there, and report did not write it: name another file by --out")
    return options


def _usual_name(options: argparse.Namespace) -> str:
    """Returns the name of the page; one on other data leaves the run's own page in place."""
    if len(options.runs) > 1:
        return "comparison.html"
    what = "report" if options.truth is None else "scores"
    return f"{what}-{Path(os.path.realpath(options.prediction)).name}.html" if options.prediction else "report.html"


def main() -> None:
    """Ends the process with the act's exit code."""
    sys.exit(run(act))


if __name__ == "__main__":
    main()
