"""Training at another spacing than the files': prepared so, kept apart from other caches, and taken back in the end."""

from pathlib import Path

import nibabel
import numpy as np
import pytest

from seqpar.cli import predict
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.preparation.cache import open_cache
from seqpar.data.preparation.prepare_dataset import prepare, prepared
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.runs.trained_run import read_run
from tests.support.folders import tree
from tests.support.training_runs import tiny_data, trained


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return tiny_data(tmp_path_factory.mktemp("spacing"))


def _labels(folder: Path) -> list[nibabel.Nifti1Image]:
    return [nibabel.load(path) for path in sorted(folder.glob("*.nii.gz"))]


def test_a_run_at_another_spacing_answers_in_the_files_geometry(flags, tmp_path):
    data, cache = (Path(flags[flags.index(name) + 1]) for name in ("--data", "--cache"))
    trained(1, [*flags, "--spacing", "2,2,3"], tmp_path / "run")
    assert read_run(tmp_path / "run").recipe.spacing == (2, 2, 3)
    assert open_cache(cache).cases["c_000"].label.shape != (14, 12, 10)
    assert predict.act([str(tmp_path / "run"), "-i", str(data / "imagesTr"), "-o", str(tmp_path / "out")]) == 0
    sources = _labels(data / "labelsTr")
    for labels in (_labels(tmp_path / "out"), _labels(tmp_path / "run/validation")):
        assert labels
        for label in labels:
            assert label.shape == (14, 12, 10) and np.allclose(label.affine, sources[0].affine)
            assert set(np.unique(np.asarray(label.dataobj))) <= {0, 1}
    assert len(_labels(tmp_path / "out")) == len(sources)


def test_images_of_other_voxels_than_a_run_was_trained_on_are_warned_of(flags, tmp_path, capsys):
    """In the words of the pages."""
    data, images = Path(flags[flags.index("--data") + 1]), tmp_path / "images"
    trained(1, flags, tmp_path / "run")

    def said(folder: Path, *runs: Path) -> str:
        runs = runs or (tmp_path / "run",)
        assert predict.act([*map(str, runs), "-i", str(folder), "-o", str(tmp_path / f"{folder.name}{len(runs)}")]) == 0
        return capsys.readouterr().err

    assert "voxels of another size" not in said(data / "imagesTr")
    images.mkdir()
    for path in sorted((data / "imagesTr").glob("*.nii.gz")):
        image = nibabel.load(path)
        affine = image.affine @ np.diag([2, 2, 2, 1]) if path.name.startswith("c_000") else image.affine
        nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj), affine), images / path.name)
    count, voxels = len(list(images.iterdir())), "voxels of another size or shape than the run's own cases: c_000 of"
    assert f"warning: 1 of {count} cases has {voxels}" in (err := said(images))
    assert "This run does not resample, so the network sees structures at another scale than in training" in err
    trained(1, [*flags, "--seed", "1"], tmp_path / "other")
    assert f"warning: {tmp_path}/run: 1 of {count} cases has {voxels}" in said(
        images, tmp_path / "run", tmp_path / "other"
    )


def test_a_cache_of_another_spacing_is_left_as_it_is_and_the_new_one_stands_in_it(flags, tmp_path):
    data = flags[flags.index("--data") + 1]
    prepare(read_dataset(data), tmp_path / "c", PrepareSettings.spaced("2,2,3"), workers=0)
    before = tree(tmp_path / "c")
    said = trained(1, [*flags, "--cache", str(tmp_path / "c")], tmp_path / "run").said()
    assert f"prepared in {tmp_path}/c/@source: 10 x 8 x 6 voxels" in said
    after = tree(tmp_path / "c")
    assert before.items() < after.items()
    again = prepared(data, tmp_path / "c", PrepareSettings.spaced("2,2,3"), is_first=True, workers=0)
    assert again.path == tmp_path / "c" and tree(tmp_path / "c") == after, "each is found again"
