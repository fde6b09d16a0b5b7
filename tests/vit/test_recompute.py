"""What is computed again in backward: the same gradients by every strategy, and held bytes that are counted."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from seqpar import DropoutKey, Layout, SeqParViT
from seqpar.parallel.mesh import Group, Mesh
from seqpar.planner.memory_counter import saved_bytes
from tests.support.new_tensors import NewTensors
from tests.support.ranks import relative

WAYS = [("none", 1), ("attention", 1), ("full", 1), ("none", 3), ("attention", 4), ("full", 2)]
TILE, BATCH = (5, 4, 4), 2


def ways(world: int) -> list[tuple[str, int]]:
    """Returns what is computed again; on four ranks blocks, or attention with its MLP in chunks."""
    return WAYS if world < 4 else [WAYS[at] for at in (0, 2, 4)]


def strategies(world: int) -> list[str]:
    return ["gather-kv", "gather-x", "ulysses"] + (["hybrid:2"] if world == 4 else [])


def vit(group: Group, recompute: str, chunks: int, attention: str = "gather-kv", **changes: object) -> SeqParViT:
    torch.manual_seed(0)
    sizes = dict(embed_dim=24, depth=2, num_heads=4, dropout=0.3, drop_path=0.3, mlp="swiglu", split="ordered")
    more = dict(recompute=recompute, mlp_chunks=chunks, attention=attention, group=group)
    return SeqParViT(1, TILE, 1, **{**sizes, **more, **changes}).double()  # type: ignore[arg-type]


def gaps(mesh: Mesh) -> dict[tuple, float]:
    """Returns, for each way, how far outputs and gradients lie from those with everything held."""
    toss = torch.Generator().manual_seed(3)
    image = torch.randn(BATCH, 1, *TILE, generator=toss, dtype=torch.float64)
    gaps_of = {}
    for name in strategies(mesh.seq.size):
        want: list[Tensor] = []
        for recompute, chunks in ways(mesh.seq.size):
            net = vit(mesh.seq, recompute, chunks, name)
            part = net.layout.cut(image, mesh.seq.index).requires_grad_()
            out = net(part, key=DropoutKey(1, 2, (0, 1)))
            (out * torch.randn(out.shape, generator=toss.manual_seed(4), dtype=out.dtype)).sum().backward()
            got = [out, part.grad, *(p.grad for p in net.parameters())]
            want = want or got  # type: ignore[assignment]
            gaps_of[name, recompute, chunks] = max(relative(a, b) for a, b in zip(got, want))  # type: ignore[arg-type]
    return gaps_of


@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_is_computed_again_gives_the_same_gradients_by_every_strategy(
    world: int, ranks: Callable[..., list]
) -> None:
    for gaps_of in ranks(world, gaps):
        assert len(gaps_of) == len(ways(world)) * len(strategies(world))
        assert max(gaps_of.values()) < 1e-12, gaps_of


@pytest.mark.parametrize(("recompute", "chunks"), WAYS)
def test_held_bytes_are_the_sum_of_what_the_blocks_are_said_to_hold(recompute: str, chunks: int) -> None:
    """Per block and token, in widths: 6 for attention, 2 + 2 x ratio for the MLP, 1 where it is computed again."""
    depth, width, tokens, ratio = 3, 48, 512, 4.0
    torch.manual_seed(0)
    net = SeqParViT(1, 8, 1, width, depth, 4, ratio, recompute=recompute, mlp_chunks=chunks, positions="none")
    saved = saved_bytes(net, lambda: net(torch.randn(1, 1, 8, 8, 8)).sum())
    image_and_norm = 4 * tokens * (1 + width)
    attention, mlp = 1 if recompute == "attention" else 6, 1 if chunks > 1 else 2 + 2 * ratio
    each = 1 if recompute == "full" else attention + mlp
    said = 4 * tokens * width * depth * each + image_and_norm
    assert said <= saved <= 1.04 * said  # beside it statistics of norms and sums of softmax


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_temporary_is_larger_than_the_tokens_times_the_ratio_over_the_chunks(mlp: str, recompute: str) -> None:
    width, ratio, tokens = 24, 8, 125
    net = SeqParViT(1, 5, 1, width, 1, 4, ratio, mlp=mlp, dropout=0.1, recompute=recompute)
    block, x = net.blocks[0], torch.randn(2, tokens, width)
    weights = [p.numel() for p in net.parameters()]
    largest = {}
    for chunks in (1, 2, 5):
        block.mlp_chunks = chunks
        with NewTensors() as made:
            leaf = x.clone().requires_grad_()
            block(leaf, (tokens,), torch.arange(tokens), None, DropoutKey(0, 0, (0, 1)).at(0)).sum().backward()
        largest[chunks] = most = max(size for size in made.sizes if size not in weights)
        run = -(-tokens // chunks)
        assert most <= max(2 * run * width * ratio, 3 * 2 * tokens * width), chunks
    assert largest[1] == 2 * tokens * width * ratio and largest[5] < largest[2] < largest[1], largest


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="recompute='some': choose none, attention, full"):
        SeqParViT(1, 8, 4, embed_dim=24, depth=1, num_heads=3, recompute="some")
    with pytest.raises(ValueError, match="mlp_chunks=5: a rank holds 4 tokens; choose 1 to 4"):
        SeqParViT(1, 8, 4, embed_dim=24, depth=1, num_heads=3, mlp_chunks=5, group=Group("seq", (0, 1)))


def test_an_image_of_fewer_tokens_than_chunks_passes() -> None:
    net, whole = vit(Group("seq"), "none", 4).eval(), vit(Group("seq"), "none", 1).eval()
    image = torch.randn(1, 1, 3, 1, 1, dtype=torch.float64)
    small = Layout.of((3, 1, 1), 1)
    assert relative(net(small.cut(image, 0), layout=small), whole(image)) < 1e-12
