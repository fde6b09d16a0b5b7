"""Attacks by what an output is called, and by arguments that are empty because a variable of the shell is not set."""

from collections.abc import Callable
from pathlib import Path

from tests.attacks.attack import TINY, Attack
from tests.support.folders import image_array, nnunet, save, write_json
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


def _one_unreadable_image(here: Path) -> None:
    _run(here)
    (here / "D/imagesTr/c_001_0000.nii.gz").chmod(0)


def _predicted_the_other(here: Path, said: str) -> None:
    assert [path.name for path in (here / "out").glob("*.nii.gz")] == ["c_000.nii.gz"]


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
        f"predict into {place} of a run",
        types=f"predict run -i D -o run/{place}",
        code=3,
        says=f"run/{place}: is a run's own, which training clears; choose another --output",
        make=_run,
        keeps="D run",
    )
    for place in ("validation", "validation-whole", "checkpoints/step-00000099")
]
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
        "predict into a new folder among images",
        types="predict run -i D -o D/imagesTr/sub",
        code=3,
        says="D/imagesTr/sub: belongs to a data set, which predict never writes into",
        make=_run,
        keeps="D run",
    )
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


def _foreign_tables(here: Path) -> None:
    """Makes predicted label maps and classes with their truth, and files that share a key or a column with ours."""
    nnunet(here / "D", 2)
    for n in range(2):
        save(here / "P" / f"c_00{n}.nii.gz", image_array(0) * 0)
    (here / "S").mkdir()
    (here / "S" / "predictions.csv").write_text("case,class,p(a),p(b)\nc_000_0000,a,1.0,0.0\nc_001_0000,b,0.0,1.0\n")
    (here / "labels.csv").write_text("class,case\na,c_000_0000\nb,c_001_0000\n")
    entries = [{"image": f"D/imagesTr/c_00{n}_0000.nii.gz", "label": name} for n, name in enumerate("ab")]
    write_json(here / "list.json", {"classes": ["a", "b"], "training": entries})
    (here / "old.csv").write_text("class,cases,sensitivity,specificity,AUC\n")  # as older versions began
    (here / "mine.csv").write_text("class,dice,my comment\n")
    (here / "mine.json").write_text('{"classes": {}, "metric_per_case": [], "author": "me"}')


ATTACKS += [
    Attack(
        f"evaluate {line}, which another program wrote",
        types=f"evaluate {line} --workers 1",
        code=3,
        says=f"{name}: is there, and evaluate did not write it: name another file by --{kind}",
        make=_foreign_tables,
        keeps="D P S labels.csv list.json mine.csv mine.json",
    )
    for line, name, kind in (
        ("labels.csv S --csv labels.csv", "labels.csv", "csv"),
        ("D/labelsTr P --csv labels.csv", "labels.csv", "csv"),
        ("D/labelsTr P --csv mine.csv", "mine.csv", "csv"),
        ("list.json S --json list.json", "list.json", "json"),
        ("D/labelsTr P --json mine.json", "mine.json", "json"),
    )
]
ATTACKS += [
    Attack(
        "evaluate over a table that an older version wrote",
        types="evaluate list.json S --csv old.csv",
        code=0,
        says="S/summary.json; old.csv",
        make=_foreign_tables,
        after=lambda here, _: _is_scored(here / "old.csv"),
        keeps="D P list.json",
    )
]


def _two_tasks(here: Path) -> None:
    """Makes a run, and a folder with the classes that another one predicted, and label maps."""
    _run(here)
    save(here / "P" / "c_000.nii.gz", image_array(0) * 0)
    (here / "P" / "predictions.csv").write_text("case,class,p(a),p(b)\nc_000,a,1.0,0.0\n")
    write_json(here / "P" / "prediction.json", {"task": "classify", "runs": [], "files": ["predictions.csv"]})


ATTACKS += [
    Attack(
        f"{line.split()[0]} where label maps and classes would be in one folder",
        types=line,
        code=3,
        says=words,
        make=_two_tasks,
        keeps="D P run",
    )
    for line, words in (
        ("predict run -i D -o P", "P: holds predictions of a run with another --task; choose another --output"),
        ("evaluate D P", "P: holds label maps and predictions.csv: name P/predictions.csv to score the classes"),
    )
]


def _is_scored(table: Path) -> None:
    assert table.read_text().splitlines()[1].startswith("a,1,1.0,1.0,1.0,")


def _own_file(name: str) -> Callable[[Path], None]:
    """Returns what makes a data set, and a folder that holds a file of another program, named as one of a run's."""

    def make(here: Path) -> None:
        nnunet(here / "D", 5)
        write_json(here / "out" / name, {"state": "ready"})

    return make


ATTACKS += [
    Attack(
        f"train {fold} into a folder with somebody's {name}",
        types=f"train {TINY} --data D --cache cache --out out {fold}",
        code=code,
        says=words,
        make=_own_file(name),
        keeps="D out",
    )
    for name, fold, code, words in (
        ("status.json", "", 2, "--out out holds a status.json that no run wrote"),
        ("status.json", "--fold all5", 2, "--out out holds a status.json that no run wrote"),
        ("folds.json", "--fold all5", 3, "out/folds.json: is damaged (no list of flags): restore it, or name another"),
        ("checkpoints/best", "", 2, "--out out holds best, which would be lost"),
        ("checkpoints/latest", "", 2, "--out out holds latest, which would be lost"),
    )
]
ATTACKS += [
    Attack(
        f"tune {flags} into a folder with somebody's status.json",
        types=f"tune {TINY} --data D --cache cache --out out --space lr=1e-3,1e-4 --devices 1 {flags}",
        code=2,
        says="--out out holds a status.json that no run wrote, and that would be replaced",
        make=_own_file("status.json"),
        keeps="D out",
    )
    for flags in ("", "--plan")
]


def _preprocessed(here: Path) -> None:
    """Makes a run, a folder that nnU-Net preprocessed, with its labels alone, and predictions."""
    _run(here)
    (here / "D" / "imagesTr").rename(here / "images")
    (here / "D" / "labelsTr").rename(here / "D" / "gt_segmentations")
    save(here / "P" / "c_000.nii.gz", image_array(0) * 0)
    save(here / "P" / "c_001.nii.gz", image_array(0) * 0)


ATTACKS += [
    Attack(line, types=line, code=code, says=words, make=_preprocessed, keeps="D images run")
    for line, code, words in (
        ("evaluate D/gt_segmentations P --workers 1", 0, "2 cases, 1 class: mean Dice 0.0000"),
        ("evaluate D P --workers 1", 3, ("name the raw folder, or ", "D/gt_segmentations as the truth of scores")),
        ("train --data D --out out --preset debug", 3, "nnU-Net preprocessed this one: name the raw folder"),
        ("predict run -i images -o D/gt_segmentations/out", 3, "belongs to a data set, which predict never writes"),
        ("predict run -i images -o D", 3, "D: belongs to a data set, which predict never writes into"),
    )
]
ATTACKS.append(
    Attack(
        "an image that may not be read, among others",
        types="predict run -i D/imagesTr -o out",
        make=_one_unreadable_image,
        as_nobody=True,
        code=3,
        says=("c_001_0000.nii.gz: cannot be read (Permission denied)", "label maps of 1 case, 1 fault: out"),
        after=_predicted_the_other,
    )
)
