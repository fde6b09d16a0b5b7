"""Every token has one owner, cut and join invert each other, and what cannot work is refused with what does."""

import itertools
import math
import pickle

import pytest
import torch

from seqpar.parallel.layout import Layout, cut_counts, from_patches, to_patches

CASES = [
    ((20, 8, 28), 4, world, split)
    for world, split in itertools.product((1, 2, 3, 4, 5, 6, 7, 8), ("spatial", "ordered"))
] + [((6, 10, 14), 2, 8, "spatial"), ((6, 10), 2, 4, "spatial"), ((96, 96, 96), 16, 4, "ordered")]


@pytest.mark.parametrize("tile, patch, world, split", CASES)
def test_every_token_has_one_owner_and_join_inverts_cut(tile: tuple, patch: int, world: int, split: str) -> None:
    layout = Layout.of(tile, patch, world, split)
    ids = torch.cat(layout.all_ids)
    assert torch.equal(ids.sort().values, torch.arange(layout.num_tokens))
    assert sum(layout.counts) == layout.num_tokens and min(layout.counts) > 0
    for rank in range(world):
        at = layout.coordinates(rank)
        assert bool((layout.owner[tuple(at.T)] == rank).all())
        assert torch.equal(layout.token_ids(rank), layout.token_ids(rank).sort().values)
    image, label = torch.randn(2, 3, *tile), torch.randint(5, (2, *tile))
    parts = [layout.cut(image, rank) for rank in range(world)]
    assert parts[0].shape == (2, layout.counts[0], 3, *layout.patch)
    assert torch.equal(layout.join(parts), image)
    assert torch.equal(layout.join([layout.cut(label, rank) for rank in range(world)]), label)


@pytest.mark.parametrize("tile, patch, world, split", CASES)
def test_counts_and_boxes_are_those_of_the_listed_tokens(tile: tuple, patch: int, world: int, split: str) -> None:
    layout = Layout.of(tile, patch, world, split)
    for rank, ids in enumerate(layout.all_ids):
        at = layout.coordinates(rank)
        box = tuple(zip(at.amin(0).tolist(), (at.amax(0) + 1).tolist()))
        fills = math.prod(high - low for low, high in box) == len(ids)
        assert layout.counts[rank] == len(ids) and layout._boxes[rank] == (box if fills else None)
        if fills:
            below = [int((ids < number).sum()) for number in range(layout.num_tokens + 1)]
            assert [layout.num_below(rank, number) for number in range(layout.num_tokens + 1)] == below


def test_tensors_without_data_get_numbers_without_data() -> None:
    layout, meta = Layout.of(1 << 15, 1, 2), torch.device("meta")
    assert layout.token_ids(1, meta).shape == (1 << 44,) and layout.raster_order(meta).shape == (1 << 45,)


def test_patches_are_the_voxels_of_their_token() -> None:
    whole = torch.arange(4 * 6 * 2).reshape(4, 6, 2)
    cells = to_patches(whole, (2, 3, 2))
    assert torch.equal(cells[1], whole[0:2, 3:6, 0:2])  # raster order, last direction fastest
    assert torch.equal(from_patches(cells, (2, 2, 1)), whole)


def test_spatial_cuts_largest_primes_first_in_turn() -> None:
    grid = (8, 8, 8)
    counts = {n: cut_counts(n, grid) for n in (1, 2, 4, 8, 6, 12, 16)}
    assert counts[1] == (1, 1, 1) and counts[2] == (2, 1, 1) and counts[4] == (2, 2, 1) and counts[8] == (2, 2, 2)
    assert counts[6] == (3, 2, 1) and counts[12] == (3, 2, 2) and counts[16] == (4, 2, 2)


def test_where_the_grid_forbids_it_the_largest_box_is_smallest() -> None:
    assert cut_counts(5, (3, 8, 8)) == (1, 5, 1)
    assert cut_counts(8, (1, 2, 9)) == (1, 2, 4)  # 1x1x3 beats 1x2x2
    with pytest.raises(ValueError, match="num_ranks=7 cannot cut.*num_ranks=6 or split='ordered'"):
        Layout.of((12, 8, 8), 4, 7)


def test_ordered_equals_spatial_for_two_ranks() -> None:
    a, b = (Layout.of(32, 4, 2, split) for split in ("ordered", "spatial"))
    assert torch.equal(a.owner, b.owner) and a.cuts == b.cuts


def test_ordered_chunks_need_not_be_boxes() -> None:
    layout = Layout.of(96, 16, 4, "ordered")  # 54 tokens are one plane and a half
    assert layout.counts == (54, 54, 54, 54) and not layout.is_box and layout.cuts is None
    with pytest.raises(ValueError, match="split='spatial' or num_ranks=1 or 2 or 3"):
        layout.box(0)
    assert layout.boxed() == Layout.of(96, 16, 4, "spatial")
    planes = Layout.of(96, 16, 3, "ordered")
    assert planes.is_box and planes.cuts == ((0, 2, 4, 6), (0, 6), (0, 6)) and planes.boxed() is planes


def test_cuts_list_boxes_in_rank_order_and_refine() -> None:
    layout = Layout.of((12, 8, 16), 4, 6)
    assert layout.cuts == ((0, 1, 2, 3), (0, 1, 2), (0, 4))
    assert layout.box(3) == ((1, 2), (1, 2), (0, 4))
    assert layout.voxel_cuts(2) == ((0, 2, 4, 6), (0, 2, 4), (0, 8))
    with pytest.raises(ValueError, match="split='spatial'"):
        Layout.of(96, 16, 4, "ordered").voxel_cuts()


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(tile=30, patch=16), r"tile=\(32, 32, 32\)"),
        (dict(tile=32, patch=16, num_ranks=9), "8 tokens.*num_ranks=8"),
        (dict(tile=32, patch=16, split="random"), "spatial or ordered"),
        (dict(tile=(32, 32), patch=(8, 8, 8)), "different numbers of axes"),
        (dict(tile=32, patch=0), "positive"),
    ],
)
def test_what_cannot_work_is_refused_with_what_does(wrong: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Layout.of(**wrong)


def test_one_number_or_a_list_stands_for_a_tuple() -> None:
    layout = Layout((16, 16, 16), (8, 8, 8), 2)
    assert Layout(16, 8, 2) == Layout([16, 16, 16], 8, 2) == Layout.of(16, 8, 2) == layout  # type: ignore[arg-type]
    assert layout.of_tile(32) == layout.of_tile([32] * 3) == Layout.of(32, 8, 2)
    assert hash(Layout([16, 24], 8)) == hash(Layout.of((16, 24), 8))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1, 1, 32, 16, 16), (1, 20, 16, 16), (16, 16, 16), (1, 1, 1, 16, 16, 16)])
def test_a_tensor_of_another_tile_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"with tile=\(16, 16, 16\), got a tensor of shape"):
        Layout.of(16, 8, 2).cut(torch.zeros(shape), 0)


def test_other_parts_ranks_and_numbers_are_refused_in_words() -> None:
    layout = Layout.of(16, 8, 3, "ordered")
    part = layout.cut(torch.zeros(1, 1, 16, 16, 16), 0)
    with pytest.raises(ValueError, match="rank=3: this layout has 3 ranks, counted from 0"):
        layout.cut(torch.zeros(1, 16, 16, 16), 3)
    with pytest.raises(ValueError, match="expected 3 parts of .* tokens, in rank order, got 1 part"):
        layout.join([part])
    with pytest.raises(ValueError, match="tile=32.0: give a whole number, or several in a tuple"):
        Layout.of(32.0, 8)  # type: ignore[arg-type]


def test_a_pickle_has_no_tables() -> None:
    layout = Layout.of(16, 8, 2)
    layout.token_ids(1)
    copied = pickle.loads(pickle.dumps(layout))
    assert copied == layout and copied.__dict__.keys() == {"tile", "patch", "num_ranks", "split"}
