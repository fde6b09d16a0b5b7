"""Planes of a volume: what a truth leaves unlabelled is hatched in each picture, and air is told from the body."""

import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from seqpar.report.embedded_volumes import ShownCase, planes_of, viewer_data
from seqpar.report.images import to_grey
from seqpar.report.pictures import PicturedCase, figure_of_cases
from seqpar.report.planes import COLOURS, UNLABELLED, body_of, grey_window, hatched
from tests.support.report_page import own_slices, unroll

GREY = 60


def shown_case(has_image: bool = True) -> ShownCase:
    """Returns a case whose upper half has no labels."""
    truth, ignored = np.zeros((12, 10, 8), np.uint8), np.zeros((12, 10, 8), bool)
    truth[4:7, 4:7, 1:3], ignored[..., 4:] = 1, True
    images = {"CT": np.full(truth.shape, GREY, np.uint8)} if has_image else {}
    return ShownCase("a", images, truth, truth, (1.0,) * 3, own_slices(truth.shape), ignored=ignored)


@pytest.mark.parametrize("grey", [0, 100, 160, 255])
def test_stripes_are_seen_on_every_grey_and_only_inside(grey: int) -> None:
    image, area = np.full((9, 12), grey), np.zeros((9, 12), bool)
    area[:, 5:] = True
    drawn = hatched(image, area, 0, 255, 1.0, 1.0)
    assert (drawn == image)[~area].all() and 0 <= drawn.min() <= drawn.max() <= 255
    stripes = np.abs(drawn - image)[area] > 60
    assert 0.2 < stripes.mean() < 0.3, "every fourth pixel, the others as they are"
    assert (drawn[area][~stripes] == grey).all()


def test_stripes_put_no_bright_spots_where_noise_is_around_a_middle_grey() -> None:
    """As in soft tissue near 0 HU: they would look like calcifications."""
    for grey in (30, 80, 127, 200):
        image = np.random.default_rng(0).normal(grey, 8, (60, 60)).round().astype(int)
        image[:, 40:] = 0  # air next to it
        drawn = hatched(image, np.ones(image.shape, bool), 0, 255, 1.0, 1.0)
        assert drawn.min() >= 0 and drawn.max() <= max(image.max(), 255 * (0.35 + 0.3)), "none is bright"
        tissue = np.sign(drawn - image)[:, :36]
        assert {*tissue[tissue != 0].tolist()} in ({1}, {-1}), "all are lighter, or all are darker"
        assert (np.abs(drawn - image) > 50)[:, :36].mean() > 0.2 < (drawn > 60)[:, 44:].mean(), "stripes are on both"


@pytest.mark.parametrize(("mm", "up"), [(0.65, 0.65), (0.65, 6.0), (4.0, 4.0)])
def test_stripes_are_as_wide_in_every_picture_whichever_voxels_it_has(mm: float, up: float) -> None:
    """Else those of fine voxels are a mesh that looks like another density."""
    shape = round(330 / up), round(330 / mm)
    drawn = hatched(np.zeros(shape), np.ones(shape, bool), 0, 1, mm, up)
    row = drawn[0] > 0
    assert 15 <= np.count_nonzero(np.diff(row.astype(int)) == 1) <= 30 and 0.2 <= row.mean() <= 0.35


def test_a_page_hatches_the_same_voxels_in_its_planes_and_in_its_viewer() -> None:
    case = shown_case()
    embedded = case.embedded(10**6)
    (entry,) = viewer_data(["tumour"], [(case, embedded)], neurological=True)["cases"]
    assert entry["areas"].keys() == {"ignored"}
    seen = unroll(entry["areas"]["ignored"], entry["shape"], entry["columns"])
    assert case.ignored is not None and np.array_equal(seen, case.ignored)
    plain = planes_of(replace(case, ignored=None), True)
    assert [one.png == other.png for one, other in zip(planes_of(case, True), plain)] == [False, False, True]
    assert not replace(case, ignored=None).embedded(10**6).areas


def test_a_case_without_an_image_is_hatched_too_and_keeps_its_tints() -> None:
    sagittal = planes_of(shown_case(has_image=False), True)[0]
    assert base64.b64decode(sagittal.png)[:4] == b"\x89PNG"
    assert {kind for kind, *_ in sagittal.outlines} == {"ignored", "inside bare", "truth", "prediction"}
    assert not planes_of(replace(shown_case(has_image=False), ignored=None), True)[0].png


def test_a_picture_of_a_validation_hatches_it_and_says_so() -> None:
    case = shown_case()
    truth = np.where(case.ignored, 2, case.truth)
    drawn = PicturedCase(
        "a", np.full(truth.shape, 1.0), truth, case.truth, (1.0,) * 3, own_slices(truth.shape), is_ct=True
    )
    figure = figure_of_cases([drawn], ["tumour"], 1, False, Path("run"))
    sagittal = np.asarray(figure.axes[0].images[0].get_array())
    lines = [to_hex(panel.collections[0].get_edgecolor()[0]) for panel in figure.axes]
    assert lines == ["#ffffff", "#ffffff", COLOURS[0]], "its edge, where the plane cuts it"
    assert len(np.unique(sagittal[:4])) == 2 and len(np.unique(sagittal[4:])) == 1, "above, where nothing is labelled"
    assert figure.legends[0].texts[-1].get_text() == UNLABELLED
    plain = figure_of_cases([replace(drawn, truth=case.truth)], ["tumour"], 1, False, Path("run"))
    assert plain.legends[0].texts[-1].get_text() != UNLABELLED


@pytest.mark.parametrize("snr", [5, 8, 12, 50])
def test_noise_in_air_is_no_body_and_what_the_body_encloses_is(snr: float) -> None:
    rng, places = np.random.default_rng(0), np.indices((32, 36, 32)) - np.array([16, 18, 16])[:, None, None, None]
    x, y, z = places
    body, fluid = (x / 12) ** 2 + (y / 14) ** 2 + (z / 13) ** 2 < 1, (x / 4) ** 2 + (y / 6) ** 2 + (z / 4) ** 2 < 1
    clean = np.where(fluid, 0.1, body.astype(float))
    noisy = np.hypot(*(clean * part + rng.normal(0, 1 / snr, body.shape) for part in (1, 0)))  # as magnitudes have
    found = body_of((noisy - noisy.mean()) / noisy.std())
    assert (found & ~body).sum() < 0.01 * (~body).sum() and (body & ~found).sum() < 0.01 * body.sum()
    full = rng.normal(1, 0.2, body.shape)
    full[8:20, 8:20, 8:20] += 1
    assert body_of(full).mean() > 0.99, "corners of tissue are not air"


def test_noise_in_the_air_leaves_no_more_of_the_body_white() -> None:
    """A bright lesion of a hundredth of the body is brighter than the rest, where most voxels are air."""
    image = np.random.default_rng(0).normal(0, 4, (40, 40, 30)).astype(np.float32)
    image[8:32, 8:32, 5:25] = np.random.default_rng(1).normal(80, 6, (24, 24, 20))
    image[20:25, 20:25, 12:17] = np.linspace(140, 160, 125).reshape(5, 5, 5)
    low, high = grey_window(image)
    assert low < 0 and 140 < high < 160 and np.percentile(image, 99.5) < 100, "as all voxels would have it"
    image[image < 20] = 0
    assert grey_window(image)[1] == pytest.approx(np.percentile(image[image != 0], 99.5))
    assert to_grey(image, "zscore")[2] == grey_window(image)[1] and to_grey(image, "ct")[2] < 100
    assert grey_window(np.zeros((4, 4, 4))) == (0.0, 1.0)
