"""Calibration of voxels by tenths of probability: sums of cases equal a direct computation over all voxels."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import pytest

from seqpar.data.formats.recognise import describe
from seqpar.scores.class_scores import format_calibration
from seqpar.scores.label_classes import labels_of_classes
from seqpar.scores.label_files import doubts_of, read_reference
from seqpar.tasks.case_evaluation import CaseEvaluation, ScoringJob, Seen
from seqpar.tasks.segment import evaluation, page
from seqpar.tasks.segment.evaluation import calibration_diagram
from seqpar.tasks.segment.label_map_folder import SavedProbabilities
from tests.support.label_folders import evaluate_folders, random_labels, save, summary_of

PLAIN = {"background": 0, "organ": 1, "core": 2}
NESTED = {"background": 0, "whole": [1, 2], "core": [2]}


def save_probabilities(prediction: Path, case: str, shares: np.ndarray, labels: dict[str, Any]) -> None:
    """Writes probabilities ``k W D H`` as ``predict --npz`` does, and a label map."""
    folder = prediction / "npz"
    folder.mkdir(parents=True, exist_ok=True)
    order = {"regions_class_order": [1, 2]} if labels is NESTED else {}
    np.savez_compressed(folder / f"{case}.npz", probabilities=shares.transpose(0, 3, 2, 1).astype(np.float32))
    (folder / "plans.json").write_text(json.dumps({"image_reader_writer": "SimpleITKIO"}))
    (folder / "dataset.json").write_text(json.dumps({"labels": labels, "channel_names": {"0": "T1"}, **order}))


def expected_error(given: np.ndarray, right: np.ndarray, low: int = 0) -> float:
    """Returns the expected calibration error over all voxels at once, from tenth ``low`` on."""
    error, bins = 0.0, np.minimum((given * 10).astype(int), 9)
    count = int((bins >= low).sum())
    for n in range(low, 10):
        own = bins == n
        error += abs(given[own].mean() - right[own].mean()) * own.sum() / count if own.any() else 0.0
    return error


@pytest.fixture(params=["labels", "regions"])
def predicted(request, tmp_path: Path) -> tuple[tuple[Path, Path], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Folders of three cases, one with an ignored slab; the probability of each class and whether it is there."""
    truth, prediction = tmp_path / "labelsTr", tmp_path / "predicted"
    labels, rng = (PLAIN if request.param == "labels" else NESTED), np.random.default_rng(0)
    (tmp_path / "dataset.json").write_text(
        json.dumps({"labels": labels | {"ignore": 3}, "regions_class_order": [1, 2]})
    )
    every: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for n in range(3):
        true = random_labels(n)
        true[:2] = 3 if n == 1 else true[:2]
        save(truth / f"c{n}.nii.gz", true)
        logits = rng.normal(0, 1, (3, *true.shape)) + 3 * np.stack([true == v for v in range(3)])
        shares = (np.exp(logits) / np.exp(logits).sum(0)).astype(np.float32)
        chosen = shares.argmax(0)
        if labels is NESTED:
            shares = np.stack([shares[1] + shares[2], shares[2]])
            chosen = np.where(shares[1] > 0.5, 2, shares[0] > 0.5)
        chosen[3:5] = 0  # as postprocessing may have done
        save(prediction / f"c{n}.nii.gz", chosen.astype(np.uint8))
        save_probabilities(prediction, f"c{n}", shares, labels)
        if labels is PLAIN:
            classes = {"organ": (shares[1], true == 1), "core": (shares[2], true == 2)}
        else:
            classes = {"whole": (shares[0], np.isin(true, (1, 2))), "core": (shares[1], true == 2)}
        for name, pair in classes.items():
            every.setdefault(name, []).append(tuple(values[true != 3] for values in pair))
    return (truth, prediction), {name: tuple(map(np.concatenate, zip(*rows))) for name, rows in every.items()}


def test_calibration_is_that_of_all_voxels_together(predicted, capfd) -> None:
    folders, every = predicted
    assert evaluate_folders(folders, "--calibration") == 0
    found, said = summary_of(folders)["calibration"], capfd.readouterr().out
    assert set(found) == set(every)
    for name, (given, right) in every.items():
        assert found[name]["ECE"] == pytest.approx(expected_error(given, right), abs=1e-6)
        assert found[name]["ECE_from_0.1"] == pytest.approx(expected_error(given, right, 1), abs=1e-6) and right.any()
        assert found[name]["ECE_from_0.1"] > 0.01, "or all is certain"
        assert sum(tenth["voxels"] for tenth in found[name]["tenths"]) == len(given)
        assert f"{found[name]['ECE_from_0.1']:.4f}" in said and "(share" not in said
    picture = folders[1] / "summary-calibration.png"
    assert str(picture) in said and picture.stat().st_size > 5000
    assert evaluate_folders(folders, "--calibration") == 0, "its own picture is drawn again"
    picture.write_bytes(b"my own")
    assert evaluate_folders(folders, "--calibration") == 3 and picture.read_bytes() == b"my own"
    assert f"{picture}: is there, and evaluate did not write it" in capfd.readouterr().err


def test_a_case_without_a_labelled_voxel_is_not_counted(predicted, monkeypatch, capfd) -> None:
    folders, _ = predicted
    save(folders[0] / "c1.nii.gz", np.full(random_labels(1).shape, 3, np.uint8))
    titles = list[str]()

    def drawn(*args: Any) -> Any:
        diagram = calibration_diagram(*args)
        titles.append(diagram.quantity)
        return diagram

    monkeypatch.setattr(evaluation, "calibration_diagram", drawn)
    assert evaluate_folders(folders, "--calibration") == 0
    assert titles == ["Calibration of the voxels of 2 cases"] and "a temperature" not in capfd.readouterr().out
    made = {"run": "gone", "settings": {"temperature": 0.8154}}
    (folders[1] / "prediction.json").write_text(json.dumps(made))
    assert evaluate_folders(folders, "--calibration") == 0
    assert "\n(probabilities were computed at a temperature of 0.815)" in capfd.readouterr().out


def test_calibration_of_new_cases_leads_and_all_together_stay_in_the_summary(predicted, capfd, monkeypatch) -> None:
    folders, every = predicted

    def look_up(self: CaseEvaluation, job: ScoringJob) -> str:
        job.seen = Seen(["c1"], [], 3, ["c2"])
        return ""

    monkeypatch.setattr(CaseEvaluation, "_look_up", look_up)
    assert evaluate_folders(folders, "--calibration") == 0
    summary, said = summary_of(folders), capfd.readouterr().out
    assert "calibration over the voxels of the cases new to the run\n" in said
    voxels = np.prod(random_labels(0).shape)
    counts = [sum(t["voxels"] for t in own["calibration"]["core"]["tenths"]) for own in summary["groups"].values()]
    assert counts == [voxels, voxels, 10 * voxels // 12], "new, chose the weights, and seen with its ignored slab"
    for name, (given, right) in every.items():
        assert summary["calibration"][name]["ECE"] == pytest.approx(expected_error(given, right), abs=1e-6)
        own = summary["groups"]["new to the run"]["calibration"][name]["ECE"]
        assert own == pytest.approx(expected_error(given[:voxels], right[:voxels]), abs=1e-6) and f"{own:.4f}" in said


def test_probabilities_of_another_case_are_refused_by_name(predicted, capfd, monkeypatch) -> None:
    folders, every = predicted
    one, other = (folders[1] / "npz" / f"c{n}.npz" for n in (0, 2))
    one.write_bytes(other.read_bytes())
    assert evaluate_folders(folders, "--calibration") == 3
    said = capfd.readouterr().err
    assert f"{one}: holds probabilities of another prediction than {folders[1] / 'c0.nii.gz'}: in " in said
    assert said.count("another prediction") == 1
    why = "another label is more probable" if "organ" in every else "the label's region is less probable than not"
    assert f"% of its labelled voxels, {why}: predict the case again" in said
    monkeypatch.setattr(SavedProbabilities, "contradicted", lambda *_: 0.014)
    assert evaluate_folders(folders, "--calibration", "--workers", "1") == 3
    assert "in 1.4% of its labelled voxels" in capfd.readouterr().err


def test_a_class_without_a_probable_voxel_has_no_calibration_error_and_each_class_has_the_colour_it_is_given() -> None:
    never, own = np.zeros((10, 3)), np.zeros((10, 3))
    never[0], own[0], own[6] = (1000, 20, 0), (500, 10, 5), (500, 320, 310)
    tenths = {"never": never, "own": own}
    lines = calibration_diagram(tenths, 2, {"never": "#111111", "own": "#222222"}).lines[1:]
    assert [line.label for line in lines] == ["never: no voxel above 0.1", "own: ECE (from 0.1) 0.020"]
    assert [line.colour for line in lines] == ["#111111", "#222222"]
    row = format_calibration(tenths, tenths).splitlines()[-2]
    assert row.split() == ["never", "0.0200", "–", "–", "–", "0"], "no mean of no voxel"
    one = np.zeros((10, 3))
    one[0], one[1] = (1000, 20, 0), (1, 0.11, 1)
    (label,) = [line.label for line in calibration_diagram({"one": one}, 2, {"one": "#111111"}).lines[1:]]
    assert label == "one: 1 voxel above 0.1", "an error of one voxel is none"
    assert format_calibration({"one": one}, ["one"]).splitlines()[-1].split()[-1] == "1"


def test_a_union_of_labels_has_the_sum_of_their_probabilities_and_one_of_regions_none(predicted, capfd) -> None:
    folders, every = predicted
    own = ("--regions", "both=1,2", "--regions", "organ=1")
    assert evaluate_folders(folders, "--calibration", *own) == 0
    found, said = summary_of(folders)["calibration"], capfd.readouterr().out
    if "organ" in every:
        given, right = (np.stack([every[name][n] for name in ("organ", "core")]).sum(0) for n in (0, 1))
        assert found["both"]["ECE"] == pytest.approx(expected_error(given, right > 0), abs=1e-6)
    else:
        assert set(found) == {"both"} and "organ  no output of the network stands for it" in said


def written_by(kind: str, root: Path) -> np.ndarray:
    """Writes a data set of one case whose labels have doubt; returns the probability of each label in it."""
    content: dict[str, Any] = {"labels": PLAIN, "channel_names": {"0": "T1"}, "file_ending": ".nii.gz"}
    save(root / "imagesTr" / "c_0000.nii.gz", np.ones((12, 11, 9), np.float32))
    if kind == "readers":
        maps = {name: random_labels(n) for n, name in enumerate(("ann", "ben", "cy"))}
        for name, values in maps.items():
            save(root / f"labelsTr_{name}" / "c.nii.gz", values)
        content["readers"], shares = [*maps], np.mean([[m == v for v in range(3)] for m in maps.values()], 0)
    else:
        shares = np.random.default_rng(0).dirichlet((1, 1, 1), (12, 11, 9)).astype(np.float32)
        save(root / "labelsTr" / "c.nii.gz", shares)
        content["soft_labels"], shares = True, np.moveaxis(shares, -1, 0)
    (root / "dataset.json").write_text(json.dumps(content))
    return shares


@pytest.mark.parametrize(
    "kind, share", [("readers", "the mean over the 3 readers"), ("probabilities", "the mean probability in the truth")]
)
def test_probabilities_that_are_those_of_a_doubtful_truth_are_right(kind, share, tmp_path, capfd, monkeypatch) -> None:
    """The target that a network learns has no calibration error, nor has a class of two labels."""
    monkeypatch.setattr(evaluation, "draw_figure", lambda _title, _diagrams, about, _files: told.append(about))
    told, folders = list[str](), (tmp_path / "data", tmp_path / "predicted")
    shares = written_by(kind, folders[0])
    image = nibabel.load(folders[0] / "imagesTr" / "c_0000.nii.gz")
    turned = nibabel.as_closest_canonical(nibabel.Nifti1Image(np.moveaxis(shares, 0, -1), image.affine))
    given = np.moveaxis(turned.get_fdata(), -1, 0)
    save(folders[1] / "c.nii.gz", given.argmax(0).astype(np.uint8), turned.affine)
    save_probabilities(folders[1], "c", given, PLAIN)
    more = ("--regions", "organ=1", "--regions", "core=2", "--regions", "both=1,2")
    assert evaluate_folders(folders, "--calibration", *more) == 0
    found, said = summary_of(folders)["calibration"], capfd.readouterr().out
    for name, own in {"organ": (1,), "core": (2,), "both": (1, 2)}.items():
        assert found[name]["ECE"] < 1e-6 and found[name]["ECE_from_0.1"] < 1e-6
        right = shares[list(own)].sum(0)
        assert sum(t["voxels"] * t["share"] for t in found[name]["tenths"]) == pytest.approx(right.sum(), rel=1e-5)
        assert ((right > 0.3) & (right < 0.4)).any(), "or nothing is in doubt"
    (doubt,) = doubts_of(describe(folders[0])).values()
    joined = read_reference(folders[0] / "labelsTr" / "c.nii.gz", doubt._replace(joined=((2, 1),)))
    assert np.array_equal(joined.values == 1, joined.shares([1]) > joined.shares([0])), "their sum is compared"
    assert joined.shares([1]).sum() == pytest.approx(shares[1:].sum(), rel=1e-5) and not joined.shares([2]).any()
    assert f"(share: {share})" in said and told[0].endswith(f" The share is {share}.")
    scored: Any = SimpleNamespace(cases=[SimpleNamespace(name="c")])
    options = Namespace(truth=folders[0], prediction=folders[1], common=False)
    shown = {"readers": "core: 57 voxels above 0.1", "probabilities": "core: ECE (from 0.1) 0.000"}
    (chart,), text = page._calibration(options, scored, labels_of_classes({"core": (2,)}), {"core": "#111111"})
    assert text == told[0] and shown[kind] in str(chart)

    save_probabilities(folders[1], "c", (given.argmax(0) == np.arange(3)[:, None, None, None]) * 1.0, PLAIN)
    assert evaluate_folders(folders, "--calibration") == 0
    assert summary_of(folders)["calibration"]["core"]["ECE_from_0.1"] > 0.05, "certainty is overconfident"


def test_a_truth_of_other_numbers_than_probabilities_is_said_by_name(tmp_path, capfd) -> None:
    folders = tmp_path / "data", tmp_path / "predicted"
    shares = written_by("probabilities", folders[0])
    save(folders[0] / "labelsTr" / "c.nii.gz", 100 * np.moveaxis(shares, 0, -1))
    save(folders[1] / "c.nii.gz", shares.argmax(0).astype(np.uint8))
    save_probabilities(folders[1], "c", shares, PLAIN)
    assert evaluate_folders(folders, "--calibration") == 3
    assert f"{folders[0] / 'labelsTr' / 'c.nii.gz'}: holds numbers that are no prob" in capfd.readouterr().err


def test_cases_without_probabilities_or_with_others_are_said_by_name(predicted, capfd) -> None:
    folders, _ = predicted
    path = folders[1] / "npz" / "c1.npz"
    with np.load(path) as content:
        array = content["probabilities"]
    for wrong, problem in (
        (array[:, :-1], "has probabilities of shape"),
        (array + 2, "holds numbers that are no prob"),
    ):
        np.savez_compressed(path, probabilities=wrong)
        assert evaluate_folders(folders, "--calibration") == 3
        assert f"{path}: {problem}" in capfd.readouterr().err
        assert sum(tenth["voxels"] for tenth in summary_of(folders)["calibration"]["core"]["tenths"]) > 0
    path.unlink()
    assert evaluate_folders(folders, "--calibration") == 3
    assert "c1.nii.gz: has no probabilities, which --calibration needs: predict with --npz" in capfd.readouterr().err


def test_axes_of_files_do_not_matter(tmp_path, capfd) -> None:
    """Probabilities lie as their label map does, which may run to other sides than the truth."""
    truth, prediction = tmp_path / "labelsTr", tmp_path / "predicted"
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": PLAIN}))
    true, affine = random_labels(0), np.diag([-1.0, 1, 2, 1])
    save(truth / "c.nii.gz", true, affine)
    turned = nibabel.as_closest_canonical(nibabel.load(truth / "c.nii.gz"))
    flipped = np.asarray(turned.dataobj)
    save(prediction / "c.nii.gz", flipped, turned.affine)
    save_probabilities(prediction, "c", np.stack([flipped == v for v in range(3)]) * 1.0, PLAIN)
    assert evaluate_folders((truth, prediction), "--calibration") == 0
    found = summary_of((truth, prediction))["calibration"]
    assert (
        found["organ"]["ECE"] == found["core"]["ECE"] == 0 and found["core"]["tenths"][9]["voxels"] == (true == 2).sum()
    )
