"""Attacks by what an output is called, and by arguments that are empty because a variable of the shell is not set."""

from pathlib import Path

from tests.attacks.attack import TINY, Attack
from tests.support.folders import image_array, nnunet, save
from tests.support.predictions import make_run


def _run(here: Path) -> None:
    """Makes a data set, and a run with the label map of a case that it was validated on."""
    nnunet(here / "D", 2)
    make_run(here / "run")
    save(here / "run" / "validation" / "c_000.nii.gz", image_array(0) * 0)


def _predicted(here: Path) -> None:
    """Makes a run, and a folder of predictions that became a run folder as well."""
    _run(here)
    save(here / "run" / "c_001.nii.gz", image_array(0) * 0)


ATTACKS = [
    Attack(
        f"{line.split()[0]} with an empty {what}",
        types=line,
        code=2,
        says=f"{what} is empty: give it a value or remove it; is a shell variable not set?",
        make=_run,
        after=lambda here, _: _nothing_new(here),
        keeps="D run",
    )
    for line, what in (
        ("predict run -i D -o ''", "-o"),
        ("predict run -i '' -o out", "-i"),
        ("predict '' -i D -o out", "the argument after seqpar-predict"),
        ("evaluate D/labelsTr '' --json x.json", "the argument after D/labelsTr"),
        (f"train {TINY} --data '' --cache cache", "--data"),
        (f"train {TINY} --data D --cache cache --out ''", "--out"),
        (f"pretrain {TINY} --data=", "--data"),
        ("report run --out ''", "--out"),
        ("prepare D --out ''", "--out"),
    )
]


def _nothing_new(here: Path) -> None:
    assert sorted(path.name for path in here.iterdir()) == ["D", "run"]


ATTACKS += [
    Attack(
        "predict into a run folder",
        types="predict run -i D -o run",
        code=3,
        says="run: is a run folder, which evaluate takes for its validation; choose another --output",
        make=_run,
        keeps="D run",
    ),
    Attack(
        "evaluate a run folder that holds label maps",
        types="evaluate D/labelsTr run --json x.json --csv x.csv",
        code=3,
        says="run: holds a run, whose validation would be scored, and label maps next to it: name its folder",
        make=_predicted,
        keeps="D run",
    ),
]
ATTACKS += [
    Attack(
        f"evaluate with {line}",
        types=f"evaluate D/labelsTr P --workers 1 {line}",
        code=code,
        says=words,
        make=lambda here: (nnunet(here / "D", 1), save(here / "P" / "c_000.nii.gz", image_array(0) * 0)),
        keeps="D P",
    )
    for line, code, words in (
        ("--find-best P/summary.json", 2, "--find-best P/summary.json is to hold two results: name another file"),
        ("--json P/x.json --find-best P/x.json", 2, "--find-best P/x.json is to hold two results: name another file"),
    )
]


def _learned(here: Path) -> None:
    """Makes a prediction, and a postprocessing that was learned elsewhere."""
    nnunet(here / "D", 1)
    save(here / "P" / "c_000.nii.gz", image_array(0) * 0)
    (here / "p.json").write_text('{"written_by": "seqpar", "steps": []}')
    (here / "s.json").write_text('{"classes": {}, "metric_per_case": []}')


ATTACKS += [
    Attack(
        f"evaluate with {line}, which holds another result",
        types=f"evaluate D/labelsTr P --workers 1 {line}",
        code=3,
        says=words,
        make=_learned,
        keeps="D P p.json s.json",
    )
    for line, words in (
        ("--json p.json", "p.json: is there, and evaluate did not write it: name another file by --json"),
        ("--find-best s.json", "s.json: is there, and evaluate did not write it: name another file by --find-best"),
    )
]


def _long(here: Path) -> None:
    make_run(here / "run")
    for name in ("a", "b" * 240, "c"):  # with an output's name it has more than 255 letters
        save(here / "images" / f"{name}_0000.nii.gz", image_array(0))


ATTACKS += [
    Attack(
        "predict a case whose name leaves no room for an output's",
        types="predict run -i images -o out --probabilities",
        code=3,
        says=("bbb_label-0.nii.gz: cannot be written (File name too long", "label maps of 2 cases, 1 fault: out"),
        make=_long,
    )
]
ATTACKS += [
    Attack(
        "weights that are named twice",  # of three files, as of best, latest and another, one would count twice
        types="predict run -i D -o out --checkpoint run/model.safetensors best run/model.safetensors",
        code=0,
        says="predicting 2 cases with run/model.safetensors; 1 rank",
        make=_run,
        keeps="D run",
    )
]
