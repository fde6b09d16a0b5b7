"""Packs a trained run to hand on: ``python launch/export.py RUN OUT.zip``.

``OUT.pth`` has the encoder of a Primus, pretrained or trained, for nnU-Net to train on, or the weights of a MedNeXt for
its package. A folder ``OUT`` becomes an nnU-Net results folder.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from seqpar.cluster.exit_codes import run
from seqpar.data.addresses import local_file
from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import place_in_data
from seqpar.runs.archive import write_archive
from seqpar.runs.fold_folder import expand_folds
from seqpar.runs.nnunet_export import write_results
from seqpar.runs.run_folder import read_config, read_windows
from seqpar.runs.run_status import warn_if_killed, warn_of_weights
from seqpar.runs.trained_run import TrainedRun, find_weights, load_run, read_run
from seqpar.settings.parser import Parser
from seqpar.tasks.lookup import task_of
from seqpar.terminal import coloured, next_command
from seqpar.weights.nnssl import other_normalisation, write_pretrained
from seqpar.weights.nnunet_weights import write_mednext

_FILES = (".zip", ".pth", ".pt", ".safetensors", ".tar", ".gz", ".tgz")  # a target with another ending is a folder


def act(arguments: Sequence[str]) -> int:
    """Writes the file and prints what is in it; returns exit code 0."""
    parser = Parser("export", description="Packs a trained run into one file, or into an nnU-Net results folder.")
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder that train wrote, or folder of five folds for a folder OUT")
    add("out", type=Path, metavar="OUT", help="what to write: OUT.zip, which predict takes instead of a run "
        "folder; OUT.pth, the encoder of a Primus in nnssl's format, which nnU-Net can train further, or a "
        "MedNeXt's weights for its package; or a folder, from which nnU-Net predicts")  # fmt: skip
    add("--checkpoint", default="best", metavar="WHICH", help="best (default), latest or a file of the run's weights")
    add("--licence", default="not stated", metavar="TEXT", help="licence of the weights, such as CC-BY-4.0")
    options = parser.parse_args(list(arguments))
    options.run = local_file(options.run)
    place = options.out.parent if options.out.suffix in _FILES else options.out
    if kept := place_in_data(place):
        raise DataError(place, f"{kept}, which export never writes into: name another place")
    if options.out.suffix not in _FILES:
        return _hand_back(options)
    if options.out.suffix not in (".zip", ".pth"):
        raise ValueError(
            f"{options.out}: an archive is a zip file, weights for nnU-Net a pth file; name it {options.out.name}.zip"
        )
    warn_if_killed(options.run)
    warn_of_weights(options.run, are_named=options.checkpoint != "best")
    trained = read_run(options.run)
    weights = find_weights(trained, options.checkpoint)
    net = load_run(options.run, str(weights))  # weights of another network would be found out by its user
    if options.out.suffix == ".pth" and trained.config.network.startswith("mednext-"):
        plan = trained.recipe.plan
        write_mednext(options.out, net, plan.transpose_forward if plan else (0, 1, 2), options.licence)
        print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB, MedNeXt, licence: {options.licence}")
        print(f"next: mednextv1_train … -pretrained_weights {options.out}")
        return 0
    if options.out.suffix == ".pth":
        schemes = trained.recipe.schemes
        name = write_pretrained(options.out, net, trained.recipe.spacing, schemes, options.licence)
        print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB, {name}, licence: {options.licence}")
        if line := other_normalisation(schemes):
            print(line, file=sys.stderr)
        print(f"next: nnUNetv2_preprocess_like_nnssl -d DATASET -n NAME -pc {options.out}")
        return 0
    windows = read_windows(options.run)
    fitted = trained.temperatures if options.checkpoint == "best" else {}  # to the best checkpoint alone
    windows = windows._replace(temperatures=fitted)
    measured = windows.as_json() if windows.dice else {}
    caution = ""
    with suppress(DataError):  # its scores may be gone
        caution = task_of(trained.config).caution(options.run)
    task = task_of(trained.config)
    use = task.use_of(Path(options.out.name), options.run)
    about = write_archive(options.out, read_config(options.run), weights, options.licence, measured, caution, use=use)
    size = options.out.stat().st_size / 1e6
    print(f"{options.out}: {size:.1f} MB, weights {about['checkpoint']}, licence: {about['licence']}")
    if caution:
        print(coloured(f"warning: {caution}", sys.stderr), file=sys.stderr)
    print(coloured(f"next: {next_command(*task.use_of(options.out, options.run))}", sys.stdout))
    return 0


def _hand_back(options: argparse.Namespace) -> int:
    """Writes a run, or five folds, as an nnU-Net results folder; returns exit code 0."""
    runs = []
    for path in expand_folds([options.run]):
        warn_if_killed(path)
        warn_of_weights(path, are_named=options.checkpoint != "best")
        trained = read_run(path)
        weights = find_weights(trained, options.checkpoint)
        runs.append((trained, read_config(path), load_run(path, str(weights))))
    what, *notes = write_results(options.out, runs, options.licence)
    notes += _of_joined(runs[0][0])
    print(f"{options.out}: {what}, licence: {options.licence}")
    print("\n".join(notes), end="\n" * bool(notes), file=sys.stderr)
    folds = " ".join(sorted(path.name.removeprefix("fold_") for path in options.out.glob("fold_*")))
    on_cpu = "" if torch.cuda.is_available() else " -device cpu"
    print(f"next: nnUNetv2_predict_from_modelfolder -i IMAGES -o PREDICTIONS -m {options.out} -f {folds}{on_cpu}")
    return 0


def _of_joined(run: TrainedRun) -> list[str]:
    """Returns a note if a run learned several labels as one, which nnU-Net's folder cannot say."""
    if not (joined := dict(run.recipe.joined)):
        return []
    each = list[str]()
    for name, number in run.labels.items():
        first = run.recipe.values[number]
        values = [first, *(value for value, other in joined.items() if other == first)]
        each += ["--regions", shlex.quote(f"{name}={','.join(map(str, values))}")] if number else []
    told = (
        "note: the run learned joined labels (--join-labels), which this folder does not record: score its predictions"
    )
    return [f"{told} with evaluate {' '.join(each)}"]


def main() -> None:
    """Ends the process with the act's exit code."""
    sys.exit(run(act))


if __name__ == "__main__":
    main()
