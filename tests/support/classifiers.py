"""Small classifiers on every number of ranks: logits, loss, every gradient, running statistics."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.resattnet import ResAttNet
from seqpar.losses.loss import Loss
from seqpar.losses.terms import CrossEntropy
from seqpar.models.classifier import Classifier, TokenClassifier, VolumeClassifier
from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Group, Mesh
from seqpar.vit.dropout import DropoutKey
from seqpar.vit.encoder import SeqParViT
from tests.support.boxes import numbers
from tests.support.ranks import summed

CHANNELS, CLASSES, TILE = 2, 3, (72, 40, 16)
Make = Callable[[Group, Group | None, str, str], Classifier]  # group, data, mode, split


def resattnet(group: Group, data: Group | None, mode: str, split: str) -> Classifier:
    peers = group if mode == "swap" and group.size > 1 else None
    network = ResAttNet(CHANNELS, CLASSES, (1, 1, 1, 2), 2, data, peers)
    return VolumeClassifier(network, TILE, (8, 8, 8), choose_mode(mode, group), split)


def resattnet_text(group: Group, data: Group | None, mode: str, split: str) -> Classifier:
    peers = group if mode == "swap" and group.size > 1 else None
    network = ResAttNet(CHANNELS, CLASSES, (1, 1, 1, 1), 8, data, peers, "text")
    return VolumeClassifier(network, TILE, (8, 8, 8), choose_mode(mode, group), split)


def vit(group: Group, data: Group | None, mode: str, split: str, pooling: str = "mean") -> Classifier:
    positions = "learned" if pooling == "token" else "learned+rope"
    options = {"positions": positions, "dropout": 0.3, "drop_path": 0.2, "mlp_chunks": 2}
    encoder = SeqParViT(CHANNELS, TILE, 8, 24, 2, 2, group=group, split=split, **options)  # type: ignore[arg-type]
    return TokenClassifier(encoder, CLASSES, choose_mode(mode, group), pooling)


def vit_with_token(group: Group, data: Group | None, mode: str, split: str) -> Classifier:
    return vit(group, data, mode, split, "token")


def batch(samples: int) -> tuple[Tensor, Tensor]:
    return numbers(1, samples, CHANNELS, *TILE), torch.arange(samples) % CLASSES


def outcome(make: Make, group: Group, data: Group, mode: str, split: str, samples: int) -> dict[str, Tensor]:
    """Returns by name what a step has: logits of all samples, loss, gradients summed over ranks, statistics."""
    torch.manual_seed(0)
    net = make(group, data if data.size > 1 else None, mode, split).double()
    with torch.no_grad():
        for number, p in enumerate(net.parameters()):
            p += 0.1 * numbers(1000 + number, *p.shape)
    image, label = batch(samples)
    (mine,) = torch.arange(samples).chunk(data.size)[data.index : data.index + 1]
    key = DropoutKey(3, 5, tuple(mine.tolist()))
    loss_fn, groups = Loss([CrossEntropy()], class_weights=(1.0, 2.0, 0.5)), net.loss_groups(data, len(mine))
    logits = net(net.layout.cut(image[mine], group.index), None, key)
    loss = loss_fn(logits, net.arrange(label[mine]), groups)
    loss.backward()
    learned = {name: p for name, p in net.named_parameters() if p.requires_grad}
    grads = [p.grad for p in learned.values()]
    for shared in (group, data):
        grads = summed([grad / shared.size for grad in grads], shared)  # type: ignore[operator]
        loss = all_reduce(loss.detach(), shared) / shared.size
    own = net.mode.samples(mine)
    copies = image[:1].expand(group.size if mode == "swap" else 1, -1, -1, -1, -1)
    part = net.eval().layout.cut(copies, group.index)
    return {
        **{way: net.evidence(part, net.layout, 1, way).points for way in net.ways},
        "logits": logits.detach().flatten(1),
        "samples": own,
        "loss": loss.detach(),
        **dict(zip(learned, grads)),
        **{name: buffer.detach().double() for name, buffer in net.named_buffers()},
    }


@cache
def one_process(make: Make, samples: int) -> dict[str, Tensor]:
    return outcome(make, Group("seq"), Group("data"), "gather", "spatial", samples)


def outcomes(mesh: Mesh, cases: list[tuple[Make, str, str, int]]) -> list[dict[str, Tensor]]:
    return [outcome(make, mesh.seq, mesh.data, *more) for make, *more in cases]


def gaps(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Returns relative differences; of what has no gradient but rounding, to the largest gradient."""
    logits, samples = want["logits"], got.pop("samples")
    largest = max(float(x.abs().max()) for name, x in want.items() if name not in ("logits", "samples"))
    result = {"logits": float((got.pop("logits") - logits[samples]).abs().max() / logits.abs().max())}
    for name, x in got.items():
        size = float(want[name].abs().max())
        result[name] = float((x - want[name]).abs().max()) / (size if size > 1e-10 * largest else largest)
    return result
