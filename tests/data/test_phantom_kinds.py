"""Livers and organs: CT numbers as in patients, labels that show what the data set says they show."""

import numpy as np
import pytest
from scipy import ndimage

from seqpar.cli import phantom as launch_phantom
from seqpar.cluster.exit_codes import USAGE, run
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.phantom import abdomen, brain, head_neck, vessels
from seqpar.data.phantom.fields import PhantomCase
from seqpar.data.phantom.kinds import KINDS
from seqpar.data.phantom.phantom_files import PhantomSettings, write_phantom

LIVER_SIZE, HEAD_SIZE = (64, 54, 54), (60, 64, 60)


@pytest.fixture(scope="module")
def livers() -> list[PhantomCase]:
    return [abdomen.make_case(0, index, LIVER_SIZE) for index in range(8)]


@pytest.fixture(scope="module")
def heads() -> list[PhantomCase]:
    return [head_neck.make_case(0, index, HEAD_SIZE) for index in range(6)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_depends_on_its_seed_and_index_alone(kind):
    make, size = KINDS[kind].make_case, (20, 24, 20)
    case, again = make(3, 2, size), make(3, 2, size)
    assert np.array_equal(case.image, again.image) and np.array_equal(case.label, again.label)
    for other in (make(3, 1, size), make(4, 2, size)):
        assert not np.array_equal(case.image, other.image)


def test_brains_are_those_of_the_first_version():
    case = brain.make_case(0, 3, (40, 48, 40))
    assert np.allclose(case.image.mean((1, 2, 3)), [51.2036, 83.1631, 47.2514, 102.8445], atol=0.01)
    counts = np.bincount(case.label.ravel(), minlength=4)
    assert np.abs(counts - [76525, 4, 244, 27]).max() <= 2
    assert PhantomSettings().record() == PhantomSettings.of("brain").record()
    assert PhantomSettings().record().keys() == {"version", "layout", "size", "seed", "field_of_view"}


def test_livers_have_the_ct_numbers_of_patients(livers):
    contrasts = []
    for case in livers:
        image, liver, lesion = case.image[0], case.label == 1, case.label == 2
        assert image.min() < -950 and (image > 300).mean() > 0.01  # air; ribs and spine
        inner = ndimage.binary_erosion(liver, iterations=2)
        assert 60 < np.median(image[inner]) < 140 and liver.mean() > 0.03
        vessels = ndimage.gaussian_filter(np.where(inner, image, np.median(image[inner])).astype(float), 0.7)
        assert np.mean(vessels[inner] > np.median(image[inner]) + 15) > 0.015
        around = ndimage.binary_dilation(lesion) & ~lesion
        assert not lesion.any() or liver[around].mean() > 0.6  # it lies in the liver, at its edge or inside
        if lesion.sum() > 60:
            contrasts.append(image[inner].mean() - image[ndimage.binary_erosion(lesion)].mean())
        same_as_lesion = (image > 30) & (image < 80) & (case.label == 0)
        assert same_as_lesion.sum() > 3 * lesion.sum()  # a threshold does not find lesions
    assert len(contrasts) >= 5 and min(contrasts) > 15 and max(contrasts) < 90


def test_every_eighth_liver_has_no_lesion(livers):
    assert [index for index, case in enumerate(livers) if not (case.label == 2).any()] == [7]


def test_nine_organs_lie_on_their_sides(heads):
    case = heads[0]
    assert head_neck.annotated(0, 0) == head_neck.ORGANS and len(head_neck.ORGANS) == 9
    middle = HEAD_SIZE[0] / 2
    for name, value in head_neck.LABELS.items():
        places = np.argwhere(case.label == value)
        assert len(places) > 20, name
        if name.endswith("_left"):  # the first axis runs to the patient's right
            assert places[:, 0].max() < middle
        if name.endswith("_right"):
            assert places[:, 0].min() > middle
    assert case.image[0][case.label == head_neck.LABELS["mandible"]].mean() > 600


def test_organs_are_large_and_stand_out_enough_to_be_learned_in_minutes() -> None:
    """In the usual size: voxels of each organ, and its CT numbers against what lies around it, in the noise's."""
    noise = 8.0
    case = head_neck.make_case(0, 0, KINDS["organs"].size)
    image = ndimage.gaussian_filter(np.clip(case.image[0], -150, 250).astype(float), 0.5)
    for name, value in head_neck.LABELS.items():
        organ = case.label == value
        if value:
            around = ndimage.binary_dilation(organ, iterations=2) & (case.label == 0)
            assert organ.sum() >= 60, (name, organ.sum())
            assert abs(np.median(image[organ]) - np.median(image[around])) > 2.5 * noise, name


def test_labels_show_the_annotated_organs_alone(heads):
    for index, case in enumerate(heads):
        shown = {head_neck.LABELS[name] for name in head_neck.annotated(0, index)}
        assert set(np.unique(case.label)) == shown | {0}
    missing = [set(head_neck.ORGANS) - set(head_neck.annotated(0, index)) for index in range(60)]
    assert [bool(names) for names in missing] == [index % 3 != 0 for index in range(60)]
    assert max(map(len, missing)) == 4 and set().union(*missing) == set(head_neck.ORGANS)


def test_vessels_are_thin_connected_and_rare_and_not_all_that_is_bright() -> None:
    for index in range(3):
        case = vessels.make_case(0, index)
        vessel, image = case.label == 1, case.image[0]
        assert 0.0005 < vessel.mean() < 0.002
        assert ndimage.label(vessel, np.ones((3, 3, 3)))[1] <= 3  # trees
        assert vessel.any(axis=(0, 1)).sum() > 40
        assert not ndimage.binary_erosion(vessel, np.ones((3, 3, 3))).any()  # no cube of three voxels
        assert ndimage.binary_erosion(vessel, np.ones((2, 2, 2))).any()  # but the trunks are thicker than one
        bright = image > np.percentile(image[vessel], 20)
        assert (bright & vessel).sum() < 0.8 * bright.sum(), "a threshold finds more than vessels"
    fine = vessels.make_case(0, 2, (144, 144, 144))
    assert ndimage.label(fine.label, np.ones((3, 3, 3)))[1] <= 3


def test_a_data_set_says_which_organs_its_cases_show(tmp_path):
    root = write_phantom(tmp_path, 4, PhantomSettings.of("organs", size=(20, 20, 20), seed=5))
    dataset = read_dataset(root)
    shown = {case.id: case.annotated for case in dataset.cases}
    for index, (name, values) in enumerate(sorted(shown.items())):
        names = head_neck.annotated(5, index)
        assert name == f"phantom_{index:05d}"
        assert values == (None if names == head_neck.ORGANS else tuple(head_neck.LABELS[n] for n in names))
    assert len(set(shown.values())) > 2


def test_the_act_writes_each_kind_in_its_own_size(tmp_path, capsys):
    line = ["--cases", "1", "--workers", "1", "--size", "24", "20", "22"]
    for kind, folder in (("liver", "Dataset998_PhantomLiver"), ("organs", "Dataset997_PhantomOrgans")):
        assert run(launch_phantom.act, [*line, "--kind", kind, "--out", str(tmp_path)]) == 0
        assert list(read_dataset(tmp_path / folder).labels)[0] == "background"
        assert PhantomSettings.of(kind).size == KINDS[kind].size
    capsys.readouterr()
    assert run(launch_phantom.act, [*line, "--kind", "liver", "--layout", "brats", "--out", str(tmp_path)]) == USAGE
    assert "phantoms of kind liver are written as nnunet; got --layout brats" in capsys.readouterr().err
