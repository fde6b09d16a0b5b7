"""What a whole network holds for backward falls with the ranks where the decoder is spread too: counted.

Tensors without data serve: that they hold what real ones do is shown by the planner's tests, and here by one case.
"""

from functools import cache

import pytest
import torch

from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.unetr import UnetrDecoder, skip_blocks
from seqpar.losses import DiceCE
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.mesh import Group, Mesh
from seqpar.planner.memory_counter import saved_bytes
from seqpar.vit.encoder import SeqParViT

Case = tuple[int, int, int, str, int]  # tile, patch, depth, mode, batch
CASES: list[Case] = [(96, 16, 4, "halo", 1), (96, 16, 4, "swap", 4), (96, 4, 1, "halo", 1), (48, 4, 1, "swap", 4)]
SMALL: list[Case] = [(32, 8, 1, "halo", 1), (32, 8, 1, "swap", 4)]


def count_saved(group: Group, case: Case, device: str = "meta") -> int:
    """Returns the bytes of distinct storages held after forward and loss, parameters excluded."""
    side, patch, depth, mode, batch = case
    tile = (side,) * 3
    with torch.device(device):
        encoder = SeqParViT(2, tile, patch, embed_dim=48, depth=depth, num_heads=4, group=group)
        decoder = UnetrDecoder(2, 48, 3, encoder.layout.patch, width=4)
        image, label = torch.randn(batch, 2, *tile), torch.zeros(batch, *tile, dtype=torch.long)
        tokens = encoder.layout.counts[group.index]
        part, truth = (encoder.layout.cut(t, group.index) for t in (image, label))
    assert part.shape[:2] == (batch, tokens)
    net = SegmentationNet(encoder, decoder, choose_mode(mode, group), skip_blocks(depth, encoder.layout.patch))
    return saved_bytes(net, lambda: DiceCE()(net(part), net.arrange(truth), net.mode.loss_groups(None, batch)))


@cache
def one_process(case: Case) -> int:
    return count_saved(Group("seq"), case)


@pytest.mark.parametrize("world", [2, 4])
def test_a_network_in_halo_or_swap_holds_its_share(world: int) -> None:
    for case in CASES:
        for rank in range(world):
            mine = count_saved(Group("seq", tuple(range(world)), rank), case)
            assert mine <= (1 / world + 0.10) * one_process(case), (case, rank, mine / one_process(case))


def on_ranks(mesh: Mesh) -> list[int]:
    return [count_saved(mesh.seq, case, "cpu") for case in SMALL]


def test_tensors_without_data_are_held_as_real_ones_are(ranks) -> None:
    for rank, sizes in enumerate(ranks(2, on_ranks)):
        for case, held in zip(SMALL, sizes):  # a kernel may save its random state, of some bytes
            assert held == pytest.approx(count_saved(Group("seq", (0, 1), rank), case), rel=1e-3)


def test_in_gather_every_rank_holds_the_whole_decoder() -> None:
    """The control: the share falls because the decoder is spread, not because little is counted."""
    case = (96, 16, 2, "gather", 1)
    assert count_saved(Group("seq", (0, 1)), case) > 0.7 * one_process(case)
