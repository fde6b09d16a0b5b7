"""The paper's decoder in every mode, split and number of ranks equals one process: logits, loss, every gradient."""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqpar.decoders.modes import halo, swap
from seqpar.decoders.modes.mode import Mode
from seqpar.decoders.modes.named_modes import MODES, Auto, choose_mode
from seqpar.decoders.plain import PlainDecoder
from seqpar.losses import DiceCE, LossOptions, make_loss, mark_skeleton
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Group, Mesh
from seqpar.vit.encoder import SeqParViT
from tests.support import nets
from tests.support.ranks import relative, summed

WORLDS = [1, 2, 3, 4, 8]
EXACT = ["gather", "halo", "swap"]
PATCH = 4
TILE = (20, 12, 8)  # 5 x 3 x 2 tokens: boxes differ in size, ordered chunks are none
THIN = ("skeleton-recall", "cldice")  # losses that depend on more than single voxels
LOSSES = {
    "plain": DiceCE(),
    "summed": DiceCE(batch_dice=True, ignore_label=2),
    **{name: make_loss(name, LossOptions(batch=True), ignore_label=2) for name in THIN},
}


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_net(group: Group, mode: str, split: str) -> SegmentationNet:
    torch.manual_seed(3)
    options = {"embed_dim": 12, "depth": 1, "num_heads": 2, "qkv_bias": False, "split": split}
    encoder = SeqParViT(2, TILE, PATCH, **options, group=group)
    return SegmentationNet(encoder, PlainDecoder(12, 3, (PATCH,) * 3, width=4), choose_mode(mode, group)).double()


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    label = torch.randint(3, (size, *TILE), generator=torch.Generator().manual_seed(5))
    return numbers(4, size, 2, *TILE), label


@cache
def one_process(size: int, loss_name: str) -> dict[str, Any]:
    """Returns what a single process gets of the whole batch; ranks inherit what their parent has computed."""
    loss = LOSSES[loss_name]
    net = make_net(Group("seq"), "gather", "spatial")
    image, label = batch_of(size)
    logits = net(image.requires_grad_())
    value = loss(logits, mark_skeleton(label, 2) if loss.needs_marks else label)
    dimage, *grads = torch.autograd.grad(value, [image, *net.parameters()])
    return {"logits": logits.detach(), "loss": value.detach(), "input": dimage, "weights": grads}


def place(net: SegmentationNet, batch: int) -> tuple[Any, ...]:
    """Returns where in the whole batch this rank's logits lie."""
    group, layout, mode = net.mode.group, net.encoder.layout, net.mode.name
    if mode in ("auto",):
        mode = net.mode.pick(batch).name  # type: ignore[attr-defined]
    if mode == "gather":
        return (...,)
    if mode == "swap":
        each = batch // group.size
        return (slice(group.index * each, (group.index + 1) * each),)
    box = layout.boxed().box(group.index)
    return (..., *(slice(low * PATCH, high * PATCH) for low, high in box))


def check_mode(mesh: Mesh, mode: str, split: str, each: int, loss_name: str) -> dict[str, float]:
    """Returns the gaps to one process; every data group has ``each`` samples together."""
    loss, group = LOSSES[loss_name], mesh.seq
    expected = one_process(each * mesh.data.size, loss_name)
    net = make_net(group, mode, split)
    layout = net.encoder.layout
    mine = slice(mesh.data.index * each, (mesh.data.index + 1) * each)
    image, label = batch_of(each * mesh.data.size)
    label = mark_skeleton(label, 2) if loss.needs_marks else label
    image, label = (layout.cut(whole[mine], group.index) for whole in (image, label))
    logits = net(image.requires_grad_())
    value = loss(logits, net.arrange(label), net.loss_groups(mesh.data, each))
    dimage, *grads = torch.autograd.grad(value, [image, *net.parameters()])
    whole_input = layout.cut(expected["input"][mine], group.index)
    averaged = [total / mesh.world.size for total in summed(grads, mesh.world)]
    return {
        "logits": relative(logits.detach(), expected["logits"][mine][place(net, each)]),
        "loss": relative(all_reduce(value, mesh.world) / mesh.world.size, expected["loss"]),
        "input": relative(dimage / mesh.world.size, whole_input),
        "weights": max(map(relative, averaged, expected["weights"])),
    }


def check_modes(mesh: Mesh, cases: list[tuple[str, str, int]]) -> list[dict[str, float]]:
    return [check_mode(mesh, *case, "plain") for case in cases]


@pytest.mark.parametrize("world", WORLDS)
def test_in_each_mode_and_split_the_plain_decoder_equals_one_process(world: int, ranks: Callable[..., list]) -> None:
    how = nets.FEW if world > 4 else [*nets.EXACT, ("auto", "spatial"), ("auto", "ordered")]
    cases = [(mode, split, world if mode == "swap" else 2) for mode, split in how]
    for size in {size for _, _, size in cases}:
        one_process(size, "plain")
    for every in ranks(world, check_modes, cases, timeout=120):
        for case, gaps in zip(cases, every):
            assert max(gaps.values()) < 1e-12, (case, gaps)


def plain() -> tuple[nn.Module, tuple[int, ...]]:
    return PlainDecoder(nets.EMBED, nets.CLASSES, (nets.PATCH,) * 3, width=4), ()


@pytest.mark.parametrize("world", [2, 4])
def test_the_plain_decoder_takes_equal_steps(world: int, ranks: Callable[..., list]) -> None:
    nets.check_exact(ranks, world, plain)


@pytest.mark.parametrize("mode", EXACT)
def test_sums_over_the_batch_run_over_all_who_share_it(mode: str, ranks: Callable[..., list]) -> None:
    """Batch Dice and ignored voxels, on two sequence groups of two ranks."""
    for gaps in ranks(4, check_mode, mode, "ordered", 2, "summed", seqpar=2):
        assert max(gaps.values()) < 1e-12, gaps


def check_thin(mesh: Mesh, cases: list[tuple[str, str, int]]) -> list[dict[str, float]]:
    return [check_mode(mesh, *case, name) for case in cases for name in THIN]


@pytest.mark.parametrize(("world", "seqpar"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_losses_of_skeletons_equal_those_of_one_process(world: int, seqpar: int, ranks: Callable[..., list]) -> None:
    """The control is last: without its neighbours' voxels, a box has another loss."""
    exact = [("gather", "ordered", 2), ("swap", "ordered", seqpar), ("halo", "spatial", 2)]
    for size, name in itertools.product({each * world // seqpar for *_, each in exact}, THIN):
        one_process(size, name)
    for *every, recall, cldice in ranks(world, check_thin, [*exact, ("nogather", "spatial", 2)], seqpar=seqpar):
        for number, gaps in enumerate(every):
            assert max(gaps.values()) < 1e-12, (exact[number // 2], THIN[number % 2], gaps)
        assert seqpar == 1 or min(recall["loss"], cldice["loss"]) > 1e-4


def check_nogather(mesh: Mesh) -> float:
    net = make_net(mesh.seq, "nogather", "spatial")
    layout = net.encoder.layout
    image, _ = batch_of(2)
    logits = net(layout.cut(image, mesh.seq.index))
    return relative(logits, one_process(2, "plain")["logits"][place(net, 2)])


@pytest.mark.parametrize("world", WORLDS)
def test_nogather_differs_from_one_process_where_there_are_several_parts(
    world: int, ranks: Callable[..., list]
) -> None:
    """The control of the tests above: boxes without halos are seen."""
    for gap in ranks(world, check_nogather):
        assert gap < 1e-12 if world == 1 else gap > 1e-2


def check_moves(mesh: Mesh, split: str) -> dict[str, int]:
    """Features of two blocks, image and label come where they should; returns the bytes sent."""
    group, layout = mesh.seq, Layout.of(TILE, PATCH, mesh.seq.size, split)
    image, label = batch_of(2)
    tokens = [numbers(6 + i, 2, layout.num_tokens, width) for i, width in enumerate((3, 5))]
    mode = choose_mode("halo", group)
    mine = [x[:, layout.token_ids(group.index)] for x in tokens]
    got = mode.features(mine, layout)
    box = (..., *(slice(*side) for side in layout.boxed().box(group.index)))
    for grid, whole in zip(got, tokens):
        assert torch.equal(grid, whole.transpose(1, 2).unflatten(2, layout.grid)[box])
    voxels = (..., *(slice(a * PATCH, b * PATCH) for a, b in layout.boxed().box(group.index)))
    assert torch.equal(mode.voxels(layout.cut(image, group.index), layout), image[voxels])
    assert torch.equal(mode.voxels(layout.cut(label, group.index), layout), label[voxels])
    return {"remap": group.traffic["remap"], "voxels": group.traffic["voxels"]}


@pytest.mark.parametrize("world", WORLDS)
def test_halo_moves_only_tokens_whose_box_is_elsewhere(world: int, ranks: Callable[..., list]) -> None:
    assert all(sent == {"remap": 0, "voxels": 0} for sent in ranks(world, check_moves, "spatial"))
    layout = Layout.of(TILE, PATCH, world, "ordered")
    moving = int((layout.owner != layout.boxed().owner).sum())
    every = ranks(world, check_moves, "ordered")
    assert sum(sent["remap"] for sent in every) == moving * 2 * (3 + 5) * 8
    assert sum(sent["voxels"] for sent in every) == moving * 2 * PATCH**3 * (2 * 8 + 8)
    assert (moving > 0) == (world > 1)


def check_swap(mesh: Mesh) -> int:
    group, layout = mesh.seq, Layout.of(TILE, PATCH, mesh.seq.size, "ordered")
    each = 2
    whole = numbers(6, each * group.size, layout.num_tokens, 3)
    (grid,) = choose_mode("swap", group).features([whole[:, layout.token_ids(group.index)]], layout)
    mine = whole[group.index * each : (group.index + 1) * each]
    assert torch.equal(grid, mine.transpose(1, 2).unflatten(2, layout.grid))
    return group.traffic["remap"] - each * (group.size - 1) * layout.counts[group.index] * 3 * 8


@pytest.mark.parametrize("world", WORLDS)
def test_swap_sends_each_token_once(world: int, ranks: Callable[..., list]) -> None:
    assert ranks(world, check_swap) == [0] * world


@pytest.mark.parametrize("world", WORLDS)
def test_remaps_without_positions_count_the_rows_of_those_with(world: int) -> None:
    layout = Layout.of(TILE, PATCH, world, "ordered")
    for rank in range(world):
        pairs = [(halo._plan_to_boxes(layout, rank), halo._count_to_boxes(layout, rank))]
        pairs += [(swap._plan_to_samples(layout, 2 * world, rank), swap._count_to_samples(layout, 2 * world, rank))]
        for listed, counted in pairs:
            for name in ("num_source", "num_target", "num_sent", "num_received"):
                assert getattr(counted, name) == getattr(listed, name), (world, rank, name)
            assert counted.sent.is_meta and counted.sent.shape == listed.sent.shape
            assert counted.received.is_meta and counted.received.shape == listed.received.shape


def four() -> Group:
    return Group("seq", (0, 1, 2, 3), 1)


def test_auto_swaps_where_the_batch_divides_and_says_so() -> None:
    layout, mode = Layout.of(TILE, PATCH, 4), Auto(four())
    assert "takes swap: each of 4 ranks decodes 2 of" in mode.check(layout, 8) and mode.chosen == "swap"
    assert "takes halo: each of 4 ranks decodes one of 2 x 2 x 1 boxes" in mode.check(layout, 6)
    assert mode.chosen == "halo"
    assert mode.box_grid(layout, 4) is None and mode.box_grid(layout, 3) is not None
    assert mode.loss_groups(None, 4).num_sample_ranks == 4 and mode.loss_groups(None, 3).voxels is mode.group
    with pytest.raises(ValueError, match="batch"):
        mode.loss_groups()


@pytest.mark.parametrize(("batch", "advice"), [(6, "batch=4 or 8,"), (3, "batch=4,"), (9, "batch=8 or 12,")])
def test_swap_refuses_a_batch_that_does_not_divide(batch: int, advice: str) -> None:
    layout, mode = Layout.of(TILE, PATCH, 4), choose_mode("swap", four())
    with pytest.raises(ValueError, match=f"{advice} or mode='halo'"):
        mode.check(layout, batch)
    with pytest.raises(ValueError, match=advice):  # before any message
        mode.features([torch.zeros(batch, layout.counts[1], 3)], layout)


def test_halo_refuses_more_ranks_than_boxes_exist_for() -> None:
    layout = Layout.of(8, 4, 7, "ordered")
    with pytest.raises(ValueError, match="cannot be cut into 7 boxes"):
        choose_mode("halo", Group("seq", tuple(range(7)), 2)).check(layout)


def test_every_mode_says_what_it_does_and_unknown_ones_are_refused() -> None:
    layout = Layout.of(TILE, PATCH, 4)
    modes: list[Mode] = [choose_mode(name, four()) for name in MODES]
    assert [mode.check(layout, 4).split(":")[0] for mode in modes] == list(MODES)
    assert "to which the tokens are moved" in choose_mode("halo", four()).check(Layout.of(TILE, PATCH, 4, "ordered"))
    with pytest.raises(ValueError, match="mode='broadcast': choose one of gather, nogather, halo, swap, auto"):
        choose_mode("broadcast", four())


def check_memory(mesh: Mesh, mode: str) -> int:
    """Returns the bytes that the decoder keeps for backward, parameters excluded."""
    net = make_net(mesh.seq, mode, "spatial")
    layout = Layout.of((32, 16, 16), PATCH, mesh.seq.size)
    tokens = numbers(1, 2, layout.num_tokens, 12)[:, layout.token_ids(mesh.seq.index)].requires_grad_()
    kept: dict[int, int] = {}
    skip = {weight.untyped_storage().data_ptr() for weight in net.parameters()}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in skip:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        (grid,) = net.mode.features([tokens], layout)
        logits, _ = net.decoder([grid], None, net.mode.box_grid(layout, 2))
    assert logits.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("mode", ["halo", "swap"])
def test_a_rank_keeps_its_share_of_the_decoder(mode: str, ranks: Callable[..., list]) -> None:
    """Gather is the control: there every rank keeps everything."""
    (alone,) = ranks(1, check_memory, "gather")
    assert min(ranks(2, check_memory, "gather")) > 0.9 * alone
    for kept in ranks(2, check_memory, mode):
        assert kept < 0.6 * alone, (kept, alone)
