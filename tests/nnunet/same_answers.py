"""The real nnU-Net averages what predict --npz writes, and chooses the postprocessing that evaluate chooses."""

import json
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np

from tests.nnunet.real_nnunet import oblique
from tests.nnunet.there_and_back import started

GOLDEN = Path(__file__).parents[1] / "golden" / "nnunet"
POSTPROCESS = """
import sys
from nnunetv2.postprocessing.remove_connected_components import determine_postprocessing
if __name__ == "__main__":
    determine_postprocessing(*sys.argv[1:], num_processes=1)
"""


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


def test_postprocessing_is_what_nnunet_determines(tmp_path) -> None:
    """On labels and regions, where it raises Dice and where it does not."""
    from seqpar.cli.evaluate import act
    from seqpar.scores.postprocessing import read_postprocessing

    chosen = list[int]()
    for seed, regions in ((0, False), (1, True), (2, False), (3, True)):
        place, rng = tmp_path / str(seed), np.random.default_rng(seed)
        labels = {"background": 0, "organ": [1, 2] if regions else 1, "tumour": 2}
        declared = {"labels": labels, "channel_names": {"0": "T1"}, "numTraining": 4, "file_ending": ".nii.gz"}
        declared |= {"regions_class_order": [1, 2]} if regions else {}
        plans = {"image_reader_writer": "SimpleITKIO", "dataset_name": "D", "plans_name": "P", "configurations": {},
                 "transpose_forward": [0, 1, 2], "transpose_backward": [0, 1, 2]}  # fmt: skip
        for n in range(4):
            truth = blobs(rng, 1 + seed // 2, (6, 9))
            noise = blobs(rng, 3, (2, 4)) * (rng.random(truth.shape) < 0.7)
            write(place / "labelsTr" / f"c{n}.nii.gz", truth)
            write(place / "predicted" / f"c{n}.nii.gz", np.where(noise > 0, noise, truth).astype(np.uint8))
        for name, content in (("plans", plans), ("dataset", declared)):
            (place / f"{name}.json").write_text(json.dumps(content))
        ours = place / "ours.json"
        more = ["--json", str(place / "o.json"), "--csv", str(place / "o.csv"), "--find-best", str(ours)]
        assert act([str(place / "labelsTr"), str(place / "predicted"), "--workers", "1", *more]) == 0
        (place / "run.py").write_text(POSTPROCESS)
        arguments = [place / "predicted", place / "labelsTr", place / "plans.json", place / "dataset.json"]
        subprocess.run([sys.executable, place / "run.py", *map(str, arguments)], check=True, timeout=600)
        theirs = place / "predicted" / "postprocessing.json"
        assert read_postprocessing(ours) == read_postprocessing(theirs), seed
        got, want = (json.loads(path.read_text())["postprocessed"]["mean"] for path in (ours, theirs))
        assert {key: rounded(own["Dice"]) for key, own in got.items()} == {
            key: rounded(own["Dice"]) for key, own in want.items()
        }
        chosen.append(len(read_postprocessing(ours)))
    assert len(set(chosen)) > 1, "no control"


def rounded(value: float) -> float:
    return round(value, 9)


def test_nnunet_averages_our_probabilities(tmp_path) -> None:
    """Of two folds that nnU-Net trained, and of a run that has no plans."""
    from tests.support.predictions import RECIPE, make_run

    write(tmp_path / "images" / "c0_0000.nii.gz", np.random.default_rng(0).normal(300, 60, (13, 12, 11)))
    own, theirs = make_run(tmp_path / "own", RECIPE, name="own"), GOLDEN / "model"
    for name, line in (("fold0", [theirs, "-f", 0]), ("fold1", [theirs, "-f", 1]), ("run", [own])):
        images = tmp_path / "images" if name == "run" else GOLDEN / "imagesTs"
        started("seqpar.cli.predict", *line, "-i", images, "--npz", "--device", "cpu", "-o", tmp_path / name)
    for names in (("fold0", "fold1"), ("run", "run")):
        folders, mean = [str(tmp_path / name / "npz") for name in names], tmp_path / f"mean-{names[0]}"
        program = Path(sys.executable).with_name("nnUNetv2_ensemble")
        subprocess.run([program, "-i", *folders, "-o", str(mean), "-np", "1"], check=True, timeout=600)
        for path in sorted((tmp_path / names[0]).glob("*.nii.gz")):
            arrays = [np.load(f"{folder}/{path.name.split('.')[0]}.npz")["probabilities"] for folder in folders]
            written, source = nibabel.load(mean / path.name), nibabel.load(path)
            assert written.shape == source.shape and np.allclose(written.affine, source.affine, atol=1e-3)
            labels = np.asarray(written.dataobj)
            np.testing.assert_array_equal(labels, sum(arrays).argmax(0).T)
            differing = np.count_nonzero(labels != np.asarray(source.dataobj)) / labels.size
            assert (len(np.unique(labels)) > 1 and 0 < differing < 0.5) == (names[0] == "fold0")
