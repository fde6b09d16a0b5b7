"""The phantom: the same case from the same numbers, tumours that are nested, files that others read."""

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
from scipy import ndimage

from seqpar.cli import phantom as launch_phantom
from seqpar.cluster.exit_codes import DATA, USAGE, run
from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.phantom import builtin
from seqpar.data.phantom.anatomy import FIELD_OF_VIEW
from seqpar.data.phantom.brain import MODALITIES, make_case
from seqpar.data.phantom.fields import PhantomCase
from seqpar.data.phantom.phantom_files import PhantomSettings, flags_of_others, is_generated, write_phantom
from seqpar.data.preparation.fingerprint import read_fingerprint

SIZE = (40, 48, 40)
TINY = (24, 28, 24)


@pytest.fixture(scope="module")
def cases() -> list[PhantomCase]:
    return [make_case(0, index, SIZE) for index in range(16)]


def test_a_case_depends_on_seed_and_index_alone(cases):
    np.random.seed(5)
    np.random.rand(3)
    again = make_case(0, 3, SIZE)
    assert np.array_equal(again.image, cases[3].image) and np.array_equal(again.label, cases[3].label)
    assert not np.array_equal(make_case(1, 3, SIZE).image, cases[3].image)
    assert not np.array_equal(cases[2].image, cases[3].image)


def test_some_cases_have_no_tumour_and_all_labels_occur(cases):
    labels_of = [set(np.unique(case.label)) for case in cases]
    assert [index for index, labels in enumerate(labels_of) if labels == {0}] == [7, 15]
    assert all(labels <= {0, 1, 2, 3} and 2 in labels for labels in labels_of if labels != {0})
    assert set.union(*labels_of) == {0, 1, 2, 3}
    volumes = [np.count_nonzero(case.label) for case in cases if case.label.any()]
    assert max(volumes) > 3 * min(volumes)
    assert max(ndimage.label(case.label)[1] for case in cases) > 1


def test_tumours_are_nested(cases):
    necrotic = 0
    for case in cases:
        brain = (case.image != 0).any(0)
        assert not (case.label[~brain]).any()
        core, ring = np.isin(case.label, (1, 3)), case.label == 3
        assert (case.label[ndimage.binary_dilation(core) & brain] > 0).all()  # a core lies within the whole
        parts, count = ndimage.label(core)
        for part in (parts == i for i in range(1, count + 1)):
            if (part & ring).any() and (part & (case.label == 1)).any() and count == 1:
                necrotic += 1
                around = ndimage.binary_dilation(case.label == 1) & ~core
                assert not around.any()  # necrosis lies within its ring
    assert necrotic > 3


def test_modalities_show_what_they_show_in_patients(cases):
    t1ce, flair = 1, 3
    as_bright = []
    for case in cases:
        brain = (case.image != 0).all(0)
        normal = case.image[:, brain & (case.label == 0)].astype(float)
        middle, spread = normal.mean(1), normal.std(1)
        for label, channel in ((3, t1ce), (2, flair)):
            voxels = case.image[channel][case.label == label]
            if voxels.size > 30:
                assert voxels.mean() > middle[channel] + 0.5 * spread[channel]
                as_bright.append(np.sum(normal[channel] > np.percentile(voxels, 10)) / voxels.size)
        assert len({round(float(m)) for m in middle}) == 4  # each modality has a scale of its own
    # but a threshold that finds the tumour finds as much of what is normal, in most cases
    assert len(as_bright) > 12 and np.median(as_bright) > 0.5


def test_another_size_shows_the_same_head():
    coarse, fine = make_case(3, 2, TINY), make_case(3, 2, tuple(2 * n for n in TINY))
    assert np.allclose(np.array(coarse.spacing) * TINY, FIELD_OF_VIEW)
    pooled = fine.image[0].reshape(24, 2, 28, 2, 24, 2).mean((1, 3, 5))
    assert np.corrcoef(coarse.image[0].ravel(), pooled.ravel())[0, 1] > 0.95
    other = make_case(3, 4, TINY).image[0]
    assert np.corrcoef(coarse.image[0].ravel(), other.ravel())[0, 1] < 0.93  # two heads, for comparison


def test_brats_files_are_readable_and_kept(tmp_path):
    settings = PhantomSettings("brats", TINY, 7)
    assert write_phantom(tmp_path, 3, settings, workers=2) == tmp_path
    name = "BraTS-GLI-00002-000"
    case = make_case(7, 2, TINY)
    for volume, kind in zip([*case.image, case.label], [*MODALITIES, "seg"]):
        file = nibabel.load(tmp_path / name / f"{name}-{kind}.nii.gz")
        assert np.array_equal(np.asanyarray(file.dataobj), volume) and file.get_data_dtype() == volume.dtype
        assert np.allclose(file.affine, case.affine) and nibabel.aff2axcodes(file.affine) == ("R", "A", "S")
        assert int(file.header["qform_code"]) == int(file.header["sform_code"]) == 1
    files = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*.nii.gz")}
    assert len(files) == 15
    lost = tmp_path / name / f"{name}-t1c.nii.gz"
    lost.unlink()
    write_phantom(tmp_path, 4, settings)
    assert lost.read_bytes() == files[lost][1]  # the same bytes, whenever they are made
    assert all(p.stat().st_mtime_ns == at for p, (at, _) in files.items() if p != lost)
    assert len(list(tmp_path.rglob("*.nii.gz"))) == 20 and not list(tmp_path.rglob("*.tmp"))


def test_the_built_in_phantoms_are_known_before_they_are_written(tmp_path, monkeypatch):
    settings = PhantomSettings("brats", TINY)
    write_phantom(tmp_path, 2, settings)
    monkeypatch.setattr(builtin, "PhantomSettings", lambda: settings)
    known, read = builtin.phantom_fingerprint(2), read_fingerprint(read_dataset(tmp_path))
    names = {"name": known.name, "layout": known.layout}
    assert known == replace(read, **names, spacings=known.spacings)
    assert np.allclose(known.spacings, read.spacings) and known.outputs("regions") == ("WT", "TC", "ET")
    assert known.outputs("labels") == ("background", "NCR", "ED", "ET")


def test_nnunet_files_have_their_description(tmp_path):
    root = write_phantom(tmp_path, 2, PhantomSettings("nnunet", TINY))
    description = json.loads((root / "dataset.json").read_text())
    assert description["numTraining"] == 2 and description["file_ending"] == ".nii.gz"
    assert list(description["channel_names"].values()) == ["T1", "T1c", "T2", "FLAIR"]
    assert len(list((root / "imagesTr").iterdir())) == 8
    # painting the regions in their order gives the labels back
    label = np.asanyarray(nibabel.load(root / "labelsTr" / "phantom_00000.nii.gz").dataobj)
    painted = np.zeros_like(label)
    regions = [value for value in description["labels"].values() if value != 0]
    for region, value in zip(regions, description["regions_class_order"]):
        painted[np.isin(label, region)] = value
    assert np.array_equal(painted, label) and label.any()


def test_a_folder_of_other_settings_is_refused(tmp_path):
    write_phantom(tmp_path, 1, PhantomSettings(size=TINY))
    with pytest.raises(DataError, match="other settings"):
        write_phantom(tmp_path, 1, PhantomSettings(size=TINY, seed=1))


@pytest.mark.parametrize("kind", ["brain", "dementia"])
def test_nothing_is_written_among_the_files_of_others(kind, tmp_path):
    (tmp_path / "labels.csv").write_text("case,class\na,ill\n")
    with pytest.raises(DataError, match="holds labels.csv, which phantom did not write"):
        write_phantom(tmp_path, 1, PhantomSettings.of(kind, None, TINY))
    assert [path.name for path in tmp_path.iterdir()] == ["labels.csv"]
    assert (tmp_path / "labels.csv").read_text() == "case,class\na,ill\n"


def test_a_table_that_somebody_changed_is_not_replaced(tmp_path):
    settings = PhantomSettings.of("dementia", None, TINY)
    table = write_phantom(tmp_path, 1, settings) / "labels.csv"
    table.write_text(table.read_text() + "mine,healthy\n")
    with pytest.raises(DataError, match="labels.csv: is not as phantom wrote it"):
        write_phantom(tmp_path, 2, settings)
    assert table.read_text().endswith("mine,healthy\n") and len(list(tmp_path.glob("*.nii.gz"))) == 1
    table.write_text(table.read_text().removesuffix("mine,healthy\n"))
    write_phantom(tmp_path, 2, settings)
    assert len(table.read_text().splitlines()) == 3


@pytest.mark.parametrize("kind", ["brain", "liver"])
def test_a_dataset_json_that_somebody_changed_is_not_replaced(kind, tmp_path):
    settings = PhantomSettings.of(kind, "nnunet", TINY)
    about = write_phantom(tmp_path, 1, settings) / "dataset.json"
    write_phantom(tmp_path, 2, settings)
    written = about.read_text()
    assert '"numTraining": 2' in written
    for changed in (written.replace('"numTraining"', '"licence": "mine", "numTraining"'), "{}", ""):
        about.write_text(changed)
        with pytest.raises(DataError, match="dataset.json: is not as phantom wrote it"):
            write_phantom(tmp_path, 3, settings)
        assert about.read_text() == changed and len(list(about.parent.glob("labelsTr/*"))) == 2
    about.write_text(written)
    write_phantom(tmp_path, 3, settings)
    assert '"numTraining": 3' in about.read_text()


def test_the_built_in_phantom_is_written_into_an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin, "PhantomSettings", lambda: PhantomSettings(size=TINY))
    folder = builtin.phantom(1, is_first=True)  # reports its progress in the folder that it writes
    assert builtin.phantom(1, is_first=False) == folder and len(read_dataset(folder).cases) == 1
    assert not list(folder.glob("state-*"))


def test_two_processes_may_begin_at_once(tmp_path, monkeypatch):
    mkdir, settings = Path.mkdir, PhantomSettings(size=TINY)

    def meanwhile(folder: Path, *of: object, **more: object) -> None:
        mkdir(folder, *of, **more)
        if folder == tmp_path:  # the other one is further on
            (folder / "phantom.json").write_text(json.dumps(settings.record()))
            mkdir(folder / "BraTS-GLI-00000-000", exist_ok=True)

    monkeypatch.setattr(Path, "mkdir", meanwhile)
    write_phantom(tmp_path, 1, settings)
    assert len(read_dataset(tmp_path).cases) == 1


def test_an_interrupted_file_is_no_file(tmp_path, monkeypatch):
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match=r"phantom\.json: .*No space left.*another --out"):
        write_phantom(tmp_path, 1, PhantomSettings(size=TINY))
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_worker_error_reaches_the_caller_and_no_process_stays(tmp_path):
    write_phantom(tmp_path, 1, PhantomSettings(size=TINY))
    (tmp_path / "BraTS-GLI-00001-000").write_text("in the way")
    with pytest.raises(DataError, match=r"BraTS-GLI-00001-000: cannot write .*File exists"):
        write_phantom(tmp_path, 4, PhantomSettings(size=TINY), workers=2)
    assert not multiprocessing.active_children() and not list(tmp_path.rglob("*.tmp"))


def test_the_act_writes_and_its_faults_have_codes(tmp_path, capsys):
    good = ["--cases", "1", "--size", "24", "28", "24", "--workers", "1", "--out"]
    assert run(launch_phantom.act, [*good, str(tmp_path / "a")]) == 0
    assert "1 case in" in capsys.readouterr().out
    vessels = ["--kind", "vessels", "--cases", "1", "--size", "24"]
    assert run(launch_phantom.act, [*vessels, "--out", str(tmp_path / "c")]) == 0
    (image,) = (tmp_path / "c").rglob("*_0000.nii.gz")
    assert nibabel.load(image).shape == (24, 24, 24)
    assert run(launch_phantom.act, ["--size", "24", "24", "--out", str(tmp_path / "b")]) == USAGE
    assert run(launch_phantom.act, [*good, str(tmp_path / "a"), "--seed", "1"]) == DATA
    assert run(launch_phantom.act, ["--cases", "0", "--out", str(tmp_path / "b")]) == USAGE
    assert run(launch_phantom.act, ["--size", "8", "8", "8", "--out", str(tmp_path / "b")]) == USAGE
    (tmp_path / "file").write_text("")
    assert run(launch_phantom.act, [*good, str(tmp_path / "file")]) == DATA
    assert "file" in capsys.readouterr().err


def test_cases_that_are_there_already_are_counted_apart(tmp_path, capsys) -> None:
    flags = ["--out", str(tmp_path), "--layout", "nnunet", "--size", "20", "24", "20", "--workers", "1", "--cases"]
    said = []
    for cases in ("3", "1"):
        assert launch_phantom.act([*flags, cases]) == 0
        said.append(next(line for line in capsys.readouterr().out.splitlines() if " in " in line))
    assert said[0].startswith("3 cases in ") and "were there" not in said[0]
    assert said[1].startswith("1 case in ") and said[1].endswith(" (and 2 cases that were there)")


def test_files_of_phantoms_are_known_as_generated(tmp_path) -> None:
    root = write_phantom(tmp_path / "a", 1, PhantomSettings.of("brain", None, (16, 16, 16)))
    files = PhantomSettings.of("brain", None, (16, 16, 16)).files(tmp_path / "a", 0)
    assert is_generated(root) and is_generated(files[0]) and is_generated("")
    assert not is_generated(tmp_path) and not is_generated(tmp_path / "scan.nii.gz")


def test_the_flags_that_make_new_cases_have_their_size(tmp_path):
    """Without it, voxels would have another size than the run's."""
    settings = PhantomSettings.of("liver", size=(48, 40, 40))
    (tmp_path / "phantom.json").write_text(json.dumps(settings.record()))
    flags = ["--kind", "liver", "--size", "48", "40", "40", "--seed", "1", "--out", "new-liver"]
    assert flags_of_others(str(tmp_path)) == (flags, Path("new-liver/Dataset998_PhantomLiver"))
    assert flags_of_others("") == (["--seed", "1", "--out", "new-brain"], Path("new-brain"))
    (tmp_path / "phantom.json").write_text(json.dumps(PhantomSettings.of("liver").record()))
    assert "--size" not in flags_of_others(str(tmp_path))[0]
    (tmp_path / "phantom.json").write_text(json.dumps({"kind": "brain", "seed": 1}))
    assert flags_of_others(str(tmp_path))[0][-1] == "new-brain-2", "new-brain may hold these"


def test_other_phantoms_in_a_folder_are_told_by_what_differs(tmp_path):
    write_phantom(tmp_path, 1, PhantomSettings.of("brain", None, (16, 16, 16)))
    told = "other settings .kind brain, not dementia; layout brats, not classes; seed 0, not 1.; choose another --out"
    with pytest.raises(DataError, match=told):
        write_phantom(tmp_path, 1, PhantomSettings.of("dementia", None, (16, 16, 16), 1))
