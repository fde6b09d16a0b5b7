"""The real nnU-Net averages what predict --npz writes, and evaluate --find-best chooses what nnU-Net chooses."""

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from seqpar.cli.evaluate import act as evaluate
from seqpar.data.formats.dataset import Case
from seqpar.data.volumes import read_volume
from seqpar.scores.postprocessing import read_postprocessing
from seqpar.tasks.segment.label_map_folder import EnsembleFiles
from tests.nnunet.real_nnunet import oblique
from tests.nnunet.there_and_back import acts

GOLDEN = Path(__file__).parents[1] / "golden" / "nnunet"
PLANS: dict[str, Any] = {
    "image_reader_writer": "SimpleITKIO", "dataset_name": "Dataset103_Boxes", "plans_name": "nnUNetPlans",
    "configurations": {"3d_fullres": {"architecture": {"arch_kwargs": {}}}},
    "transpose_forward": [0, 1, 2], "transpose_backward": [0, 1, 2],
}  # fmt: skip


def write(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, oblique((0.8, 0.9, 1.7), (-1, 1, 1))), path)


def blobs(rng: np.random.Generator, count: int, sizes: tuple[int, int]) -> np.ndarray:
    """Returns labels of nested boxes at random places."""
    labels = np.zeros((22, 20, 18), np.uint8)
    for _ in range(count):
        side, low = int(rng.integers(*sizes)), rng.integers(0, 12, 3)
        labels[tuple(slice(a, a + side) for a in low)] = 1
        labels[tuple(slice(a + 1, a + side - 1) for a in low)] = 2
    return labels


def declaration(regions: bool) -> dict[str, Any]:
    labels = {"background": 0, "organ": [1, 2] if regions else 1, "tumour": 2}
    declared = {"labels": labels, "channel_names": {"0": "T1"}, "numTraining": 4, "file_ending": ".nii.gz"}
    return declared | ({"regions_class_order": [1, 2]} if regions else {})


def test_postprocessing_is_what_nnunet_determines(tmp_path) -> None:
    """On labels and regions, where it raises Dice and where it does not."""
    chosen, theirs = list[int](), list[list[object]]()
    for seed, regions in ((0, False), (1, True), (2, False), (3, True)):
        place, rng = tmp_path / str(seed), np.random.default_rng(seed)
        for n in range(4):
            truth = blobs(rng, 1 + seed // 2, (6, 9))
            noise = blobs(rng, 3, (2, 4)) * (rng.random(truth.shape) < 0.7)
            write(place / "labelsTr" / f"c{n}.nii.gz", truth)
            write(place / "predicted" / f"c{n}.nii.gz", np.where(noise > 0, noise, truth).astype(np.uint8))
        for name, content in (("plans", PLANS), ("dataset", declaration(regions))):
            (place / f"{name}.json").write_text(json.dumps(content))
        ours = place / "ours"
        more = ["--json", ours / "o.json", "--csv", ours / "o.csv", "--find-best", ours / "postprocessing.json"]
        assert evaluate([*map(str, [place / "labelsTr", place / "predicted", "--workers", "1", *more])]) == 0
        files = [place / name for name in ("predicted", "labelsTr", "plans.json", "dataset.json")]
        theirs.append(["postprocessing", *files])
    acts(tmp_path, *theirs)
    for seed in range(4):
        ours, their = (tmp_path / str(seed) / name / "postprocessing.json" for name in ("ours", "predicted"))
        assert read_postprocessing(ours) == read_postprocessing(their), seed
        got, want = (json.loads(path.read_text())["postprocessed"]["mean"] for path in (ours, their))
        assert {key: rounded(own["Dice"]) for key, own in got.items()} == {
            key: rounded(own["Dice"]) for key, own in want.items()
        }
        chosen.append(len(read_postprocessing(ours)))
    assert len(set(chosen)) > 1, "no control"


def rounded(value: float) -> float:
    return round(value, 9)


def write_fold(results: Path, number: int, truth: np.ndarray, noise: float, declared: dict[str, Any]) -> None:
    """Writes a fold's validation of one case as nnU-Net does: a label map, probabilities, and what they are of."""
    rng, folder = np.random.default_rng([number, int(noise * 10)]), results / f"fold_{number}" / "validation"
    logits = np.stack([4.0 * (truth == n) for n in range(3)]) + rng.normal(0, 2 + noise, (3, *truth.shape))
    shares = np.exp(logits) / np.exp(logits).sum(0)
    labels = shares.argmax(0)
    if "regions_class_order" in declared:
        shares = np.stack([shares[1] + shares[2], shares[2]])
        labels = np.where(shares[1] > 0.5, 2, shares[0] > 0.5)
    path = folder / f"c{number}.nii.gz"
    write(path, labels.astype(np.uint8))
    case = Case(f"c{number}", (path,), None)
    EnsembleFiles(PLANS, declared, ()).write(folder, case, [*shares], read_volume(path)[1])
    for file in (folder / "npz").iterdir():
        file.rename((results if file.suffix == ".json" else folder) / file.name)


@pytest.mark.parametrize("regions", [False, True])
def test_the_best_of_two_and_of_their_average_is_nnunets(tmp_path, regions, capfd) -> None:
    declared, name = declaration(regions), PLANS["dataset_name"]
    raw, prepared, results = (tmp_path / f"nnUNet_{part}" / name for part in ("raw", "preprocessed", "results"))
    trainers = ("nnUNetTrainer", "nnUNetTrainerDA5")
    folders = [results / f"{trainer}__nnUNetPlans__3d_fullres" for trainer in trainers]
    for number in range(3):
        truth = blobs(np.random.default_rng(number), 2, (6, 9))
        for place in (raw / "labelsTr", prepared / "gt_segmentations"):
            write(place / f"c{number}.nii.gz", truth)
        for folder, noise in zip(folders, (0.0, 0.3)):
            write_fold(folder, number, truth, noise, declared)
    for path, content in ((prepared / "nnUNetPlans.json", PLANS), (tmp_path / "dataset.json", declared)):
        path.write_text(json.dumps(content))
    line = [raw / "labelsTr", *folders, "--dataset", tmp_path / "dataset.json", "--workers", 1, "--find-best"]
    assert evaluate([*map(str, line)]) == 0
    said = capfd.readouterr().out
    acts(tmp_path, ["best", name, " ".join(trainers), tmp_path / "told.json"])
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["best"] == list(trainers), "no control: one alone is best"
    both = " and ".join(map(str, folders))
    assert f"highest mean Dice among 3, over 3 cases (too few to tell): the mean of {both}\n" in said
    for dice, who in zip(told["dice"], (*map(str, folders), f"the mean of {both}")):
        assert f"  {dice:.4f}  {who}\n" in said
    ensemble = results / "ensembles" / ("ensemble___" + "___".join(folder.name for folder in folders))
    ours, theirs = (Path(f"{ensemble}{end}") / "postprocessing.json" for end in ("", "___0_1_2"))
    assert read_postprocessing(ours) == read_postprocessing(theirs) != ()
    after = json.loads(ours.read_text())["postprocessed"]["foreground_mean"]["Dice"]
    assert after == pytest.approx(told["after"], abs=1e-9)


def test_nnunet_averages_our_probabilities(tmp_path) -> None:
    """Of two folds that nnU-Net trained, and of a run that has no plans."""
    from tests.support.predictions import RECIPE, make_run

    write(tmp_path / "images" / "c0_0000.nii.gz", np.random.default_rng(0).normal(300, 60, (13, 12, 11)))
    own, theirs, lines = make_run(tmp_path / "own", RECIPE, name="own"), GOLDEN / "model", list[list[object]]()
    for name, line in (("fold0", [theirs, "-f", 0]), ("fold1", [theirs, "-f", 1]), ("run", [own])):
        images = tmp_path / "images" if name == "run" else GOLDEN / "imagesTs"
        flags = ["--npz", "--mirror", "none", "--device", "cpu"]
        lines.append(["ours", "predict", *line, "-i", images, *flags, "-o", tmp_path / name])
    acts(tmp_path, *lines)
    means = {names: tmp_path / f"mean-{names[0]}" for names in (("fold0", "fold1"), ("run", "run"))}
    acts(tmp_path, *(["ensemble", *(tmp_path / name / "npz" for name in names), out] for names, out in means.items()))
    for names, mean in means.items():
        folders = [str(tmp_path / name / "npz") for name in names]
        for path in sorted((tmp_path / names[0]).glob("*.nii.gz")):
            arrays = [np.load(f"{folder}/{path.name.split('.')[0]}.npz")["probabilities"] for folder in folders]
            written, source = nibabel.load(mean / path.name), nibabel.load(path)
            assert written.shape == source.shape and np.allclose(written.affine, source.affine, atol=1e-3)
            labels = np.asarray(written.dataobj)
            np.testing.assert_array_equal(labels, sum(arrays).argmax(0).T)
            differing = np.count_nonzero(labels != np.asarray(source.dataobj)) / labels.size
            assert (len(np.unique(labels)) > 1 and 0 < differing < 0.5) == (names[0] == "fold0")
