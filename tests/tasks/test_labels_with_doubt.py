"""Several readers per case in training, evaluation and report; the same on one rank and on two."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest

from seqpar.cli import evaluate, report
from seqpar.cluster.exit_codes import run
from seqpar.data.errors import DataError
from seqpar.losses import Readers
from seqpar.losses.soft_labels import agreed_values
from seqpar.report.record import CaseScores, ScoredCase, mean_of_numbers
from seqpar.scores.label_files import Doubt, read_label_map, read_reference
from seqpar.scores.label_scores import score_readers
from seqpar.settings.command_line import parse
from seqpar.tasks.segment.data import open_data, read_headers
from seqpar.tasks.segment.page import _readers, headline
from tests.support.folders import OBLIQUE, label_array, save, several_readers
from tests.support.report_page import Page, unroll
from tests.support.training_runs import TINY, farthest, losses, prepare, trained

READERS = ("ann", "ben", "cy")


def flags_of(root: Path, *more: str) -> list[str]:
    data = several_readers(root / "Dataset001_Tiny", cases=5)
    return [*TINY.split(), "--epochs", "1", "--data", str(data), "--cache", str(root / "cache"), *more]


def disputed_in(page: str) -> dict[str, np.ndarray]:
    """Returns where readers disagree in each case of a page's viewer."""
    cases = json.loads(Page(page).scripts["volumes"])["cases"]
    return {case["name"]: unroll(case["areas"]["disputed"], case["shape"], case["columns"]) for case in cases}


def test_a_run_on_several_readers_is_the_same_on_two_ranks_and_reports_their_agreement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = flags_of(tmp_path, "--precision", "fp64", "--mode", "halo", "--foreground", "1")
    prepare(flags)
    first = trained(1, flags, tmp_path / "one")
    trained(2, [*flags, "--seqpar", "2"], tmp_path / "two", pictures=True)
    assert farthest(losses(tmp_path / "one"), losses(tmp_path / "two")) < 1e-9
    assert "the target is the mean of 3 readers: ann, ben, cy" in first.said()

    summary = json.loads((tmp_path / "two" / "validation" / "summary.json").read_text())
    (entry, *_) = summary["metric_per_case"]
    assert [Path(path).parent.name for path in entry["doubt"]["readers"].values()] == [f"labelsTr_{r}" for r in READERS]
    rows = [entry["metrics"]["1"], summary["mean"]["2"]]
    assert rows[0]["InterReaderDice"] == pytest.approx(2 / 3) and 0.9 < rows[1]["InterReaderDice"] < 1
    assert 0 < rows[1]["DisputedMl"] < rows[0]["DisputedMl"]

    red, green, blue = plt.imread(tmp_path / "two" / "validation.png")[..., :3].transpose(2, 0, 1)
    violet = (blue > green + 0.2) & (red > green + 0.1)
    assert violet[: violet.shape[0] * 9 // 10].any(), "its pictures show where readers disagree, not its legend alone"
    assert run(report.act, [str(tmp_path / "two")]) == 0
    page = (tmp_path / "two" / "report.html").read_text()
    assert 'id="readers"' in page and 'id="readers-per-case"' in page and "two readers" in page
    assert page.index(">Readers<") < page.index(">Volumes and connected regions<"), "what follows has its own head"
    assert "Violet areas show where the readers disagree" in page
    assert page.count("the label that most of the 3 readers gave a voxel; in a tie, the smallest value") == 3
    assert page.index("It compares with the label") < page.index(">Configuration<"), "next to the large numbers"
    data = tmp_path / "Dataset001_Tiny"
    seen = disputed_in(page)
    for name, shown in seen.items():
        maps = [read_label_map(data / f"labelsTr_{reader}" / f"{name}.nii.gz")[0] for reader in READERS]
        own = np.any([one != maps[0] for one in maps], 0)
        assert np.array_equal(shown[shown.any((1, 2))].sum((1, 2)), own.sum((1, 2))[own.any((1, 2))]) and own.any()
    assert page.count('class="disputed" stroke') == 3 * len(seen), "a plane each"
    data.rename(tmp_path / "moved")  # the prepared data know it too
    assert run(report.act, [str(tmp_path / "two")]) == 0
    again = disputed_in((tmp_path / "two" / "report.html").read_text())
    assert again.keys() == seen.keys() and all(np.array_equal(again[name], seen[name]) for name in seen)
    (tmp_path / "moved").rename(data)

    both = [str(tmp_path / name) for name in ("two", "one")]
    assert run(report.act, [*both, "--out", str(tmp_path / "both.html")]) == 0
    assert "Dice compares with the label that most of the 3 readers gave" in (tmp_path / "both.html").read_text()

    predicted = tmp_path / "predicted"
    shutil.copytree(tmp_path / "Dataset001_Tiny" / "labelsTr_ben", predicted)  # as good as a reader
    capsys.readouterr()
    assert run(evaluate.act, [str(tmp_path / "Dataset001_Tiny"), str(predicted), "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "InterReaderDice" in said and "mean Dice of each two readers" in said
    assert re.search(r"^  truth +the label that most of the 3 readers gave a voxel; in a tie,", said, re.M)
    mean = json.loads((predicted / "summary.json").read_text())["mean"]["1"]
    assert mean["Dice_ben"] == 1 and mean["Dice_ann"] == pytest.approx(2 / 3)
    assert mean["ReaderDice"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)


@pytest.mark.parametrize(
    "more, message",
    [
        (["--loss", "focal"], "--loss focal: labels with doubt have probabilities: choose one of ce, dice, dice-ce"),
        (["--class-weights", "1", "1", "1"], "--class-weights: labels with doubt have no class per voxel"),
        (["--synthesis", "0.5"], "--synthesis 0.5: no tumours are made in labels with doubt"),
    ],
)
@pytest.mark.parametrize("act", [lambda config: open_data(config, True), read_headers])
def test_settings_without_a_meaning_are_refused_before_anything_is_prepared(
    act: Callable, more: list[str], message: str, tmp_path: Path
) -> None:
    config = parse(flags_of(tmp_path, *more), "debug")[1]
    with pytest.raises(ValueError, match=message):
        act(config)
    assert not (tmp_path / "cache").exists()


def reference_of(tmp_path: Path, maps: list[np.ndarray], **more: object) -> Doubt:
    names = "abcdef"[: len(maps)]
    return Doubt({name: save(tmp_path / name / "c.nii.gz", one) for name, one in zip(names, maps)}, **more)


def test_it_is_said_what_the_truth_of_two_readers_is(tmp_path: Path) -> None:
    one, two = np.zeros((2, 4, 4, 4), np.uint8)
    one[:2], two[1:3] = 1, 1
    doubt = reference_of(tmp_path, [one, two])
    assert read_reference(doubt.readers["a"], doubt).values.sum() == (one & two).sum() == 16
    case = ScoredCase("c", doubt.readers["a"], Path("c.nii.gz"), {"t": {"Dice": 0.8}}, doubt)
    record: Any = SimpleNamespace(dataset={}, held_out=())
    told = " It compares with the label that both readers gave a voxel; if they differ, the smaller value, mostly the"
    note = headline(record, CaseScores("", {"t": "1"}, (case,), {"mean": {}}, {}))[1]
    assert note.endswith(f"others.{told} background.")
    assert "It compares" not in headline(record, CaseScores("", {"t": "1"}, (replace(case, doubt=None),), {}, {}))[1]
    assert Doubt({}, (0, 1)).consensus == "the most probable label of a voxel"
    for more in ({"readers": ["a", "b"]}, {"soft_labels": True}):
        assert "It compares with" in headline(SimpleNamespace(dataset=more, held_out=()), None)[1]  # type: ignore[arg-type]


def test_a_reference_is_the_value_that_most_readers_gave(tmp_path: Path) -> None:
    maps = [np.zeros((2, 2, 2), np.uint8) for _ in range(3)]
    for one, values in zip(maps, ([0, 5, 2, 2], [2, 5, 5, 2], [5, 5, 2, 0])):
        one[0].flat[:] = values
    doubt = reference_of(tmp_path, maps)
    first = doubt.readers["a"]
    values, geometry, readers, _ = read_reference(first, doubt)
    assert sorted(values[values > 0].tolist()) == [2, 2, 5] and (readers["b"] > 0).sum() == 4
    assert sorted(read_reference(first, doubt._replace(joined=((5, 2),))).values.ravel().tolist()) == [0] * 4 + [2] * 4
    with pytest.raises(DataError, match=r"a/c.nii.gz: holds \[5\], which is not among the declared labels"):
        read_reference(first, doubt, frozenset({0, 2}))
    save(doubt.readers["b"], maps[1], OBLIQUE * 2)
    with pytest.raises(DataError, match="does not lie on"):
        read_reference(first, doubt)


def test_a_reference_of_probabilities_is_the_most_probable_value(tmp_path: Path) -> None:
    shares = np.zeros((3, 2, 2, 3), np.float32)
    shares[..., 0], shares[1, 1, 1], shares[0, 0, 0] = 1, (0.2, 0.3, 0.5), (0.4, 0.4, 0.2)
    path = save(tmp_path / "c.nii.gz", shares)
    reference = read_reference(path, Doubt({}, (0, 3, 7)))
    values = reference.values
    assert reference.disputed == [], "there are no readers"
    assert sorted(values.ravel().tolist()) == [0] * 11 + [7]
    with pytest.raises(DataError, match="holds 3 channels: 2 probabilities are needed"):
        read_reference(path, Doubt({}, (0, 3)))


def test_the_agreement_of_readers_is_the_mean_over_pairs() -> None:
    one, two = label_array((1,)), label_array((1,))
    two[3] = 0  # half of it
    scores = score_readers({"a": one, "b": two, "c": two}, one, {"t": (1,), "none": (4,)}, 0.002)
    assert scores["t"]["Dice_a"] == 1 and scores["t"]["Dice_b"] == pytest.approx(2 / 3)
    assert scores["t"]["InterReaderDice"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    assert scores["t"]["DisputedMl"] == pytest.approx(16 * 2 / 1000)
    assert math.isnan(scores["none"]["InterReaderDice"]) and scores["none"]["DisputedMl"] == 0
    perfect = score_readers({"a": one, "b": two}, one, {"none": (4,)}, 0.002, "brats")["none"]
    assert perfect["ReaderDice"] == perfect["InterReaderDice"] == 1


def test_agreements_over_different_cases_say_how_many_these_are() -> None:
    doubt = Doubt({reader: Path(reader) for reader in READERS})
    agree = {"Dice": 1.0, "ReaderDice": 1.0, "InterReaderDice": 1.0, "DisputedMl": 0.0}
    agree |= {f"Dice_{reader}": 1.0 for reader in READERS}
    invented = dict.fromkeys(agree, 0.0) | {"InterReaderDice": math.nan}  # predicted where no reader saw it
    cases = [ScoredCase(str(n), None, Path(), {"t": row}, doubt) for n, row in enumerate((agree, invented))]
    mean = {"t": {key: mean_of_numbers(case.scores["t"][key] for case in cases) for key in agree}}
    table = (_readers(CaseScores("", {"t": "1"}, tuple(cases), {"mean": mean}, {})) or ())[0]
    assert [getattr(cell, "text", cell) for cell in table.rows[0].cells[:3]] == [
        "0.500 (n = 2)", "0.500 (n = 2)", "1.000 (n = 1)"
    ]  # fmt: skip
    assert "Compare scores of the same n." in table.note and table.heads[-1].text == "Mean disputed, ml"
    table = (_readers(CaseScores("", {"t": "1"}, (cases[0],), {"mean": {"t": agree}}, {})) or ())[0]
    assert table.rows[0].cells[2].text == "1.000" and "same n" not in table.note  # type: ignore[union-attr]


def test_a_voxel_is_in_the_regions_that_most_readers_put_it_into(tmp_path: Path) -> None:
    """Readers who name different labels of one region agree on the region, in scores as in prepared cases."""
    regions = {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
    each = np.array(list(product(range(4), repeat=3)), np.uint8).T.reshape(3, 4, 4, 4)  # all that three may say
    doubt = reference_of(tmp_path, list(each))._replace(regions=True)
    found = read_reference(doubt.readers["a"], doubt, regions=regions.values()).values
    each = np.stack([read_label_map(path)[0] for path in doubt.readers.values()])  # in canonical orientation
    for region in regions.values():
        expected = np.isin(each, region).sum(0) >= 2
        assert (np.isin(found, region) == expected).all(), region
    soft = Readers(4, 3)
    codes = soft.join(list(each))
    assert (soft.consensus(codes, regions.values()) == found).all() and (soft.consensus(codes) != found).any()
    assert (soft.consensus(codes, [(1,), (2,), (3,)]) == soft.consensus(codes)).all(), "labels alone"
    probabilities = np.ones((2, 2, 2, 1)) * [0.45, 0.0, 0.3, 0.25]
    path = save(tmp_path / "p.nii.gz", probabilities.astype(np.float32))
    channels = Doubt({}, (0, 1, 2, 3), regions=True)
    assert (read_reference(path, channels).values == 0).all()
    assert (read_reference(path, channels, regions=regions.values()).values == 2).all()
    assert Doubt.from_json(json.loads(json.dumps(channels.to_json()))) == channels
    assert channels.consensus == "the voxels that are more probably in than outside of each region"
    assert doubt.consensus == "the voxels that most of the 3 readers gave to each region"


def test_regions_agree_alike_whichever_labels_a_case_has(tmp_path: Path) -> None:
    """Four readers, two regions apart: half of the readers are no majority, also where no map has the other label."""
    regions, votes = [(1, 2), (3,)], np.array([1, 1, 0, 3], np.uint8)[:, None, None, None]
    alone = agreed_values(list(votes), regions)
    among = agreed_values(list(np.concatenate([votes, np.full_like(votes, 2)], 1)), regions)
    codes = Readers(4, 4).join(list(votes))
    assert alone.ravel()[0] == among.ravel()[0] == Readers(4, 4).consensus(codes, regions).ravel()[0] == 0
    assert agreed_values(list(votes)).ravel()[0] == 1, "labels alone"


def test_the_truth_is_described_as_it_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = several_readers(tmp_path / "D", cases=2), tmp_path / "out"
    shutil.copytree(data / f"labelsTr_{READERS[0]}", out)
    for more, said in (
        ([], "the label that most of the 3 readers gave a voxel"),
        (["--regions", "both=1,2", "--regions", "one=1"], "the voxels that most of the 3 readers gave to each region"),
    ):
        run(evaluate.act, [str(data), str(out), *more])
        assert f"  {said}" in capsys.readouterr().out, more
