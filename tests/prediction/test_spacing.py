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
