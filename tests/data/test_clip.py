"""A modality named "clip a:b": a and less become 0, b and more 1, in training and prediction alike."""

import numpy as np
import pytest

from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.preparation.cache import open_cache
from seqpar.data.preparation.preparation import prepare_case
from seqpar.data.preparation.prepare_dataset import prepare
from seqpar.data.preparation.prepared_case import image_to_source
from seqpar.data.preparation.recipe import PrepareSettings, Recipe, draft_recipe
from seqpar.data.volumes import read_volume
from tests.support.bad_data import rewrite
from tests.support.folders import nnunet


def test_a_range_becomes_0_to_1_beside_other_schemes(tmp_path) -> None:
    """CT next to it is learned from the labels, and z-scores are over all, as that is nowhere 0; JSON keeps it."""
    root = nnunet(tmp_path / "D", 2, ("Clip -160:240", "CT", "T1"))
    for n in range(2):
        rewrite(root / "imagesTr" / f"c_{n:03d}_0000.nii.gz", lambda a: a.astype("f4") * 2 - 400)
    assert not prepare(read_dataset(root), tmp_path / "c", workers=0).faults
    cache = open_cache(tmp_path / "c")
    assert cache.recipe.schemes == ("clip", "ct", "volume") and Recipe.from_json(cache.recipe.to_json()) == cache.recipe
    assert (
        cache.recipe.intensities[0] != cache.recipe.intensities[1] is not None and cache.recipe.intensities[2] is None
    )
    case = read_dataset(root).cases[0]
    done = prepare_case(case, cache.recipe)
    np.testing.assert_array_equal(done.image, cache.cases["c_000"].image)
    source = read_volume(case.images[0]).array
    assert (source < -160).any() and (source > 240).any() and done.image[0].min() == 0 and done.image[0].max() == 1
    back = image_to_source(done.image, done.properties)[0]
    inside = image_to_source(np.ones_like(done.image), done.properties)[0] == 240  # what the crop keeps
    np.testing.assert_allclose(back[inside], np.clip(source[0], -160, 240)[inside], atol=1e-3)
    assert inside.sum() > 100


@pytest.mark.parametrize("name", ["clip", "clip 5", "clip 5:5", "clip 9:3", "clip a:b", "clip 0:inf", "clip 1:2:3"])
def test_a_name_without_a_range_is_refused(name: str, tmp_path) -> None:
    dataset = read_dataset(nnunet(tmp_path / "D", 1, (name,)))
    with pytest.raises(DataError, match=f"modality '{name}' gives no range; .* clip -160:240"):
        draft_recipe(dataset, PrepareSettings())
