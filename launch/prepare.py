"""Prepares a data set for training: ``python launch/prepare.py DATA [--out CACHE]``."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import Dataset, recognise
from seqpar.data.preparation.prepare import PrepareSettings, Report, cache_folder, check_cache, is_current, prepare
from seqpar.launch.job.exit_codes import DATA, run
from seqpar.launch.job.progress_bar import ProgressBar


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code of preparing (or checking) one data set: 0, or 3 where something was wrong."""
    options = _parser().parse_args(arguments)
    settings = PrepareSettings.spaced(options.spacing)
    dataset = recognise(options.data)
    out = cache_folder(dataset, options.out)
    names = ", ".join(dataset.modalities)
    print(f"{dataset.name}: {dataset.layout}, {len(dataset.cases)} cases, {names} -> {out}")
    if options.check:
        return _listed(_check(dataset, out, settings), "cache")
    try:
        report = prepare(dataset, out, settings, options.workers, ProgressBar("preparing"))
    except KeyboardInterrupt:
        print(
            "\ninterrupted; what is finished is kept, and the same command goes on",
            file=sys.stderr,
            flush=True,
        )
        return 128 + signal.SIGINT
    _tell(report)
    return _listed(report.faults, "data set")


def _check(dataset: Dataset, out: Path, settings: PrepareSettings) -> list[DataError]:
    """Returns what is damaged in the cache, or that it is out of date."""
    faults = [*dataset.faults, *check_cache(out)]
    if not faults and not is_current(dataset, out, settings):
        faults = [DataError(out, "is not what the data set and settings are now; run prepare again")]
    return faults


def _tell(report: Report) -> None:
    """Prints what was done in one line."""
    without = f", {len(report.empty)} of them without foreground" if report.empty else ""
    done = f"{len(report.prepared)} prepared, {len(report.kept)} already there{without}"
    print(f"{done}, {len(report.faults)} faults")


def _listed(faults: Sequence[DataError], what: str) -> int:
    """Returns the exit code for faults, after a line for each."""
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr, flush=True)
    if not faults:
        print(f"the {what} is in order")
    return DATA if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prepare", description="Prepares a data set for training.")
    parser.add_argument("data", help="folder, list (.json), or name or number under nnUNet_raw")
    parser.add_argument("--out", help="folder of the cache (default: in $SEQPAR_CACHE, else DATA.prepared)")
    parser.add_argument("--spacing", default="source", help="source, median, or R,A,S in mm (default: source)")
    parser.add_argument("--workers", type=int, help="processes; 0 works in this one (default: cores, at most 8)")
    parser.add_argument("--check", action="store_true", help="verify the cache's digests and change nothing")
    return parser


def main() -> None:
    """Ends the process with the act's exit code."""
    sys.exit(run(act))


if __name__ == "__main__":
    main()
