"""What a masked autoencoder hides, and which rank encodes what is left."""

import pytest
import torch

from seqpar import DropoutKey, Layout
from seqpar.vit.masking import check_num_visible, count_visible, make_visible, num_visible, visible_tokens

KEY = DropoutKey(3, 5, (0, 1, 6))


@pytest.mark.parametrize("split", ["spatial", "ordered"])
def test_the_same_tokens_are_visible_on_any_number_of_ranks(split: str) -> None:
    want = visible_tokens(KEY, 60, 15)
    for ranks in (1, 2, 3, 4, 8):
        layout = Layout.of((12, 16, 20), 4, ranks, split)
        parts = [make_visible(KEY, layout, rank, 0.75) for rank in range(ranks)]
        encoded = torch.cat(parts[0].ids, 1)
        assert torch.equal(encoded.sort(1).values, want)
        for rank, part in enumerate(parts):  # what each rank owns, by the whole's numbers
            own, count = layout.token_ids(rank), layout.counts[rank]
            numbers = torch.stack([part.shown // count, own[part.shown % count]], 1)
            shown = {tuple(row) for row in numbers.tolist()}
            assert shown == {(b, int(n)) for b, row in enumerate(want) for n in row if n in own}
            both = torch.cat([part.shown, part.hidden]).sort().values
            assert torch.equal(both, torch.arange(3 * count))


def test_a_mask_follows_from_seed_step_and_sample_alone() -> None:
    def of(seed: int, step: int, *samples: int) -> torch.Tensor:
        return visible_tokens(DropoutKey(seed, step, samples), 1000, 250)

    want = of(3, 5, 6)
    assert torch.equal(visible_tokens(KEY, 1000, 250)[2:], want)
    for other in (of(4, 5, 6), of(3, 6, 6), of(3, 5, 7)):
        common = len(set(other[0].tolist()) & set(want[0].tolist()))
        assert 30 < common < 95, common  # 62.5 of 250 are expected
    assert of(0, 0, 0)[0, :8].tolist() == FIRST, "a resumed run would hide other tokens than it began with"


FIRST = [0, 3, 4, 6, 15, 16, 19, 29]


def test_every_token_is_visible_as_often() -> None:
    times = torch.zeros(64)
    for step in range(400):
        times[visible_tokens(DropoutKey(0, step, (0,)), 64, 16)[0]] += 1
    assert times.sum() == 400 * 16 and times.min() > 60 and times.max() < 140  # 100 each, standard deviation 8.7


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_ranks_encode_equal_numbers_and_move_no_more_than_that_takes(ranks: int) -> None:
    layout = Layout.of((24, 24, 28), 4, ranks)
    for rank in range(ranks):
        visible = make_visible(KEY, layout, rank, 0.75)
        assert max(visible.sizes) - min(visible.sizes) <= 1 and sum(visible.sizes) == num_visible(252, 0.75) == 63
        own = layout.token_ids(rank)
        owned = [int(torch.isin(row, own).sum()) for row in visible_tokens(KEY, 252, 63)]
        leaving = sum(max(0, count - visible.sizes[rank]) for count in owned)
        coming = sum(max(0, visible.sizes[rank] - count) for count in owned)
        assert sum(visible.moves.num_sent) - visible.moves.num_sent[rank] == leaving
        assert sum(visible.moves.num_received) - visible.moves.num_received[rank] == coming


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_count_without_numbers_is_exact_for_one_rank_and_expected_for_more(ranks: int) -> None:
    layout = Layout.of((64, 64, 64), 4, ranks)
    for rank in range(ranks):
        listed, counted = make_visible(KEY, layout, rank, 0.75), count_visible(3, layout, rank, 0.75)
        assert counted.sizes == listed.sizes and counted.moves.num_target == listed.moves.num_target
        assert len(counted.shown) == pytest.approx(len(listed.shown), rel=0 if ranks == 1 else 0.1)
        assert len(counted.shown) == counted.moves.num_source and counted.shown.is_meta
        assert len(counted.shown) + len(counted.hidden) == 3 * layout.counts[rank]


def test_a_ratio_that_hides_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="mask_ratio=0.005 hides none of 64 tokens: use a larger `mask_ratio`"):
        check_num_visible(64, 1, 0.005)
    check_num_visible(64, 1, 0.01)


def test_too_few_visible_tokens_for_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="mask_ratio=0.9 leaves 3 of 30 tokens, fewer than the 4 ranks"):
        make_visible(KEY, Layout.of((8, 12, 20), 4, 4), 0, 0.9)
