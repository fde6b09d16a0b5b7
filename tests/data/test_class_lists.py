"""Volumes with one class each: tables and lists, splits by subject, what is refused; phantoms of two groups."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from seqpar.cli import prepare as launch_prepare
from seqpar.data.errors import DataError
from seqpar.data.formats.class_lists import read_class_dataset
from seqpar.data.formats.dataset import VolumeClasses
from seqpar.data.formats.splits import class_folds, split_classes
from seqpar.data.phantom import brain
from seqpar.data.phantom.phantom_files import PhantomSettings, write_phantom
from seqpar.data.preparation.cache import open_cache
from seqpar.data.preparation.prepare_dataset import prepare
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.tasks.classify.scores import read_subjects
from seqpar.tasks.lookup import TASKS
from seqpar.training.folds import refuse_folds
from tests.support.class_folders import class_folder
from tests.support.folders import image_array, nnunet, save, write_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("classes") / "data")


def with_table(folder: Path, *lines: str) -> Path:
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


EIGHT = [f"c_{n:02d},{'ill' if n % 2 else 'healthy'}" for n in range(8)]


def test_a_table_beside_images_gives_each_case_its_class(folder: Path) -> None:
    table = with_table(folder, "Age,Case,CLASS,subject", *(f"70,{line},s{n // 2}" for n, line in enumerate(EIGHT)))
    dataset = read_class_dataset(table)
    classes = dataset.volume_classes
    assert classes is not None and classes.names == ("healthy", "ill") and not dataset.labels
    assert [classes.numbers[case] for case in dataset.ids] == [0, 1] * 4
    assert classes.subject_of("c_03") == "s1" and classes.counts(dataset.ids[:3]) == [2, 1]
    assert VolumeClasses.from_json(classes.to_json()) == classes


def test_a_column_patient_is_read_as_subject_is_and_both_are_refused(folder: Path) -> None:
    lines = [f"{line},s{n // 2}" for n, line in enumerate(EIGHT)]
    classes = read_class_dataset(with_table(folder, "case,class,Patient", *lines)).volume_classes
    assert classes is not None and classes.subject_of("c_03") == "s1"
    assert read_subjects(folder) == read_subjects(folder / "labels.csv") == classes.subjects
    for name in ("patient_id", "Subject ID", "PatientID", "participant_id"):
        with_table(folder, f"case,class,{name}", *lines)
        assert read_subjects(folder) == classes.subjects, name
    with_table(folder, "case,class,subject,patient_id", *(f"{line},{n}" for n, line in enumerate(lines)))
    assert read_subjects(folder) == classes.subjects, "the name that pages give comes first"
    with_table(
        folder,
        "case,class,patient_id,patient_name,subject_id,patients",
        *(f"{line},Ann,{line[:4]},3" for line in lines),
    )
    assert read_subjects(folder) == classes.subjects, "the others are ignored"
    with_table(folder, "case,class,patient,subject", *(f"{line},s1" for line in lines))
    for read in (read_class_dataset, read_subjects):
        with pytest.raises(DataError, match="has the columns subject and patient, which both name the patient; keep"):
            read(folder)
    entries = [{"image": str(folder / f"c_{n:02d}.nii.gz"), "label": n % 2, "patient": n // 2} for n in range(4)]
    listed = read_class_dataset(write_json(folder.parent / "patients.json", {"training": entries})).volume_classes
    assert listed is not None and listed.subject_of("c_03") == "1"
    entries[0] |= {"subject": 5}
    with pytest.raises(DataError, match="gives case c_00 two patients"):
        read_class_dataset(write_json(folder.parent / "patients.json", {"training": entries}))


def test_splits_of_a_table_are_taken_and_cases_kept_for_tests_are_left_out(folder: Path) -> None:
    parts = ["train"] * 4 + ["Validation"] * 2 + ["test"] * 2
    dataset = read_class_dataset(with_table(folder, "case,class,split", *map(",".join, zip(EIGHT, parts))))
    assert dataset.volume_classes is not None and dataset.ids == tuple(f"c_{n:02d}" for n in range(6))
    assert split_classes(dataset.volume_classes, "0") == (dataset.ids[:4], dataset.ids[4:])
    assert VolumeClasses.from_json(dataset.volume_classes.to_json()).tests == ("c_06", "c_07")
    numbered = read_class_dataset(
        with_table(folder, "case,class,split", *(f"{e},{n // 4}" for n, e in enumerate(EIGHT)))
    )
    assert numbered.volume_classes is not None and len(numbered.volume_classes.splits) == 2
    assert split_classes(numbered.volume_classes, "1")[1] == numbered.ids[4:]


def test_a_fold_has_the_number_that_the_table_gives_it(folder: Path) -> None:
    for numbers, listed in (((1, 2), "1 to 2"), ((10, 2), "2, 10")):
        lines = [f"{line},{numbers[n // 4]}" for n, line in enumerate(EIGHT)]
        classes = read_class_dataset(with_table(folder, "case,class,split", *lines)).volume_classes
        assert classes is not None
        for read in (classes, VolumeClasses.from_json(classes.to_json())):
            for at, number in enumerate(numbers):
                assert split_classes(read, str(number))[1] == tuple(f"c_{n:02d}" for n in range(4 * at, 4 * at + 4))
            with pytest.raises(ValueError, match=f"--fold 0: the folds are {listed}, all and 90:10"):
                split_classes(read, "0")
        with pytest.raises(ValueError, match=rf"all5: .* has the folds {listed.replace(' to ', ', ')}, not 0 to 4"):
            refuse_folds(TASKS["classify"], str(folder))


def test_a_monai_list_has_labels_as_numbers_or_names(folder: Path) -> None:
    entries = [{"image": f"c_{n:02d}.nii.gz", "label": n % 2} for n in range(8)]
    content = {"training": entries[:6], "validation": entries[6:], "labels": {"0": "healthy", "1": "ill"}}
    classes = read_class_dataset(write_json(folder.parent / "list.json", _in(folder, content))).volume_classes
    assert classes is not None and classes.names == ("healthy", "ill")
    assert classes.splits[0][1] == ("c_06", "c_07") and classes.numbers["c_01"] == 1
    entries = [{**entry, "label": ["healthy", "ill"][n % 2], "fold": n % 3} for n, entry in enumerate(entries)]
    named = read_class_dataset(write_json(folder.parent / "names.json", _in(folder, {"training": entries})))
    assert named.volume_classes is not None and named.volume_classes.numbers == classes.numbers
    assert len(named.volume_classes.splits) == 3 and named.volume_classes.folds == (0, 1, 2)


def _in(folder: Path, content: dict) -> dict:
    for entry in (*content["training"], *content.get("validation", ())):
        entry["image"] = str(folder / Path(entry["image"]).name)
    return content


def test_an_nnu_net_folder_may_have_a_table_too(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "Dataset001_T", 4)
    (root / "labels.csv").write_text("case,class\nc_000,1\nc_001,2\nc_002,10\nc_003,1\n")
    dataset = read_class_dataset(root)
    assert dataset.volume_classes is not None and dataset.volume_classes.names == ("1", "2", "10")
    assert all(case.label is None for case in dataset.cases)


def test_an_nnu_net_folder_of_before_needs_a_table(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "Task001_T", 3)
    content = json.loads((root / "dataset.json").read_text())
    for listed in ({"image": "./imagesTr/c_000.nii.gz", "label": "./labelsTr/c_000.nii.gz"}, "c_000.nii.gz", {}):
        write_json(root / "dataset.json", content | {"training": [listed]})
        with pytest.raises(DataError, match="not an image with a class; add labels.csv next to it, a table with the"):
            read_class_dataset(root)
    (root / "labels.csv").write_text("case,class\nc_000,1\nc_001,2\nc_002,1\n")
    assert read_class_dataset(root).ids == ("c_000", "c_001", "c_002")


BAD: dict[str, tuple[list[str], str]] = {
    "an unknown case": (["case,class", *EIGHT, "c_99,ill"], "line 10 names case c_99, which has no image"),
    "a case without a line": (["case,class", *EIGHT[:7]], "has no line for case c_07"),
    "no class": (["case,class", *EIGHT[:7], "c_07,"], "line 9, case c_07, has no class"),
    "what stands for no class": (["case,class", *EIGHT[:7], "c_07,NaN"], "line 9, case c_07, has the class 'NaN'"),
    "a control character": (["case,class", *EIGHT[:7], "c_07,i\x07ll"], "case c_07, has the class 'i\\x07ll'"),
    "a separator of lines": (["case,class", *EIGHT[:7], "c_07,i\u2028ll"], "case c_07, has the class 'i\\u2028ll'"),
    "a class in two ways": (
        ["case,class", *EIGHT[:7], f"c_07,{EIGHT[0].split(',')[1].title()}"],
        "line 2 has the class 'healthy' and line 9 'Healthy', which would be two classes",
    ),
    "one class": (
        ["case,class", *(f"c_{n:02d},ill" for n in range(8))],
        "all cases the class ill; at least two classes",
    ),
    "a case twice": (["case,class", *EIGHT, EIGHT[0]], "names case c_00 a second time"),
    "no header": (EIGHT, "it needs a header with case and class"),
    "semicolons": (
        [line.replace(",", ";") for line in ("case,class", *EIGHT)],
        "begins with case;class; it needs a header with case and class, separated by commas, not by semicolons: save "
        "it as CSV with commas",
    ),
    "tabs": ([line.replace(",", "\t") for line in ("case,class", *EIGHT)], "separated by commas, not by tabs: save"),
    "a line behind empty ones": (["case,class", "", " , ", *EIGHT, "c_99,ill"], "line 12 names case c_99"),
    "a class without a case": (["case,class", *EIGHT, ",ill"], "line 10, case without a name, has no case; fill it"),
    "two columns of a name": (["case,class,Class", *(f"{e},ill" for e in EIGHT)], "has two columns class; keep one"),
    "all kept for tests": (["case,class,split", *(f"{e},test" for e in EIGHT)], "keeps every case for tests"),
    "cells": (["case,class", *EIGHT[:7], "c_07,ill,1"], "line 9 has 3 cells; 2 are needed"),
    "an empty split": (
        ["case,class,split", *(f"{line}," + "train" * n for n, line in enumerate(EIGHT))],
        "has no split",
    ),
    "a split": (["case,class,split", *(f"{line},later" for line in EIGHT)], "has the split 'later'"),
    "a subject on both sides": (
        ["case,class,subject,split", *(f"{e},s,{'train' if n < 4 else 'val'}" for n, e in enumerate(EIGHT))],
        "has subject s on both sides",
    ),
    "a subject in tests too": (
        [
            "case,class,split,subject",
            *(f"{e},{'train' if n < 4 else 'val' if n < 6 else 'test'},s{n % 6}" for n, e in enumerate(EIGHT)),
        ],
        "has subject s0 on both sides of a split",
    ),
    "no one to hold out": (["case,class,split", *(f"{line},train" for line in EIGHT)], "without cases to train on or"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_refused_by_name(name: str, folder: Path) -> None:
    lines, why = BAD[name]
    with pytest.raises(DataError, match=re.escape(why)) as caught:
        read_class_dataset(with_table(folder, *lines))
    assert str(caught.value).startswith(str(folder / "labels.csv"))


def test_a_label_outside_of_those_declared_is_refused(folder: Path) -> None:
    entries = [{"image": str(folder / f"c_{n:02d}.nii.gz"), "label": n} for n in range(3)]
    content = {"training": entries, "labels": {"0": "healthy", "1": "ill"}}
    with pytest.raises(DataError, match="case c_02 has the label 2, but 0 healthy, 1 ill are declared"):
        read_class_dataset(write_json(folder.parent / "outside.json", content))
    (folder / "labels.csv").unlink()
    with pytest.raises(DataError, match="labels.csv: is missing"):
        read_class_dataset(folder)


BAD_LISTS: dict[str, tuple[object, object, str]] = {  # declared labels, the third case's label
    "none": (None, None, "case c_02 has the label None; it must be a whole number or the name of a class"),
    "nan": (None, "nan", "case c_02 has the class 'nan'; a class needs a name"),
    "no name": ({"0": "healthy", "1": " "}, 0, "label 1 of \"labels\" has the class ''"),
    "part of a number": (None, 0.5, "case c_02 has the label 0.5; it must be a whole number"),
    "a label map": (None, "labels/c_02.nii.gz", "a volume; give the class of the whole case (label maps are for"),
    "names of names": ({"healthy": "ill"}, 0, '"labels" is {\'healthy\': \'ill\'}; it must look like {"0": "healthy"'),
    "a list of names": (["healthy", "ill"], 0, "\"labels\" is ['healthy', 'ill']; it must look like {\"0\""),
}


@pytest.mark.parametrize("name", BAD_LISTS)
def test_a_bad_list_is_refused_by_name(name: str, folder: Path) -> None:
    declared, label, why = BAD_LISTS[name]
    labels = [0, 1, label]
    entries = [{"image": str(folder / f"c_{n:02d}.nii.gz"), "label": own} for n, own in enumerate(labels)]
    content = {"training": entries} | ({"labels": declared} if declared else {})
    with pytest.raises(DataError, match=re.escape(why)) as caught:
        read_class_dataset(write_json(folder.parent / "bad.json", content))
    assert str(caught.value).startswith(str(folder.parent / "bad.json"))


def test_a_list_has_subjects_and_a_label_may_be_a_number_here_and_its_name_there(folder: Path) -> None:
    entries = [
        {"image": str(folder / f"c_{n:02d}.nii.gz"), "label": label, "subject": n // 2}
        for n, label in enumerate([0, "0", 1, "1", " 01"])
    ]
    classes = read_class_dataset(write_json(folder.parent / "mixed.json", {"training": entries})).volume_classes
    assert classes is not None and classes.names == ("0", "01", "1"), "the same on all ranks, whose hashes differ"
    assert list(classes.numbers.values()) == [0, 0, 2, 2, 1] and classes.subject_of("c_03") == "1"
    content = {"training": entries[:3], "validation": entries[2:]}
    with pytest.raises(DataError, match="lists case c_02 for training and for validation; keep one"):
        read_class_dataset(write_json(folder.parent / "mixed.json", content))
    content = {"training": [*entries, *entries[:2]]}
    with pytest.raises(DataError, match=r"lists case c_00 twice .*\(and 1 more fault\)"):
        read_class_dataset(write_json(folder.parent / "mixed.json", content))
    with pytest.raises(DataError, match="is a table; give the folder of its images, which has it as labels.csv"):
        read_class_dataset(with_table(folder, "case,class", *EIGHT) / "labels.csv")


def test_names_of_cases_may_have_commas(tmp_path: Path) -> None:
    root = class_folder(tmp_path, 4)
    (root / "c_00.nii.gz").rename(root / "left, first.nii.gz")
    classes = read_class_dataset(with_table(root, "case,class", '"left, first",ill', *EIGHT[1:4])).volume_classes
    assert classes is not None and classes.names[classes.numbers["left, first"]] == "ill"


def test_folds_are_stratified_and_keep_subjects_together() -> None:
    numbers = {f"c{n:03d}": int(n % 4 == 0) for n in range(100)}
    subjects = {case: f"s{int(case[1:]) // 4}" for case in numbers if int(case[1:]) >= 40}
    classes = VolumeClasses(("a", "b"), numbers, subjects)
    scans = VolumeClasses(("a", "b"), {f"sub-{n}_ses-{scan}": n % 2 for n in range(10) for scan in range(2)})
    for by_patient in (True, False):  # without a table's subjects, names tell them
        sides = [[{case[:5] for case in side} for side in own] for own in class_folds(scans, 5, by_patient)]
        assert any(train & held_out for train, held_out in sides) is not by_patient
    folds = class_folds(classes, 5)
    assert sorted(case for _, held_out in folds for case in held_out) == sorted(numbers)
    for train, held_out in folds:
        assert not set(train) & set(held_out) and len(train) + len(held_out) == 100
        assert not {classes.subject_of(c) for c in train} & {classes.subject_of(c) for c in held_out}
        assert min(classes.counts(held_out)) >= 4, "each class has about its share"
    assert folds == class_folds(classes, 5) and len(split_classes(classes, "90:10")[1]) < 16
    with pytest.raises(ValueError, match="--fold 5: the folds are 0 to 4"):
        split_classes(classes, "5")


def test_a_cache_of_classes_holds_images_alone_and_follows_the_table(folder: Path, tmp_path: Path) -> None:
    dataset = read_class_dataset(with_table(folder, "case,class", *EIGHT))
    report = prepare(dataset, tmp_path / "cache", PrepareSettings(), 0)
    assert not report.faults and len(report.prepared) == 8
    cache = open_cache(tmp_path / "cache")
    assert cache.volume_classes == dataset.volume_classes and not cache.labels
    assert not (tmp_path / "cache/cases/c_00/label.npy").exists() and cache.cases["c_00"].image.ndim == 4
    turned = [line.replace("ill", "odd") for line in EIGHT]
    again = prepare(read_class_dataset(with_table(folder, "case,class", *turned)), tmp_path / "cache", None, 0)
    assert not again.prepared and open_cache(tmp_path / "cache").volume_classes.names == ("healthy", "odd")


def test_prepare_prepares_and_checks_classes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    line = [str(with_table(folder, "case,class", *EIGHT)), "--task", "classify", "--out", str(tmp_path / "cache")]
    assert launch_prepare.act([*line, "--workers", "0"]) == 0
    output = capsys.readouterr().out
    assert "8 prepared, 0 already there" in output and "--task classify" in output
    assert launch_prepare.act([*line, "--workers", "0", "--check"]) == 0
    with pytest.raises(DataError, match="has no label maps, and labels.csv gives .*: add --task classify"):
        launch_prepare.act([line[0], "--out", str(tmp_path / "other"), "--workers", "0"])
    (tmp_path / "cache/cases/c_00/image.npy").write_bytes(b"other")
    assert launch_prepare.act([*line, "--workers", "0", "--check"]) == 3


@pytest.fixture(scope="module")
def brains() -> list:
    return [brain.make_dementia_case(0, index, (40, 48, 40)) for index in range(10)]


def test_demented_brains_have_more_fluid_in_the_region_of_the_mask(brains: list) -> None:
    dark = []
    for index, case in enumerate(brains):
        image, region = case.image[0].astype(float), case.label == 1
        dark.append(float((image[region] < 0.55 * np.median(image[image > 0])).mean()))
        assert brain.class_of(0, index) == brain.CLASSES[index % 2] and 0.003 < case.label.mean() < 0.02
    assert np.mean(dark[1::2]) > 1.5 * np.mean(dark[::2]), dark


def test_groups_overlap_and_head_size_does_not_tell(brains: list) -> None:
    sizes = np.array([(case.image[0] > 0).mean() for case in brains])
    assert sizes[::2].min() < sizes[1::2].max() and sizes[1::2].min() < sizes[::2].max()


def test_a_folder_of_phantoms_is_a_data_set_of_classes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    settings = PhantomSettings.of("dementia", size=(20, 24, 20))
    assert write_phantom(tmp_path, 3, settings) == tmp_path
    write_phantom(tmp_path, 4, settings)
    dataset = read_class_dataset(tmp_path)
    assert dataset.volume_classes is not None and dataset.volume_classes.names == ("dementia", "healthy")
    assert len(dataset.cases) == 4 and len(list((tmp_path / "regions").iterdir())) == 4


def test_numbers_that_are_read_as_channels_are_told_where_cases_have_no_image(tmp_path: Path) -> None:
    names = [f"case_{number:04d}" for number in range(8)]
    for name in names:
        save(tmp_path / f"{name}.nii.gz", image_array(0))
    with_table(tmp_path, "case,class", *(f"{name},{'healthy' if n % 2 else 'ill'}" for n, name in enumerate(names)))
    told = (
        "line 2 names case case_0000, which has no image (the first one with an image is case): _0000 at the end of an "
        "image's name counts as its channel; rename the images, such as to case_0000_0000"
    )
    with pytest.raises(DataError, match=re.escape(told)):
        read_class_dataset(tmp_path)
    for name in names:
        (tmp_path / f"{name}.nii.gz").rename(tmp_path / f"{name}_0000.nii.gz")
    assert read_class_dataset(tmp_path).ids == tuple(names)
    with_table(tmp_path, "case,class", *(f"{name},ill" for name in (*names, "case_0009")))
    with pytest.raises(DataError, match="case_0009, which has no image .*; correct or remove it"):
        read_class_dataset(tmp_path)
