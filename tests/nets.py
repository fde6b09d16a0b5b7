"""Small networks on every number of ranks, held against one process: logits, loss, every gradient."""

from collections.abc import Callable, Sequence

import pytest
import torch
from conftest import relative
from torch import Tensor, nn

from seqpar.collectives import all_reduce
from seqpar.decoders.modes import choose_mode
from seqpar.decoders.spread import Spread
from seqpar.encoder import SeqParViT
from seqpar.launch.model import SegmentationNet
from seqpar.layout import Layout
from seqpar.losses import DiceCE
from seqpar.mesh import Group, Mesh

CHANNELS, CLASSES, EMBED, DEPTH, PATCH, TILE = 2, 3, 24, 3, 4, (16, 12, 16)
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


def step(net: SegmentationNet, samples: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Returns logits (voxels by classes), the voxels' numbers, the loss and all gradients, averaged over the group."""
    group, layout = net.encoder.group, net.encoder.layout
    image, label = batch(samples)
    at = group.index
    logits = net(layout.cut(image, at))
    loss = DiceCE()(logits, net.arrange(layout.cut(label, at)), net.mode.share())
    loss.backward()
    grads = {name: all_reduce(p.grad, group) / group.size for name, p in net.named_parameters()}  # type: ignore
    voxels = net.arrange(layout.cut(torch.arange(label.numel()).view_as(label), at))
    mean = all_reduce(loss.detach(), group) / group.size
    return logits.detach().movedim(1, -1).flatten(0, 3), voxels.flatten(), mean, grads


def step_of(mesh: Mesh, make: Make, mode: str, split: str, samples: int) -> tuple:
    return step(build(make, mesh.seq, mode, split), samples)


def differences(ranks: Callable[..., list], world: int, make: Make, mode: str, split: str) -> dict[str, float]:
    """Returns the largest relative difference to one process: of logits, loss and gradients."""
    samples = world if mode == "swap" else 2
    logits, _, loss, grads = step(build(make, Group("seq"), "gather", "spatial"), samples)
    found, seen = {"logits": 0.0, "loss": 0.0, "gradients": 0.0}, []
    for rank_logits, voxels, rank_loss, rank_grads in ranks(world, step_of, make, mode, split, samples):
        seen.append(voxels)
        gap = float((rank_logits - logits[voxels]).abs().max() / logits.abs().max())
        found["logits"] = max(found["logits"], gap)
        found["loss"] = max(found["loss"], relative(rank_loss, loss))
        assert rank_grads.keys() == grads.keys()
        found["gradients"] = max(found["gradients"], *(relative(rank_grads[name], grads[name]) for name in grads))
    assert torch.equal(torch.cat(seen).unique(), torch.arange(len(logits))), "some voxels have no logits"
    return found


def skip_without_boxes(world: int, mode: str, split: str) -> None:
    if mode == "nogather" and not Layout.of(TILE, PATCH, world, split).is_box:
        pytest.skip("nogather refuses parts that are no boxes")


def decode_boxes(mesh: Mesh, make: Callable[[], nn.Module], grid: Sequence[int], patch: int) -> tuple:
    """Returns the largest differences of a decoder on boxes to it on the whole, the spread's extents, bytes sent."""
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
    output, spread = decoder(inputs[:-1], inputs[-1])
    assert spread is None
    slope = torch.randn(output.shape, generator=dice, dtype=torch.float64)
    names = [name for name, _ in decoder.named_parameters()]
    learned = list(decoder.parameters())
    used = inputs if decoder.uses_image else inputs[:-1]
    wanted = torch.autograd.grad((output * slope).sum(), [*used, *learned])

    def mine(tensor: Tensor) -> Tensor:
        times = tensor.shape[2] // grid[0]
        cut = (slice(None), slice(None), *(slice(low * times, high * times) for low, high in layout.box(group.index)))
        return tensor[cut].detach().clone().requires_grad_(tensor.requires_grad)

    boxes = [mine(tensor) for tensor in inputs]
    box_output, spread = decoder(boxes[:-1], boxes[-1], Spread(layout.cuts, group))
    found = torch.autograd.grad(
        (box_output * mine(slope)).sum(), [*(boxes if decoder.uses_image else boxes[:-1]), *learned]
    )
    sent = dict(group.traffic)  # before the sums below
    gaps = {"output": relative(box_output, mine(output))}
    for at, (a, b) in enumerate(zip(found, wanted)):
        if at < len(used):
            gaps[f"input {at}"] = float((a - mine(b)).abs().max() / b.abs().max())
        else:
            gaps[names[at - len(used)]] = relative(all_reduce(a, group), b)
    return gaps, spread.extents, sent
