"""Decoders of torch's own modules: right where every rank decodes whole volumes, refused on boxes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.losses import DiceCE
from seqpar.models.build import build_on_meta
from seqpar.models.pipelined import PartOfBatch
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.mesh import Group, Mesh
from seqpar.pipeline.cells import IMAGE
from seqpar.settings.config import Config
from seqpar.vit.encoder import SeqParViT
from tests.support.ranks import relative, run_ranks, summed

TILE, PATCH, BATCH = (16, 8, 8), 4, 2


class TorchDecoder(nn.Module):
    """Convolutions of torch; ``ends`` says what it returns with its logits."""

    num_features, uses_image = 1, True

    def __init__(self, ends: str) -> None:
        super().__init__()
        self.ends, self.up = ends, nn.ConvTranspose3d(12, 4, PATCH, stride=PATCH)
        self.join = nn.Conv3d(5, 3, 3, padding=1)

    def forward(self, features: list[Tensor], image: Tensor, grid: Any = None) -> Any:
        logits = self.join(torch.cat([self.up(features[0]), image], 1))
        return {"alone": logits, "with nothing": (logits, None), "with its own": (logits, grid), "more": (logits, 1)}[
            self.ends
        ]


def net_of(group: Group, mode: str, ends: str) -> SegmentationNet:
    torch.manual_seed(3)
    encoder = SeqParViT(1, TILE, PATCH, embed_dim=12, depth=1, num_heads=2, group=group)
    return SegmentationNet(encoder, TorchDecoder(ends), choose_mode(mode, group)).double()


def gradients(net: SegmentationNet, mesh: Mesh | None) -> list[Tensor]:
    """Returns the gradients of the loss of a fixed batch, averaged over the ranks."""
    torch.manual_seed(4)
    image, label = torch.randn(BATCH, 1, *TILE).double(), torch.randint(3, (BATCH, *TILE))
    if mesh is None:
        return list(torch.autograd.grad(DiceCE()(net(image), label), list(net.parameters())))
    part, target = (net.layout.cut(x, mesh.seq.index) for x in (image, label))
    loss = DiceCE()(net(part), net.arrange(target), net.mode.loss_groups(mesh.data, BATCH))
    grads = torch.autograd.grad(loss, list(net.parameters()))
    return [total / mesh.world.size for total in summed(grads, mesh.world)]


def logits_of_cells(net: SegmentationNet, part: Tensor) -> Tensor:
    """Returns the logits of a part by the cells between which a pipe may cut."""
    staged, micro = net.staged(), PartOfBatch(part, net.layout)
    values = {IMAGE: staged.image(micro)}
    for number, taken in enumerate(staged.takes):
        values[number] = staged.run_cell(number, [values[value] for value in taken], micro)
    return values[staged.outputs[0]][0]


def cells_on_ranks(mesh: Mesh) -> dict[str, bool | str]:
    """Returns, by mode, whether the cells give the logits of the whole network, or what is refused."""
    torch.manual_seed(4)
    image, results = torch.randn(BATCH, 1, *TILE).double(), dict[str, bool | str]()
    for mode in ("gather", "swap", "halo"):
        net = net_of(mesh.seq, mode, "alone")
        part = net.layout.cut(image, mesh.seq.index)
        try:
            results[mode] = torch.equal(logits_of_cells(net, part), net(part))
        except ValueError as error:
            results[mode] = str(error)
    return results


def test_as_cells_of_a_pipe_they_are_refused_in_halo_too() -> None:
    for results in run_ranks(2, cells_on_ranks):
        assert results["gather"] is results["swap"] is True
        assert "mode='halo': each of 2 ranks decodes a box, and TorchDecoder returned no box grid" in str(
            results["halo"]
        )


def on_ranks(mesh: Mesh) -> dict[tuple[str, str], float | str]:
    """Returns, by mode and by what the decoder returns, the gap to one process, or what is refused."""
    expected = gradients(net_of(Group("seq"), "gather", "alone"), None)
    results: dict[tuple[str, str], float | str] = {}
    for mode in ("gather", "swap", "halo"):
        for ends in ("alone", "with nothing", "with its own", "more"):
            try:
                grads = gradients(net_of(mesh.seq, mode, ends), mesh)
                results[mode, ends] = max(map(relative, grads, expected))
            except ValueError as error:
                results[mode, ends] = str(error)
    return results


def test_on_several_ranks_they_are_exact_in_gather_and_swap_and_refused_in_halo() -> None:
    first, second = run_ranks(2, on_ranks)
    for (mode, ends), result in first.items():
        if mode != "halo" and ends != "more":
            assert isinstance(result, float) and max(result, second[mode, ends]) < 1e-12, (mode, ends)
            continue
        assert isinstance(result, str) and result == second[mode, ends]
        if mode != "halo":
            assert "TorchDecoder returned int next to its logits, but None is needed" in result
        else:
            beside = "no box grid" if ends in ("alone", "with nothing") else "another box grid"
            assert f"mode='halo': each of 2 ranks decodes a box, and TorchDecoder returned {beside}" in result
            assert "It works with mode='gather' or mode='swap'; for halo build it of seqpar.spatial" in result


@pytest.mark.parametrize("mode", ["gather", "halo"])
def test_in_one_process_they_work_in_every_mode(mode: str) -> None:
    expected = gradients(net_of(Group("seq"), "gather", "with nothing"), None)
    assert max(map(relative, gradients(net_of(Group("seq"), mode, "alone"), None), expected)) == 0.0


def test_under_deep_supervision_a_tile_that_is_no_multiple_is_refused_in_training_alone() -> None:
    config = Config(
        network="nnunet-plain",
        stages="133:111 333:222 333:222 333:222",
        deep_supervision=True,
        features=2,
        tile=(16, 16, 16),
    )
    net = build_on_meta(config, Group("seq"))
    image = torch.zeros(1, 1, 16, 15, 16, device="meta")
    assert net.eval()(image).shape == (1, 2, 16, 15, 16)
    with pytest.raises(ValueError, match="a tile of 16 x 15 x 16 came in training .* must be multiples of 8 x 8 x 8"):
        net.train()(image)
