"""Preparation of one case: every step has an inverse, and a label comes back to its file voxel for voxel."""

import json

import numpy as np
import pytest
import torch

from seqpar.data.boxes import uncrop
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.preparation import transforms
from seqpar.data.preparation.preparation import prepare_case
from seqpar.data.preparation.prepared_case import Properties, image_to_source, labels_to_source
from seqpar.data.preparation.recipe import PrepareSettings, Recipe, draft_recipe
from seqpar.data.volumes import read_volume
from tests.support.folders import OBLIQUE, image_array, label_array, nnunet, save


def test_normalise_is_a_z_score_inside_and_zero_outside_and_has_an_inverse():
    channel = image_array(0)
    mean, std = transforms.measure(channel)
    done = transforms.normalise(channel, mean, std, keep_zero=True)
    inside = done[channel != 0]
    assert abs(inside.mean()) < 1e-6 and abs(inside.std() - 1) < 1e-6 and done.dtype == np.float32
    np.testing.assert_array_equal(done == 0, channel == 0)
    np.testing.assert_allclose(transforms.denormalise(done, mean, std, True), channel, rtol=1e-5)
    plain = np.array([[[1.0, 2.0, 3.0, 0.0]]])  # 2 is the mean: it stays apart from what lies outside
    np.testing.assert_array_equal(transforms.normalise(plain, 2, 1, True) == 0, plain == 0)


@pytest.mark.parametrize("shape", [(5, 9, 4), (8, 6, 10), (13, 3, 7), (8, 6, 7)])
def test_resampling_is_torchs_trilinear_for_arrays_and_tensors_and_rows_of_it_can_be_had_alone(shape):
    array = np.random.default_rng(0).normal(size=(2, 8, 6, 7)).astype(np.float32)
    reference = torch.nn.functional.interpolate(torch.from_numpy(array)[None], shape, mode="trilinear")[0]
    done = transforms.resample(array, shape)
    np.testing.assert_allclose(done, reference.numpy(), atol=1e-5)
    np.testing.assert_array_equal(transforms.resample(torch.from_numpy(array), shape).numpy(), done)
    for rows in (slice(0, 2), slice(2, 5), slice(shape[0] - 1, shape[0])):
        slab = transforms.blend(array, 1, *(part[rows] for part in transforms.neighbours(8, shape[0])))
        np.testing.assert_array_equal(transforms.resample(slab, shape[1:]), done[:, rows])


def test_label_resampling_never_invents_a_label():
    rng = np.random.default_rng(0)
    label = rng.choice(np.array([0, 3, 7], np.uint8), (8, 7, 6), p=[0.5, 0.25, 0.25])
    for shape in ((11, 5, 9), (3, 3, 3), (16, 14, 12)):
        assert set(np.unique(transforms.resample_label(label, shape))) <= {0, 3, 7}
    assert set(np.unique(transforms.resample(label.astype(float), (11, 5, 9)).round())) > {0, 3, 7}, "no control"
    np.testing.assert_array_equal(transforms.resample_label(label.repeat(3, 0), label.shape), label)


def test_class_ids_and_file_values_are_inverse():
    label = np.array([[[0, 4, 2, 9]]])
    ids = transforms.to_ids(label, (0, 2, 4, 9))
    assert ids.tolist() == [[[0, 2, 1, 3]]] and ids.dtype == np.uint8
    np.testing.assert_array_equal(transforms.to_values(ids, (0, 2, 4, 9)), label)


@pytest.mark.parametrize("spacing", [None, (1.1, 1.0, 1.3), (0.7, 1.2, 0.9)])
@pytest.mark.parametrize("shape", [(14, 12, 10), (9, 8, 1), (33, 9, 6)])
def test_a_label_comes_back_to_its_file(shape, spacing, tmp_path):
    for n, turn in enumerate(([0, 1, 2], [2, 0, 1], [1, 0, 2])):
        affine = OBLIQUE[:, [*turn, 3]] @ np.diag([1, -1, 1, 1] if n else [1, 1, 1, 1])
        label = np.zeros(shape, np.uint8)
        label[2:7, 2:7], label[4:5, 3:6] = 1, 4
        image = np.where(label + (np.indices(shape)[0] > 1), np.random.default_rng(n).normal(9, 2, shape), 0)
        case = Case("a", (save(tmp_path / "i.nii.gz", image, affine),), save(tmp_path / "l.nii.gz", label, affine))
        recipe = Recipe(("T1",), ("zscore",), (None,), spacing, (0, 1, 4), False, 100)
        done = prepare_case(case, recipe)
        properties = Properties.from_json(json.loads(json.dumps(done.properties.to_json())))
        assert done.label is not None and done.image.shape[1:] == done.label.shape == properties.shape
        whole = properties.geometry.canonical_shape
        assert uncrop(np.ones(properties.box_shape), properties.box, whole).sum() < np.prod(whole)
        back = labels_to_source(done.label, properties)
        scores = np.stack([done.label == n for n in range(3)]).astype(np.float32)
        ids = transforms.resample(scores, properties.box_shape).argmax(0)
        np.testing.assert_array_equal(labels_to_source(ids, properties), back)
        if spacing is None:
            np.testing.assert_array_equal(back, label)
            np.testing.assert_allclose(image_to_source(done.image, properties)[0], image, rtol=1e-4)
        else:
            assert (back == label).mean() > 0.85 and set(np.unique(back)) <= {0, 1, 4} and back.shape == shape
            if shape[2] > 1:
                extent = np.array(done.image.shape[1:]) * spacing
                old = np.array(properties.box_shape) * properties.geometry.canonical_spacing
                np.testing.assert_allclose(extent, old, atol=max(spacing))


def test_a_case_without_label_is_prepared_the_same_for_prediction(tmp_path):
    root = nnunet(tmp_path / "D", 1)
    data = read_dataset(root)
    recipe = draft_recipe(data, PrepareSettings())
    with_label, without = (
        prepare_case(data.cases[0], recipe),
        prepare_case(read_dataset(root / "imagesTr").cases[0], recipe),
    )
    np.testing.assert_array_equal(with_label.image, without.image)
    assert without.label is None and without.locations == {}
    source = read_volume(data.cases[0].label)
    np.testing.assert_array_equal(labels_to_source(with_label.label, without.properties), source.array[0])


def test_a_label_outside_the_image_is_kept(tmp_path):
    root = nnunet(tmp_path / "D", 1)
    label = label_array()
    label[0, 0, 0] = 1
    save(root / "labelsTr/c_000.nii.gz", label)
    done = prepare_case(read_dataset(root).cases[0], draft_recipe(read_dataset(root), PrepareSettings()))
    np.testing.assert_array_equal(labels_to_source(done.label, done.properties), label)
