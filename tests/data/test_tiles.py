"""A tile follows from its numbers alone; where it is cut follows nnU-Net's rule; only its box is read."""

import pickle
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.preparation.cache import open_cache
from seqpar.data.preparation.prepare_dataset import prepare
from seqpar.data.sampling.augmentation import augment
from seqpar.data.sampling.tiles import Tile, TileKey, TileSource, position_bounds
from seqpar.losses import mark_skeleton
from tests.support.cases import NoiseCase, PlaceCase, Telling, noise_source
from tests.support.folders import nnunet

EDGE = 10
CORNER = (9, 9, 9)  # as a centre it gives a start that is beyond a uniform draw's reach


def same(a: Tile, b: Tile) -> bool:
    return np.array_equal(a.image, b.image) and np.array_equal(a.label, b.label)


def places(
    foreground: float,
    *classes: tuple[int, tuple[tuple[int, ...], ...]],
    draws: int = 1500,
    tile: int = 4,
    shifted: bool = False,
):
    """Returns where tiles of one case start."""
    case = PlaceCase("a", (EDGE,) * 3, classes)
    source = TileSource((case,), augment("none", (tile,) * 3), 3, 4, foreground, shifted=shifted)
    starts = []
    for sample in range(draws):
        image = source.draw(TileKey(1, 0, sample)).image
        voxel = np.argwhere(image[0] > 0)[0]
        starts.append(tuple(int(image[d][tuple(voxel)]) - 1 - int(voxel[d]) for d in range(3)))
    return starts


def test_a_shifted_tile_has_its_voxel_anywhere_and_stays_inside_the_case() -> None:
    starts = set(places(1.0, (1, ((5, 5, 5),)), draws=800, shifted=True))
    assert starts == {(x, y, z) for x in range(2, 6) for y in range(2, 6) for z in range(2, 6)}
    assert set(places(1.0, (1, (CORNER,)), draws=100, shifted=True)) == {(6, 6, 6)}
    assert set(places(1.0, (1, ((5, 5, 5),)), draws=100)) == {(3, 3, 3)}  # the control


def test_a_shift_follows_from_the_sample_alone() -> None:
    source = replace(noise_source(augment("none", (4, 4, 4))), foreground=1.0, shifted=True)
    keys = [TileKey(2, 0, sample) for sample in range(12)]
    first = {key: source.draw(key) for key in keys}
    assert all(same(first[key], source.draw(key)) for key in reversed(keys))


@pytest.mark.parametrize("name", ["none", "paper", "full"])
def test_a_tile_follows_from_seed_step_and_sample_alone(name: str) -> None:
    source = noise_source(augment(name, (12, 12, 12)))
    keys = [TileKey(*numbers) for numbers in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (7, 3, 5)]]
    first = {key: source.draw(key) for key in keys}
    np.random.seed(5)
    again = {key: pickle.loads(pickle.dumps(source)).draw(key) for key in reversed(keys)}
    assert all(same(first[key], again[key]) for key in keys)
    assert all(not same(first[a], first[b]) for a in keys for b in keys if a != b)


def test_transforms_that_draw_from_global_generators_follow_too_and_leave_them_alone() -> None:
    source, key = noise_source(Telling()), TileKey(0, 4, 2)
    first = source.draw(key)
    torch.manual_seed(3)
    before = np.random.get_state()[1].copy(), random.getstate(), torch.get_rng_state()
    assert same(source.draw(key), first)
    after = np.random.get_state()[1], random.getstate(), torch.get_rng_state()
    assert np.array_equal(before[0], after[0]) and before[1] == after[1] and torch.equal(before[2], after[2])
    drawn = [source.draw(TileKey(0, 4, n)).image[1, 0, 0, :3].tolist() for n in range(3)]
    assert len({number for three in drawn for number in three}) == 9


def test_one_tile_in_three_is_forced_to_foreground() -> None:
    starts = places(1 / 3, (1, (CORNER,)), draws=1500)
    assert abs(starts.count((7, 7, 7)) / len(starts) - 1 / 3) < 4 * np.sqrt(2 / 9 / len(starts))
    assert (7, 7, 7) not in places(0.0, (1, (CORNER,)), draws=300)  # the control


def test_a_present_class_is_chosen_uniformly_then_a_voxel() -> None:
    many = tuple((9, n, m) for n in range(3, 9) for m in range(3, 9))
    starts = Counter(places(1.0, (1, (CORNER,)), (2, many), (3, ())))
    rare = starts.pop((7, 7, 7))
    assert abs(rare / 1500 - 1 / 2) < 4 * np.sqrt(1 / 4 / 1500)
    assert set(starts) == {(7, n - 2, m - 2) for _, n, m in many}
    expected = (1500 - rare) / len(many)
    assert sum((n - expected) ** 2 / expected for n in starts.values()) < 85  # chi-squared, 35 degrees, p = 5e-6


def test_positions_and_cases_are_uniform_otherwise() -> None:
    starts = places(0.0, draws=1400)
    for direction in range(3):
        counts = Counter(start[direction] for start in starts)
        assert sorted(counts) == list(range(EDGE - 4 + 1))
        assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 35  # 6 degrees, p = 4e-6
    source = noise_source()
    cases = Counter(source.case_of(TileKey(0, step, 0)) for step in range(2000))
    assert sum((cases[str(n)] - 500) ** 2 / 500 for n in range(4)) < 30  # 3 degrees, p = 1e-6
    assert places(1.0, draws=300) == places(0.0, draws=300)  # a case without foreground


@pytest.mark.parametrize("voxel, start", [((0, 0, 0), (0, 0, 0)), ((5, 1, 9), (3, 0, 7)), ((2, 3, 4), (0, 1, 2))])
def test_only_the_lower_bound_holds_a_forced_tile_back(voxel: tuple[int, ...], start: tuple[int, ...]) -> None:
    assert set(places(1.0, (1, (voxel,)), draws=20)) == {start}


def test_bounds_are_those_of_nnunet_for_any_source_size() -> None:
    """nnU-Net bounds the source, which is larger than the tile by a margin on both sides; we bound the tile."""
    for extent in range(1, 14):
        for tile in range(1, 14):
            for margin in range(3):
                source = tile + 2 * margin
                pad = max(source - tile, source - extent)
                low, high = -pad // 2, extent + pad // 2 + pad % 2 - source
                assert position_bounds(extent, tile) == (low + margin, high + margin), (extent, tile, margin)


def test_what_lies_outside_of_a_case_is_zero_and_has_the_outside_label() -> None:
    case = PlaceCase("a", (5, 20, 6))
    source = TileSource((case,), augment("none", (8, 8, 9), outside_label=3), 3, 4, foreground=0)
    for sample in range(20):
        image, label = source.draw(TileKey(0, 0, sample))
        low = 1 if (label[1, 0, 4] == 1) else 2
        inside = np.zeros((8, 8, 9), bool)
        last = 1 if (label[4, 0, 1] == 1) else 2
        inside[low : low + 5, :, last : last + 6] = True
        assert (label[inside] == 1).all() and (label[~inside] == 3).all()
        assert (image[:, inside] > 0).all() and (image[:, ~inside] == 0).all()
        assert image[0, low, 0, last] == 1 and image[2, low, 0, last] == 1


@dataclass
class Watched:
    """An array that notes how much of it is read."""

    array: np.ndarray
    read: list[int] = field(default_factory=list)

    def __getattr__(self, name: str):
        return getattr(self.array, name)

    def __getitem__(self, box: tuple) -> np.ndarray:
        self.read.append(self.array[box].size)
        return self.array[box]


@dataclass(frozen=True)
class WatchedCase:
    id: str
    image: Watched
    label: Watched
    locations: dict[int, np.ndarray]


def test_only_the_needed_box_is_read() -> None:
    made = NoiseCase("3", (40, 40, 40))
    case = WatchedCase("3", Watched(made.image), Watched(made.label), made.locations)
    augmentation = augment("paper", (10, 10, 10))
    source = TileSource((case,), augmentation, 2, 3)  # type: ignore[arg-type]
    turned = 0
    for sample in range(30):
        key = TileKey(0, 0, sample)
        need = int(np.prod(augmentation.needed_size(key.seeds()[1])))
        source.draw(key)
        assert len(case.image.read) == len(case.label.read) == 1
        assert case.image.read.pop() <= 2 * need and case.label.read.pop() <= need
        turned += need > 1000
    assert 0 < turned < 30


def test_tiles_of_a_real_cache(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "raw", 3, ("T1", "T2"), labels={"background": 0, "tumour": 1, "ignore": 2})
    prepare(read_dataset(root), tmp_path / "cache", workers=0)
    dataset = open_cache(tmp_path / "cache")
    augmentation = augment("none", (8, 8, 8), outside_label=2)
    source = pickle.loads(pickle.dumps(TileSource.of(dataset, ["c_002", "c_000"], augmentation)))
    assert [case.id for case in source.cases] == ["c_000", "c_002"]
    tumour = 0
    for sample in range(30):
        image, label = source.draw(TileKey(0, 0, sample))
        assert image.shape == (2, 8, 8, 8) and image.dtype == np.float32 and label.dtype == np.uint8
        assert set(np.unique(label)) <= {0, 1, 2}
        tumour += bool((label == 1).any())
    assert tumour >= 10
    with pytest.raises(ValueError, match="c_009 is not in the cache"):
        TileSource.of(dataset, ["c_009"], augmentation)
    with pytest.raises(ValueError, match="outside_label=2"):
        TileSource.of(dataset, ["c_000"], augment("none", (8, 8, 8)))
    path = dataset.cases["c_002"].folder / "image.npy"
    path.write_bytes(path.read_bytes()[:300])
    bad = next(key for n in range(99) if source.case_of(key := TileKey(0, 0, n)) == "c_002")
    with pytest.raises(DataError, match=rf"c_002/image.npy: .*case c_002, for sample {bad.sample} of step 0"):
        source.draw(bad)
    path = dataset.cases["c_000"].folder / "label.npy"
    path.write_bytes(path.read_bytes()[:-200] + bytes([200] * 200))
    keys = (TileKey(0, 0, n) for n in range(99))
    with pytest.raises(DataError, match=r"c_000/label.npy: holds labels from . to 200, and 0 to 2 are known"):
        [source.draw(key) for key in keys if source.case_of(key) == "c_000"]


def test_what_cannot_be_drawn_is_refused() -> None:
    case = NoiseCase("1")
    augmentation = augment("none", (8, 8, 8))
    with pytest.raises(ValueError, match="no cases to train on"):
        TileSource((), augmentation, 2, 3)
    with pytest.raises(ValueError, match="it must be a share from 0 to 1"):
        TileSource((case,), augmentation, 2, 3, 1.5)
    with pytest.raises(ValueError, match="sorted by id"):
        TileSource((case, NoiseCase("0")), augmentation, 2, 3)
    with pytest.raises(DataError, match="case 1: image .* do not match 3 channels"):
        TileSource((case,), augmentation, 3, 3).draw(TileKey(0, 0, 0))


def test_by_count_the_last_tiles_of_a_step_are_the_centred_ones() -> None:
    """As nnU-Net rounds: of two tiles one, of four one, of one none."""
    for tiles, centred in ((1, []), (2, [1]), (4, [3]), (6, [4, 5])):
        source = replace(noise_source(), foreground=0.33, step_tiles=tiles)
        rng = np.random.default_rng(0)
        assert [sample for sample in range(tiles) if source._is_centred(rng, sample)] == centred


def test_labels_with_skeletons_are_those_of_whole_tiles() -> None:
    plain = replace(noise_source(augment("light", (12, 12, 12))), foreground=1.0)
    marking = replace(plain, marks_skeletons=True)
    assert marking.label_dtype == np.int16
    for sample in range(3):
        (image, label), (same, marked) = (source.draw(TileKey(1, 0, sample)) for source in (plain, marking))
        want = mark_skeleton(torch.from_numpy(label)[None])[0].numpy()
        assert np.array_equal(image, same) and np.array_equal(marked, want) and marked.dtype == np.int16
        assert marked.max() > label.max()
