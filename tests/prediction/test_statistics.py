"""--statistics: voxels, ml and mean intensity per case and class, in the files' own numbers."""

import csv
import itertools
from dataclasses import replace
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest

from seqpar.data.errors import DataError
from seqpar.data.preparation.recipe import Intensity
from seqpar.prediction.class_statistics import statistics_of
from seqpar.tasks.segment import prediction
from seqpar.text import millilitres
from tests.support.folders import OBLIQUE, tree
from tests.support.predictions import RECIPE, act, labelled, make_run, voxels


def rows_of(path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


def test_a_class_has_the_volume_and_the_mean_of_its_voxels(tmp_path, echo, capsys) -> None:
    """The network answers with the image, whose numbers are scaled in the file and lie obliquely in space."""
    truth = labelled((9, 14, 10), (0, 1, 2, 4))
    truth[:3] = 0  # the crop leaves something out
    image = nibabel.Nifti1Image((truth * 4).astype(np.int16), OBLIQUE)
    image.header.set_slope_inter(0.25, 0)
    (tmp_path / "images").mkdir()
    nibabel.save(image, tmp_path / "images" / "case.nii.gz")
    recipe = replace(RECIPE, schemes=("none",), values=(0, 1, 2, 4))
    regions = {"WT": [1, 2, 3], "ET": [3]}
    names = {"background": 0, "NCR": 1, "ED": 2, "label 4": 3}
    run = make_run(tmp_path / "run", recipe, labels=names, regions=regions, regions_class_order=[2, 3])
    assert act(tmp_path, run, "--statistics") == 0
    labels, rows = voxels(tmp_path / "out" / "case.nii.gz"), rows_of(tmp_path / "out" / "statistics.csv")
    ml = 1.1 * 1.0 * 1.3 / 1000
    assert [row["class"] for row in rows] == ["NCR", "ED", "WT", "ET"] and rows[0]["case"] == "case"
    for row, members in zip(rows, ((1,), (2,), (1, 2, 4), (4,))):
        inside = np.isin(labels, members)
        assert int(row["voxels"]) == inside.sum()
        assert float(row["ml"]) == pytest.approx(inside.sum() * ml, rel=1e-4)
        assert row["mean T1"] == (f"{truth[inside].mean():.6g}" if inside.any() else "")
        assert row["sd T1"] == (f"{truth[inside].std():.6g}" if inside.any() else "")
    said = capsys.readouterr().out
    volumes = ", ".join(f"{row['class']} {millilitres(float(row['ml']))} ml" for row in rows)
    assert f"; {volumes}, " in said and f"\nstatistics: {tmp_path / 'out' / 'statistics.csv'}\n" in said
    assert rows[0]["mean T1"] == "" and float(rows[2]["mean T1"]) > 1, "both kinds of rows are shown"


def test_each_modality_has_its_mean_and_an_absent_class_none() -> None:
    labels = np.array([[[0, 1, 1, 3]]], np.uint8)
    image = np.array([[[[9, 1, 2, 8]]], [[[0, -4, -8, 1000]]]], np.int16)
    rows = statistics_of(labels, image, 0.01, {"a": (1,), "both": (1, 3), "none": (7,)})
    assert rows[0] == ["a", 2, 0.02, 1.5, -6.0, pytest.approx(0.5), pytest.approx(2.0)]
    spread = [pytest.approx(np.std(values)) for values in ([1, 2, 8], [-4, -8, 1000])]
    assert rows[1] == ["both", 3, 0.03, pytest.approx(11 / 3), pytest.approx(988 / 3), *spread]
    assert rows[2][:3] == ["none", 0, 0.0] and np.isnan(rows[2][3:]).all()


def test_a_continued_prediction_keeps_the_lines_of_finished_cases(images, tmp_path) -> None:
    run = make_run(tmp_path / "run")
    assert act(tmp_path, run, "--statistics") == 0
    whole = (tmp_path / "out" / "statistics.csv").read_text()
    assert [row["case"] for row in rows_of(tmp_path / "out" / "statistics.csv")] == ["c_000", "c_001", "c_002"]
    (tmp_path / "out" / "c_001.nii.gz").unlink()
    assert act(tmp_path, run, "--statistics", "--continue") == 0
    again = (tmp_path / "out" / "statistics.csv").read_text()
    assert sorted(again.splitlines()) == sorted(whole.splitlines())
    with pytest.raises(DataError, match=r"other settings \(statistics\)"):
        act(tmp_path, run, "--continue")


def test_a_second_set_of_images_keeps_the_lines_of_the_first_while_its_label_maps_are_there(images, tmp_path) -> None:
    run, table = make_run(tmp_path / "run"), tmp_path / "out" / "statistics.csv"
    assert act(tmp_path, run, "--statistics") == 0
    first = table.read_text().splitlines()
    for path in sorted((tmp_path / "images").iterdir()):
        path.rename(path.with_name(path.name.replace("c_000", "d_000").replace("c_001", "d_001")))
    (tmp_path / "out" / "c_001.nii.gz").unlink()
    assert act(tmp_path, run, "--statistics") == 0
    second = table.read_text().splitlines()
    assert sorted({row["case"] for row in rows_of(table)}) == ["c_000", "c_002", "d_000", "d_001"]
    assert [line for line in second if line.startswith("c_000")] == [line for line in first if line.startswith("c_000")]
    assert len(second) == len(set(second))
    ct = replace(RECIPE, modalities=("CT",), schemes=("ct",), intensities=(Intensity(-100, 300, 40, 20),))
    other = make_run(tmp_path / "other", ct)
    for path in sorted((tmp_path / "images").iterdir()):
        path.rename(path.with_name(path.name.replace("d_00", "e_00")))
    with pytest.raises(
        DataError, match=r"statistics\.csv: has the columns .*mean T1.* mean CT \(HU\), sd CT \(HU\); choose another"
    ):
        act(tmp_path, other, "--statistics")
    assert table.read_text().splitlines() == second and (tmp_path / "out" / "d_000.nii.gz").is_file()


def test_images_without_a_name_are_called_as_on_pages_and_older_tables_are_taken_over(images, tmp_path) -> None:
    run, table = make_run(tmp_path / "run", replace(RECIPE, modalities=("channel 0",))), tmp_path / "out/statistics.csv"
    assert act(tmp_path, run, "--statistics") == 0
    whole = table.read_text()
    assert whole.startswith("case,class,voxels,ml,mean image,sd image\n")
    table.write_text(whole.replace(" image", " channel 0"))
    (tmp_path / "out" / "c_001.nii.gz").unlink()
    assert act(tmp_path, run, "--statistics", "--continue") == 0
    assert sorted(table.read_text().splitlines()) == sorted(whole.splitlines())


def test_a_table_that_predict_did_not_write_is_not_overwritten(images, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "statistics.csv").write_text("mine")
    with pytest.raises(DataError, match=r"statistics\.csv: would be overwritten"):
        act(tmp_path, make_run(tmp_path / "run"), "--statistics")
    assert (tmp_path / "out" / "statistics.csv").read_text() == "mine"


def test_a_table_that_somebody_changed_is_refused_before_anything_is_written(images, tmp_path) -> None:
    run, table = make_run(tmp_path / "run"), tmp_path / "out" / "statistics.csv"
    assert act(tmp_path, run, "--statistics") == 0
    text = table.read_text()
    table.write_text(text, encoding="utf-8-sig")  # as a spreadsheet saves it
    assert act(tmp_path, run, "--statistics", "--continue") == 0
    more_columns = "".join(f"{line},{n or 'remark'}\n" for n, line in enumerate(text.splitlines()))
    rows = [line.split(",") for line in text.splitlines()]
    moved_columns = "".join(",".join([*row[:-2], row[-1], row[-2]]) + "\n" for row in rows)
    for changed, more in itertools.product((more_columns, moved_columns), ((), ("--continue",))):
        table.write_text(changed)
        before = tree(tmp_path)
        with pytest.raises(DataError, match=r"statistics\.csv: has the columns case, .*; choose another --output"):
            act(tmp_path, run, "--statistics", *more)
        assert tree(tmp_path) == before
    table.write_text(text.replace("label 1", "Höhle"), encoding="latin-1")
    before = tree(tmp_path)
    for flags in (("--statistics",), ("--statistics", "--continue"), ()):
        with pytest.raises(DataError, match=r"statistics\.csv: cannot be read \('utf-8' .*save it as CSV in UTF-8"):
            act(tmp_path, run, *flags)
    assert tree(tmp_path) == before


def test_images_in_hounsfield_units_are_named_so(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(prediction, "_classes", lambda run: {})
    monkeypatch.setattr(prediction, "ClassStatistics", lambda folder, classes, names: names)
    recipe = SimpleNamespace(modalities=("a", "b", "c", "d"), schemes=("ct", "CTNormalization", "zscore", "clip"))
    names = prediction._statistics(tmp_path, SimpleNamespace(recipe=recipe))
    assert names == ["a (HU)", "b (HU)", "c", "d"]
