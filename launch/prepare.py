"""Prepares a data set for training: ``python launch/prepare.py DATA [--out CACHE]``."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import Dataset, recognise
from seqpar.data.preparation.cache_place import outdated_cache
from seqpar.data.preparation.prepare import PrepareSettings, Report, cache_folder, check_cache, is_current, prepare
from seqpar.data.preparation.source_check import check_sources
from seqpar.launch.job.display import coloured
from seqpar.launch.job.exit_codes import DATA, run
from seqpar.launch.job.next_command import next_command
from seqpar.launch.job.progress_bar import ProgressBar
from seqpar.launch.settings.command_line import Parser


def act(arguments: Sequence[str]) -> int:
    """Prepares or checks a data set; returns exit code 0, or 3 if something is wrong."""
    options = _parser().parse_args(arguments)
    settings = PrepareSettings.spaced(options.spacing)
    dataset = recognise(options.data)
    out = cache_folder(dataset, options.out, settings)
    names = ", ".join(dataset.modalities)
    print(f"{dataset.name}: {dataset.layout}, {len(dataset.cases)} cases, {names} -> {out}")
    if line := outdated_cache(dataset.root, out):
        print(line)
    if options.check:
        return _check(dataset, out, settings, options.workers)
    try:
        report = prepare(dataset, out, settings, options.workers, ProgressBar("preparing"))
    except KeyboardInterrupt:
        print(
            "\ninterrupted; what is finished is kept, and the same command goes on",
            file=sys.stderr,
            flush=True,
        )
        return 128 + signal.SIGINT
    _print_report(report)
    code = _print_faults(report.faults, "data set")
    if code == 0:
        more = ["--cache", options.out] if options.out else []
        more += ["--spacing", options.spacing] if options.spacing != "source" else []
        print(coloured(f"next: {next_command('train', '--data', options.data, *more)}", sys.stdout))
    return code


def _check(dataset: Dataset, out: Path, settings: PrepareSettings, workers: int | None) -> int:
    """Prints what is wrong with the data set's files and with its cache, if there is one; returns the exit code."""
    faults = [*dataset.faults, *check_sources(dataset, out, settings, workers, ProgressBar("checking"))]
    if not out.exists():
        print(f"{out}: there is no cache yet")
        return _print_faults(faults, "data set")
    faults += check_cache(out)
    if not faults and not is_current(dataset, out, settings):
        faults = [DataError(out, "is not what the data set and settings are now; run prepare again")]
    return _print_faults(faults, "data set, and its cache,")


def _print_report(report: Report) -> None:
    """Prints in one line what was done."""
    without = f", {len(report.empty)} of them without foreground" if report.empty else ""
    done = f"{len(report.prepared)} prepared, {len(report.kept)} already there{without}"
    print(f"{done}, {len(report.faults)} faults")


def _print_faults(faults: Sequence[DataError], what: str) -> int:
    """Prints a line for each fault; returns the exit code."""
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr, flush=True)
    if not faults:
        print(f"the {what} is in order")
    return DATA if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("prepare", description="Prepares a data set for training.")
    parser.add_argument(
        "data", metavar="DATA", help="folder of the data set, list of cases (.json), or name or number under nnUNet_raw"
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="folder of the cache (default: in $SEQPAR_CACHE if set, else in seqpar-prepared near DATA)",
    )
    parser.add_argument(
        "--spacing", default="source", metavar="MM", help="voxel size: source, median, or R,A,S in mm (default: source)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="PROCESSES",
        help="processes; 0: none but this one (default: number of cores, at most 8)",
    )
    parser.add_argument(
        "--check", action="store_true", help="only read all files, and compare the cache with them; change nothing"
    )
    return parser


def main() -> None:
    """Prepares what the command line says and exits with its code."""
    sys.exit(run(act))


if __name__ == "__main__":
    main()
