"""What a whole network holds for backward falls with the ranks where the decoder is spread too: counted."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from seqpar.decoders.modes.choose import choose_mode
from seqpar.decoders.unetr import UnetrDecoder, taps
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.planning.saved_bytes import saved_bytes
from seqpar.losses import DiceCE
from seqpar.mesh import Mesh
from seqpar.vit.encoder import SeqParViT
from tests.support.ranks import run_ranks

Case = tuple[int, int, int, str, int]  # tile, patch, depth, mode, batch
CASES: list[Case] = [(96, 16, 4, "halo", 1), (96, 16, 4, "swap", 4), (96, 4, 1, "halo", 1), (48, 4, 1, "swap", 4)]


def count_saved(mesh: Mesh, side: int, patch: int, depth: int, mode: str, batch: int) -> int:
    """Returns the bytes of distinct storages held after forward and loss, parameters excluded."""
    tile = (side,) * 3
    torch.manual_seed(0)
    encoder = SeqParViT(2, tile, patch, embed_dim=48, depth=depth, num_heads=4, group=mesh.seq)
    decoder = UnetrDecoder(2, 48, 3, encoder.layout.patch, width=4)
    net = SegmentationNet(encoder, decoder, choose_mode(mode, mesh.seq), taps(depth, encoder.layout.patch))
    image, label = torch.randn(batch, 2, *tile), torch.randint(0, 3, (batch, *tile))
    part, truth = (encoder.layout.cut(t, mesh.seq.index) for t in (image, label))
    return saved_bytes(net, lambda: DiceCE()(net(part), net.arrange(truth), net.mode.loss_groups(None, batch)))


def all_cases(mesh: Mesh, cases: list[Case]) -> list[int]:
    return [count_saved(mesh, *case) for case in cases]


@cache
def one_process() -> list[int]:
    (one,) = run_ranks(1, all_cases, CASES, timeout=240)
    return one


@pytest.mark.parametrize("world", [2, 4])
def test_a_network_in_halo_or_swap_holds_its_share(world: int, ranks: Callable[..., list]) -> None:
    for sizes in ranks(world, all_cases, CASES, timeout=240):
        for case, mine, whole in zip(CASES, sizes, one_process()):
            assert mine <= (1 / world + 0.10) * whole, (case, mine / whole)


def test_in_gather_every_rank_holds_the_whole_decoder(ranks: Callable[..., list]) -> None:
    """The control: the share falls because the decoder is spread, not because little is counted."""
    case = (96, 16, 2, "gather", 1)
    (one,) = ranks(1, count_saved, *case)
    assert min(ranks(2, count_saved, *case)) > 0.7 * one
