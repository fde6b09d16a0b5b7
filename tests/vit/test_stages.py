"""Tokens that merge: nested orders and their inverse, merging as Swin's, and the encoder as raster order has it."""

import itertools

import pytest
import torch
from einops import rearrange
from torch import Tensor

from seqpar import Layout, SeqParViT, export_monai
from seqpar.parallel.layout import to_patches
from seqpar.vit.dropout import token_numbers
from seqpar.vit.token_merging import NestedLayout, PatchMerging, join_cubes, make_stages, split_cubes
from seqpar.vit.tokens import RotaryPositions, to_grid
from tests.support.ranks import relative

TILE, PATCH, DEPTHS = (16, 8, 24), 2, (1, 2, 1)


@pytest.mark.parametrize(
    "tile, patch, merges", [((16, 8, 24), (2, 2, 2), 2), ((8, 8, 4), (4, 2, 1), 1), ((16, 8), (2, 4), 1)]
)
@pytest.mark.parametrize("num_ranks, split", [(1, "spatial"), (2, "spatial"), (2, "ordered")])
def test_patches_of_cubes_are_those_of_the_nested_layout_and_come_back_as_a_grid(
    tile: tuple[int, ...], patch: tuple[int, ...], merges: int, num_ranks: int, split: str
) -> None:
    image = torch.randn(2, 3, *tile)
    cubes = Layout(tile, tuple(side << merges for side in patch), num_ranks, split)
    nested = NestedLayout(tile, patch, num_ranks, split, merges)
    parts = [split_cubes(cubes.cut(image, rank), merges) for rank in range(num_ranks)]
    assert all(torch.equal(part, nested.cut(image, rank)) for rank, part in enumerate(parts))
    assert torch.equal(nested.join([nested.cut(image, rank) for rank in range(num_ranks)]), image)
    assert torch.equal(torch.cat(nested.all_ids).sort().values, torch.arange(nested.num_tokens))
    assert nested.counts == tuple(count << merges * len(tile) for count in cubes.counts)
    assert nested.counts == tuple(map(len, nested.all_ids))
    for rank, box in enumerate(nested._boxes):
        at = nested.coordinates(rank)
        assert box == tuple(zip(at.amin(0).tolist(), (at.amax(0) + 1).tolist()))
    if num_ranks == 1:
        grid = to_grid(parts[0].flatten(2).unflatten(1, (cubes.num_tokens, -1)).flatten(2), cubes.grid)
        patches = rearrange(to_patches(image, patch), "b c n ... -> b n (c ...)")
        assert torch.equal(join_cubes(grid, merges), to_grid(patches, nested.grid))


def swins_merging(x: Tensor, merge: PatchMerging) -> Tensor:
    """Returns a grid ``b w d h e`` merged as Swin's text says: eight slices side by side, a norm, a matrix."""
    slices = [x[:, i::2, j::2, k::2] for i, j, k in itertools.product((0, 1), repeat=3)]
    return merge.reduction(merge.norm(torch.cat(slices, -1)))


def encoder(**changes: object) -> SeqParViT:
    torch.manual_seed(0)
    options = dict(positions="learned+rope", mlp="swiglu", layer_scale=0.5)
    return SeqParViT(2, TILE, PATCH, 12, DEPTHS, 2, **options | changes).double()  # type: ignore[arg-type]


def in_raster_order(net: SeqParViT, image: Tensor) -> list[Tensor]:
    """Returns the tokens after each stage as grids, with tokens in raster order throughout and slices that merge."""
    fine = Layout.of(TILE, PATCH)
    x, grids = net.patch_embed(fine.cut(image, 0)) + net.pos_embed, []
    for stage in net.stages:
        layout = Layout.of(TILE, PATCH << stage.number)
        if stage.number:
            x = rearrange(
                swins_merging(x.unflatten(1, grids[-1].shape[2:]), net.merges[stage.number - 1]),
                "b w d h e -> b (w d h) e",
            )  # type: ignore[arg-type]
        rotary = RotaryPositions(layout, 0, 6, x)
        for block in stage.blocks:
            x = net.blocks[block](x, layout.counts, token_numbers(layout, 0, x), rotary, None)
        grids.append(to_grid(x, layout.grid))
    return grids


def stages_of(net: SeqParViT, image: Tensor) -> list[Tensor]:
    """Returns the tokens after each stage as grids, by the encoder's own way."""
    _, taken = net.forward_intermediates(image, [stage.blocks[-1] for stage in net.stages])
    return [join_cubes(to_grid(rows, net.layout.grid), stage.merges) for stage, rows in zip(net.stages, taken)]


def test_stages_are_those_of_tokens_in_raster_order_and_merging_is_swins(monkeypatch: pytest.MonkeyPatch) -> None:
    net, image = encoder(), torch.randn(2, 2, *TILE, dtype=torch.float64)
    expected = in_raster_order(net, image)
    assert [tuple(grid.shape[1:]) for grid in expected] == [(12, 8, 4, 12), (24, 4, 2, 6), (48, 2, 1, 3)]
    assert max(map(relative, stages_of(net, image), expected)) < 1e-12
    assert relative(net(image), net.norm(rearrange(expected[-1], "b e w d h -> b (w d h) e"))) < 1e-12
    right = NestedLayout.coordinates  # the control: tokens are said to lie in another order than they do
    monkeypatch.setattr(NestedLayout, "coordinates", lambda layout, rank: right(layout, rank).flip(0))
    assert relative(stages_of(encoder(), image)[0], expected[0]) > 1e-3


def test_a_volume_of_another_size_passes_padded_to_cubes() -> None:
    net, image = encoder(), torch.randn(1, 2, 17, 8, 20, dtype=torch.float64)
    padded = torch.nn.functional.pad(image, (0, 4, 0, 0, 0, 7))
    assert net.layout.patch == (8, 8, 8) and net(image).shape == (1, 3 * 1 * 3, 48)
    assert torch.equal(net(image), net(padded))


def test_one_stage_is_the_plain_encoder_bit_for_bit() -> None:
    image, nets = torch.randn(1, 2, *TILE), []
    for depth in (2, (2,)):
        torch.manual_seed(0)
        nets.append(SeqParViT(2, TILE, 8, 12, depth, 2))
    assert torch.equal(nets[0](image), nets[1](image)) and nets[0].layout == nets[1].layout
    assert nets[0].state_dict().keys() == nets[1].state_dict().keys()


def test_what_others_do_not_compute_is_not_exported() -> None:
    for changes, why in (
        (dict(depth=DEPTHS), "an encoder of several stages"),
        (dict(window=2), "attention in windows"),
    ):
        net = SeqParViT(**dict(in_channels=1, tile=16, patch=4, embed_dim=12, depth=1, num_heads=2) | changes)
        with pytest.raises(ValueError, match=why):
            export_monai(net)


def test_wrong_stages_are_refused() -> None:
    assert [(s.embed_dim, s.num_heads, s.merges) for s in make_stages((2, 2, 6), 48, 3)] == [
        (48, 3, 2),
        (96, 6, 1),
        (192, 12, 0),
    ]
    for depths in ((), (2, 0)):
        with pytest.raises(ValueError, match="each stage needs at least one block"):
            make_stages(depths, 48, 3)
    with pytest.raises(ValueError, match=r"use tile=\(16, 8, 24\)"):
        SeqParViT(2, (12, 8, 24), PATCH, 12, DEPTHS, 2)
