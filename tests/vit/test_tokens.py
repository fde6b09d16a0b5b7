"""Positions and draws depend on global numbers alone; the embedding is the convolution that it stands for."""

import pytest
import torch
import torch.nn.functional as F

from seqpar.parallel.layout import Layout
from seqpar.parallel.meta_tensors import meta_as_device
from seqpar.planner.launch_counter import LaunchCounter
from seqpar.vit import dropout
from seqpar.vit.dropout import DropoutKey, keyed_drop_path, keyed_dropout
from seqpar.vit.tokens import PatchEmbed, RotaryPositions, learned_positions, sincos_positions, to_grid
from tests.support.ranks import relative

LAYOUT = Layout.of((12, 8, 16), 4)
KEY = DropoutKey(seed=3, step=5, samples=(8, 9))


def test_the_embedding_is_a_strided_convolution() -> None:
    embed, image = PatchEmbed(3, (4, 4, 4), 10).double(), torch.randn(2, 3, 12, 8, 16, dtype=torch.float64)
    want = F.conv3d(image, embed.proj.weight, embed.proj.bias, stride=4)
    assert relative(to_grid(embed(LAYOUT.cut(image, 0)), LAYOUT.grid), want) < 1e-14
    with pytest.raises(ValueError, match="expected patches of shape"):
        embed(torch.zeros(1, 2, 3, 2, 2, 2))


def test_learned_positions_are_rows_by_global_number_and_resized_on_another_grid() -> None:
    table = torch.randn(1, 24, 6)
    third = Layout.of((12, 8, 16), 4, 3)
    assert torch.equal(learned_positions(table, third.grid, third, 1), table[:, third.token_ids(1)])
    larger = Layout.of((24, 8, 16), 4, 2)
    image = table.transpose(1, 2).reshape(1, 6, 3, 2, 4)
    want = F.interpolate(image, (6, 2, 4), mode="trilinear").flatten(2).transpose(1, 2)
    assert torch.equal(learned_positions(table, (3, 2, 4), larger, 1), want[:, larger.token_ids(1)])


def test_sincos_gives_each_direction_a_third_of_the_features() -> None:
    waves = sincos_positions(LAYOUT, 0, 14, torch.zeros((), dtype=torch.float64))[
        0
    ]  # 2 bands per direction, 2 features left over
    at = LAYOUT.coordinates(0).double()
    assert torch.equal(waves[:, 12:], torch.zeros(24, 2, dtype=torch.float64))
    assert torch.allclose(waves[:, 4], at[:, 1].sin()) and torch.allclose(waves[:, 11], (at[:, 2] / 100).cos())


def test_rotation_makes_scores_depend_on_distances_only() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    rotate = RotaryPositions(LAYOUT, 0, 20, like)
    assert rotate.width == 18  # the largest multiple of 6
    q, k = (torch.randn(20, dtype=torch.float64).expand(1, 1, 24, 20) for _ in range(2))
    turned_q, turned_k = rotate(q)[0, 0], rotate(k)[0, 0]
    assert torch.allclose(turned_q.norm(dim=1), q[0, 0].norm(dim=1)) and torch.equal(turned_q[:, 18:], q[0, 0, :, 18:])
    scores, at = turned_q @ turned_k.T, LAYOUT.coordinates(0)
    seen: dict[tuple, torch.Tensor] = {}
    for i in range(24):
        for j in range(24):
            gap = tuple((at[i] - at[j]).tolist())
            assert torch.allclose(scores[i, j], seen.setdefault(gap, scores[i, j]))
    assert len({round(float(s), 9) for s in seen.values()}) > 40  # and they do differ
    with pytest.raises(ValueError, match="too narrow"):
        RotaryPositions(LAYOUT, 0, 4, like)


def test_dropout_of_a_part_is_the_part_of_the_dropout() -> None:
    x = torch.randn(2, 24, 5, dtype=torch.float64)
    whole = keyed_dropout(x, 0.4, KEY, torch.arange(24))
    for rank in range(3):
        ids = Layout.of((12, 8, 16), 4, 3, "ordered").token_ids(rank)
        assert torch.equal(keyed_dropout(x[:, ids], 0.4, KEY, ids), whole[:, ids])
    later = DropoutKey(3, 5, (9,))
    assert torch.equal(keyed_dropout(x[1:], 0.4, later, torch.arange(24)), whole[1:])


def test_every_word_of_the_key_changes_the_draw() -> None:
    x = torch.ones(2, 50, 40)
    keys = [KEY, KEY.at(1), KEY.at(1, 0), KEY.at(0, 1), DropoutKey(4, 5, (8, 9)), DropoutKey(3, 6, (8, 9))]
    keys += [DropoutKey(3, 5, (9, 8))]
    masks = [keyed_dropout(x, 0.5, key, torch.arange(50)) > 0 for key in keys]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert 0.4 < float((a == b).float().mean()) < 0.6


def test_draws_are_those_of_runs_made_before() -> None:
    kept = keyed_dropout(torch.ones(2, 3, 8), 0.5, KEY.at(1, 0), torch.arange(3)) > 0
    assert [int("".join(str(int(bit)) for bit in row), 2) for row in kept.flatten(1).tolist()] == [7958581, 3915502]


def test_rates_hold_and_kept_values_are_scaled() -> None:
    x = torch.ones(2, 300, 100)
    dropped = keyed_dropout(x, 0.3, KEY, torch.arange(300))
    assert abs(float((dropped == 0).float().mean()) - 0.3) < 0.01
    assert torch.allclose(dropped[dropped > 0], torch.tensor(1 / 0.7))
    many = DropoutKey(0, 0, tuple(range(4000)))
    branch = keyed_drop_path(torch.ones(4000, 1, 1), 0.25, many)
    assert abs(float((branch == 0).float().mean()) - 0.25) < 0.03
    assert keyed_dropout(x, 0.0, KEY, torch.arange(300)) is x and keyed_dropout(x, 0.3, None, torch.arange(300)) is x


def test_a_gpus_draws_are_by_sample_place_token_and_channel_too() -> None:
    """Counted on this processor: rates, each word of the key, and the same for any share of the tokens."""
    layout = Layout.of((12, 8, 16), 4, 3, "ordered")
    scrambled = dropout._scramble(torch.arange(300))
    keys = [KEY, KEY.at(1), KEY.at(1, 0), KEY.at(0, 1), DropoutKey(4, 5, (8, 9)), DropoutKey(3, 6, (8, 9))]

    def kept(key: DropoutKey, tokens: torch.Tensor, rate: float = 0.5) -> torch.Tensor:
        return dropout._kept_by_products(key.sample_hashes(tokens.device), tokens, 100, rate)

    masks = [kept(key, scrambled) for key in keys]
    for i, a in enumerate(masks):
        assert 0.48 < float((a[0] == a[1]).float().mean()) < 0.52
        assert 0.48 < float((a[:, 1:] == a[:, :-1]).float().mean()) < 0.52
        assert 0.48 < float((a[..., 1:] == a[..., :-1]).float().mean()) < 0.52
        assert all(0.48 < float((a == b).float().mean()) < 0.52 for b in masks[:i])
    for rate in (0.1, 0.3, 0.9):
        assert abs(float(kept(KEY, scrambled, rate).float().mean()) - 1 + rate) < 0.01
    for rank in range(3):
        ids = layout.token_ids(rank)
        assert torch.equal(kept(KEY, scrambled[ids]), masks[0][:, ids])


def test_a_dropout_site_launches_at_most_eight_times() -> None:
    layout = Layout.of((12, 8, 16), 4)
    with meta_as_device("cuda"):
        x = torch.empty(2, 24, 5, device="meta", requires_grad=True)
        towards = torch.empty(2, 24, 5, device="meta")
        for _ in range(2):  # tables are made at the first
            key = KEY.drawn([(0, 1)], {(0, 2): 0.2}, x.device)
            with LaunchCounter() as counter:
                y = keyed_dropout(x, 0.4, key.at(0, 1), dropout.token_numbers(layout, 0, x))
                torch.autograd.grad(y, x, towards)
    assert not counter.fetches and 0 < counter.launches.total() <= 8, counter.launches


def test_what_was_drawn_beforehand_is_what_is_drawn_later() -> None:
    key, x = DropoutKey(3, 5, tuple(range(40))), torch.ones(40, 3, 4)
    drawn = key.drawn([(1, 0)], {(2, 1): 0.3}, x.device)
    beforehand, later = (keyed_dropout(x, 0.3, k.at(1, 0), torch.arange(3)) for k in (drawn, key))
    assert torch.equal(beforehand, later)
    assert torch.equal(keyed_drop_path(x, 0.3, drawn.at(2, 1)), keyed_drop_path(x, 0.3, key.at(2, 1)))
    assert drawn == key and torch.equal(keyed_drop_path(x, 0.2, drawn.at(2, 1)), keyed_drop_path(x, 0.2, key.at(2, 1)))
