"""A patch of three numbers: every decoder comes back to voxels as its reference does, on any number of ranks."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqpar.decoders.decoder import strides
from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.plain import PlainDecoder
from seqpar.decoders.primus import PrimusDecoder
from seqpar.decoders.unetr import UnetrDecoder, skip_blocks
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.mesh import Group
from seqpar.vit.encoder import SeqParViT
from seqpar.weights.monai_weights import export_monai, monai_names
from seqpar.weights.primus_weights import export_primus, load_primus
from tests.support import nets, references
from tests.support.ranks import relative

PATCH, TILE = (4, 2, 1), (16, 6, 4)  # 4 x 3 x 4 tokens


def test_a_short_side_is_doubled_where_its_voxels_are_still_short() -> None:
    assert strides((8, 8, 8)) == ((2, 2, 2),) * 3 == strides((8, 8, 8), short_first=False)
    assert strides((8, 8, 2)) == ((2, 2, 2), (2, 2, 1), (2, 2, 1))
    assert strides((8, 8, 2), short_first=False) == ((2, 2, 1), (2, 2, 1), (2, 2, 2))
    assert strides((1, 4, 2)) == ((1, 2, 2), (1, 2, 1))
    for patch in [(4, 4), (4, 4, 3), (1, 1, 1), (0, 2, 2)]:
        with pytest.raises(ValueError, match="patch=2, 4, 8 or 16, or three such numbers"):
            strides(patch)


def plain() -> tuple[nn.Module, tuple[int, ...]]:
    return PlainDecoder(nets.EMBED, nets.CLASSES, PATCH, width=4), ()


def unetr() -> tuple[nn.Module, tuple[int, ...]]:
    return UnetrDecoder(nets.CHANNELS, nets.EMBED, nets.CLASSES, PATCH, 2), skip_blocks(nets.DEPTH, PATCH)


def primus() -> tuple[nn.Module, tuple[int, ...]]:
    return PrimusDecoder(nets.EMBED, nets.CLASSES, PATCH), ()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_exact_mode_and_split_equals_one_process(ranks, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nets, "PATCH", PATCH)
    monkeypatch.setattr(nets, "TILE", TILE)
    for make in (plain, unetr, primus):
        for case, gaps in nets.differences(ranks, world, make, nets.EXACT if world < 4 else nets.FEW).items():
            assert max(gaps["logits"], gaps["loss"], gaps["gradients"]) < 1e-12, (make, case, gaps)


def text_of_plain(tokens: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Returns the logits of a grid of tokens as the plain decoder's text says: upsampled, then classified."""
    x = tokens
    for stage, factors in enumerate([(2.0, 2.0, 1.0), (2.0, 1.0, 1.0)]):
        x = F.conv3d(x, weights[f"convs.{stage}.weight"], padding=1)
        x = F.instance_norm(x, weight=weights[f"norms.{stage}.weight"], bias=weights[f"norms.{stage}.bias"])
        x = F.interpolate(F.leaky_relu(x, 0.01), scale_factor=factors, mode="trilinear")
    return F.conv3d(x, weights["classes.weight"], weights["classes.bias"])


def test_the_plain_decoder_is_its_text() -> None:
    torch.manual_seed(0)
    decoder = plain()[0].double()
    tokens = torch.randn(2, nets.EMBED, 4, 3, 4, dtype=torch.float64)
    logits, _ = decoder([tokens], None)
    assert logits.shape[2:] == TILE
    assert relative(logits, text_of_plain(tokens, decoder.state_dict())) < 1e-12


@pytest.mark.parametrize("patch", [(8, 8, 4), (2, 8, 1)])
def test_unetr_is_the_reference_with_fewer_doublings_of_a_short_side(patch: tuple[int, int, int]) -> None:
    grid, depth = (2, 1, 3), 3
    tile = tuple(n * p for n, p in zip(grid, patch))
    state = references.draw(references.unetr_shapes(2, 3, patch, grid, 3, 24, 40, depth))
    encoder, levels = SeqParViT(2, tile, patch, 24, depth, 4, 40 / 24, False), len(strides(patch))
    decoder = UnetrDecoder(2, 24, 3, patch, 3)
    net = (
        SegmentationNet(encoder, decoder, choose_mode("auto", Group("seq")), skip_blocks(depth, patch)).double().eval()
    )
    net.load_state_dict({ours: state[theirs] for theirs, ours in monai_names(depth, False, levels, True).items()})
    x = torch.randn(2, 2, *tile, dtype=torch.float64)
    with torch.no_grad():
        assert relative(net(x), references.unetr(state, x, 4, skip_blocks(depth, patch))) < 1e-12
    with pytest.raises(ValueError, match=rf"MONAI has no patch \({patch[0]}, {patch[1]}, {patch[2]}\)"):
        export_monai(net)
    assert set(export_monai(encoder)) >= {"patch_embedding.patch_embeddings.weight"}, "its ViT takes such patches"


def test_primus_weights_load_and_come_back() -> None:
    """Primus doubles a short side in its last stages."""
    patch, grid = (8, 8, 4), (2, 1, 3)
    tile = tuple(n * p for n, p in zip(grid, patch))
    state = references.draw(references.primus_shapes(2, 3, patch, grid, 72, 2, [32, 16]))
    assert state["up_projection.decode.0.0.weight"].shape[2:] == (2, 2, 1)
    net = load_primus(state, tile, num_heads=4).eval()
    x = torch.randn(1, 2, *tile, dtype=torch.float64)
    with torch.no_grad():
        assert relative(net(x), references.primus(state, x, 4)) < 1e-12
    back = export_primus(net)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items() if name != "mask_token")
    assert math.prod(net.encoder.layout.grid) == math.prod(grid)
