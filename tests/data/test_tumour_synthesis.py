"""Tumour synthesis: the lesion's contrast is moved, and the data set's labels say which lesion."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import ndimage

from seqpar.data.sampling.augmentation import augment
from seqpar.data.sampling.tumour_synthesis import TumourSynthesis


def liver(size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Returns a ball (1) with a lesion (2), darker in one channel and brighter in the other."""
    far = np.sqrt(
        sum((np.arange(size).reshape([-1 if d == i else 1 for d in range(3)]) - size / 2) ** 2 for i in range(3))
    )
    label = (far < 28).astype(np.uint8)
    label[20:34, 20:34, 24:38] = 2
    image = np.where(label > 0, 1.0, 0)[None].repeat(2, 0)
    image[0, label == 2], image[1, label == 2] = 0.6, 1.3
    noise = 0.02 * np.random.default_rng(0).standard_normal(image.shape)
    return (image + noise * (label > 0)).astype(np.float32), label


def test_synthesis_takes_the_real_contrast_away_and_puts_it_elsewhere():
    image, label = liver()
    real = label == 2
    for seed in range(6):
        new, painted = TumourSynthesis()(image, label, np.random.default_rng(seed))
        assert set(np.unique(painted)) == {0, 1, 2} and np.array_equal(painted == 0, label == 0)
        fake, inner = painted == 2, ndimage.binary_erosion(painted == 2, iterations=1)
        old = ndimage.binary_erosion(real & ~fake, iterations=2)
        assert inner.sum() > 50 and old.sum() > 100
        for channel, contrast in ((0, -0.4), (1, 0.3)):
            assert (new[channel][old].mean() - 1) / contrast == pytest.approx(-0.15, abs=0.02)  # 1.15 times is taken
            assert (new[channel][inner & ~real].mean() - 1) / contrast > 0.8
        assert np.array_equal(new[:, label == 0], image[:, label == 0])
    shares = [TumourSynthesis()._region(np.random.default_rng(s), (24, 24, 24)).mean() for s in range(60)]
    assert all(0.045 < share < 0.255 for share in shares)
    assert 0.6 < np.mean(np.array(shares) < 0.051) < 0.95 and max(shares) > 0.08  # most are the smallest


@pytest.mark.parametrize(("drawn", "share"), [(-1.0, 0.05), (0.05, 0.1), (1.0, 0.25)])
def test_a_fake_lesion_has_a_twentieth_to_a_quarter_of_the_volume(drawn, share):
    rng = SimpleNamespace(normal=lambda mean, spread: drawn)
    assert TumourSynthesis().draw_share(rng) == pytest.approx(share)
    two_above = SimpleNamespace(normal=lambda mean, spread: mean + 2 * spread)
    assert TumourSynthesis().draw_share(two_above) == pytest.approx(0.01 + 2 * 0.01 + 2 * 0.05)


def test_synthesis_leaves_alone_what_has_no_lesion_or_no_contrast():
    image, label = liver()
    rng = np.random.default_rng(0)
    for same_image, same_label in (
        (image, (label > 0).astype(np.uint8)),
        (image, label * (label == 2)),
        (np.ones_like(image), label),
    ):
        new, painted = TumourSynthesis()(same_image, same_label, rng)
        assert np.array_equal(new, same_image) and np.array_equal(painted, same_label)


def test_synthesis_takes_label_values_and_spares_air():
    image, label = liver()
    brain = np.where(label == 2, 3, 0).astype(np.int16)  # healthy tissue and air are both 0
    synthesis = TumourSynthesis(healthy=(0,), lesion=(3, 1), fake=2, probability=1.0)
    new, painted = synthesis(image, brain, np.random.default_rng(0))
    assert set(np.unique(painted)) == {0, 2} and painted.dtype == np.int16
    assert not painted[label == 0].any() and (new[:, label == 0] == 0).all()
    through = augment("none", (64, 64, 64), synthesis)
    assert through.plan(1) == ("synthesis",) and 2 in through(image, brain, 1)[1]
    never = augment("none", (64, 64, 64), replace(synthesis, probability=0.0))
    assert all(map(np.array_equal, never(image, brain, 1), (image, brain)))


def labelled(names: str, regions: dict | None = None, order: tuple[int, ...] = (), scheme: str = "zscore"):
    """Returns what synthesis looks at in a data set."""
    labels = {name: n for n, name in enumerate(names.split())}
    recipe = SimpleNamespace(schemes=(scheme,) * 2)
    return SimpleNamespace(name="D", labels=labels, regions=regions or {}, regions_class_order=order, recipe=recipe)


BRATS = {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)}


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (labelled("background NCR ED ET", BRATS, (2, 1, 3)), TumourSynthesis((0,), (1, 2, 3), 2, 0.3)),
        (labelled("background NETC SNFH ET RC", {**BRATS, "RC": (4,)}, (2, 1, 3, 4)),
         TumourSynthesis((0,), (1, 2, 3), 2, 0.3)),
        (labelled("background tumour"), TumourSynthesis((0,), (1,), None, 0.3)),
        (labelled("background liver Cancer", scheme="ct"), TumourSynthesis((1,), (2,), None, 0.3)),
    ],
)  # fmt: skip
def test_synthesis_takes_the_lesion_and_the_healthy_tissue_from_the_labels(dataset, expected):
    assert TumourSynthesis.of(dataset, 0.3) == expected


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (labelled("background hippocampus"), r"--synthesis 0.3: .* \(background, hippocampus\) do not tell lesions"),
        (labelled("background kidney tumor cyst"), "do not tell lesions"),
        (labelled("background kidney tumor", {"kidney": (1, 2), "tumor": (2,)}, (1, 2)), "do not tell lesions"),
        (labelled("background cancer", scheme="ct"), "labels no organ, and without z-scores of what is not 0"),
    ],
)
def test_labels_that_do_not_tell_a_lesion_are_refused(dataset, message):
    with pytest.raises(ValueError, match=message):
        TumourSynthesis.of(dataset, 0.3)


def test_a_synthesis_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="labels that differ"):
        TumourSynthesis((1, 2), (2,))
    with pytest.raises(ValueError, match="smallest share"):
        TumourSynthesis(smallest=0)
