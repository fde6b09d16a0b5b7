"""Writes one HTML page about a run, to open and to send: python launch/report.py RUN."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from seqpar.data.errors import DataError
from seqpar.launch.evaluation.summary_files import write_output
from seqpar.launch.job.exit_codes import DATA, run
from seqpar.launch.reporting import page
from seqpar.launch.reporting.cases import Shown, find_cache, load
from seqpar.launch.reporting.record import Record, Scored, read_record, read_scored, score_folders
from seqpar.launch.reporting.volumes import Embedded, embed

BUDGET = 5_000_000  # bytes of the volumes in a page, which mail still takes


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the command line, checked."""
    p = argparse.ArgumentParser(prog="report.py", description=__doc__, allow_abbrev=False)
    p.add_argument("run", type=Path, help="run folder that train wrote")
    p.add_argument("--truth", type=Path, help="score and show this data set or folder of label maps, with --prediction")
    p.add_argument("--prediction", type=Path, help="predicted label maps of the same names (else: the run's own)")
    p.add_argument("--cases", type=int, default=6, help="cases to show, the worst first (%(default)s)")
    p.add_argument("--out", type=Path, help="file to write (report.html in RUN)")
    options = p.parse_args(arguments)
    if (options.truth is None) != (options.prediction is None):
        raise ValueError("--truth and --prediction belong together: give both, or neither")
    if options.cases < 0:
        raise ValueError(f"--cases is {options.cases}: 0 or more are needed")
    options.out = options.out or options.run / "report.html"
    if options.out.is_dir():
        raise ValueError(f"--out {options.out} is a folder: name a file")
    return options


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code; gaps in a run stand in the page, faults of the folders given are errors too."""
    options = parse(arguments)
    record, gaps = read_record(options.run), list[str]()
    scored: Scored | None = None
    if options.truth is not None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        scored = score_folders(options.truth, options.prediction, record.labels, min(8, cores))
    else:
        try:
            scored = read_scored(options.run)
        except DataError as error:
            gaps.append(f"There are no scores of single cases: {error}.")
    shown = show(record, scored, options.cases, gaps) if scored else []
    cases, volumes = section(record, scored, shown) if scored and shown else ("<p>No case is shown.</p>", {})
    write_output(options.out, page.page(record, scored, cases, volumes, gaps))
    faults = scored.faults if scored and options.truth is not None else ()
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr, flush=True)
    size = options.out.stat().st_size / 1e6
    print(f"{options.out}: {len(shown)} cases shown, {size:.1f} MB", flush=True)
    return DATA if faults else 0


def show(record: Record, scored: Scored, count: int, gaps: list[str]) -> list[tuple[Shown, Embedded]]:
    """Returns the worst cases with their volumes; one that cannot be read is a gap, and the next takes its place."""
    cache, shown = find_cache(record), list[tuple[Shown, Embedded]]()
    if cache is None and count:
        gaps.append("The prepared data are not where the run had them: cases are shown without their images.")
    budget = BUDGET // max(1, min(count, len(scored.cases)))
    for case in scored.cases:
        if len(shown) == count:
            break
        try:
            found = load(case, record, cache)
        except DataError as error:
            gaps.append(f"Case {case.name} cannot be shown: {error}.")
            continue
        images = list(found.images.values())
        shown.append((found, embed(images, found.truth, found.prediction, found.spacing, budget)))
    return shown


def section(record: Record, scored: Scored, shown: list[tuple[Shown, Embedded]]) -> tuple[str, dict[str, object]]:
    """Returns the section of the cases, and what its viewer reads."""
    by_name = {case.name: case for case in scored.cases}
    legend = page.legend(record)
    viewer = (page.PARTS / "viewer.html").read_text()
    viewer = viewer.replace("{{legend}}", legend).replace("{{note}}", page.viewer_note(shown, BUDGET))
    planes = "".join(page.case_section(by_name[case.name], case) for case, _ in shown)
    told = '<p class="small">Planes that hold most of the truth; worst cases first.</p>'
    return viewer + legend + told + planes, page.viewer_data(record, shown)


def main() -> None:
    """Returns never: the console script."""
    sys.exit(run(act))


if __name__ == "__main__":
    main()
