"""predictions.csv: whose cases stay when others are predicted into its folder; what the maps of its cases share."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import nibabel
import numpy as np
import pytest

from seqpar.cli import evaluate
from seqpar.cluster.exit_codes import run
from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.tasks.classify import page
from seqpar.tasks.classify.prediction import PredictionTable
from seqpar.tasks.classify.scores import (
    EXPLANATIONS,
    place_of_maximum,
    read_class_table,
    replaced_rows,
    unlisted_rows,
    what_maps_share,
)
from tests.support.folders import save, tree, write_json


def test_what_another_run_predicted_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    cases, names = [Case("a", ()), Case("b", ())], ("healthy", "ill")

    def left(run: str, resume: bool) -> list[str]:
        return [case.id for case in PredictionTable(tmp_path, names).open(cases, {"runs": run}, resume)]

    table = PredictionTable(tmp_path, names, explains=True)
    table.open(cases, {"runs": "first"}, False)
    table.close()  # as at the end of a prediction: others may come
    table.add(cases[0], np.array([0.5, 0.5]))
    (picture := tmp_path / EXPLANATIONS / "a.png").parent.mkdir()
    picture.write_bytes(b"a picture")
    assert left("first", True) == ["b"] and picture.exists()
    before = tree(tmp_path)
    for resume in (True, False):
        with pytest.raises(DataError, match=r"was predicted with other settings \(runs\); choose another --output$"):
            left("second", resume)
    assert tree(tmp_path) == before, "the table and its explanations are of another network"
    table.path.unlink()
    with pytest.raises(DataError, match="other settings"):
        left("second", False)
    picture.unlink()
    assert left("second", False) == ["a", "b"]
    picture.touch()  # somebody else's
    assert left("second", True) == ["a", "b"], "it was killed before its first case"
    assert picture.exists()
    with pytest.raises(DataError, match=r"a\.png: would be overwritten"):
        PredictionTable(tmp_path, names, explains=True).open(cases, {"runs": "second"}, False)


def test_cases_whose_explanation_is_not_whole_are_left(tmp_path: Path) -> None:
    names, record, cases = ("healthy", "ill"), {"runs": "first"}, [Case(name, ()) for name in "abc"]
    table = PredictionTable(tmp_path, names, explains=True)
    for case in table.open(cases, record, False):
        for path in table.explanation_paths(case):
            path.parent.mkdir(exist_ok=True)
        save(table.explanation_paths(case)[0], np.zeros((2, 2, 2), np.float32))
        plt.imsave(table.explanation_paths(case)[1], np.zeros((2, 2)))
        table.add(case, np.array([0.123456, 0.876544]))
    table.close()
    volume, picture = table.explanation_paths(cases[0])[0], table.explanation_paths(cases[1])[1]
    volume.write_bytes(b"")
    picture.write_bytes(picture.read_bytes()[:-1])

    def left() -> list[str]:
        return [case.id for case in PredictionTable(tmp_path, names, explains=True).open(cases, record, True)]

    assert left() == ["a", "b"]
    whole = table.path.read_bytes()
    table.path.write_bytes(whole[:-1])
    assert left() == ["a", "b"], "its line break alone is gone"
    edited = whole.replace(b"0.123456", b"0.223456").replace(b"0.876544", b"0.776544")
    table.path.write_bytes(whole[: whole.rindex(b"c,")] + edited[whole.rindex(b"c,") :].rstrip())
    assert left() == ["a", "b"], "somebody's work"
    table.path.write_bytes(whole[:-2])
    assert left() == ["a", "b", "c"], "the last number of c is cut off"
    table.path.write_bytes(whole)
    table.add(cases[0], np.array([0.5, 0.5]))
    table.path.write_bytes(b"")
    assert left() == ["a", "b", "c"], "an emptied table has nothing to keep"


def test_cases_that_are_predicted_later_join_the_table_of_the_same_settings(tmp_path: Path) -> None:
    names, record = ("healthy", "ill"), {"runs": "first"}

    def predict_as(cases: str, probability: float, own: dict = record) -> tuple[str, ...]:
        table = PredictionTable(tmp_path, names)
        for case in table.open([Case(case, ()) for case in cases], own, False):
            table.add(case, np.array([probability, 1 - probability]))
        return read_class_table(tmp_path / "predictions.csv").cases

    assert predict_as("abc", 0.2) == ("a", "b", "c")
    assert predict_as("bd", 0.7) == ("a", "b", "c", "d")
    assert read_class_table(tmp_path / "predictions.csv").probabilities[:, 0].tolist() == [0.2, 0.7, 0.2, 0.7]
    PredictionTable(tmp_path, names).open([Case("d", ())], record, False)  # killed before its first case
    assert read_class_table(tmp_path / "predictions.csv").cases == ("a", "b", "c", "d"), "what it had predicted stays"
    before = (tmp_path / "predictions.csv").read_bytes()
    for cases in ("ae", "abcde"):
        with pytest.raises(DataError, match=r"was predicted with other settings \(runs\); choose another --output"):
            predict_as(cases, 0.5, {"runs": "second"})
    assert (tmp_path / "predictions.csv").read_bytes() == before


def test_rows_that_joined_a_table_are_told_from_those_that_predict_wrote(tmp_path: Path, capsys) -> None:
    names, record, path = ("healthy", "ill"), {"runs": "first", "explained": ""}, tmp_path / "predictions.csv"

    def predict_as(cases: str, way: str = "", written: int = 9) -> None:
        table = PredictionTable(tmp_path, names, bool(way))
        for case in table.open([Case(case, ()) for case in cases], {**record, "explained": way}, False)[:written]:
            table.add(case, np.array([0.2, 0.8]))
        assert unlisted_rows(tmp_path) == ([], ""), (cases, way)

    for cases, way, written in (("abc", "", 9), ("bd", "", 0), ("bd", "", 9), ("ab", "hirescam", 1)):
        predict_as(cases, way, written)
    path.write_text(f"{path.read_text()}x,ill,0.1,0.9\ny,ill,0.1,0.9\n")
    others, said = unlisted_rows(tmp_path)
    assert others == ["x", "y"] and said == (
        f"2 of 6 rows of {path}, such as that of x, are not in its prediction.json: another network or program may "
        "have made them, and whether that has seen these cases is not known."
    )
    (tmp_path / "labels.csv").write_text("case,class\na,ill\nb,healthy\nc,ill\nd,ill\nx,ill\ny,healthy\n")
    assert run(evaluate.act, [str(tmp_path / "labels.csv"), str(tmp_path)]) == 0
    assert said in capsys.readouterr().out
    lines = path.read_text().splitlines(True)
    path.write_text("".join([*lines[:3], *lines[4:]]))
    assert replaced_rows(tmp_path) == f"{path} lacks 1 row that was written, such as that of c."
    path.write_text("".join([lines[0], lines[1].replace("0.2", "0.3").replace("0.8", "0.7"), lines[2], *lines[5:]]))
    assert replaced_rows(tmp_path) == (
        f"1 of 4 rows of {path}, such as that of a, has changed since it was written. "
        f"{path} lacks 2 rows that were written, such as that of c."
    )
    before = path.read_bytes()
    with pytest.raises(DataError, match="holds a prediction of a that has changed since predict wrote it"):
        predict_as("abc", "hirescam")
    assert path.read_bytes() == before
    path.write_bytes(before.rstrip(b"\n"))  # as some editors save it
    with pytest.raises(DataError, match="holds a prediction of a that has changed since predict wrote it"):
        predict_as("abc", "hirescam")
    path.write_bytes(before)
    table = PredictionTable(tmp_path, names, True)
    table.open([Case("z", ())], {**record, "explained": "hirescam"}, False)
    path.write_bytes(before.replace(b"0.3", b"0.4").replace(b"0.7", b"0.6"))
    with pytest.raises(DataError, match="has changed while predict was at work"):
        table.add(Case("z", ()), np.array([0.2, 0.8]))
    table.close()
    content = json.loads((tmp_path / "prediction.json").read_text())
    for part in ("label_maps", "inputs", "files"):
        write_json(tmp_path / "prediction.json", {name: own for name, own in content.items() if name != part})
        assert unlisted_rows(path) == ([], ""), "of an older version"


def test_a_table_does_not_join_what_another_task_predicted(tmp_path: Path) -> None:
    write_json(tmp_path / "prediction.json", {"weights": {"w": "0"}, "files": ["a.nii.gz"], "inputs": {}})
    record = {"task": "classify", "runs": [{"weights": {"w": "1"}}]}
    assert PredictionTable(tmp_path, ("healthy", "ill")).open([Case("a", ())], record, False), "its label map is gone"
    write_json(tmp_path / "prediction.json", {"weights": {"w": "0"}, "files": ["a.nii.gz"], "inputs": {}})
    save(tmp_path / "a.nii.gz", np.zeros((2, 2, 2), np.float32))
    before = tree(tmp_path)
    with pytest.raises(DataError, match="holds predictions of a run with another --task; choose another --output"):
        PredictionTable(tmp_path, ("healthy", "ill")).open([Case("a", ())], record, False)
    assert tree(tmp_path) == before


def test_explanations_join_a_table_that_has_none(tmp_path: Path) -> None:
    def opened(way: str, resume: bool = False) -> PredictionTable:
        table = PredictionTable(tmp_path, ("healthy", "ill"), bool(way))
        assert len(table.open([Case("a", ())], {"runs": "first", "explained": way}, resume)) == 1
        return table

    opened("").add(Case("a", ()), np.array([0.5, 0.5]))
    with pytest.raises(DataError, match=r"settings \(explained\); choose another --output, or leave --continue out"):
        opened("hirescam", resume=True)
    table = opened("hirescam")
    assert read_class_table(table.path).cases == ("a",)
    (picture := table.explanation_paths(Case("a", ()))[1]).parent.mkdir()
    picture.write_bytes(b"a picture")
    table.close()
    for way in ("grad-cam", ""):
        with pytest.raises(DataError, match=r"settings \(explained\); choose another --output$"):
            opened(way)


def test_a_table_whose_columns_were_moved_or_added_is_read_by_their_names(tmp_path: Path) -> None:
    """As a spreadsheet leaves it. It is written only if a case joins it, and never without somebody's columns."""
    names, record, path = ("healthy", "ill"), {"runs": "first"}, tmp_path / "predictions.csv"

    def left(cases: str) -> tuple[PredictionTable, list[Case]]:
        table = PredictionTable(tmp_path, names)
        return table, table.open([Case(case, ()) for case in cases], record, True)

    table, (case,) = left("a")
    table.add(case, np.array([0.75, 0.25]))
    table.close()
    for text in ("case,class,p(ill),p(healthy)\na,healthy,0.25,0.75\n",
                 "case,remark,class,p(healthy),p(ill)\na,mine,healthy,0.75,0.25\n"):  # fmt: skip
        path.write_text(text)
        table, cases = left("a")
        assert cases == [] and path.read_text() == text
        table.close()
    with pytest.raises(DataError, match=r"predictions\.csv: has columns that .*\(remark\).* another --output"):
        left("ab")
    assert path.read_text() == text
    path.write_text("case,class,p(ill),p(healthy)\na,healthy,0.25,0.75\n")
    table, (case,) = left("ab")
    table.add(case, np.array([0.0, 1.0]))
    table.close()
    assert path.read_text() == "case,class,p(healthy),p(ill)\na,healthy,0.75,0.25\nb,ill,0.0,1.0\n"
    path.write_text("case,class,p(healthy),p(odd)\na,healthy,0.75,0.25\n")
    with pytest.raises(DataError, match="has the classes healthy, odd, and the network healthy, ill; choose another"):
        left("ab")


def test_maxima_at_one_place_whatever_is_predicted_are_a_habit_of_the_network() -> None:
    rng = np.random.default_rng(0)
    spread = {f"c{n}": tuple(rng.uniform(0, 1, 3)) for n in range(12)}
    close = {f"c{n}": tuple(0.4 + rng.uniform(-0.04, 0.04, 3)) for n in range(12)}
    both = {f"c{n}": ("healthy", "ill")[n % 2] for n in range(12)}
    habit = " have it at the same place, to within 10% of the image's extent"
    of = "Of 12 maps whose maximum is in the image, "
    assert what_maps_share(spread, both) == ""
    assert what_maps_share(close, both).startswith(
        f"{of}12{habit}, whichever class was predicted: the maps show a habit of the"
    )
    most = close | {f"c{n}": spread[f"c{n}"] for n in range(5)}
    assert what_maps_share(most, both).startswith(f"{of}7{habit}")
    of_ill = {case: spread[case] if name == "healthy" else close[case] for case, name in both.items()}
    assert what_maps_share(of_ill | {"c0": close["c0"]}, both) == "", "ill cases may well share a place"
    alone = what_maps_share(close, dict.fromkeys(close, "ill"))
    assert "extent. All were predicted as ill: it may be a habit" in alone
    assert what_maps_share(dict(list(close.items())[:4]), both) == "", "too few to tell"
    seen = np.zeros((10, 20, 4))
    assert place_of_maximum(seen) is None
    seen[3, 19, 0] = 0.5
    assert place_of_maximum(seen) is None, "the maximum, 1, is outside the image"
    seen[3, 19, 0] = 1
    assert place_of_maximum(seen) == (0.35, 0.975, 0.125)


def test_a_page_says_that_maps_have_their_maxima_at_one_place(tmp_path: Path) -> None:
    """In the axes of each file."""
    cases = [{"case": f"c{n}", "class": ("healthy", "ill")[n % 2]} for n in range(6)]
    for n, case in enumerate(cases):
        seen = np.zeros((20, 20, 20), np.float32)
        seen[(17 if n % 3 else 2), 5, 5] = 1
        affine = np.diag([1 if n % 3 else -1, 1, 1, 1])
        nibabel.save(nibabel.Nifti1Image(seen, affine), tmp_path / f"{case['case']}.nii.gz")
    (tmp_path / "c5.nii.gz").write_bytes(b"damaged")
    places = page.places_of_maps({"metric_per_case": cases}, tmp_path)
    assert places == {f"c{n}": (0.875, 0.275, 0.275) for n in range(5)}
    assert "Of 5 maps whose maximum is in the image, 5 have" in what_maps_share(
        places, page.predicted_classes({"metric_per_case": cases})
    )
