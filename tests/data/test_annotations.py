"""Which classes a case's label shows: listed in three ways, checked, kept in the cache."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from seqpar.cluster.exit_codes import DATA, run
from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.preparation.cache import open_cache
from seqpar.data.preparation.prepare_dataset import prepare
from seqpar.scores.label_files import dataset_at
from tests.support.folders import label_array, nnunet, save, write_json

LABELS = {"background": 0, "liver": 1, "spleen": 2, "kidney": 5}
SHOWN = {"c_000": (1, 5), "c_001": (2,), "c_002": ()}  # c_003 shows all


def organs(root: Path, **more: object) -> Path:
    """Writes four cases whose labels have the classes that they show."""
    nnunet(root, cases=4, labels=LABELS, **more)
    for case, shown in {**SHOWN, "c_003": (1, 2, 5)}.items():
        save(root / "labelsTr" / f"{case}.nii.gz", label_array(shown))
    return root


def names(values: tuple[int, ...]) -> list[str]:
    return [name for name, value in LABELS.items() if value in values]


def by_json(root: Path) -> None:
    organs(root, annotated={case: names(shown) for case, shown in SHOWN.items()})


def by_csv(root: Path) -> None:
    organs(root)
    rows = [",".join([case, *("10"[value not in shown] for value in (2, 1, 5))]) for case, shown in SHOWN.items()]
    (root / "annotated.csv").write_text("\n".join(["case, spleen,liver,kidney", *rows, ""]))


def by_files(root: Path) -> None:
    organs(root)
    (root / "annotated").mkdir()
    for case, shown in SHOWN.items():
        (root / "annotated" / f"{case}.txt").write_text("background\n" + "\n".join(names(shown)))


@pytest.mark.parametrize("write", [by_json, by_csv, by_files])
def test_three_ways_say_the_same_and_the_cache_keeps_it(write, tmp_path: Path) -> None:
    write(tmp_path / "D")
    data = read_dataset(tmp_path / "D")
    assert not data.faults and {case.id: case.annotated for case in data.cases} == {**SHOWN, "c_003": None}
    report = prepare(data, tmp_path / "cache", workers=0)
    assert not report.faults and len(report.prepared) == 4
    assert open_cache(tmp_path / "cache").annotated == {"c_000": (1, 3), "c_001": (2,), "c_002": ()}


def test_a_data_set_without_lists_keeps_its_cache(tmp_path: Path) -> None:
    data = read_dataset(organs(tmp_path / "D"))
    prepare(data, tmp_path / "cache", workers=0)
    cache = open_cache(tmp_path / "cache")
    assert cache.annotated == {} and "annotated" not in cache.described
    by_csv(tmp_path / "D")  # the same labels again, but later
    report = prepare(read_dataset(tmp_path / "D"), tmp_path / "cache", workers=0)
    assert not report.prepared and len(report.kept) == 4, "files are compared, and no case is prepared again"
    assert open_cache(tmp_path / "cache").annotated["c_001"] == (2,)


def test_voxels_of_a_class_that_is_not_listed_are_a_fault_of_the_case(tmp_path: Path) -> None:
    by_json(tmp_path / "D")
    save(tmp_path / "D" / "labelsTr" / "c_001.nii.gz", label_array((1, 2)))
    report = prepare(read_dataset(tmp_path / "D"), tmp_path / "cache", workers=0)
    (fault,) = report.faults
    assert "c_001.nii.gz" in fault.path and "voxels of value [1]" in fault.problem and "case c_001" in fault.problem
    organs(tmp_path / "E")
    prepare(read_dataset(tmp_path / "E"), tmp_path / "other", workers=0)
    write_json(tmp_path / "E" / "annotated.json", {})  # no such way: it is ignored
    (tmp_path / "E" / "annotated.csv").write_text("case,liver\nc_003,1\n")
    report = prepare(read_dataset(tmp_path / "E"), tmp_path / "other", workers=0)
    assert [fault.problem[:26] for fault in report.faults] == ["has voxels of value [2, 5]"], "of kept cases too"


BAD = {
    "case,liver\nc_009,1\n": "lists case c_009, which the data set does not have",
    "case,heart\nc_000,0\n": "has a column heart; the classes are liver, spleen, kidney",
    "case,liver\nc_000,yes\n": "case c_000 has yes; it needs 0 or 1 for each of liver",
    "case,liver\nc_000,1\nc_000,0\n": "lists case c_000 twice",
    "id,liver\nc_000,1\n": "begins with id,liver; it needs the header case,CLASS",
    "": "begins with nothing",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_table_is_refused_with_what_is_needed(text: str, tmp_path: Path) -> None:
    organs(tmp_path / "D")
    (tmp_path / "D" / "annotated.csv").write_text(text)
    with pytest.raises(DataError, match="annotated.csv") as fault:
        read_dataset(tmp_path / "D")
    assert BAD[text] in str(fault.value)


def test_two_ways_at_once_and_a_list_of_another_kind_are_refused(tmp_path: Path) -> None:
    by_json(tmp_path / "D")
    (tmp_path / "D" / "annotated.csv").write_text("case,liver\nc_000,1\n")
    with pytest.raises(DataError, match="and so does dataset.json; keep one"):
        read_dataset(tmp_path / "D")
    organs(tmp_path / "E", annotated=["c_000"])
    with pytest.raises(DataError, match="must be an object of lists"):
        read_dataset(tmp_path / "E")


def test_hidden_classes_have_no_scores() -> None:
    from seqpar.scores.label_scores import score, summarise

    truth, prediction = np.zeros((2, 6, 6, 6), np.uint8)
    truth[:3], prediction[:2], prediction[4:] = 1, 1, 2
    classes = {"liver": (1,), "spleen": (2,), "both": (1, 2)}
    for more in ({}, {"lesion_wise": True}, {"surfaces": False}, {"empty": "brats"}):
        full = score(truth, prediction, classes, (1, 1, 1), **more)
        part = score(truth, prediction, classes, (1, 1, 1), hidden=("spleen", "both"), **more)
        assert part["liver"] == full["liver"] and all(part[name].keys() == full[name].keys() for name in classes)
        assert np.isnan(part["spleen"]["Dice"]) and part["spleen"]["FP"] == part["spleen"]["TN"] == 0
        summary = summarise([part, full])
        assert summary["num_values"]["both"]["Dice"] == 1
        assert summary["global"]["both"]["Dice"] == summary["mean"]["both"]["Dice"] == full["both"]["Dice"]


def test_evaluation_of_a_data_set_scores_what_its_labels_show(tmp_path: Path) -> None:
    from seqpar.cli import evaluate

    by_csv(tmp_path / "D")
    for n in range(4):
        save(tmp_path / "out" / f"c_{n:03d}.nii.gz", label_array((1, 2, 5)))
    assert evaluate.act([str(tmp_path / "D"), str(tmp_path / "out"), "--workers", "1"]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {key: row["Dice"] for key, row in summary["num_values"].items()} == {"1": 2, "2": 2, "5": 2}
    assert len(summary["metric_per_case"]) == 4


@pytest.mark.parametrize("place", ["labelsTs", "elsewhere"])
@pytest.mark.parametrize("way", ["csv", "files", "json"])
def test_a_list_next_to_label_maps_says_what_they_show(place, way, tmp_path, capsys) -> None:
    from seqpar.cli import evaluate

    root, content = organs(tmp_path / "D"), json.loads((tmp_path / "D" / "dataset.json").read_text())
    folder, regions = root / place, {"organs": [1, 2], "liver": 1, "spleen": 2, "kidney": 5, "background": 0}
    save(folder / "new.nii.gz", label_array((1,)))
    content |= {"labels": regions, "regions_class_order": [1, 2, 3, 5]}
    if way == "json":
        write_json(folder / "dataset.json", {**content, "annotated": {"new": ["liver"]}})
    else:
        write_json(root / "dataset.json", content)
        (folder / "annotated").mkdir()
        (folder / "annotated/new.txt").write_text("liver")
    if way == "csv":
        (folder / "annotated/new.txt").unlink()
        (folder / "annotated").rmdir()
        (folder / "annotated.csv").write_text("case,liver,spleen\nnew,1,0\n")
    save(tmp_path / "out" / "new.nii.gz", label_array((1, 2, 5)))
    assert evaluate.act([str(folder), str(tmp_path / "out"), "--workers", "1"]) == 0
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["num_values"]
    assert {key: row["Dice"] for key, row in rows.items()} == {"1": 1, "2": 0, "5": 0, "(1, 2)": 0}
    (folder / "other.nii").write_bytes(b"")
    (folder / "other.nii.gz").symlink_to(tmp_path / "gone")  # other files do not count
    alone = [str(folder / "new.nii.gz"), str(tmp_path / "out/new.nii.gz"), "--json", str(tmp_path / "alone.json")]
    assert evaluate.act(alone) == 0
    (folder / "other.nii").unlink()
    (folder / "other.nii.gz").unlink()
    assert json.loads((tmp_path / "alone.json").read_text())["num_values"] == rows
    (root / "dataset.json").unlink()
    if way == "json":
        shutil.move(folder / "dataset.json", tmp_path / "named.json")
    else:
        assert run(evaluate.act, [str(folder), str(tmp_path / "out")]) == DATA
        assert "add one next to it (or name it to evaluate by --dataset)" in capsys.readouterr().err
        write_json(tmp_path / "named.json", content)
    assert evaluate.act([str(folder), str(tmp_path / "out"), "--dataset", str(tmp_path / "named.json")]) == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["num_values"] == rows


def test_lists_of_other_cases_and_empty_ones_change_nothing(tmp_path: Path) -> None:
    """A copy of some label maps may come with the list of all; a data set's own list stands in the data set."""
    by_csv(tmp_path / "D")
    shutil.copytree(tmp_path / "D/labelsTr", tmp_path / "copy")
    for name in ("annotated.csv", "dataset.json"):
        shutil.copy(tmp_path / "D" / name, tmp_path / "copy")
    (tmp_path / "copy/c_002.nii.gz").unlink()
    copied = dataset_at(tmp_path / "copy")
    assert copied is not None
    assert {case.id: case.annotated for case in copied.cases} == {"c_000": (1, 5), "c_001": (2,), "c_003": None}
    (told,) = copied.notes
    assert told.endswith(
        "annotated.csv: lists cases that are not among the label maps (1), such as c_002: these lines are ignored"
    )
    (tmp_path / "D/labelsTr/annotated.csv").write_text("case,liver,spleen,kidney\nc_000,0,0,0\n")
    own = dataset_at(tmp_path / "D/labelsTr")
    assert own is not None and {case.id: case.annotated for case in own.cases} == {**SHOWN, "c_003": None}
    (tmp_path / "D/annotated.csv").unlink()
    with pytest.raises(DataError, match="is not read by training there: move it to .*/D"):
        dataset_at(tmp_path / "D/labelsTr")
    (tmp_path / "copy/annotated.csv").write_text("case,liver,spleen,kidney\nc_000.nii.gz,1,0,0\n")
    unmatched = dataset_at(tmp_path / "copy")
    assert unmatched is not None and "such as c_000.nii.gz: these lines are ignored" in unmatched.notes[0]
    (tmp_path / "copy/annotated.csv").write_text("case,liver,spleen,kidney\n")
    assert dataset_at(tmp_path / "copy") is None
    (tmp_path / "copy/annotated.csv").unlink()
    (tmp_path / "copy/annotated").mkdir()
    assert dataset_at(tmp_path / "copy") is None and dataset_at(tmp_path / "copy", tmp_path / "copy") is None
