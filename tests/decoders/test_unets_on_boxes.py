"""U-Nets on boxes are the network on the whole image: outputs, input gradient, each gradient, running statistics."""

from collections.abc import Callable

import pytest
import torch

from seqpar.decoders.unets import Style, UNet, distmis
from seqpar.parallel.mesh import Group, Mesh
from seqpar.planner.memory_counter import saved_bytes
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.memory_format import is_channels_last
from tests.support import unets
from tests.support.marks import long_case
from tests.support.unets import Case

UNEVEN = {
    2: ((0, 8, 24), (0, 8), (0, 8)),
    3: ((0, 8, 12, 24), (0, 8), (0, 8)),
    4: ((0, 8, 16), (0, 4, 16), (0, 8)),
    8: ((0, 4, 16), (0, 8, 12), (0, 4, 8)),
}
OFF_THE_STRIDE = {
    2: ((0, 13, 24), (0, 8), (0, 8)),
    3: ((0, 7, 14, 20), (0, 8), (0, 8)),
    4: ((0, 7, 16), (0, 10, 16), (0, 8)),
    8: ((0, 5, 16), (0, 9, 16), (0, 7, 16)),
}
WIDE = {2: ((0, 32, 96), (0, 32), (0, 32)), 4: ((0, 32, 64), (0, 32, 64), (0, 32))}
WITHOUT_LAST = {2: ((0, 8, 24), (0, 8), (0, 16)), 4: ((0, 8, 24), (0, 8, 16), (0, 16))}
OTHERS = ("distmis", "distmis groups", "distmis text", "lamp", "se-lamp")
OF_THREE_STAGES = [name for name in unets.MAKERS if name not in OTHERS]
CASES = {  # of each number of ranks
    2: [
        *(Case(name, UNEVEN[2]) for name in OF_THREE_STAGES),
        Case("distmis text", WIDE[2]),
        Case("se-lamp", WIDE[2], 2),
    ],
    3: [Case(name, OFF_THE_STRIDE[3]) for name in ("anisotropic", "bottleneck", "batch norm")],
    4: [
        *(Case(name, OFF_THE_STRIDE[4]) for name in OF_THREE_STAGES),
        *(Case(name, WITHOUT_LAST[4]) for name in ("distmis", "distmis groups")),
    ],
    8: [Case("deep supervision", UNEVEN[8]), Case("residual", OFF_THE_STRIDE[8]), Case("batch norm", UNEVEN[8])],
}


@pytest.mark.parametrize("world", [long_case(world) if world == 4 else world for world in CASES])
def test_every_network_on_boxes_is_the_one_on_the_whole(world: int, ranks: Callable[..., list]) -> None:
    cases = [(case, unets.whole(case)) for case in CASES[world]]
    for gaps_of in ranks(world, unets.check_all, cases, timeout=240):
        for (case, _), gaps in zip(cases, gaps_of):
            assert max(gaps.values()) < 1e-12, (case, max(gaps, key=gaps.__getitem__), gaps)


def test_batch_norm_runs_over_data_too(ranks: Callable[..., list]) -> None:
    """A tile for each of two sequence groups of two ranks, against two tiles in one process."""
    names = {"batch norm": UNEVEN, "plain": UNEVEN, "lamp": WIDE, "distmis": WITHOUT_LAST}
    cases = [(case, unets.whole(case)) for case in (Case(name, edges[2], 2) for name, edges in names.items())]
    for gaps_of in ranks(4, unets.check_all, cases, seqpar=2, timeout=120):
        for (case, _), gaps in zip(cases, gaps_of):
            assert max(gaps.values()) < 1e-12, (case, gaps)
            assert (case.name == "plain") != any("running" in name for name in gaps)


def test_boxes_that_know_nothing_of_each_other_are_another_function(ranks: Callable[..., list]) -> None:
    assert min(ranks(2, unets.alone_on_boxes, Case("plain", UNEVEN[2]))) > 1e-2


def whole_samples(mesh: Mesh) -> list[float]:
    """Returns the gaps of a rank that holds one whole sample of two, with batch norm over both."""
    one, many = unets.make("batch norm"), unets.make("batch norm")
    for module in many.modules():
        if hasattr(module, "peers"):
            module.peers = mesh.seq
    image = unets.numbers(1, 2, unets.CHANNELS, 16, 8, 8)
    mine = slice(mesh.seq.index, mesh.seq.index + 1)
    gaps_of = [unets.relative(many(image[mine]), one(image)[mine])]
    return gaps_of + [unets.relative(a.double(), b.double()) for a, b in zip(many.buffers(), one.buffers())]


def test_batch_norm_runs_over_ranks_that_hold_whole_samples(ranks: Callable[..., list]) -> None:
    for gaps_of in ranks(2, whole_samples):
        assert max(gaps_of) < 1e-12 and len(gaps_of) > 3


def test_float32_computes_channels_last_from_one_channel_too() -> None:
    for channels in (1, 2):
        net = UNet(unets.Architecture.of(channels, 3, (4, 8)))
        assert is_channels_last(net(torch.randn(1, channels, 8, 8, 8)))


@pytest.mark.parametrize("norm", ["instance", "group", "none"])
def test_half_of_a_volume_holds_half_whatever_follows_a_convolution(norm: str) -> None:
    """What a norm activates is held by the next convolution alone, what is activated without one also by itself."""
    with torch.device("meta"):
        net = UNet(unets.Architecture.of(1, 2, (8, 8, 16), encoder=3, style=Style(norm)))
        half, whole = torch.empty(1, 1, 32, 32, 32), torch.empty(1, 1, 64, 32, 32)
    grid = BoxGrid(((0, 32, 64), (0, 32), (0, 32)), Group("seq", (0, 1), 0))
    mine = saved_bytes(net, lambda: net.on_boxes(half, grid)[0][0].sum())
    assert mine <= 0.6 * saved_bytes(net, lambda: net(whole).sum())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cut_last_axis_is_refused_by_all_before_any_message(rank: int) -> None:
    """The group has no process group: a message would fail otherwise."""
    net = distmis(1, 1, 16, features=2)
    grid = BoxGrid(((0, 8), (0, 8), (0, 8, 16)), Group("seq", (0, 1), rank))
    with pytest.raises(ValueError, match="need it whole"):
        net.on_boxes(torch.zeros(1, 1, *grid.sides), grid)
