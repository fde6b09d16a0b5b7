"""What prediction takes: data sets, folders, lists and files, labels or not; and flags that it refuses."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seqpar.cli import predict
from seqpar.cluster.exit_codes import DATA
from seqpar.data.errors import DataError
from seqpar.data.preparation.preparation import RecipePreparation
from tests.support.folders import NEW, OLD, brats, nnunet, tree, write_json
from tests.support.predictions import RECIPE, act, make_run


@pytest.mark.parametrize(
    "more, message",
    [
        (("--window", "half"), "invalid choice"),
        (("--overlap", "1"), "--overlap 1.0"),
        (("--min-component", "many"), "--min-component many"),
        (("--window-batch", "0"), "--window-batch 0"),
        (("--window", "whole", "--overlap", "0.5"), "no windows"),
        (("--mirror", "Z"), "invalid choice"),
        (("--seqpar", "-1"), "use seqpar=1"),
        (("--explain",), "--explain would do nothing: .* labels voxels, and no whole cases: remove it"),
        (("--explain-by", "grad-cam"), "--explain-by would do nothing"),
        (("--checkpoint", "nowhere.pt"), "no such file"),
        (("--unknown",), "unrecognized"),
    ],
)
def test_what_cannot_be_done_is_refused(more: tuple[str, ...], message: str, images, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        act(tmp_path, make_run(tmp_path / "run"), *more)
    assert not (tmp_path / "out").exists()


def test_in_a_job_it_says_how_to_start_the_ranks_that_share_a_window(images, tmp_path, monkeypatch) -> None:
    """Elsewhere it starts them: README's second command does."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(ValueError, match=r"use: srun -n 2 python \S*predict.py \S*run -i"):
        act(tmp_path, make_run(tmp_path / "run"), "--seqpar", "2")


def test_wrong_inputs_are_refused(images, tmp_path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(ValueError, match="nowhere does not exist: name the folder"):
        act(tmp_path, tmp_path / "nowhere")
    with pytest.raises(DataError, match="does not exist"):
        act(tmp_path, run, images="nowhere")
    shutil.copy(images / "c_000_0000.nii.gz", tmp_path / "plain.nii.gz")
    with pytest.raises(DataError, match="would be overwritten"):
        act(tmp_path, run, images="plain.nii.gz", out=".")
    other = make_run(tmp_path / "other", replace(RECIPE, values=(0, 1, 2)))
    with pytest.raises(DataError, match="another network"):
        act(tmp_path, run, "--checkpoint", str(other / "model.safetensors"))


def test_inputs_are_whatever_training_reads(images, tmp_path) -> None:
    """A data set, its images alone, and single files say the same; a label that is there plays no part."""
    run, data = make_run(tmp_path / "run"), nnunet(tmp_path / "data")
    assert act(tmp_path, run, images="data", out="a") == act(tmp_path, run, images="data/imagesTr", out="b") == 0
    files = [str(path) for path in sorted((data / "imagesTr").iterdir())]
    assert predict.act([str(run), "-i", *files, "-o", str(tmp_path / "c")]) == 0
    assert tree(tmp_path / "a") == tree(tmp_path / "b") == tree(tmp_path / "c") and len(tree(tmp_path / "a")) == 4


def unlabelled_nnunet(root: Path) -> Path:
    nnunet(root)
    (root / "labelsTr" / "c_001.nii.gz").unlink()
    write_json(root / "splits_final.json", [{"train": ["c_000"], "val": ["gone"]}])
    return root


def images_of_nnunet(root: Path) -> Path:
    shutil.rmtree(nnunet(root, labels={}) / "labelsTr")
    return root


def explicit_nnunet(root: Path) -> Path:
    nnunet(root)
    files = {f"c_{n:03d}": {"images": [f"imagesTr/c_{n:03d}_0000.nii.gz"]} for n in range(3)}
    return nnunet(root, 0, dataset=files)


def unlabelled_list(root: Path) -> Path:
    nnunet(root)
    entries = [{"image": f"imagesTr/c_{n:03d}_0000.nii.gz"} | ({"fold": 0} if n else {}) for n in range(3)]
    return write_json(root / "list.json", {"training": entries[:2], "validation": entries[1:]})


def unlabelled_decathlon(root: Path) -> Path:
    nnunet(root)
    for n in range(3):
        (root / "imagesTr" / f"c_{n:03d}_0000.nii.gz").rename(root / "imagesTr" / f"c_{n:03d}.nii.gz")
    entries = [{"image": f"./imagesTr/c_{n:03d}.nii.gz", "label": "./labelsTr/gone.nii.gz"} for n in range(3)]
    write_json(root / "dataset.json", {"modality": {"0": "T1"}, "training": entries})
    return root


@pytest.mark.parametrize(
    "write", [unlabelled_nnunet, images_of_nnunet, explicit_nnunet, unlabelled_list, unlabelled_decathlon]
)
def test_prediction_asks_for_neither_labels_nor_splits(write: Any, tmp_path, capfd) -> None:
    data = write(tmp_path / "data")
    assert act(tmp_path, make_run(tmp_path / "run"), images=str(data.relative_to(tmp_path))) == 0
    assert len(list((tmp_path / "out").glob("*.nii.gz"))) == 3 and "error" not in capfd.readouterr().err


def test_brats_cases_are_predicted_with_or_without_a_label(tmp_path) -> None:
    """Whatever their labels would mean, and as often as there are some."""
    names = ["BraTS-GLI-00000-000", "BraTS-GLI-00001-000"]
    root = brats(tmp_path / "data", names, NEW, "-", (1, 2, 3))
    (root / names[1] / f"{names[1]}-seg.nii.gz").unlink()
    shutil.copy(root / names[0] / f"{names[0]}-seg.nii.gz", root / f"{names[0]}-seg.nii.gz")
    brats(root, ["BraTS2021_00000"], OLD, "_", (1, 2, 4))
    names4 = ("T1", "T1c", "T2", "FLAIR")
    recipe = replace(RECIPE, modalities=names4, schemes=("zscore",) * 4, intensities=(None,) * 4)
    assert act(tmp_path, make_run(tmp_path / "run", recipe), images="data") == 0
    assert len(list((tmp_path / "out").glob("BraTS*.nii.gz"))) == 3


def test_where_no_case_can_be_predicted_the_error_stands_alone(tmp_path, capfd) -> None:
    two = replace(RECIPE, modalities=("T1", "FLAIR"), schemes=("none",) * 2, intensities=(None,) * 2)
    (nnunet(tmp_path / "data", 1, ("T1", "FLAIR")) / "imagesTr" / "c_000_0001.nii.gz").unlink()
    assert act(tmp_path, make_run(tmp_path / "run", two), images="data") == DATA
    said, error = capfd.readouterr()
    assert "c_000_0001.nii.gz: is missing" in error and "predicting" not in said and "next: " not in said


def test_modalities_are_taken_by_name(tmp_path, capfd) -> None:
    recipe = replace(RECIPE, modalities=("T1", "FLAIR"), schemes=("none",) * 2, intensities=(None,) * 2)
    run = make_run(tmp_path / "run", recipe)
    for name, channels in (("a", ("T1", "FLAIR")), ("b", ("FLAIR", "T1")), ("d", ("T1", "T2"))):
        nnunet(tmp_path / name, 1, channels)
    for channel in range(2):  # b holds the same images under the other numbers
        source = tmp_path / "a" / "imagesTr" / f"c_000_{channel:04d}.nii.gz"
        shutil.copy(source, tmp_path / "b" / "imagesTr" / f"c_000_{1 - channel:04d}.nii.gz")
    assert act(tmp_path, run, images="a", out="of a") == act(tmp_path, run, images="b", out="of b") == 0
    of_a, of_b = (tree(tmp_path / f"of {one}") for one in "ab")
    assert of_a.pop("prediction.json") != of_b.pop("prediction.json"), "names of files differ"
    assert of_a == of_b and len(of_a) == 1
    with pytest.raises(DataError, match="T1, T2, but the network was trained on T1, FLAIR"):
        act(tmp_path, run, images="d")


def test_it_is_said_that_mirrored_copies_exchange_left_and_right(tmp_path: Path, capsys, monkeypatch) -> None:
    sides = {"background": 0, "left kidney": 1, "right kidney": 2}
    run = make_run(tmp_path / "run", replace(RECIPE, values=(0, 1, 2)), labels=sides)
    nnunet(tmp_path / "data", 1)
    for more, is_said in ((("--mirror",), True), (("--mirror", "D", "H"), False), ((), False)):
        assert act(tmp_path, run, *more, images="data", out="-".join(("out", *more))) == 0
        said = "warning: A prediction is the mean over copies mirrored from left to right (--mirror), which exchanges"
        assert (f"{said} left kidney and right kidney: these may be confused." in capsys.readouterr().err) == is_said
    monkeypatch.setattr(RecipePreparation, "axes", "nnU-Net's (SimpleITKIO)")
    assert act(tmp_path, run, "--mirror", images="data", out="other") == 0
    assert "mirrored" not in capsys.readouterr().err
