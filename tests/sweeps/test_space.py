"""The space of a sweep: its grammar, the names of its points, and what is refused."""

import json
import re
from pathlib import Path

import pytest

from seqpar.data.errors import DataError
from seqpar.sweeps.space import Range, name_of_point, parse_space


def test_the_papers_grid_is_32_points_with_names_that_tell_their_settings() -> None:
    space = parse_space(
        ["lr=1e-4,5e-4,1e-3,5e-3", "network=unet-hou,unet-lamp", "betas=0.9:0.99,0.9:0.999", "amsgrad=no,yes"]
    )
    points = space.points()
    assert len(points) == 32 == len({name_of_point(point) for point in points})
    assert points[0] == {"lr": 1e-4, "network": "unet-hou", "betas": (0.9, 0.99), "amsgrad": False}
    assert name_of_point(points[0]) == "lr-0.0001_network-unet-hou_betas-0.9x0.99_amsgrad-no"


def test_ranges_are_drawn_for_each_of_the_other_values() -> None:
    space = parse_space(["lr=log:1e-4:1e-2", "--tile=16,16:24:32"])
    assert space.ranges == {"lr": Range("log", 1e-4, 1e-2)}
    assert space.values == {"tile": ((16, 16, 16), (16, 24, 32))}
    assert parse_space(["spacing=median,1:1:2.5"]).values == {"spacing": ("median", "1,1,2.5")}
    drawn = iter(range(1, 100))
    points = space.points(3, lambda one: one.low + next(drawn) / 81)
    assert [point["lr"] for point in points] == [0.01245, 0.02479, 0.03714, 0.04948, 0.06183, 0.07417]
    assert [point["tile"] for point in points] == [(16, 16, 16)] * 3 + [(16, 24, 32)] * 3


def test_a_file_says_the_same_and_values_that_have_commas(tmp_path: Path) -> None:
    path = tmp_path / "space.json"
    path.write_text(
        json.dumps({"betas": [[0.9, 0.99]], "amsgrad": [True], "spacing": ["1,1,1"], "lr": {"log": [1, 2]}})
    )
    space = parse_space([str(path)])
    assert space.values == {"betas": ((0.9, 0.99),), "amsgrad": (True,), "spacing": ("1,1,1",)}
    assert space.ranges == {"lr": Range("log", 1.0, 2.0)}
    for text in ('{"lr": 3}', '{"weights": [null, "a"]}'):
        path.write_text(text)
        with pytest.raises(DataError, match="give a list of values"):
            parse_space([str(path)])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["lrr=1"], "train has no flag --lrr; nearest is lr"),
        (["lr"], "there is no such file, and it is no flag=values"),
        (["lr=1", "batch"], "give a flag of train and its values"),
        (["lr=fast"], "--space lr=fast: a number is needed"),
        (["batch=1.5"], "--space batch=1.5: a whole number is needed"),
        (["amsgrad=maybe"], "--space amsgrad=maybe: yes or no is needed"),
        (["lr=1e-3,0.001"], "--space lr: 0.001 is there twice"),
        (["lr=1", "lr=2"], "--space lr: it is there twice"),
        (["out=a,b"], "each run of a sweep has its own --out"),
        (["take-over=yes"], "each run of a sweep has its own --take-over"),
        (["lr=log:1e-2:1e-4"], "the first end must lie below the second, above 0"),
        (["lr=log:0:1"], "above 0"),
        (["lr=log:1"], "give two ends, as in log:1e-4:1e-2"),
        (["batch=uniform:1:4"], "list its values"),
        (["fold=0,all5"], "fold=all5 is five runs: compare folds by --space fold=0,1,2,3,4"),
    ],
)
def test_what_is_no_space_is_refused_with_the_flag(words: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=f".*{error}"):
        parse_space(words)


def test_names_are_folders_whatever_the_values_are() -> None:
    long = {"data": "/data/" + "x" * 200, "lr": 1 / 3}
    name = name_of_point(long)
    assert len(name) == 120 and "/" not in name
    assert name != name_of_point({**long, "lr": 0.3}), "a name that was cut ends in a digest"
    assert name_of_point({"lr": 1 / 3}) == "lr-0.3333333333333333", "two values never have the same name"


def test_files_are_named_from_where_they_are_typed_and_points_by_their_last_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (path := tmp_path / "space.json").write_text('{"data": ["A/images", "B/images"]}')
    for words in (["data=A/images,B/images"], [str(path)]):
        space = parse_space(words)
        assert space.values == {"data": (f"{tmp_path}/A/images", f"{tmp_path}/B/images")}
    names = {name_of_point(point) for point in space.points()}
    assert len(names) == 2 and all(re.fullmatch("data-images-[0-9a-f]{8}", name) for name in names)


def test_a_file_that_is_not_named_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space = parse_space(["weights=,runs/a"])
    assert space.values == {"weights": ("", f"{tmp_path}/runs/a")}
    assert [name_of_point(point)[:9] for point in space.points()] == ["weights-", "weights-a"]
