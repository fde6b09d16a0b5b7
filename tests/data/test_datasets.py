"""Data sets: every format that people have becomes the same description; folds are nnU-Net's."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from seqpar.cli.prepare import act
from seqpar.data.errors import DataError
from seqpar.data.formats import splits
from seqpar.data.formats.recognise import find_inputs, place_in_data, read_dataset
from seqpar.data.formats.splits import data_faults, folds, patients_of, split
from seqpar.data.preparation.preparation import prepare_case
from seqpar.data.preparation.recipe import PrepareSettings, draft_recipe
from seqpar.settings.config import Config
from seqpar.tasks.training_data import split_of
from tests.support.folders import NEW, OLD, brats, decathlon, image_array, label_array, nnunet, save, write_json


def test_nnunet_raw_is_read_with_channels_in_order(tmp_path):
    data = read_dataset(nnunet(tmp_path / "Dataset007_X", 3, ("T1", "FLAIR")))
    assert (data.layout, data.ids, data.modalities) == (
        "nnU-Net raw",
        ("c_000", "c_001", "c_002"),
        ("T1", "FLAIR"),
    )
    assert data.labels == {"background": 0, "tumour": 1} and not data.regions and data.ignore_label is None
    assert [path.name for path in data.cases[1].images] == ["c_001_0000.nii.gz", "c_001_0001.nii.gz"]
    assert data.cases[1].label == tmp_path / "Dataset007_X/labelsTr/c_001.nii.gz"
    described = tmp_path / "Dataset007_X/dataset.json"
    described.write_text(described.read_text(), encoding="utf-8-sig")  # as Windows' editors save it
    assert read_dataset(tmp_path / "Dataset007_X") == data


def test_what_dataset_json_says_otherwise_than_the_files_is_told(tmp_path, capfd):
    images = [{"image": f"./imagesTr/c_00{n}.nii.gz", "label": f"./labelsTr/c_00{n}.nii.gz"} for n in (1, 2, 7)]
    root = nnunet(tmp_path / "D", 3, numTraining=5, training=images)
    notes = read_dataset(root).notes
    assert [note.removeprefix(f"{root / 'dataset.json'}: ") for note in notes] == [
        "numTraining is 5, and there are 3 cases; correct it, or the files",
        "training lists cases that are not there: c_007; correct it, or the files",
        "training does not list cases that are there: c_000; correct it, or the files",
    ]
    assert act([str(root), "--out", str(tmp_path / "cache"), "--workers", "0"]) == 0
    assert {f"warning: {note}" for note in notes} <= set(capfd.readouterr().err.splitlines())
    assert not read_dataset(nnunet(tmp_path / "E", 3)).notes and not read_dataset(decathlon(tmp_path / "F")).notes


def test_only_a_data_set_with_cases_is_one_that_nothing_is_written_into(tmp_path):
    """nnU-Net copies dataset.json next to what it predicts, and predictions may be next to imagesTr."""
    roots = {nnunet(tmp_path / "D"), decathlon(tmp_path / "MSD"), tmp_path / "listed", tmp_path / "broken"}
    write_json(tmp_path / "listed" / "dataset.json", {"training": [{"image": "a.nii.gz", "label": "b.nii.gz"}]})
    write_json(tmp_path / "broken" / "dataset.json", [])
    kept = {*roots, tmp_path / "D/imagesTr", tmp_path / "D/labelsTr", tmp_path / "MSD/labelsTr"}
    found = tmp_path / "found"
    write_json(found / "dataset.json", json.loads((tmp_path / "D/dataset.json").read_text()))
    write_json(found / "plans.json", {})
    save(found / "c_000.nii.gz", label_array())
    as_list = json.loads((tmp_path / "MSD/dataset.json").read_text())
    as_dict = {"labels": as_list["labels"], "dataset": {"a": {"images": ["imagesTr/a.nii"], "label": "labelsTr/a.nii"}}}
    for name, content in (("found-list", as_list), ("found-dict", as_dict)):
        write_json(tmp_path / name / "dataset.json", content)
        write_json(tmp_path / name / "plans.json", {})
        save(tmp_path / name / "BRATS_000.nii.gz", label_array())
    listed = {"image": "./BRATS_000.nii.gz", "label": "x"}
    write_json(save(tmp_path / "own/BRATS_000.nii.gz", label_array()).with_name("plans.json"), {})
    write_json(tmp_path / "own/dataset.json", {"training": [listed]})
    brats = save(tmp_path / "B/BraTS-GLI-00001-000/BraTS-GLI-00001-000-t1c.nii.gz", image_array(0)).parent
    kept |= {brats, tmp_path / "own", tmp_path / "D/imagesTr/sub", tmp_path / "classes"}
    save(tmp_path / "classes/a.nii.gz", image_array(0)).with_name("labels.csv").write_text("case,class\na,b\n")
    write_json(tmp_path / "tables/other.json", {}).with_name("labels.csv").write_text("case,class\na,b\n")
    others = {tmp_path / "tables", tmp_path / "classes/new", tmp_path / "D/new"}
    others |= {found, tmp_path / "found-list", tmp_path / "found-dict", tmp_path, tmp_path / "new"}
    assert {folder for folder in kept | others if place_in_data(folder)} == kept


def test_nnunet_raw_is_found_by_name_and_number(tmp_path, monkeypatch):
    root = nnunet(tmp_path / "Dataset007_X")
    with pytest.raises(DataError, match="set nnUNet_raw"):
        read_dataset("Dataset007_X")
    monkeypatch.setenv("nnUNet_raw", str(tmp_path))
    assert read_dataset(7).root == read_dataset("7").root == read_dataset("Dataset007_X").root == root
    nnunet(tmp_path / "Dataset007_Y")
    with pytest.raises(DataError, match="2 folders"):
        read_dataset(7)


def test_nnunet_regions_order_and_ignore_label(tmp_path):
    labels = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3, "ignore": 4}
    data = read_dataset(nnunet(tmp_path / "D", labels=labels, regions_class_order=[1, 2, 3]))
    assert list(data.labels.values()) == [0, 1, 2, 3] and data.ignore_label == 4
    assert data.regions == {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
    assert data.regions_class_order == (1, 2, 3)
    with pytest.raises(DataError, match="regions_class_order"):
        read_dataset(nnunet(tmp_path / "E", labels=labels, regions_class_order=[1, 2]))
    nested = {"background": 0, "whole": [1, 2], "core": 2}
    with pytest.raises(
        DataError, match=r"which writes region core .2. as 1, which is not in it: give one label of each of whole, core"
    ):
        read_dataset(nnunet(tmp_path / "F", labels=nested, regions_class_order=[2, 1]))
    inside_out = {"background": 0, "core": 2, "whole": [1, 2]}
    with pytest.raises(DataError, match="lists region core before whole, which contains it: .* list whole first"):
        read_dataset(nnunet(tmp_path / "G", labels=inside_out, regions_class_order=[2, 1]))


def test_nnunet_explicit_paths_and_plain_nii(tmp_path):
    save(tmp_path / "elsewhere/a.nii", image_array(0))
    save(tmp_path / "elsewhere/a_label.nii", label_array())
    entry = {"images": ["../elsewhere/a.nii"], "label": str(tmp_path / "elsewhere/a_label.nii")}
    data = read_dataset(nnunet(tmp_path / "D", 0, dataset={"a": entry}, file_ending=".nii"))
    assert data.ids == ("a",) and data.cases[0].images[0].samefile(tmp_path / "elsewhere/a.nii")


def test_decathlon_is_read_with_its_regions(tmp_path):
    data = read_dataset(decathlon(tmp_path / "Task01"))
    assert (data.layout, data.name, data.ids) == (
        "Medical Segmentation Decathlon",
        "BRATS",
        ("BRATS_000", "BRATS_001"),
    )
    assert data.modalities == ("FLAIR", "T1w", "t1gd", "T2w") and len(data.cases[0].images) == 1
    assert data.labels == {"background": 0, "edema": 1, "non-enhancing tumor": 2, "enhancing tumour": 3}
    assert data.regions == {"WT": (1, 2, 3), "TC": (2, 3), "ET": (3,)}


@pytest.mark.parametrize(
    "names,kinds,separator,suffix,flat,labels,core",
    [
        (["BraTS2021_00000"], OLD, "_", ".nii.gz", False, {"NCR": 1, "ED": 2, "ET": 4}, (1, 4)),
        (["HGG/Brats18_CBICA_AAB_1"], OLD, "_", ".nii", False, {"NCR": 1, "ED": 2, "ET": 4}, (1, 4)),
        (["BraTS20_Training_001"], OLD, "_", ".nii", False, {"NCR": 1, "ED": 2, "ET": 4}, (1, 4)),
        (["BraTS-GLI-00000-000"], NEW, "-", ".nii.gz", False, {"NCR": 1, "ED": 2, "ET": 3}, (1, 3)),
        (["BraTS-MEN-00004-000"], NEW, "-", ".nii.gz", True, {"NCR": 1, "ED": 2, "ET": 3}, (1, 3)),
        (["BraTS-PEDs2023/BraTS-PED-02024-000"], NEW, "-", ".nii.gz", False, {"NCR": 1, "ED": 2, "ET": 3}, (1, 3)),
        (["BraTS-GLI-00005-100", "BraTS-GLI-00006-000"], NEW, "-", ".nii.gz", False,
         {"NETC": 1, "SNFH": 2, "ET": 3, "RC": 4}, (1, 3)),
        (["BraTS-PEDs2024_Training/BraTS-PED-00001-000"], NEW, "-", ".nii.gz", False,
         {"ET": 1, "NET": 2, "CC": 3, "ED": 4}, (1, 2, 3)),
    ],
)  # fmt: skip
def test_brats_of_every_year_has_its_labels(names, kinds, separator, suffix, flat, labels, core, tmp_path):
    data = read_dataset(brats(tmp_path / "data", names, kinds, separator, tuple(labels.values()), suffix, flat))
    assert data.labels == {"background": 0, **labels} and data.regions["TC"] == core and not data.faults
    assert data.ids == tuple(sorted(Path(name).name for name in names))
    assert data.regions["ET"] == (labels["ET"],) and labels["ET"] in data.regions_class_order
    endings = [path.name.removesuffix(suffix).rsplit(separator, 1)[1] for path in data.cases[0].images]
    assert data.modalities == ("T1", "T1c", "T2", "FLAIR")
    assert endings == (["t1", "t1ce", "t2", "flair"] if kinds is OLD else ["t1n", "t1c", "t2w", "t2f"])


def test_paediatric_cases_of_no_year_are_refused_unless_they_have_no_labels(tmp_path):
    brats(tmp_path / "data", ["BraTS-PED-02024-000"], NEW, "-", (1, 2, 3, 4))
    with pytest.raises(DataError, match="BraTS-PED case, whose label values changed in 2024.*BraTS-PEDs2024"):
        read_dataset(tmp_path / "data")
    images = read_dataset(brats(tmp_path / "images", ["BraTS-PED-02024-000"], NEW[:-1], "-", ()))
    assert images.labels == {} and len(images.cases) == 1


@pytest.mark.parametrize(("name", "hint"), [("BraTS2021_00000", True), ("BraTS-GLI-00000-000", False)])
def test_an_undeclared_4_is_called_the_old_tumour_only_where_it_can_be(name, hint, tmp_path):
    data = read_dataset(brats(tmp_path, [name], NEW, "-", (1, 2, 4)))
    with pytest.raises(DataError, match=r"value \[4\]; declared are \[0, 1, 2, 3\]") as raised:
        prepare_case(data.cases[0], draft_recipe(data, PrepareSettings()))
    assert ("BraTS up to 2021" in raised.value.problem) == hint


def test_the_misnamed_label_of_2020_is_found(tmp_path):
    root = brats(tmp_path, ["BraTS20_Training_355"], OLD, "_", (1, 2, 4), ".nii")
    folder = root / "BraTS20_Training_355"
    (folder / "BraTS20_Training_355_seg.nii").rename(folder / "W39_1998.09.19_Segm.nii")
    assert read_dataset(root).cases[0].label == folder / "W39_1998.09.19_Segm.nii"


def test_brats_without_any_label_is_for_prediction(tmp_path):
    data = read_dataset(brats(tmp_path, ["BraTS-GLI-00000-000"], NEW[:-1], "-", ()))
    assert data.labels == {} and data.cases[0].label is None and len(data.cases[0].images) == 4


def test_brats_of_different_meanings_is_refused(tmp_path):
    brats(tmp_path, ["BraTS-GLI-00000-000"], NEW, "-", (1, 2, 3))
    brats(tmp_path, ["BraTS2021_00000"], OLD, "_", (1, 2, 4))
    both = r"2023: .*/BraTS-GLI-00000-000-\w+.nii.gz; to 2021: .*/BraTS2021_00000_\w+.nii.gz"
    with pytest.raises(DataError, match=f"differ in meaning .{both}"):
        read_dataset(tmp_path)


@pytest.mark.parametrize("numbers", [(1, 2, 3), (0, 2, 3)])
def test_a_list_whose_folds_do_not_begin_at_0_is_refused(numbers, tmp_path):
    """``--fold 1`` would hold out its fold 2 and call it fold 1."""
    nnunet(tmp_path)
    names = [f"c_{n:03d}" for n in range(3)]
    entries = [
        {"image": f"imagesTr/{name}_0000.nii.gz", "label": f"labelsTr/{name}.nii.gz", "fold": fold}
        for name, fold in zip(names, numbers)
    ]
    path = write_json(tmp_path / "list.json", {"labels": {"0": "background", "1": "core"}, "training": entries})
    with pytest.raises(DataError, match=f"its folds are {', '.join(map(str, numbers))}; number them 0, 1, 2"):
        read_dataset(path)


def test_monai_fold_list_keeps_its_channel_order_and_folds(tmp_path):
    names = [f"BraTS2021_{n:05d}" for n in range(4)]
    brats(tmp_path / "TrainingData", names, OLD, "_", (1, 2, 4))
    entries = [
        {
            "fold": (0, "1", 0.0, "1.0")[n],  # as programs write tables
            "image": [f"TrainingData/{name}/{name}_{kind}.nii.gz" for kind in ("flair", "t1ce", "t1", "t2")],
            "label": f"TrainingData/{name}/{name}_seg.nii.gz",
        }
        for n, name in enumerate(names)
    ]
    data = read_dataset(write_json(tmp_path / "brats21_folds.json", {"training": entries}))
    assert data.modalities == ("FLAIR", "T1c", "T1", "T2") and data.labels["ET"] == 4
    assert data.ids == tuple(names)
    assert split(data, 1) == ((names[0], names[2]), (names[1], names[3])) and len(folds(data)) == 2
    for fold in ("one", 0.5, -1, True):
        entries[0]["fold"] = fold
        (fault, *_) = read_dataset(write_json(tmp_path / "brats21_folds.json", {"training": entries})).faults
        assert f"gives case {names[0]} the fold {fold!r}; a fold is a whole number" in fault.problem


def test_cases_of_a_monai_list_follow_the_firsts_order_of_modalities(tmp_path):
    names = [f"BraTS2021_{n:05d}" for n in range(4)]
    brats(tmp_path, names, OLD, "_", (1, 2, 4))
    orders = [("flair", "t1ce", "t1", "t2"), ("t2", "t1", "flair", "t1ce"), ("flair", "t1ce", "t1"), OLD[:4]]
    entries = [
        {"image": [f"{name}/{name}_{kind}.nii.gz" for kind in order], "label": f"{name}/{name}_seg.nii.gz"}
        for name, order in zip(names, orders)
    ]
    data = read_dataset(write_json(tmp_path / "list.json", {"training": entries[:3], "validation": entries[3:]}))
    assert data.modalities == ("FLAIR", "T1c", "T1", "T2") and data.ids == (names[0], names[1], names[3])
    for case in data.cases:
        assert [image.name for image in case.images] == [f"{case.id}_{kind}.nii.gz" for kind in orders[0]]
    assert len(data.faults) == 1 and "has FLAIR, T1c, T1, but " in data.faults[0].problem
    assert "BraTS2021_00000/BraTS2021_00000_flair.nii.gz has" in data.faults[0].problem


def test_monai_list_with_validation_is_one_split(tmp_path):
    root = nnunet(tmp_path / "D", 3)
    entries = [{"image": f"imagesTr/c_{n:03d}_0000.nii.gz", "label": f"labelsTr/c_{n:03d}.nii.gz"} for n in range(3)]
    content = {
        "labels": {"0": "background", "1": "organ"},
        "training": entries[:2],
        "validation": entries[2:],
    }
    data = read_dataset(write_json(root / "dataset_0.json", content))
    assert data.modalities == ("channel 0",) and data.labels == {"background": 0, "organ": 1}
    assert split(data, 0) == (("c_000_0000", "c_001_0000"), ("c_002_0000",))
    content |= {"training": [entry | {"subject": n // 2} for n, entry in enumerate(entries)], "validation": []}
    (note,) = read_dataset(write_json(root / "dataset_0.json", content)).notes
    assert "scans of a patient may be on both sides of a split; give each entry a fold" in note
    content["training"] = [entry | {"fold": n // 2} for n, entry in enumerate(content["training"])]
    assert read_dataset(write_json(root / "dataset_0.json", content)).notes == ()
    entries[0]["annotated"], entries[1]["label"] = ["organ"], entries[1]["image"]
    content |= {"training": entries, "validation": []}
    list_fault, same_fault = read_dataset(write_json(root / "dataset_0.json", content)).faults
    assert 'in the entry of case c_000_0000 what is annotated; list that next to "training"' in list_fault.problem
    assert "c_001_0000.nii.gz as an image and as its label" in same_fault.problem


def test_a_folder_of_images_is_for_prediction(tmp_path):
    root = nnunet(tmp_path / "D", 2, ("T1", "T2"))
    data = read_dataset(root / "imagesTr")
    assert (data.ids, data.modalities, data.labels) == (("c_000", "c_001"), ("T1", "T2"), {})
    assert all(case.label is None and len(case.images) == 2 for case in data.cases)
    save(tmp_path / "alone/scan.nii.gz", image_array(0, (9, 8, 7, 3)))
    assert read_dataset(tmp_path / "alone").modalities == ("channel 0", "channel 1", "channel 2")
    four = decathlon(tmp_path / "Task01")
    assert read_dataset(four / "imagesTr").modalities == ("FLAIR", "T1w", "t1gd", "T2w")


def test_a_stray_file_among_channel_files_is_reported_and_changes_nothing_else(tmp_path):
    images = nnunet(tmp_path / "D", 2, ("T1", "T2")) / "imagesTr"
    stray = save(images / "localizer.nii.gz", image_array(9))
    data, (cases, faults) = read_dataset(images), find_inputs([images], ("T1", "T2"))
    assert data.ids == tuple(case.id for case in cases) == ("c_000", "c_001") and data.modalities == ("T1", "T2")
    assert [fault.path for fault in data.faults] == [fault.path for fault in faults] == [str(stray)]
    assert "no channel number" in faults[0].problem


def test_files_named_one_by_one_have_the_channels_that_their_data_set_declares(tmp_path):
    folders = [
        nnunet(tmp_path / name, 1, names) / "imagesTr" for name, names in (("D", ("T2", "T1")), ("E", ("T1", "T2")))
    ]
    files = [sorted(folder.iterdir()) for folder in folders]
    for inputs in ([folders[0]], files[0]):
        (case,), faults = find_inputs(inputs, ("T1", "T2"))
        assert case.images == tuple(files[0][::-1]) and not faults
    with pytest.raises(DataError, match=f"{files[1][1]}: is of a data set with other channels than the first file"):
        find_inputs([files[0][0], files[1][1]], ("T1", "T2"))


def test_of_a_case_that_is_there_twice_both_files_are_named(tmp_path):
    files = [save(tmp_path / name, image_array(0)) for name in ("one/a.nii", "one/a.nii.gz", "two/a.nii")]
    with pytest.raises(DataError, match=f"case a twice, as {files[0]} and {files[1]}; keep one"):
        read_dataset(tmp_path / "one")
    with pytest.raises(DataError, match=f"case a twice, as {files[0]} and {files[2]}; keep one"):
        find_inputs([files[0], files[2]], ("T1",))


def test_five_folds_are_scikit_learns(tmp_path):
    from sklearn.model_selection import KFold

    data = read_dataset(nnunet(tmp_path / "D", 13))
    for n, (train, held_out) in enumerate(KFold(5, shuffle=True, random_state=12345).split(data.ids)):
        expected = tuple(data.ids[k] for k in train), tuple(data.ids[k] for k in held_out)
        assert split(data, n) == folds(data)[n] == split(data, str(n)) == expected


def test_splits_final_is_read_beside_the_data_and_where_nnunet_puts_it(tmp_path, monkeypatch):
    root = nnunet(tmp_path / "D", 3)
    one = [{"train": ["c_000", "c_002"], "val": ["c_001"]}]
    monkeypatch.setenv("nnUNet_preprocessed", str(tmp_path / "preprocessed"))
    write_json(tmp_path / "preprocessed/D/splits_final.json", one)
    assert split(read_dataset(root), 0) == (("c_000", "c_002"), ("c_001",))
    write_json(root / "splits_final.json", [{"train": ["c_000"], "val": ["c_002"]}])
    assert split(read_dataset(root), 0) == (("c_000",), ("c_002",))


def test_the_other_splits(tmp_path):
    data = read_dataset(nnunet(tmp_path / "D", 13))
    train, held_out = split(data, "90:10")
    assert (
        sorted(train + held_out) == list(data.ids) and len(held_out) == 1 and split(data, "90:10") == (train, held_out)
    )
    assert split(data, "all") == (data.ids, data.ids)
    for wrong in ("5", "x", -1):
        with pytest.raises(ValueError, match=r"90:10"):
            split(data, wrong)
    with pytest.raises(ValueError, match="5 folds need at least 5 cases, and there are 2"):
        split(read_dataset(nnunet(tmp_path / "E", 2)), 0)


def test_names_tell_the_patients_of_scans_only_where_they_are_numbers_behind_an_id():
    def told(*ids: str) -> list[str]:
        return list(patients_of(ids).values())

    bids = "sub-01_ses-1", "sub-01_ses-2_run-1", "sub-02", "sub-011_ses-1"
    assert told(*bids) == ["sub-01", "sub-01", "sub-02", "sub-011"]
    glioma = "BraTS-GLI-00005-000", "BraTS-GLI-00005-001", "BraTS-MEN-RT-0012-1", "BraTS-GoAT-00000"
    assert told(*glioma) == ["BraTS-GLI-00005", "BraTS-GLI-00005", "BraTS-MEN-RT-0012", "BraTS-GoAT-00000"]
    assert told("p12-000", "p12-001", "p3-000") == ["p12", "p12", "p3"]
    for ids in (
        [f"2021-{n:03d}" for n in range(9)] + [f"2022-{n:03d}" for n in range(9)],  # two years, of nine patients each
        ["p12-000", "p12-001", "other"],
        ["case-000", "case-001", "case-002"],
        ["d1-000", "d1-001"],
        ["BRATS_001", "BRATS_002", "Brats18_CBICA_AAB_1"],
    ):
        assert told(*ids) == ids


def test_scans_of_a_patient_stay_on_one_side_of_each_split(tmp_path):
    ids = [f"BraTS-GLI-{n:05d}-{scan:03d}" for n in range(23) for scan in range(1 + (n % 3 == 0))]
    dataset = SimpleNamespace(ids=ids, splits=())

    def divided(train: Sequence[str], held_out: Sequence[str]) -> set[str]:
        return {case[:-4] for case in train} & {case[:-4] for case in held_out}

    every = [split(dataset, fold) for fold in (0, 1, 2, 3, 4, "90:10", "60:20:20")]
    assert all(train and held_out and not divided(train, held_out) for train, held_out in every)
    assert sorted(case for _, held_out in every[:5] for case in held_out) == ids
    assert all(list(part) == sorted(part) for parts in every for part in parts)
    tests = splits.tested_ids(dataset, "60:20:20")
    assert sorted([*every[-1][0], *every[-1][1], *tests]) == ids
    assert not divided(tests, every[-1][0]) and not divided(tests, every[-1][1])
    assert any(divided(*split(dataset, fold, by_patient=False)) for fold in range(5)), "as nnU-Net does, and old runs"
    alone = SimpleNamespace(ids=[f"sub-{n}_ses-1" for n in range(12)], splits=())  # sub-10_ses-1 before sub-1_ses-1
    for fold in (0, 4, "90:10", "70:15:15"):
        assert split(alone, fold) == split(alone, fold, by_patient=False)
    few = SimpleNamespace(ids=ids[:6], splits=())
    with pytest.raises(ValueError, match="5 folds need at least 5 patients, and there are 4"):
        split(few, 0)
    two = {"train": ids[:1], "held_out": ids[1:3]}
    assert data_faults(two).startswith("1 of 2 held-out cases is another scan of a patient whom the run")
    told = {"subjects": {ids[1]: "a", ids[2]: "b"}}
    assert not data_faults({**two, "volume_classes": told}), "a table knows better"
    assert not data_faults({"train": ids, "held_out": ids})
    cut = {"crop_to": [16, 16, 16], "cut_labels": True}
    told = "--crop-to 16 16 16 with --force may have cut off labels: scores in curves count only what is left."
    assert data_faults({"train": ids, "held_out": ids, "recipe": cut}) == told
    assert not data_faults({"train": ids, "held_out": ids, "recipe": cut | {"cut_labels": False}})
    scans = {ids[0]: "1 2", ids[1]: "1 2", ids[2]: "3"}
    same = f"1 of 2 held-out cases is the same scan as a training case, such as {ids[1]}, there {ids[0]}: "
    assert data_faults({**two, "voxels": scans}).startswith(same)
    assert splits.scans_on_both_sides({**two, "test": ["t"], "voxels": {**scans, "t": "1 2", ids[1]: ""}}) == {
        "t": ids[0]
    }
    classes = {"names": ["well", "ill"], "numbers": {ids[0]: 1, ids[1]: 0, ids[2]: 0}}
    told = f"The same image has different classes under different names, such as {ids[0]} as ill and {ids[1]} as well:"
    assert told in data_faults({**two, "voxels": scans, "volume_classes": classes})
    alike = {**classes, "numbers": dict.fromkeys(ids[:3], 1)}
    assert "different classes" not in data_faults({**two, "voxels": scans, "volume_classes": alike})


def test_a_run_that_has_begun_keeps_its_way_of_splitting(tmp_path):
    """So do the further folds of a training of five."""
    old, new, fold = tmp_path / "old", tmp_path / "five/fold0", str(tmp_path / "five/fold1")
    for run, dataset in ((old, {}), (new, {"by_patient": True})):
        write_json(run / "config.json", {"dataset": dataset})
    ids = [f"p{n}-{scan:03d}" for n in range(9) for scan in range(2)]
    dataset = SimpleNamespace(ids=ids, splits=())

    def held_out(out: Path | str, resume: bool) -> tuple[str, ...]:
        return split_of(dataset, Config(fold="0", out=str(out), resume=resume))[1]

    by_case, by_patient = (split(dataset, 0, by_patient=way)[1] for way in (False, True))
    assert by_case != by_patient and held_out("", False) == held_out(tmp_path / "next", False) == by_patient
    assert held_out(old, True) == by_case and held_out(new, True) == by_patient
    write_json(tmp_path / "five/folds.json", {})
    assert held_out(fold, False) == by_patient
    write_json(new / "config.json", {"dataset": {}})
    assert held_out(fold, False) == by_case


def test_hidden_files_and_notes_are_no_cases(tmp_path):
    root = nnunet(tmp_path / "D", 2)
    (root / "imagesTr/._c_000_0000.nii.gz").write_bytes(b"x")
    (root / "imagesTr/notes.txt").write_text("x")
    data = read_dataset(root)
    assert data.ids == ("c_000", "c_001") and not data.faults
    assert json.loads((root / "dataset.json").read_text())["numTraining"] == 2
