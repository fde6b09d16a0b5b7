"""Writes a phantom data set: ``python launch/phantom.py --cases 24 --out DIR``."""

import os
import sys
from collections.abc import Sequence

from seqpar.cluster.exit_codes import run
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.formats.splits import FOLDS
from seqpar.data.phantom.kinds import KINDS
from seqpar.data.phantom.phantom_files import LAYOUTS, PhantomSettings, write_phantom
from seqpar.settings.field import AT_LEAST_A_PROCESS
from seqpar.settings.parser import Parser, check_numbers
from seqpar.terminal import ProgressBar, coloured, next_command
from seqpar.text import quantity

CLASSIFIER = ("--task", "classify", "--network", "resattnet18", "--epochs", "14", "--batch", "4")  # which learns these


def act(arguments: Sequence[str]) -> int:
    """Writes the cases; returns exit code 0."""
    parser = Parser("phantom", description="Writes a data set of phantoms, to try things out.")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write the data set to")
    parser.add_argument("--cases", type=int, default=24, metavar="CASES", help="number of patients (%(default)s)")
    parser.add_argument("--kind", choices=list(KINDS), default="brain", help="; ".join(_line(k) for k in KINDS))
    parser.add_argument("--layout", choices=LAYOUTS, help="names of folders and files (default: the kind's)")
    parser.add_argument(
        "--size",
        type=int,
        nargs="+",
        metavar="VOXELS",
        help="voxels per direction, one number or three; the field of view stays the same (default: the kind's)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="NUMBER", help="seed of the random patients (%(default)s)"
    )
    workers = min(4, os.cpu_count() or 1)
    processes = "processes (default: number of cores, at most 4)"
    parser.add_argument("--workers", type=int, default=workers, metavar="PROCESSES", help=processes)
    options = parser.parse_args(arguments)
    check_numbers(options, workers=AT_LEAST_A_PROCESS)
    size = options.size and tuple(options.size * 3 if len(options.size) == 1 else options.size)
    settings = PhantomSettings.of(options.kind, options.layout, size, options.seed)
    root = write_phantom(options.out, options.cases, settings, options.workers, ProgressBar("phantom"))
    there = len(read_dataset(root).cases)
    more = f" (and {quantity(there - options.cases, 'case')} that were there)" if there > options.cases else ""
    print(f"{quantity(options.cases, 'case')} in {root}{more}")
    kind = KINDS[options.kind]
    own = CLASSIFIER if kind.class_of else ("--preset", "auto") * (settings.size != kind.size)  # else laptop suits
    train = next_command("train", *own, "--data", root)
    test = next_command("predict", "RUN", "-i", root, "-o", "PREDICTIONS")
    if there >= FOLDS:
        print(coloured(f"next: {train}  (to train on them)", sys.stdout))
    print(coloured(f"next: {test}  (to test a network that was trained on others)", sys.stdout))
    return 0


def _line(kind: str) -> str:
    """Returns what a kind shows, for --help."""
    about = KINDS[kind]
    return f"{kind}: {about.description}, {'x'.join(map(str, about.size))} voxels"


def main() -> None:
    sys.exit(run(act))


if __name__ == "__main__":
    main()
