"""The paper's system on any number of ranks: gather is one process to the last digits, nogather is not.

A step of stock DDP over data x seq is held against one process on the global batch: logits, loss, the gradient at
the input and at every parameter, and the weights after ten optimizer steps (two on others than two ranks), in float64
with dropout on.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from seqpar.attention.strategies import AttentionOptions
from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.plain import PlainDecoder
from seqpar.losses import DiceCE
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.collectives import all_gather, all_reduce
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.rendezvous import join
from seqpar.parallel.shared_memory import SWITCH
from seqpar.planner.memory_counter import saved_bytes
from seqpar.vit.dropout import DropoutKey
from seqpar.vit.encoder import SeqParViT
from tests.support.ranks import GOLDEN, relative, summed

CLASSES, CHANNELS = 3, 2


@dataclass(frozen=True)
class Case:
    tile: tuple[int, ...]
    patch: int
    split: str = "spatial"
    positions: str = "learned"
    mode: str = "gather"
    samples: int = 2
    steps: int = 10


def build(case: Case, mesh: Mesh) -> SegmentationNet:
    torch.manual_seed(0)
    encoder = SeqParViT(
        CHANNELS,
        case.tile,
        case.patch,
        embed_dim=12,
        depth=2,
        num_heads=2,
        mlp_ratio=2,
        positions=case.positions,
        dropout=0.2,
        drop_path=0.3,
        layer_scale=0.5,
        group=mesh.seq,
        split=case.split,
    )
    width = 4 if case.patch <= 4 else 2  # convolutions over all voxels in float64 are what the large tiles cost
    decoder = PlainDecoder(12, CLASSES, encoder.layout.patch, width)
    return SegmentationNet(encoder, decoder, choose_mode(case.mode, mesh.seq)).double()


def data(case: Case, step: int = 0) -> tuple[Tensor, Tensor]:
    toss = torch.Generator().manual_seed(100 + step)
    image = torch.randn(case.samples, CHANNELS, *case.tile, generator=toss, dtype=torch.float64)
    label = torch.randint(0, CLASSES, (case.samples, *case.tile), generator=toss)
    label[:, 0, 0] = 9  # ignored, and not the same number in each part
    return image, label


@dataclass
class Outcome:
    logits: Tensor
    loss: Tensor
    image_grad: Tensor
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


def train(mesh: Mesh, case: Case) -> Outcome:
    """Returns one rank's outcome; its logits, loss and input gradient are those of the global batch."""
    net = build(case, mesh)
    layout, loss_of = net.encoder.layout, DiceCE(ignore_label=9)
    loss_groups = net.mode.loss_groups(mesh.data)
    stepped = DistributedDataParallel(net) if mesh.world.size > 1 else net
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    mine = torch.arange(case.samples).chunk(mesh.data.size)[mesh.data.index].tolist()
    first: Outcome | None = None
    for step in range(case.steps):
        image, label = data(case, step)
        part = layout.cut(image[mine], mesh.seq.index).requires_grad_()
        logits = stepped(part, None, DropoutKey(1, step, tuple(mine)))
        loss = loss_of(logits, net.arrange(layout.cut(label[mine], mesh.seq.index)), loss_groups)
        optimizer.zero_grad()
        loss.backward()
        if first is None:
            assert part.grad is not None
            grads = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
            first = Outcome(logits.detach(), loss.detach(), part.grad / mesh.world.size, grads, {})
        optimizer.step()
    assert first is not None
    first.weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    parts = all_gather(first.image_grad, mesh.seq, 1, layout.counts).split(layout.counts, 1)
    first.image_grad = layout.join(parts)
    if mesh.data.size > 1:
        sizes = [case.samples // mesh.data.size] * mesh.data.size
        first.image_grad = all_gather(first.image_grad, mesh.data, 0, sizes)
        if case.mode == "gather":
            first.logits = all_gather(first.logits, mesh.data, 0, sizes)
    first.loss = all_reduce(first.loss, mesh.world) / mesh.world.size
    return first


@cache
def one_process(case: Case) -> Outcome:
    """Returns what a single process gets; ranks inherit what their parent has computed."""
    return train(join(Launcher("test"), None, 1, torch.device("cpu")), case)


def run_all(mesh: Mesh, cases: list[Case]) -> list[Outcome]:
    return [train(mesh, case) for case in cases]


def all_cases(world: int, groups: int = 1) -> list[Case]:
    """Returns the cases; each takes two steps on other numbers of ranks than two.

    Every rank decodes whole tiles, whose costs grow with the patch: the largest run on four ranks at most. All run on
    two; on other numbers, and in several groups, a third of them each, with both splits and uneven parts.
    """
    even = [Case((16, 16, 16), 4, "spatial", "rope"), Case((16, 16, 16), 4, "ordered", "learned")]
    uneven = [
        Case((12, 8, 16), 4, "spatial", "learned", steps=3),
        Case((12, 8, 20), 4, "ordered", "sincos", steps=3),
        Case((6, 4, 6), 2, "spatial", "none"),
        Case((6, 4, 6), 2, "ordered", "rope"),
        Case((24, 16, 16), 8, "spatial", "learned"),
        Case((24, 16, 16), 8, "ordered", "learned", steps=3),
    ]
    large = [Case((16, 32, 48), 16, "spatial"), Case((16, 32, 48), 16, "ordered", steps=3)]
    every = even + uneven + large * (world <= 4)
    if world == 2:
        return every
    third = {(1, 1): 0, (3, 1): 1, (4, 1): 2, (6, 1): 0, (4, 2): 1, (8, 2): 1, (8, 1): 2}[world, groups]
    return [replace(case, steps=2) for case in every[third::3]]


def compare(got: Outcome, want: Outcome) -> None:
    assert relative(got.loss, want.loss) < 1e-12
    assert relative(got.logits, want.logits) < 1e-12
    assert relative(got.image_grad, want.image_grad) < 1e-12
    assert got.grads.keys() == want.grads.keys() == want.weights.keys()
    for name in want.grads:
        assert relative(got.grads[name], want.grads[name]) < 1e-12, name
        assert float(want.grads[name].abs().max()) > 1e-9, f"{name} has no gradient to compare"
    for name in want.weights:
        assert relative(got.weights[name], want.weights[name]) < 1e-10, name


@pytest.mark.parametrize("world, seqpar", [(1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (8, 8), (4, 2), (8, 4)])
def test_gather_equals_one_process(world: int, seqpar: int, ranks: Callable[..., list]) -> None:
    cases = all_cases(world, world // seqpar)
    for outcomes in ranks(world, run_all, cases, seqpar=seqpar, timeout=240):
        for case, outcome in zip(cases, outcomes):
            compare(outcome, one_process(case))


def parts_alone(mesh: Mesh, *cases: Case) -> list[tuple[float, float, list[bool]]]:
    return [_part_alone(mesh, case) for case in cases]


def _part_alone(mesh: Mesh, case: Case) -> tuple[float, float, list[bool]]:
    """Returns how far nogather is from decoding each part alone, from one process, and whether ranks agree."""
    net = build(case, mesh).eval()
    layout, loss_of = net.encoder.layout, DiceCE(ignore_label=9)
    image, label = data(case)
    part, label_part = (layout.cut(t, mesh.seq.index) for t in (image, label))
    logits = net(part)
    loss = loss_of(logits, net.arrange(label_part), net.mode.loss_groups())
    whole_case = Case(**{**case.__dict__, "mode": "gather"})
    alone = build(whole_case, join(Launcher("test"), None, 1, torch.device("cpu"))).eval()
    tokens = alone.encoder(image)[:, layout.token_ids(mesh.seq.index)]
    box = layout.box(mesh.seq.index)
    grid = tokens.transpose(1, 2).unflatten(2, [high - low for low, high in box])
    own, _ = alone.decoder([grid], None)
    voxels = tuple(slice(low * case.patch, high * case.patch) for low, high in box)
    own_loss = loss_of(own, label[(slice(None), *voxels)])
    gap = max(relative(logits, own), relative(loss, own_loss))
    one = alone(image)[(..., *voxels)]
    outcome = train(mesh, case)
    weights = list(outcome.weights.values())
    equal = [relative(own, total / mesh.world.size) < 1e-14 for own, total in zip(weights, summed(weights, mesh.world))]
    return gap, relative(logits, one), equal


@pytest.mark.parametrize("world", [2, 4, 8])
def test_nogather_is_each_part_alone_and_not_one_process(world: int, ranks: Callable[..., list]) -> None:
    cases = [Case((16, 16, 16), 4, split, mode="nogather", steps=2) for split in ("spatial", "ordered")]
    for gap, control, equal in itertools.chain(*ranks(world, parts_alone, *cases)):
        assert gap < 1e-12 and all(equal)
        assert control > 1e-3  # parts that see no neighbour are another function


def test_nogather_refuses_chunks_that_are_no_boxes(ranks: Callable[..., list]) -> None:
    def build_it(mesh: Mesh) -> str:
        try:
            build(Case((24, 24, 24), 4, "ordered", mode="nogather"), mesh)
        except ValueError as error:
            return str(error)
        return ""

    messages = ranks(4, build_it)
    assert messages[0] == messages[3] and "split='spatial' or num_ranks=1 or 2 or 3" in messages[0]


RECORDED = GOLDEN / "core_losses.json"


def first_losses(mesh: Mesh, count: int) -> list[float]:
    """Returns the losses of so many steps on bright blobs in noise, one optimizer, dropout on."""
    case = Case((16, 16, 16), 4, samples=2)
    net = build(case, mesh)
    stepped = DistributedDataParallel(net) if mesh.world.size > 1 else net
    layout, loss_of, optimizer = net.encoder.layout, DiceCE(), torch.optim.Adam(net.parameters(), lr=5e-3)
    losses = []
    for step in range(count):
        toss = torch.Generator().manual_seed(step)
        image = torch.randn(2, CHANNELS, *case.tile, generator=toss, dtype=torch.float64)
        label = torch.zeros(2, *case.tile, dtype=torch.long)
        for sample, corner in enumerate(torch.randint(0, 9, (2, 3), generator=toss).tolist()):
            x, y, z = corner
            label[sample, x : x + 7, y : y + 7, z : z + 7] = 1
            label[sample, x + 2 : x + 5, y + 2 : y + 5, z + 2 : z + 5] = 2
        image[:, 0] += 3.0 * (label > 0)
        image[:, 1] += 3.0 * (label > 1)
        logits = stepped(layout.cut(image, mesh.seq.index), None, DropoutKey(7, step, (0, 1)))
        loss = loss_of(logits, net.arrange(layout.cut(label, mesh.seq.index)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(("world", "count", "memory"), [(1, 50, "1"), (2, 20, "1"), (4, 12, "1"), (2, 12, "0")])
def test_fifty_steps_follow_the_recorded_losses(
    world: int, count: int, memory: str, ranks: Callable[..., list], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty of them on two ranks, twelve on four, and where all messages go through gloo."""
    monkeypatch.setenv(SWITCH, memory)
    recorded = json.loads(RECORDED.read_text())
    assert sum(recorded[-5:]) < 0.8 * sum(recorded[:5]) and len(recorded) == 50
    for losses in ranks(world, first_losses, count, timeout=120):
        assert len(losses) == count
        assert max(abs(a - b) / abs(b) for a, b in zip(losses, recorded)) < 1e-9


def encoder_bytes(mesh: Mesh, keep: bool) -> tuple[int, int, int]:
    torch.manual_seed(0)
    tile = (24, 32, 32)
    net = SeqParViT(
        2, tile, 4, embed_dim=24, depth=3, num_heads=4, group=mesh.seq, attention=AttentionOptions("gather-kv", keep)
    )
    part = net.layout.cut(torch.randn(1, 2, *tile), mesh.seq.index)
    mesh.seq.traffic.clear()
    tokens = net(part)
    forward = mesh.seq.traffic["attention"]
    tokens.sum().backward()
    backward = mesh.seq.traffic["attention"] - forward
    saved = saved_bytes(net, lambda: net(part))
    return saved, forward, backward


@pytest.mark.parametrize("world", [2, 3, 4])
def test_saved_bytes_fall_with_the_ranks_and_traffic_is_the_formula(world: int, ranks: Callable[..., list]) -> None:
    one = ranks(1, encoder_bytes, False)[0][0]
    counts = ranks(world, encoder_bytes, False)
    u, layers = 384 * 24 * 4, 3  # N x E floats: P u, summed over the ranks
    assert max(saved for saved, _, _ in counts) <= (1 / world + 0.03) * one
    assert sum(forward for _, forward, _ in counts) == layers * 2 * (world - 1) * u
    assert sum(backward for _, _, backward in counts) == layers * 4 * (world - 1) * u
    kept = ranks(world, encoder_bytes, True)
    assert sum(backward for _, _, backward in kept) == layers * 2 * (world - 1) * u
    assert min(saved for saved, _, _ in kept) > (1 / world + 0.03) * one  # the control: keeping is not free
