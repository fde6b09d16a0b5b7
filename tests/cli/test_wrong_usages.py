"""What people mistype in every act: one line that names the flag or file and what to change, the code, no traceback."""

import importlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from seqpar.cluster.exit_codes import run
from tests.support.folders import child, exit_code, nnunet, save
from tests.support.predictions import make_run
from tests.support.programs import PROGRAMS

ACTS = {name: importlib.import_module(module) for name, module in PROGRAMS.items()}
NOBODY = 65534
TINY = "--preset debug --tile 16 --patch 8 --device cpu --workers 0 --batch 2"
USAGES = """
2 train --tilee 32 | nearest to --tilee is --tile
2 train --c | --c is a flag of nnU-Net's: use --resume
2 train -num_gpus 2 | -num_gpus is a flag of nnU-Net's: use --seqpar
2 predict run -i D -o out --disable_tta | --disable_tta is a flag of nnU-Net's: use --mirror none
2 predict run -i D -o out -chk checkpoint_best.pth | -chk is a flag of nnU-Net's: use --checkpoint
2 train --tile 30 --patch 8 | use --tile 32 32 32
2 train --seqpar x | --seqpar: x must be a number of ranks, at least 1, or auto
2 train --pipe auto | --pipe: auto must be a number of ranks, at least 1
2 train --lr nan | --lr nan: it must be above 0
2 train --seed 99999999999999999999 | --seed 99999999999999999999: it must be in
2 train --accumulate 4 --micro-batches 2 | --accumulate and --micro-batches are two names
2 train --fold 7 --data D --cache cache | --fold 7: the folds are 0 to 4
2 train --fold 7 | --fold 7: the folds are 0 to 4; other values are 90:10, 70:15:15, all and all5
2 train --resume --out nothing | no run has begun there, as it does not exist
3 train --resume --out no-layout | no-layout/config.json: lacks 'layout'
3 train --resume --out a-list | a-list/config.json: is damaged (no JSON object)
3 train --out file --data D --cache cache | --out file: cannot be written
3 train --data nowhere --out out | nowhere: does not exist
3 predict run -i nowhere -o out | nowhere: does not exist
2 predict missing.zip -i D -o out | missing.zip does not exist
3 predict file -i D -o out | file: is no exported run, or damaged
3 predict not-text -i D -o out | not-text/config.json: is damaged
3 predict no-decoder -i D -o out | no-decoder/config.json: decoder foo: choose one of
2 predict run -i D -o out --mirror none W | --mirror none W: none and directions contradict
3 predict no-weights -i D -o out | no-weights
3 predict run -i nan -o out | voxels are NaN or infinite
2 predict run -i D -o out --postprocessing seven.json | is for label 7, which run does not write
2 predict run -i D -o out --overlap 1 | overlap
2 predict run -i D -o out --min-component x | min-component
2 predict run -i D -o out --temperature 2 | --temperature 2.0 would do nothing: labels do not depend on it
2 predict run -i D -o out --uncertainty --temperature 1e-300 | --temperature 1e-300: give a number from 0.001 to 1000
2 predict run -i D -o out --uncertainty --temperature hot | 'hot' is neither a number nor 'run'
2 predict run -i D -o out --npz --temperature run | --temperature run: run has none: give a number, or remove it
2 predict run -i D -o out --npz --temperature run --checkpoint latest | --checkpoint latest came
3 evaluate nowhere D | nowhere: does not exist
3 evaluate nan nowhere | nowhere: does not exist
2 evaluate D/labelsTr D/labelsTr --json D/dataset.txt | --json D/dataset.txt: name a file that ends with .json
2 evaluate D/labelsTr D/labelsTr --brats 2023 --regions X=1 | --brats declares the labels
2 evaluate D/labelsTr D/labelsTr --nsd-tolerance nan | --nsd-tolerance is nan
3 prepare nowhere | nowhere: does not exist
2 prepare D --spacing 1,1 | --spacing 1,1: give source, median, or three sizes above 0
3 prepare D --out file | file: cannot be written
2 plan --memory nan | --memory nan: it must be
2 plan --volume 512 512 | --volume: expected 3 arguments
2 plan --volume 0 5 5 | --volume 0 5 5: it must be in [1, 65536]
2 plan --predict --largest-tile --volume 8 8 8 | --largest-tile
2 plan --pipe x | --pipe: x must be a number of ranks
2 plan --classes 1 | --classes 1: it must be in [2, 1000000]
3 plan --tile 32 --data nowhere --device a100 | nowhere: does not exist
3 plan --tile 32 --data nowhere --device a100 --channels 1 --classes 2 | nowhere: does not exist
2 plan --resume --out x --device cpu | --resume: plan does not read the run in --out: train --resume --dry-run plans it
2 doctor --time-limit 1 | --time-limit 1.0: it must be at least 5 seconds
2 doctor --json D | --json D is a folder
2 doctor --json nowhere/x.json | --json nowhere/x.json: its folder does not exist
2 report nowhere | nowhere does not exist
2 report run --out run/config.json | a report is an HTML page; name it config.json.html
2 phantom --out out --cases 0 | --cases 0
2 phantom --out out --seed -1 | seed must be at least 0, got -1
2 figures 99 | there is no figure 99 here
3 figures 5 --out file | --out file: cannot be written (File exists)
2 figures 5 --reach 2 --out out | --reach 2.0: only figure 14 asks for it
2 export run out.tar | an archive is a zip file
2 export nowhere out.zip | nowhere does not exist
2 pretrain --tilee 32 | nearest to --tilee is --tile
2 tune --out out | --space is missing
3 tune --space lr=1,2 --preset debug --data D --device cpu --out file --plan | --out file: cannot be written
3 tune --space lr=1,2 --preset debug --data D --device cpu --out D --plan | --out D: belongs to a data set,
2 bench nothing | there is no bench of nothing
"""
SHUT = """
3 train --data D --cache cache --out shut/run | shut/run
3 train --data shut --out nobodys | shut: cannot be read
3 predict shut -i D -o out | shut/
3 predict run -i D -o shut/out | shut/
3 evaluate D/labelsTr shut | shut
3 prepare D --out shut/cache | shut/cache
3 report shut | shut/
3 export run shut/out.zip | shut/
3 phantom --out shut/out --cases 1 --size 24 28 24 --workers 1 | shut/out
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder with a data set, a run, damaged ones of it, and a folder that nobody may enter."""
    with tempfile.TemporaryDirectory(prefix="usages-") as name:
        root = Path(name)
        root.chmod(0o777)  # for whom the system keeps out, as it does not root
        nnunet(root / "D", 5)
        save(root / "nan" / "a_0000.nii.gz", np.full((8, 8, 8), np.nan, np.float32))
        (root / "file").write_text("text")
        for run_name in ("run", "no-layout", "a-list", "not-text", "no-weights", "no-decoder"):
            make_run(root / run_name)
        no_decoder = root / "no-decoder" / "config.json"
        no_decoder.write_text(no_decoder.read_text().replace('"decoder": "plain"', '"decoder": "foo"'))
        (root / "a-list" / "config.json").write_text("[]")
        (root / "not-text" / "config.json").write_bytes(b"\xff\xfe\x80")
        (root / "no-weights" / "model.safetensors").unlink()
        step = {"labels_or_regions": [7]}
        names = ["remove_all_but_largest_component_from_segmentation"]
        steps = {"postprocessing_fns": names, "postprocessing_kwargs": [step]}
        (root / "seven.json").write_text(json.dumps(steps))
        (root / "shut").mkdir(mode=0)
        yield root


@pytest.fixture
def typed(place, tmp_path) -> Callable[[str, bool], tuple[int, str]]:
    """Returns a function that types a line there, in a process of its own, maybe as nobody: exit code and output."""

    def type_line(line: str, as_nobody: bool) -> tuple[int, str]:
        name, *arguments = shlex.split(line)
        more = shlex.split(TINY) if name == "train" else []
        said = tmp_path / "said.txt"

        def work() -> None:
            os.chdir(place)
            output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            if as_nobody and os.geteuid() == 0:
                os.seteuid(NOBODY)
            for stream in (1, 2):
                os.dup2(output, stream)
            sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
            code = run(ACTS[name].act, [*more, *arguments])
            sys.stdout.flush()
            os._exit(code)

        return exit_code(child(work)), said.read_text()

    return type_line


def lines_of(table: str) -> list[tuple[int, str, str]]:
    """Returns the rows of a table: exit code, what is typed, what the error says."""
    rows = [row.partition(" | ") for row in table.strip().splitlines()]
    return [(int(line[0]), line[2:], fragment) for line, _, fragment in rows]


@pytest.mark.parametrize(
    ("code", "line", "fragment", "as_nobody"),
    [(*row, False) for row in lines_of(USAGES)] + [(*row, True) for row in lines_of(SHUT)],
)
def test_what_is_mistyped_is_one_error_that_names_it(typed, code, line, fragment, as_nobody) -> None:
    came, said = typed(line, as_nobody)
    errors = [text for text in said.splitlines() if text.startswith("error: ")]
    assert came == code and len(errors) == 1 and "Traceback" not in said, said
    assert fragment in errors[0] and len(errors[0]) < 400 and "next: " not in said


def test_every_act_has_such_a_line() -> None:
    assert {line.split()[0] for _, line, _ in lines_of(USAGES)} == ACTS.keys()
