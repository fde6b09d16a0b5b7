"""Weights under Primus' names give the reference output here, and come back as they were when exported."""

from pathlib import Path

import pytest
import torch

from seqpar.launch.weights.monai import load_monai
from seqpar.launch.weights.primus import export_primus, load_primus
from tests.support import references
from tests.support.foreign_weights import HEADS, TILE, image, out, tiny_unetr

PRIMUS = {"c": 2, "k": 3, "patch": 8, "grid": (2, 1, 3), "e": 72, "depth": 2, "widths": [32, 16]}
PRIMUS_TILE = (16, 8, 24)


def test_primus_weights_give_the_reference_output_and_come_back(tmp_path: Path) -> None:
    state = references.draw(references.primus_shapes(**PRIMUS))  # type: ignore[arg-type]
    x = image(*PRIMUS_TILE)
    net = load_primus(state, PRIMUS_TILE, num_heads=4)
    assert (out(net, x) - references.primus(state, x, 4)).abs().max() < 1e-12
    torch.save(state, tmp_path / "primus.pt")
    assert torch.equal(out(load_primus(str(tmp_path / "primus.pt"), PRIMUS_TILE, num_heads=4), x), out(net, x))
    back = export_primus(net)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items() if name != "mask_token")
    with pytest.raises(ValueError, match="num_heads="):
        load_primus(state, PRIMUS_TILE)
    with pytest.raises(ValueError, match="register_tokens"):
        load_primus(state | {"register_tokens": torch.zeros(1, 2, 72)}, PRIMUS_TILE, num_heads=4)
    with pytest.raises(ValueError, match="UnetrDecoder|PrimusDecoder"):
        export_primus(load_monai(tiny_unetr(), TILE, HEADS))


@pytest.mark.parametrize("lacking", ["eva.pos_embed", "gamma_", "attn.norm", "_proj.bias"])
def test_a_primus_without_an_option_loads_and_comes_back(lacking: str) -> None:
    whole = references.draw(references.primus_shapes(**PRIMUS))  # type: ignore[arg-type]
    neutral = {"eva.pos_embed": 0.0, "gamma_": 1.0, "_proj.bias": 0.0}
    state = {name: tensor for name, tensor in whole.items() if lacking not in name}
    net = load_primus(state, PRIMUS_TILE, num_heads=4)
    assert export_primus(net).keys() == state.keys()
    if lacking in neutral:
        filled = {name: t if lacking not in name else torch.full_like(t, neutral[lacking]) for name, t in whole.items()}
        assert (out(net, image(*PRIMUS_TILE)) - references.primus(filled, image(*PRIMUS_TILE), 4)).abs().max() < 1e-12
