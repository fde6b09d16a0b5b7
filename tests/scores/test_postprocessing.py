"""The best of several predictions, its postprocessing, the cases that both folders have, and files that stay."""

import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest

from seqpar.cli import evaluate
from seqpar.cluster.exit_codes import run
from seqpar.data.errors import DataError
from seqpar.data.geometry import to_canonical
from seqpar.scores.postprocessing import keep_largest, read_postprocessing
from tests.support.label_folders import OBLIQUE, evaluate_folders, random_labels, save

PLAIN = {"background": 0, "organ": 1, "tumour": 2}


def with_specks(labels: np.ndarray, values: tuple[int, ...]) -> np.ndarray:
    """Returns labels with a far voxel of each value, apart from each other."""
    labels = labels.copy()
    for n, value in enumerate(values):
        labels[-1, -1 - 3 * n, -1] = value
    return labels


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Truth, and two folders of predictions: one with specks of organ and tumour, one that is shifted."""
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": PLAIN, "channel_names": {"0": "T1"}}))
    for n in range(3):
        truth = random_labels(n)
        save(tmp_path / "labelsTr" / f"c{n}.nii.gz", truth)
        save(tmp_path / "specks" / f"c{n}.nii.gz", with_specks(truth, (1, 2)))
        save(tmp_path / "shifted" / f"c{n}.nii.gz", np.roll(truth, 2, 0))
    return tmp_path


def act(place: Path, *more: str) -> int:
    return run(evaluate.act, [str(place / "labelsTr"), *more, "--workers", "1"])


def test_the_largest_components_are_kept_step_by_step() -> None:
    labels = np.zeros((9, 9, 9), np.uint8)
    labels[:3, :3, :3], labels[1, 1, 1], labels[3, 3, 3], labels[7, 7, 7], labels[7, 7, 5] = 1, 2, 1, 2, 2
    both = keep_largest(labels, ((1, 2),))
    assert both[7, 7, 7] == both[7, 7, 5] == 0 and both[1, 1, 1] == 2 and both[3, 3, 3] == 1  # a corner connects
    single = keep_largest(labels, ((2,),))
    np.testing.assert_array_equal(single, labels)  # three components of one voxel: all are the largest
    assert (keep_largest(labels, ((1, 2), (2,))) == 2).sum() == 1 and keep_largest(labels, ((5,),)) is not labels


def test_find_best_says_which_and_learns_what_raises_dice(place: Path, capfd) -> None:
    specks, shifted = str(place / "specks"), str(place / "shifted")
    for name in ("plans.json", "dataset.json"):
        (place / "shifted" / name).write_text("{}")  # as nnU-Net leaves them next to its predictions
    assert act(place, shifted, specks, "--find-best") == 0
    said = capfd.readouterr().out
    assert f"highest mean Dice among 2, over 3 cases (too few to tell): {specks}" in said
    assert "keeping the largest component of all labels together raises it from 0." in said
    content = json.loads((place / "specks" / "postprocessing.json").read_text())
    assert read_postprocessing(place / "specks" / "postprocessing.json") == ((1, 2),)
    assert content["postprocessed"]["foreground_mean"]["Dice"] == 1 > content["input_folder"]["foreground_mean"]["Dice"]
    assert not (place / "shifted" / "postprocessing.json").exists()
    assert act(place, shifted, "--find-best", str(place / "out" / "pp.json")) == 0
    said = capfd.readouterr().out
    assert read_postprocessing(place / "out" / "pp.json") == () and "raises it for no class" in said
    assert f"highest mean Dice over 3 cases: {shifted}\n" in said
    assert "predict.py" not in said, "these are predictions, with plans next to them"


def test_a_class_that_would_lose_keeps_its_components_and_another_does_not(place: Path) -> None:
    for n in range(3):  # two tumours in the truth, which organ's largest component may not take away
        truth = with_specks(random_labels(n), (2,))
        save(place / "labelsTr" / f"c{n}.nii.gz", truth)
        save(place / "specks" / f"c{n}.nii.gz", with_specks(truth, (2, 1)))
    assert act(place, str(place / "specks"), "--find-best") == 0
    assert read_postprocessing(place / "specks" / "postprocessing.json") == ((1,),)


def test_folds_are_taken_together(place: Path, capfd) -> None:
    results = place / "nnUNetTrainer__nnUNetPlans__3d_fullres"
    for n in range(3):
        folder = results / f"fold_{n}" / "validation"
        folder.mkdir(parents=True)
        shutil.copy(place / "specks" / f"c{n}.nii.gz", folder)
        (folder / "summary.json").write_text('{"mean": {}}')
    for name in ("plans.json", "dataset.json"):
        (results / name).write_text("{}")
    assert act(place, str(results), str(place / "shifted"), "--find-best") == 0
    said = capfd.readouterr().out
    assert f"highest mean Dice among 2, over 3 cases (too few to tell): {results}" in said
    assert f"predict.py {results} -i IMAGES -o PREDICTIONS --postprocessing {results / 'postprocessing.json'}" in said
    assert all(path.read_text() == '{"mean": {}}' for path in results.glob("fold_*/validation/summary.json"))
    shutil.copy(place / "specks" / "c0.nii.gz", results / "fold_2" / "validation")
    assert act(place, str(results), "--find-best") == 2
    assert "c0 was held out by two folds, which were trained on different splits" in capfd.readouterr().err
    for n in range(3):  # copies, which are no folds
        (results / f"fold_{n}").rename(results / f"fold_{n}_old")
    assert act(place, str(results)) == 3 and "has no fold_N/validation with label maps" in capfd.readouterr().err


def save_probabilities(place: Path, labels: np.ndarray, wrong: int, reader: str, declared: dict) -> None:
    """Writes a label map with a slab of a wrong class, and probabilities that are 0.6 sure of it, as nnU-Net does."""
    shown = labels.copy()
    shown[wrong] = (labels[wrong] + 1) % 3
    save(place, shown)
    sure = np.where(np.arange(len(labels)) == wrong, 0.6, 1.0)[:, None, None]
    shares = np.stack([(shown == n) * sure + (labels == n) * (1 - sure) for n in range(3)])
    if declared.get("regions_class_order"):
        shares = np.stack([shares[1] + shares[2], shares[2]])
    if reader.endswith("WithReorient"):
        shares = to_canonical(shares, "".join(nibabel.aff2axcodes(OBLIQUE)))
    folder = place.parent / "npz" if "fold_" not in str(place) else place.parent
    folder.mkdir(exist_ok=True)
    np.savez_compressed(folder / f"{place.name[:2]}.npz", probabilities=shares.transpose(0, 3, 2, 1).astype(np.float32))
    for name, content in (("plans", {"image_reader_writer": reader}), ("dataset", declared)):
        top = place.parents[2] if "fold_" in str(place) else folder
        (top / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("regions", [False, True])
def test_averages_of_two_take_part_where_their_probabilities_are_there(place: Path, capfd, regions: bool) -> None:
    """One has nnU-Net's, and validated three folds; the other has ours, and another reader."""
    declared = {"labels": PLAIN | {"organ": [1, 2]} if regions else PLAIN, "channel_names": {"0": "T1"}}
    declared |= {"regions_class_order": [1, 2]} if regions else {}
    (place / "dataset.json").write_text(json.dumps(declared))
    results, own = place / "nnUNetTrainer__nnUNetPlans__3d_fullres", place / "own"
    for n in range(3):
        validated = results / f"fold_{n}" / "validation" / f"c{n}.nii.gz"
        save_probabilities(validated, random_labels(n), 4, "SimpleITKIO", declared)
        save_probabilities(own / f"c{n}.nii.gz", random_labels(n), 6, "NibabelIOWithReorient", declared)
    assert act(place, str(results), str(own), str(place / "specks"), "--find-best") == 0
    said = capfd.readouterr().out
    assert f"highest mean Dice among 4, over 3 cases (too few to tell): the mean of {results} and {own}\n" in said
    assert f"no averages with {place / 'specks'}: they need" in said
    said = said[said.index("highest mean Dice among 4") :]
    assert f"  1.0000  the mean of {results} and {own}\n" in said and said.count("  1.0000  ") == 1
    assert "predict as for" in said and said.strip().endswith("names both runs")
    folder = place / "ensembles" / "ensemble___nnUNetTrainer__nnUNetPlans__3d_fullres___own"
    assert read_postprocessing(folder / "postprocessing.json") == ()
    with np.load(own / "npz" / "c1.npz") as content:
        short = content["probabilities"][:, :-1]
    np.savez_compressed(own / "npz" / "c1.npz", probabilities=short)
    assert act(place, str(results), str(own), "--find-best") == 3
    assert "c1.npz: holds (" in capfd.readouterr().err


@pytest.mark.parametrize(("name", "text"), [("summary.json", '{"mean": {"1": {"Dice": 1}}}'), ("metrics.csv", "a,b"),
                                            ("summary.json", "x"), ("postprocessing.json", "{}")])  # fmt: skip
def test_a_file_that_evaluate_did_not_write_stays(place: Path, capfd, name: str, text: str) -> None:
    path = place / "specks" / name
    path.write_text(text)
    folders = (place / "labelsTr", place / "specks")
    assert evaluate_folders(folders, "--find-best") == 3 and path.read_text() == text
    assert f"{path}: is there, and evaluate did not write it: name another file by --" in capfd.readouterr().err
    more = [f"--{kind}" for kind in ("json", "csv", "find-best")]
    places = [str(place / "out" / f"own.{kind}") for kind in ("json", "csv", "pp.json")]
    for _ in range(2):  # its own it replaces
        assert evaluate_folders(folders, *(word for pair in zip(more, places) for word in pair)) == 0
    assert path.read_text() == text


def test_common_scores_what_both_folders_have(place: Path, capfd) -> None:
    (place / "labelsTr" / "c0.nii.gz").unlink()
    (place / "specks" / "c1.nii.gz").unlink()
    folders = (place / "labelsTr", place / "specks")
    assert evaluate_folders(folders) == 3
    printed = capfd.readouterr()
    assert "has no truth of this name" in printed.err and "1 case without a prediction: c1" in printed.out
    assert evaluate_folders(folders, "--common") == 0
    printed = capfd.readouterr()
    assert not printed.err and "without" not in printed.out and "1 case, " in printed.out
    (place / "specks" / "c2.nii.gz").unlink()
    assert evaluate_folders(folders, "--common") == 3 and "holds no prediction of a case" in capfd.readouterr().err


@pytest.mark.parametrize("values", [["1"], "1", None, [None], True, [True]])
def test_labels_of_a_postprocessing_that_are_no_numbers_are_refused(values: object, tmp_path: Path) -> None:
    content = {
        "postprocessing_fns": ["remove_all_but_largest_component_from_segmentation"],
        "postprocessing_kwargs": [{"labels_or_regions": values}],
    }
    (tmp_path / "pp.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="is no postprocessing.json"):
        read_postprocessing(tmp_path / "pp.json")
