"""Cases are prepared as nnU-Net prepares them, to the bit, and go back to where they came from."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.nnunet_plans import ImagePlan, Resampling, declaration_of, plan_of
from seqpar.data.geometry import to_canonical
from seqpar.data.preparation.as_nnunet import NnunetPreparation, resampled, resampled_label
from seqpar.data.preparation.prepared_case import load_case
from seqpar.data.preparation.transforms import nearest_rows
from seqpar.data.volumes import read_volume
from tests.support import nnunet_prediction
from tests.support.folders import save
from tests.support.nnunet_networks import DATASET, configuration, plans_of

PLANS, DECLARED = Path("plans.json"), Path("dataset.json")
FLIPPED = np.array([[0, 0, -1.7, 3], [-0.9, 0, 0, 1], [0, 4.1, 0, 2], [0, 0, 0, 1.0]])  # axes W D H: -A, S, -R
STRAIGHT = np.diag([0.9, 1.3, 2.2, 1.0])
CASES: dict[str, tuple[np.ndarray, list[int], dict[str, Any]]] = {
    "as it lies": (STRAIGHT, [0, 1, 2], {}),
    "transposed": (STRAIGHT, [2, 0, 1], {"use_mask_for_norm": [False, False]}),
    "flipped, slices far apart": (FLIPPED, [1, 2, 0], {"spacing": [1.1, 1.2, 4.2]}),
    "slices far apart in the plan": (STRAIGHT, [0, 1, 2], {"spacing": [7.0, 1.0, 1.0]}),
    "two longest axes": (np.diag([1.0, 4.0, 4.0, 1.0]), [0, 1, 2], {"spacing": [3.0, 3.0, 1.0]}),
    "other schemes": (STRAIGHT, [0, 2, 1], {"normalization_schemes": ["NoNormalization", "RescaleTo01Normalization"]}),
    "colours": (STRAIGHT, [0, 1, 2], {"normalization_schemes": ["RGBTo01Normalization", "ZScoreNormalization"]}),
    "the same grid": (STRAIGHT, [0, 1, 2], {"spacing": [2.2, 1.3, 0.9]}),
}


def write_case(folder: Path, affine: np.ndarray, shape: tuple[int, ...] = (11, 9, 8)) -> Case:
    """Writes two channels with a border of zeros and a hole."""
    dice, paths = np.random.default_rng(3), []
    for number in range(2):
        array = np.zeros(shape, np.float32)
        array[1:-2, 2:, 1:-1] = dice.normal(200, 90, (shape[0] - 3, shape[1] - 2, shape[2] - 2))
        array[4:6, 4:6, 3:5] = 0
        paths.append(save(folder / f"case_{number:04d}.nii.gz", array, affine))
    return Case("case", tuple(paths))


def by_plan(**changed: Any) -> NnunetPreparation:
    """Returns the preparation of plans that differ by ``changed``: entries of the plans, or of their configuration."""
    outer = {key: changed.pop(key) for key in ("transpose_forward", "image_reader_writer") if key in changed}
    plans = plans_of({**configuration("PlainConvUNet"), **changed}, **outer)
    return NnunetPreparation.of(plan_of(plans, "3d_fullres", PLANS), declaration_of(DATASET, DECLARED))


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_prepared_to_the_bit_and_its_crop_lies_where_it_lay(tmp_path: Path, name: str) -> None:
    affine, forward, changed = CASES[name]
    case = write_case(tmp_path, affine)
    preparation = by_plan(transpose_forward=forward, **changed)
    loaded = load_case(case, preparation.recipe)
    got = preparation.prepare(loaded, case)
    own = {**configuration("PlainConvUNet"), **changed}
    data, spacing = nnunet_prediction.read(case.images, forward)
    want, cut, sides = nnunet_prediction.prepared(data, spacing, plans_of(own), own)
    assert got.image.dtype == np.float32 and np.array_equal(got.image, want)
    target = preparation.target_grid(got.properties)
    assert target.shape == sides
    ids = np.random.default_rng(0).integers(0, 3, sides)
    back = preparation.labels_to_source(ids, got.properties)
    whole = np.zeros(data.shape[1:], int)
    whole[cut] = ids
    assert np.array_equal(back, whole.transpose(np.argsort(forward)).T) and back.dtype == np.uint8
    far_apart = {"flipped, slices far apart": 2, "slices far apart in the plan": 0}
    assert target.nearest == far_apart.get(name)


def test_a_reader_that_reorients_prepares_in_canonical_axes(tmp_path: Path) -> None:
    case = write_case(tmp_path, FLIPPED)
    preparation = by_plan(image_reader_writer="NibabelIOWithReorient", spacing=[4.1, 0.9, 1.7])
    got = preparation.prepare(load_case(case, preparation.recipe), case)
    volume = read_volume(case.images[0])
    turned = to_canonical(volume.array, volume.geometry.orientation)[0].T
    assert got.image.shape[1:] == tuple(n - cut for n, cut in zip(turned.shape, (2, 3, 2)))  # nothing is resampled
    box = tuple(slice(low, high) for low, high in got.properties.box)
    assert np.array_equal(got.image[0] != got.image[0].min(), np.clip(turned[box], 15, 400) > 15)
    channel = preparation.channel_to_source(turned[box], got.properties)
    assert np.array_equal(channel, volume.array[0])


def test_an_empty_image_is_an_error_that_names_it(tmp_path: Path) -> None:
    case = write_case(tmp_path, STRAIGHT, (6, 6, 6))
    for path in case.images:
        save(path, np.zeros((6, 6, 6), np.float32), STRAIGHT)
    preparation = by_plan()
    with pytest.raises(DataError, match="case_0000.nii.gz: every voxel is 0"):
        preparation.prepare(load_case(case, preparation.recipe), case)


def test_older_names_and_an_ignore_label_are_read() -> None:
    plans = plans_of(configuration("PlainConvUNet"))
    per_channel = plans.pop("foreground_intensity_properties_per_channel")
    older = plan_of({**plans, "foreground_intensity_properties_by_modality": per_channel}, "3d_lowres", PLANS)
    assert older.intensities == tuple(per_channel.values()) and older.batch_size == 3
    labels = {"background": 0, "edge": 1, "core": 2, "ignore": 3}
    declared = declaration_of({"modality": {"0": "CT"}, "labels": labels}, DECLARED)
    assert declared.num_outputs == 3 and list(declared.labels) == ["background", "edge", "core"]
    regions = {"background": 0, "whole": [1, 2], "core": [2], "ignore": 3}
    declared = declaration_of({**DATASET, "labels": regions, "regions_class_order": [1, 2]}, DECLARED)
    assert declared.num_outputs == 2 and declared.regions == {"whole": (1, 2), "core": (2,)}


BY_TORCH = {  # spacing before and after, shape: what nnU-Net's resample_torch_fornnunet returned
    "all axes at once": (
        ((1, 1, 1), (0.75, 1.4, 0.8), (4, 3, 6)), [12.0, 42.75, 76.91666412353516, 69.00000762939453, 44.25, 75.0],
        7038.793350756168, "032200110020031100 210032003100200031 210032020003200031 002210100001032200",
    ),
    "slice by slice": (
        ((4, 1, 1), (2.5, 1.4, 0.8), (5, 3, 6)), [4.5, 35.25, 69.41666412353516, 61.5000114440918, 36.75, 67.5],
        8684.472199559212,
        "032200110020031100 032200110020031100 210032001100200031 002210100001032200 002210100001032200",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_TORCH)
def test_torchs_resampling_gives_the_values_that_nnunets_gave(name: str) -> None:
    (spacing, target, shape), row, total, digits = BY_TORCH[name]
    image = (np.arange(2 * 3 * 4 * 5) * 7919 % 101).reshape(2, 3, 4, 5).astype(np.float32)
    label = ((np.arange(3 * 4 * 5) * 37 % 11) % 5 - 1).reshape(3, 4, 5)
    by_torch = Resampling("resample_torch_fornnunet")
    got = resampled(image, shape, spacing, target, by_torch)
    assert got.dtype == np.float32 and np.allclose(got[0, 1, 1], row, rtol=1e-6)
    assert got.sum(dtype=np.float64) == pytest.approx(total, rel=1e-6)
    ids = np.maximum(label, 0)
    want = np.array([int(digit) for digit in digits.replace(" ", "")]).reshape(shape)
    assert np.array_equal(resampled_label(ids, shape, spacing, target, by_torch, range(4), label < 0), want)
    without = resampled_label(ids, shape, spacing, target, by_torch, range(4))
    assert np.count_nonzero(without != want) in (4, 6)  # voxels outside the mask are a class of their own there
    renumbered = resampled_label(3 - ids, shape, spacing, target, by_torch, [3, 2, 1, 0], label < 0)
    assert np.array_equal(renumbered, 3 - want)


def test_plans_that_resample_by_torch_prepare_so_and_their_other_modes_are_refused(tmp_path: Path) -> None:
    case = write_case(tmp_path, STRAIGHT)
    options = {"is_seg": False, "force_separate_z": False, "memefficient_seg_resampling": False}
    steps = {f"resampling_fn_{what}": "resample_torch_fornnunet" for what in ("data", "seg", "probabilities")}
    changed: dict[str, Any] = {**steps, **{f"{name}_kwargs": options for name in steps}}
    by_torch, by_splines = by_plan(**changed), by_plan()
    loaded = load_case(case, by_torch.recipe)
    got, other = (preparation.prepare(loaded, case).image for preparation in (by_torch, by_splines))
    assert got.shape == other.shape and 0.01 < np.abs(got - other).max() < 3
    assert ImagePlan.from_json(by_torch.plan.to_json()) == by_torch.plan.of_images
    changed["resampling_fn_data_kwargs"] = {**options, "mode": "nearest"}
    with pytest.raises(DataError, match="resampling_fn_data_kwargs has mode 'nearest'; supported: 'linear'"):
        by_plan(**changed)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a gap": ({"labels": {"background": 0, "a": 2}}, r"values \[0, 2\]; nnU-Net numbers them from 0 without gaps"),
    "no background": ({"labels": {"a": 1}}, 'labels is .*; it must look like {"background": 0, "tumour": 1}'),
    "no order": (
        {"labels": {"background": 0, "a": [1, 2], "b": [2]}},
        "regions_class_order is None; give a label for each",
    ),
    "an order of lists": (
        {"labels": {"background": 0, "a": [1, 2], "b": [2]}, "regions_class_order": [[1], 2]},
        r"regions_class_order is \[\[1\], 2\]; give a label for each",
    ),
    "no number": ({"labels": {"background": 0, "a": "one"}}, "labels contain 'one'; each must be a whole number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_labels_that_no_network_of_its_can_have_are_refused(name: str) -> None:
    changed, message = WRONG[name]
    with pytest.raises(DataError, match=message):
        declaration_of({**DATASET, **changed}, DECLARED)


def test_configurations_that_inherit_in_a_circle_are_refused() -> None:
    circle = {"3d_fullres": {"inherits_from": "3d_lowres"}, "3d_lowres": {"inherits_from": "3d_fullres"}}
    with pytest.raises(DataError, match="inherits from '3d_fullres', which is missing or inherits from it in turn"):
        plan_of({**plans_of({}), "configurations": circle}, "3d_fullres", PLANS)


@pytest.mark.parametrize(
    "key, value",
    [
        ("spacing", [0, 1, 1]),
        ("spacing", ["a", 1, 1]),
        ("spacing", 1),
        ("spacing", [float("nan"), 1, 1]),
        ("patch_size", [8, 0, 8]),
        ("patch_size", 8),
        ("batch_size", "two"),
        ("batch_size", 1.5),
        ("normalization_schemes", 3),
        ("use_mask_for_norm", 3),
        ("resampling_fn_data_kwargs", {"order": "three"}),
        ("resampling_fn_data_kwargs", 3),
    ],
)
def test_values_that_cannot_be_meant_are_named_with_their_key(key: str, value: Any) -> None:
    plans = plans_of({**configuration("PlainConvUNet"), key: value})
    with pytest.raises(DataError, match=rf"{key}.* is {re.escape(repr(value))}") as error:
        plan_of(plans, "3d_fullres", PLANS)
    assert str(error.value).startswith(f"{PLANS}: ")


@pytest.mark.parametrize("broken", [{"configurations": {"3d_fullres": 3}}, {"transpose_forward": ["a", 0, 1]}])
def test_plans_whose_parts_are_of_another_type_are_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=next(iter(broken)).removesuffix("s")):
        plan_of({**plans_of(configuration("PlainConvUNet")), **broken}, "3d_fullres", PLANS)


def test_the_nearest_rows_are_those_that_scipy_takes() -> None:
    from scipy import ndimage

    for old in range(1, 14):
        for new in range(1, 30):
            where = old / new * (np.arange(new) + 0.5) - 0.5
            want = ndimage.map_coordinates(np.arange(float(old)), [where], order=0, mode="nearest")
            assert np.array_equal(nearest_rows(old, new), want)
