"""Small networks on every number of ranks, held against one process: logits, loss, every gradient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.losses import DiceCE
from seqpar.models.network import Network
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Group, Mesh
from seqpar.spatial.box_grid import BoxGrid
from seqpar.vit.dropout import DropoutKey
from seqpar.vit.encoder import SeqParViT
from tests.support.ranks import relative, summed

CHANNELS, CLASSES, EMBED, DEPTH, PATCH, TILE = 2, 3, 24, 2, 4, (8, 8, 12)
Make = Callable[[], tuple[nn.Module, tuple[int, ...]]]  # a decoder and the blocks that it takes


def build(make: Make, group: Group, mode: str, split: str) -> SegmentationNet:
    torch.manual_seed(0)
    options = {"positions": "learned+rope", "mlp": "swiglu", "attention_norm": True, "layer_scale": 0.5}
    encoder = SeqParViT(CHANNELS, TILE, PATCH, EMBED, DEPTH, 2, group=group, split=split, **options)  # type: ignore
    decoder, taps = make()
    return SegmentationNet(encoder, decoder, choose_mode(mode, group), taps).double()


def batch(samples: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(1)
    image = torch.randn(samples, CHANNELS, *TILE, generator=dice, dtype=torch.float64)
    return image, torch.randint(CLASSES, (samples, *TILE), generator=dice)


@dataclass
class Outcome:
    """Logits (voxels by classes), the voxels' numbers, loss and gradients of the first step, tensors after the last."""

    logits: Tensor
    voxels: Tensor
    loss: Tensor
    grads: dict[str, Tensor]
    state: dict[str, Tensor]


def train(group: Group, make: Make, mode: str, split: str, samples: int, steps: int) -> Outcome:
    """Returns a rank's outcome; loss and gradients are averaged over the group."""
    net = build(make, group, mode, split)
    return train_net(net, batch(samples), torch.optim.Adam(net.parameters(), lr=1e-3), steps)


def train_net(
    net: Network, whole: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer, steps: int, drops: bool = False
) -> Outcome:
    """Returns what a rank's network becomes; ``whole``: images and labels of which it takes its parts.

    - ``drops``: whether its dropout acts
    """
    (image, label), layout, group = whole, net.layout, net.mode.group
    part, target = layout.cut(image, group.index), net.arrange(layout.cut(label, group.index))
    loss_of, loss_groups = net.training_loss(DiceCE()), net.mode.loss_groups(batch=len(image))
    learned = {name: p for name, p in net.named_parameters() if p.requires_grad}
    first: Outcome | None = None
    for step in range(steps):
        logits = net(part, None, DropoutKey(3, step, tuple(range(len(image)))) if drops else None)
        loss = loss_of(logits, target, loss_groups)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(list(learned.values()), group)
        if first is None:
            finest = (logits[0] if isinstance(logits, list) else logits).detach()
            grads = {name: parameter.grad.clone() for name, parameter in learned.items()}  # type: ignore[union-attr]
            voxels = net.arrange(layout.cut(torch.arange(label.numel()).view_as(label), group.index)).flatten()
            flat = finest.movedim(1, -1).flatten(0, 3)
            first = Outcome(flat, voxels, all_reduce(loss.detach(), group) / group.size, grads, {})
        optimizer.step()
    assert first is not None
    first.state = {name: tensor.detach().double() for name, tensor in net.state_dict().items()}
    return first


def average_gradients(parameters: list[nn.Parameter], group: Group) -> None:
    for parameter, total in zip(parameters, summed([p.grad for p in parameters], group)):  # type: ignore[misc]
        parameter.grad = total / group.size


@cache
def one_process(make: Make, samples: int, steps: int) -> Outcome:
    return train(Group("seq"), make, "gather", "spatial", samples, steps)


def train_all(mesh: Mesh, make: Make, cases: list[tuple[str, str]], steps: int) -> list[Outcome]:
    return [train(mesh.seq, make, *case, _samples(mesh.seq.size, case[0]), steps) for case in cases]


def _samples(world: int, mode: str) -> int:
    return world if mode == "swap" else 2


def differences(
    ranks: Callable[..., list], world: int, make: Make, cases: list[tuple[str, str]], steps: int = 1
) -> dict[tuple[str, str], dict[str, float]]:
    """Returns, for each mode and split, the largest relative differences to one process."""
    results: dict[tuple[str, str], dict[str, float]] = {}
    every = ranks(world, train_all, make, cases, steps, timeout=180)  # six networks, on a busy machine too
    for at, case in enumerate(cases):
        want = one_process(make, _samples(world, case[0]), steps)
        assert all(float(grad.abs().max()) > 1e-9 for grad in want.grads.values()), "a gradient that compares nothing"
        worst = results[case] = {"logits": 0.0, "loss": 0.0, "gradients": 0.0, "weights": 0.0}
        for got in (outcomes[at] for outcomes in every):
            gap = float((got.logits - want.logits[got.voxels]).abs().max() / want.logits.abs().max())
            worst["logits"] = max(worst["logits"], gap)
            worst["loss"] = max(worst["loss"], relative(got.loss, want.loss))
            assert got.grads.keys() == want.grads.keys()
            worst["gradients"] = max(worst["gradients"], *(relative(got.grads[n], want.grads[n]) for n in want.grads))
            worst["weights"] = max(worst["weights"], *(relative(got.state[n], want.state[n]) for n in want.state))
        seen = torch.cat([outcomes[at].voxels for outcomes in every]).unique()
        assert torch.equal(seen, torch.arange(len(want.logits))), "some voxels have no logits"
    return results


EXACT = [(mode, split) for mode in ("gather", "halo", "swap") for split in ("spatial", "ordered")]
FEW = [("gather", "spatial"), ("halo", "spatial"), ("halo", "ordered"), ("swap", "ordered")]


def check_exact(ranks: Callable[..., list], world: int, make: Make) -> None:
    """Holds every exact mode against one process: four steps of Adam on 2 ranks, two on others.

    A step is the same code on any number of ranks; what four of them add up shows on two. On eight, gather and swap run
    with one split each.
    """
    cases = EXACT if world <= 4 else FEW
    for case, gaps in differences(ranks, world, make, cases, steps=4 if world == 2 else 2).items():
        assert max(gaps["logits"], gaps["loss"], gaps["gradients"]) < 1e-12, (case, gaps)
        assert gaps["weights"] < 1e-10, (case, gaps)


def decode_boxes(
    mesh: Mesh, make: Callable[[], nn.Module], grid: Sequence[int], patch: int, dtype: torch.dtype = torch.float64
) -> tuple:
    """Returns the largest differences of a decoder on boxes to it on the whole, the box grid's extents, bytes sent.

    On boxes it computes in ``dtype``, on the whole in float64.
    """
    group = mesh.seq
    layout = Layout.of([side * patch for side in grid], patch, group.size)
    assert layout.cuts is not None
    torch.manual_seed(0)
    decoder = make().double()
    dice = torch.Generator().manual_seed(2)

    def whole(channels: int, times: int) -> Tensor:
        sides = [side * times for side in grid]
        return torch.randn(2, channels, *sides, generator=dice, dtype=torch.float64).requires_grad_()

    inputs = [*(whole(EMBED, 1) for _ in range(decoder.num_features)), whole(CHANNELS, patch)]
    output, box_grid = decoder(inputs[:-1], inputs[-1])
    assert box_grid is None
    slope = torch.randn(output.shape, generator=dice, dtype=torch.float64)
    names = [name for name, _ in decoder.named_parameters()]
    learned = list(decoder.parameters())
    used = inputs if decoder.uses_image else inputs[:-1]
    whole_gradients = torch.autograd.grad((output * slope).sum(), [*used, *learned])

    def mine(tensor: Tensor) -> Tensor:
        times = tensor.shape[2] // grid[0]
        cut = (slice(None), slice(None), *(slice(low * times, high * times) for low, high in layout.box(group.index)))
        return tensor[cut].detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)

    decoder.to(dtype)
    boxes = [mine(tensor) for tensor in inputs]
    box_output, box_grid = decoder(boxes[:-1], boxes[-1], BoxGrid(layout.cuts, group))
    box_gradients = torch.autograd.grad(
        (box_output * mine(slope)).sum(), [*(boxes if decoder.uses_image else boxes[:-1]), *learned]
    )
    sent = dict(group.traffic)  # before the sums below
    gaps = {"output": relative(box_output, mine(output))}
    for at, (a, b) in enumerate(zip(box_gradients[: len(used)], whole_gradients)):
        gaps[f"input {at}"] = float((a.double() - mine(b)).abs().max() / b.abs().max())
    totals = summed([a.double() for a in box_gradients[len(used) :]], group)
    gaps |= {name: relative(*pair) for name, *pair in zip(names, totals, whole_gradients[len(used) :])}
    return gaps, box_grid.extents, sent
