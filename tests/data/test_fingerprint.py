"""What a survey finds is nnU-Net's fingerprint, and what it decides is what nnU-Net plans."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqpar.data.preparation import recipe_survey
from seqpar.data.preparation.recipe_survey import Sample, merge_samples
from tests.nnunet.fingerprints import DATASETS, DRAWN, found, make_dataset

TOLD = json.loads((Path(__file__).parents[1] / "golden" / "nnunet" / "fingerprints.json").read_text())


def refuse_differing(got: Any, want: Any, at: str = "") -> None:
    """Fails where numbers differ by more than 1e-5 of them, or anything else at all."""
    if isinstance(want, Mapping):
        assert list(got) == list(want), at
        for key in want:
            refuse_differing(got[key], want[key], f"{at} {key}")
    elif isinstance(want, Sequence) and not isinstance(want, str):
        assert len(got) == len(want), at
        for one, other in zip(got, want):
            refuse_differing(one, other, at)
    else:
        assert got == (pytest.approx(want, rel=1e-5) if isinstance(want, float) else want), at


@pytest.mark.parametrize("name", DATASETS)
def test_fingerprint_and_decisions_are_those_of_nnunet(name, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_survey, "SAMPLED_VOXELS", DRAWN)
    got = found(make_dataset(tmp_path, name), tmp_path / "cache")
    told = dict(TOLD[name])
    if name == "Dataset204_Regions":  # crops keep labelled voxels that are outside what is not 0
        assert got.pop("shapes_after_crop") != told.pop("shapes_after_crop")
    refuse_differing(got, told)


def test_the_data_sets_differ_in_what_is_decided():
    masks = {name: told["use_mask_for_norm"] for name, told in TOLD.items()}
    assert masks["Dataset202_MR"] == [False, False] and masks["Dataset204_Regions"] == [True, False]
    assert TOLD["Dataset203_Ignore"]["intensities"]["0"]["mean"] > 200  # of voxels to ignore: the others are near 140
    assert TOLD["Dataset205_Thick"]["spacing"][2] < 4.5  # not the median


def test_drawing_is_numpys_choice_in_any_number_of_pieces(monkeypatch):
    monkeypatch.setattr(recipe_survey, "DRAWN_AT_ONCE", 700)
    for population in (1, 2, 37, 4096):
        ours, theirs = np.random.RandomState(5), np.random.RandomState(5)
        for _ in range(2):  # the second channel's draws follow the first's
            counts = recipe_survey._draw(ours, population, 5000)
            drawn = theirs.choice(np.arange(population), 5000, replace=True)
            np.testing.assert_array_equal(counts, np.bincount(drawn, minlength=population))
    assert not recipe_survey._draw(ours, 0, 5000).size


def test_merged_samples_count_equal_values_together():
    merged = merge_samples(
        [Sample(np.array([3, 1, 3]), np.array([2, 0, 1])), Sample(np.array([3, 2]), np.array([4, 5]))]
    )
    assert merged.values.tolist() == [2, 3] and merged.counts.tolist() == [5, 7]
