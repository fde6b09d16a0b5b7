"""Labels that are joined, volumes that are cut and normalised whole, and parts of the cases for tests."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqpar.data.errors import DataError
from seqpar.data.formats import splits
from seqpar.data.formats.joined_labels import join_labels, parse_joins
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.preparation.cache_index import cache_folder, refuse_other
from seqpar.data.preparation.preparation import prepare_case
from seqpar.data.preparation.prepare_dataset import prepare, prepared
from seqpar.data.preparation.prepared_case import image_to_source, labels_to_source
from seqpar.data.preparation.recipe import PrepareSettings, Recipe, draft_recipe
from seqpar.data.volumes import read_volume
from seqpar.scores.label_classes import labels_of_run
from tests.support.folders import decathlon, label_array, nnunet, save, tree

TUMOUR = parse_joins("tumour=1,2,3")


def test_joined_labels_are_one_class_from_the_files_to_the_prediction_and_the_scores(tmp_path: Path) -> None:
    dataset = join_labels(read_dataset(decathlon(tmp_path / "Task01_BrainTumour")), TUMOUR)
    assert dataset.labels == {"background": 0, "tumour": 1} and dataset.regions == {}
    recipe = draft_recipe(dataset, PrepareSettings(joins=TUMOUR))
    assert Recipe.from_json(recipe.to_json()) == recipe
    case = dataset.cases[0]
    done = prepare_case(case, recipe)
    truth = read_volume(case.label)[0][0]
    assert done.label is not None and set(np.unique(done.label)) == {0, 1} and set(np.unique(truth)) == {0, 1, 2, 3}
    np.testing.assert_array_equal(labels_to_source(done.label, done.properties), truth > 0)
    described = {"values": [0, 1], "ignore_label": None, "labels": {"background": 0, "tumour": 1}, "regions": {}}
    labels = labels_of_run({**described, "recipe": recipe.to_json()})
    assert labels.classes == {"tumour": (1, 2, 3)} and labels.declared == {0, 1, 2, 3}


def test_regions_stay_where_a_join_leaves_them_whole(tmp_path: Path) -> None:
    dataset = read_dataset(decathlon(tmp_path / "Task01_BrainTumour"))
    assert dataset.regions == {"WT": (1, 2, 3), "TC": (2, 3), "ET": (3,)}
    core = join_labels(dataset, parse_joins("core=2,3"))
    assert core.labels == {"background": 0, "edema": 1, "core": 2}
    assert core.regions == {"WT": (1, 2)} and core.regions_class_order == (dataset.regions_class_order[0],)
    shown = replace(dataset, cases=(replace(dataset.cases[0], annotated=(1, 2)), dataset.cases[1]))
    assert [case.annotated for case in join_labels(shown, parse_joins("core=2,3")).cases] == [(1,), None]


@pytest.mark.parametrize("text", ["tumour", "tumour=", "a=1,1", "a=1 b=1", "a=0,1", "a=1 a=2", "a=x"])
def test_a_text_that_is_no_join_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--join-labels"):
        parse_joins(text)


def test_a_join_of_labels_that_there_are_not_or_of_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    dataset = read_dataset(decathlon(tmp_path / "Task01_BrainTumour"))
    with pytest.raises(DataError, match="has no label 7, which --join-labels tumour names; it declares background 0"):
        join_labels(dataset, parse_joins("tumour=1,7"))
    with pytest.raises(DataError, match="already has a label edema"):
        join_labels(dataset, parse_joins("edema=2,3"))


def test_a_volume_is_cut_in_its_middle_and_normalised_with_its_background(tmp_path: Path) -> None:
    """Of 14 x 12 x 13 voxels the rows 2 to -1 stay along the last axis, as DistMIS cuts 155 to 152."""
    image = np.random.default_rng(0).normal(300, 30, (14, 12, 13, 2))
    image[:3] = 0
    root = nnunet(tmp_path / "D", cases=1, channels=("T1", "CT"))
    for channel in range(2):
        save(root / "imagesTr" / f"c_000_{channel:04d}.nii.gz", image[..., channel], np.eye(4))
    save(root / "labelsTr" / "c_000.nii.gz", label_array(shape=(14, 12, 13)), np.eye(4))
    dataset = read_dataset(root)
    settings = PrepareSettings(crop_to=(14, 20, 10), normalise="volume")
    recipe = draft_recipe(dataset, settings)
    done = prepare_case(dataset.cases[0], recipe)
    assert done.image.shape == (2, 14, 12, 10) and done.properties.box == ((0, 14), (0, 12), (2, 12))
    whole = np.moveaxis(image, 3, 0)[..., 2:-1].astype(np.float32)
    wanted = (whole - whole.mean((1, 2, 3), keepdims=True)) / whole.std((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(done.image, wanted, atol=1e-4)
    back = image_to_source(done.image, done.properties)
    np.testing.assert_allclose(back[..., 2:-1], whole, atol=1e-2)
    truth = read_volume(dataset.cases[0].label)[0][0]
    np.testing.assert_array_equal(labels_to_source(done.label, done.properties), truth)  # type: ignore[arg-type]


def test_labelled_voxels_are_cut_off_only_by_force(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "D", cases=1)
    settings = PrepareSettings(crop_to=(4, 12, 10))
    report = prepare(read_dataset(root), tmp_path / "cache", settings, workers=0)
    (fault,) = report.faults
    assert "--crop-to 4 12 10 would cut off 32 labelled voxels; give larger sides, or add --force" in str(fault)
    assert "c_000.nii.gz" in str(fault)
    forced = replace(settings, cut_labels=True, crop_to=(9, 12, 10))
    with pytest.raises(DataError, match="no case has a labelled voxel|would cut off"):
        prepared(root, tmp_path / "other", replace(settings, crop_to=(4, 12, 10)), is_first=True, workers=0)
    assert prepared(root, tmp_path / "forced", forced, is_first=True, workers=0).cases["c_000"].label.shape == (
        9,
        12,
        10,
    )


def test_a_cache_of_cut_labels_is_not_taken_without_force(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "D", cases=2)
    save(root / "labelsTr" / "c_001.nii.gz", np.ones((14, 12, 10), np.uint8))
    settings = PrepareSettings(crop_to=(9, 12, 10))
    forced = replace(settings, cut_labels=True)
    assert len(prepared(root, tmp_path / "cache", forced, is_first=True, workers=0).cases) == 2
    with pytest.raises(DataError, match="would cut off"):
        prepared(root, tmp_path / "cache", settings, is_first=True, workers=0)
    index = json.loads((tmp_path / "cache" / "cache.json").read_text())
    del index["settings"]["cut_labels"]  # as earlier versions wrote it
    (tmp_path / "cache" / "cache.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="would cut off"):
        prepared(root, tmp_path / "cache", settings, is_first=True, workers=0)
    prepared(root, tmp_path / "killed", forced, is_first=True, workers=0)
    (tmp_path / "killed" / "cache.json").unlink()  # as if it had been killed before it wrote the index
    with pytest.raises(DataError, match="would cut off"):
        prepared(root, tmp_path / "killed", settings, is_first=True, workers=0)
    dataset = read_dataset(root)
    assert cache_folder(dataset, None, forced) != cache_folder(dataset, None, settings)


def test_sides_that_were_refused_leave_the_folder_to_others(tmp_path: Path) -> None:
    """Of two cases one loses labels: the other is prepared, and larger sides are taken in the same folder."""
    root, cache = nnunet(tmp_path / "D", cases=2), tmp_path / "cache"
    save(root / "labelsTr" / "c_001.nii.gz", np.ones((14, 12, 10), np.uint8))
    small, large = PrepareSettings(crop_to=(9, 12, 10)), PrepareSettings(crop_to=(14, 12, 10))
    for replaces in (True, False):
        report = prepare(read_dataset(root), cache, small, workers=0, replace=replaces)
        assert "--crop-to 9 12 10 would cut off 600 labelled voxels" in str(report.faults[0])
        assert (report.prepared, report.kept) == ((("c_000",), ()) if replaces else ((), ("c_000",)))
    cases = prepared(root, cache, large, is_first=True, workers=0).cases
    assert {case.label.shape for case in cases.values()} == {(14, 12, 10)}


def test_each_way_of_preparing_has_a_cache_of_its_own_and_old_caches_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SEQPAR_CACHE", raising=False)
    dataset = read_dataset(decathlon(tmp_path / "Task01_BrainTumour"))
    ways = [
        PrepareSettings(),
        PrepareSettings(joins=TUMOUR),
        PrepareSettings(crop_to=(14, 12, 10)),
        PrepareSettings(crop_to=(14, 12, 10), cut_labels=True),
        PrepareSettings(normalise="volume"),
        PrepareSettings("median", normalise="volume"),
        PrepareSettings("median"),
    ]
    assert len({cache_folder(dataset, None, way) for way in ways}) == len(ways)
    assert PrepareSettings().described() == {"spacing": "source", "locations": 10_000}, "what caches so far have"
    assert cache_folder(dataset, None, PrepareSettings()).name == "Task01_BrainTumour"
    prepared(dataset.root, tmp_path / "cache", PrepareSettings(), is_first=True, workers=0)
    before = tree(tmp_path / "cache")
    places = [prepared(dataset.root, tmp_path / "cache", way, is_first=True, workers=0).path for way in ways]
    assert places[0] == tmp_path / "cache" and {place.parent for place in places[1:]} == {tmp_path / "cache"}
    assert len(set(places)) == len(ways) and before.items() <= tree(tmp_path / "cache").items()
    again = [prepared(dataset.root, tmp_path / "cache", way, is_first=True, workers=0).path for way in ways[::-1]]
    assert again == places[::-1]
    (tmp_path / "cache" / "cache.json").unlink()  # as while a file that changed is prepared again
    assert [cache_folder(dataset, tmp_path / "cache", way) for way in ways] == places
    with pytest.raises(DataError, match="was prepared with other settings: crop_to 14,12,10 there, unset here"):
        refuse_other(dataset, places[2], ways[0])


class Cases:
    def __init__(self, count: int) -> None:
        self.ids, self.splits = tuple(f"c{n:03d}" for n in range(count)), ()


def test_three_shares_are_three_parts_of_all_cases() -> None:
    cases = Cases(484)
    train, held_out = splits.split(cases, "70:15:15")
    test = splits.tested_ids(cases, "70:15:15")
    assert (len(train), len(held_out), len(test)) == (338, 73, 73)
    assert sorted([*train, *held_out, *test]) == sorted(cases.ids)
    assert splits.tested_ids(cases, "90:10") == splits.tested_ids(cases, "0") == ()
    assert [len(part) for part in splits.split(Cases(3), "70:15:15")] == [1, 1]
    for fold, why in (("70:20:20", "the sum 100"), ("100:0:0", "positive"), ("2:49:49", "leaves none of 4 cases")):
        with pytest.raises(ValueError, match=why):
            splits.split(Cases(4), fold)


def test_some_of_the_cases_are_the_same_ones_each_time_and_of_every_class() -> None:
    ids = Cases(19).ids
    four = splits.sample_cases(ids, 4)
    assert len(four) == 4 and set(four) < set(ids) and four == tuple(sorted(four)) != ids[:4]
    assert set(four) < set(splits.sample_cases(ids, 5)) and splits.sample_cases(ids, 0) == ids
    rare = {case: int(case == "c007") for case in ids}  # one case of the second class
    assert all(("c007" in splits.sample_cases(ids, count, rare.__getitem__)) == (count != 1) for count in range(1, 6))
    with pytest.raises(ValueError, match="--train-cases 20: the fold has 19 cases to train on; use at most 19"):
        splits.sample_cases(ids, 20)
