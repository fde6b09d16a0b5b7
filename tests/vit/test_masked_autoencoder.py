"""A masked autoencoder on several ranks is the one of one process, and that one is a plain one."""

import itertools
from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar import DropoutKey, SeqParViT
from seqpar.losses import LossGroups, MaskedError
from seqpar.parallel.mesh import Group, Mesh
from seqpar.planner.memory_counter import Saved
from seqpar.vit.masked_autoencoder import MaskedDecoder, decode_masked, encode_visible
from seqpar.vit.masking import make_visible, visible_tokens
from tests.support.marks import long_case
from tests.support.ranks import relative, run_ranks, summed

TILE, PATCH, EMBED, WIDTH = (8, 12, 16), 4, 24, 12  # 24 tokens, of which 10 are visible
RATIO, KEY = 0.6, DropoutKey(1, 2, (0, 3))


class Case(NamedTuple):
    attention: str
    positions: str
    split: str
    batch: int
    draws: bool = False  # dropout, with all that is computed again
    normalised: bool = False


PLACES = (("spatial", 2), ("ordered", 1), ("spatial", 1), ("ordered", 2))
CASES = [
    Case(attention, positions, *place)
    for attention, places in (
        ("gather-kv", PLACES),
        *((name, PLACES[:2]) for name in ("gather-x", "ulysses", "hybrid:2")),
    )
    for positions, place in itertools.product(("rope", "learned"), places)
]
CASES += [Case("gather-kv", "learned+rope", "spatial", 2, True), Case("gather-x", "sincos", "ordered", 2, True, True)]


class Autoencoder(nn.Module):
    def __init__(self, encoder: SeqParViT, vit: SeqParViT) -> None:
        super().__init__()
        self.encoder, self.rebuilder = encoder, MaskedDecoder(encoder.embed_dim, 2, vit)

    def forward(self, part: Tensor, key: DropoutKey) -> tuple[Tensor, Tensor]:
        return decode_masked(self.encoder, self.rebuilder, part, self.encoder.layout, key, RATIO)


def autoencoder(case: Case, group: Group) -> Autoencoder:
    torch.manual_seed(0)
    options = dict(positions=case.positions, attention=case.attention, split=case.split, group=group)
    more = dict(dropout=0.2, drop_path=0.2, recompute="full", mlp_chunks=2) if case.draws else {}
    encoder = SeqParViT(2, TILE, PATCH, EMBED, 2, 2, layer_scale=0.5, mlp="swiglu", **options, **more)  # type: ignore
    net = Autoencoder(encoder, SeqParViT(1, TILE, PATCH, WIDTH, 1, 2, **options)).double()  # type: ignore[arg-type]
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():  # so that no gradient is too small to compare
        for p in net.parameters():
            p += 0.1 * torch.randn(p.shape, generator=dice, dtype=p.dtype)
    return net


def whole_image(case: Case) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    return torch.randn(case.batch, 2, *TILE, generator=dice, dtype=torch.float64)


class Outcome(NamedTuple):
    """A rank's patches by their numbers, the loss, gradients (at its part, of parameters averaged), bytes it sent."""

    rebuilt: Tensor
    numbers: Tensor
    loss: Tensor
    at_part: Tensor
    grads: dict[str, Tensor]
    sent: int
    local_loss: Tensor


def run(case: Case, group: Group) -> Outcome:
    net = autoencoder(case, group)
    layout, key = net.encoder.layout, DropoutKey(KEY.seed, KEY.step, KEY.samples[: case.batch])
    part, before = layout.cut(whole_image(case), group.index).requires_grad_(), group.traffic["visible"]
    rebuilt, hidden = net(part, key)
    loss_fn = MaskedError(case.normalised)
    loss = loss_fn((rebuilt, hidden), part.detach(), LossGroups(voxels=group))
    loss.backward()
    sent, count = group.traffic["visible"] - before, layout.counts[group.index]
    numbers = hidden // count * layout.num_tokens + layout.token_ids(group.index)[hidden % count]
    grads = summed([p.grad for p in net.parameters()], group)  # type: ignore[misc]
    averaged = {name: grad / group.size for (name, _), grad in zip(net.named_parameters(), grads)}
    local = loss_fn((rebuilt.detach(), hidden), part.detach())
    return Outcome(rebuilt.detach(), numbers, loss.detach(), part.grad / group.size, averaged, sent, local)  # type: ignore


@cache
def alone(case: Case) -> Outcome:
    return run(case._replace(attention="gather-kv", split="spatial"), Group("seq"))


def of_world(world: int) -> list[Case]:
    return [case for case in CASES if not case.attention.startswith("hybrid") or world == 4]


def run_all(mesh: Mesh) -> list[Outcome]:
    return [run(case, mesh.seq) for case in of_world(mesh.seq.size)]


@cache
def outcomes_of(world: int) -> list[list[Outcome]]:
    return run_ranks(world, run_all)


@pytest.mark.parametrize("world", [1, 2, 3, long_case(4)])
def test_output_loss_and_every_gradient_are_those_of_one_process(world: int) -> None:
    every = outcomes_of(world)
    for at, case in enumerate(of_world(world)):
        want, ranks = alone(case), [outcomes[at] for outcomes in every]
        order = want.numbers.argsort()
        whole, numbers = want.rebuilt[order], torch.cat([got.numbers for got in ranks])
        assert torch.equal(numbers.sort().values, want.numbers[order]), "each hidden patch is rebuilt once"
        rebuilt = torch.cat([got.rebuilt for got in ranks])[numbers.argsort()]
        gaps = {"output": relative(rebuilt, whole)}
        layout = autoencoder(case, Group("seq", tuple(range(world)), 0)).encoder.layout
        gaps["input"] = relative(layout.join([got.at_part for got in ranks]), _joined(want.at_part))
        for got in ranks:
            gaps["loss"] = max(gaps.get("loss", 0), relative(got.loss, want.loss))
            gaps |= {n: max(gaps.get(n, 0), relative(got.grads[n], want.grads[n])) for n in want.grads}
        assert min(float(grad.abs().max()) for grad in want.grads.values()) > 1e-9, "a gradient that compares nothing"
        assert max(gaps.values()) <= 1e-12, (case, gaps)


def _joined(part: Tensor) -> Tensor:
    """Returns the whole of what a group of one holds."""
    net = autoencoder(CASES[0], Group("seq"))
    return net.encoder.layout.join([part])


def test_a_mean_over_one_ranks_own_voxels_is_another_loss() -> None:
    case = CASES[0]
    outcomes = [results[0] for results in outcomes_of(2)]
    mean = torch.stack([got.local_loss for got in outcomes]).mean()
    assert len(outcomes[0].numbers) != len(outcomes[1].numbers)
    assert relative(mean, alone(case).loss) > 1e-6


def test_moving_visible_tokens_sends_no_more_than_those_that_are_too_many() -> None:
    for outcome, rank in zip(outcomes_of(3), range(3)):
        case = Case("gather-kv", "rope", "spatial", 2)
        net = autoencoder(case, Group("seq", (0, 1, 2), rank))
        own, quota = net.encoder.layout.token_ids(rank), (4, 3, 3)[rank]
        counts = [int(torch.isin(row, own).sum()) for row in visible_tokens(KEY, 24, 10)]
        moved = sum(abs(count - quota) for count in counts)  # out, or in; forth and back, forward and backward
        assert outcome[CASES.index(case)].sent == 2 * moved * EMBED * 8


def test_a_hidden_voxel_reaches_no_encoded_token_and_costs_the_encoder_nothing() -> None:
    case = Case("gather-kv", "rope", "spatial", 2)
    net = autoencoder(case, Group("seq"))
    part = net.encoder.layout.cut(whole_image(case), 0).requires_grad_()
    visible = make_visible(KEY, net.encoder.layout, 0, RATIO)
    with Saved(net, [part]) as few:
        rows = encode_visible(net.encoder, part, visible, net.encoder.layout)
    with Saved(net, [part]) as all_of_them:
        net.encoder(part)
    (gradient,) = torch.autograd.grad(rows.square().sum(), part)
    rows_of_part = gradient.flatten(0, 1).abs().amax((1, 2, 3, 4))
    assert not rows_of_part[visible.hidden].any() and bool((rows_of_part[visible.shown] > 0).all())
    assert few.total < 0.5 * all_of_them.total  # 10 of 24 tokens, and the patches that were taken out


def test_on_one_process_it_is_a_plain_masked_autoencoder() -> None:
    case = Case("gather-kv", "learned", "spatial", 2)
    torch.manual_seed(0)
    net = Autoencoder(SeqParViT(2, TILE, PATCH, EMBED, 2, 2), SeqParViT(1, TILE, PATCH, WIDTH, 1, 2)).double()
    image = whole_image(case)
    part = net.encoder.layout.cut(image, 0)
    for normalised in (False, True):
        got = MaskedError(normalised)(net(part, KEY), part)
        want = plain_loss(dict(net.state_dict()), image, visible_tokens(KEY, 24, 10), normalised)
        assert relative(got, want) < 1e-12


def plain_loss(weights: dict[str, Tensor], image: Tensor, visible: Tensor, normalised: bool) -> Tensor:
    """Returns the loss of a masked autoencoder of torch's own functions, one sample after the other."""
    w, d, h = (side // PATCH for side in TILE)
    cells = image.reshape(len(image), 2, w, PATCH, d, PATCH, h, PATCH).permute(0, 2, 4, 6, 1, 3, 5, 7)
    cells = cells.reshape(len(image), w * d * h, -1)  # b n (c p p p)
    errors = list[Tensor]()
    for sample, ids in zip(cells, visible):
        kernel = weights["encoder.patch_embed.proj.weight"].flatten(1)
        tokens = sample @ kernel.T + weights["encoder.patch_embed.proj.bias"] + weights["encoder.pos_embed"][0]
        encoded = _blocks(tokens[ids], weights, "encoder", 2)  # positions first, then the hidden ones go
        every = weights["rebuilder.mask_token"].repeat(len(sample), 1)
        every[ids] = F.linear(encoded, weights["rebuilder.project.weight"], weights["rebuilder.project.bias"])
        every = _blocks(every + weights["rebuilder.vit.pos_embed"][0], weights, "rebuilder.vit", 1)
        rebuilt = F.linear(every, weights["rebuilder.patches.weight"], weights["rebuilder.patches.bias"])
        target = sample
        if normalised:
            target = (sample - sample.mean(1, keepdim=True)) / (sample.var(1, keepdim=True) + 1e-6) ** 0.5
        is_hidden = torch.ones(len(sample)).scatter(0, ids, 0.0).bool()
        errors.append((rebuilt - target)[is_hidden] ** 2)
    return torch.cat(errors).mean()


def _blocks(x: Tensor, weights: dict[str, Tensor], name: str, depth: int) -> Tensor:
    """Returns tokens ``n e`` after the blocks and the norm of a Vision Transformer with two heads."""
    width = x.shape[1]

    def norm(x: Tensor, place: str) -> Tensor:
        return F.layer_norm(x, (width,), weights[f"{place}.weight"], weights[f"{place}.bias"], 1e-5)

    for at in range(depth):
        block = f"{name}.blocks.{at}"
        y = F.linear(norm(x, f"{block}.norm1"), weights[f"{block}.attn.qkv.weight"])
        q, k, v = y.split(width, 1)
        q, v = q + weights[f"{block}.attn.q_bias"], v + weights[f"{block}.attn.v_bias"]
        heads = [(q[:, s] @ k[:, s].T / (width / 2) ** 0.5).softmax(1) @ v[:, s] for s in _halves(width)]
        x = x + F.linear(torch.cat(heads, 1), weights[f"{block}.attn.proj.weight"], weights[f"{block}.attn.proj.bias"])
        y = F.gelu(F.linear(norm(x, f"{block}.norm2"), *(weights[f"{block}.mlp.fc1.{kind}"] for kind in KINDS)))
        x = x + F.linear(y, *(weights[f"{block}.mlp.fc2.{kind}"] for kind in KINDS))
    return norm(x, f"{name}.norm")


KINDS = ("weight", "bias")


def _halves(width: int) -> tuple[slice, slice]:
    return slice(0, width // 2), slice(width // 2, width)
