"""Small U-Nets of every kind on boxes, held against the same network on the whole image in one process."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from seqpar.decoders.unets import Architecture, Style, UNet, distmis, hou, lamp
from seqpar.decoders.unets.nnunet import network
from seqpar.decoders.unets.published import SQUEEZE
from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Group, Mesh
from seqpar.spatial.box_grid import BoxGrid
from tests.support.boxes import box, numbers
from tests.support.ranks import relative

CHANNELS, CLASSES = 2, 3
Edges = tuple[tuple[int, ...], ...]
Make = Callable[[Group | None], UNet]  # of the group of data


def of(
    data: Group | None,
    *,
    norm: str = "instance",
    activation: str = "leaky_relu",
    supervised: int = 1,
    bias: bool = False,
    **more: object,
) -> UNet:
    """Returns a small network of three stages; it has no bias before a norm unless it is asked for."""
    style = Style(norm, num_groups=2, activation=activation, bias=bias, data=data)
    options = {"features": (3, 4, 5), "encoder": (1, 2, 1), "decoder": (2, 1), "style": style, **more}
    return UNet(Architecture.of(CHANNELS, CLASSES, **options), supervised)  # type: ignore[arg-type]


ANISOTROPIC = {"kernels": ((1, 3, 3), (3, 3, 3), 3), "strides": (1, (1, 2, 2), (2, 1, 2))}
MEDNEXT = {"block": "mednext", "activation": "gelu", "bias": True, "expansion": (2, 3, 2)}
MAKERS: dict[str, Make] = {
    "plain": lambda data: of(data),
    "with biases": lambda data: of(data, bias=True),
    "anisotropic": lambda data: of(data, **ANISOTROPIC),
    "deep supervision": lambda data: of(data, heads=2, supervised=2, **ANISOTROPIC),
    "residual": lambda data: of(data, block="residual", stem=4, **ANISOTROPIC),
    "bottleneck": lambda data: of(data, block="bottleneck", narrow=(2, 3, 2), squeeze=2),
    "group norm": lambda data: of(data, norm="group", up="trilinear", features=(4, 4, 6)),
    "batch norm": lambda data: of(data, norm="batch", down="max", up="nearest"),
    "gelu": lambda data: of(data, activation="gelu"),
    "no norm": lambda data: of(data, norm="none", squeeze=2),
    "hou": lambda data: hou(CHANNELS, CLASSES, features=2, data=data),
    "hou 2d": lambda data: hou(CHANNELS, CLASSES, features=2, data=data, dims=2),
    "distmis": lambda data: distmis(CHANNELS, CLASSES, 16, features=2, data=data),
    "distmis groups": lambda data: distmis(CHANNELS, CLASSES, 16, features=2, data=data, norm="group"),
    "distmis text": lambda data: distmis(CHANNELS, CLASSES, variant="text", features=2, data=data),
    "lamp": lambda data: lamp(CHANNELS, CLASSES, 2, data=data),
    "se-lamp": lambda data: lamp(CHANNELS, CLASSES, 2, data=data, squeeze=SQUEEZE),
    "mednext": lambda data: of(data, **MEDNEXT),
    "mednext, kernel 5": lambda data: of(data, kernels=5, heads=3, supervised=3, **MEDNEXT),
    "nnunet": lambda data: network(of(None, heads=2).architecture, True),
}


@dataclass(frozen=True)
class Case:
    """A network, where its image is cut, how many samples there are in all, and whether backward computes again."""

    name: str
    edges: Edges
    samples: int = 1
    recompute: bool = False

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(edges[-1] for edges in self.edges)


@dataclass(frozen=True)
class Whole:
    """What one process makes of a case: outputs, gradients of image and parameters, buffers afterwards."""

    outputs: list[Tensor]
    slopes: list[Tensor]
    image: Tensor
    dimage: Tensor
    grads: dict[str, Tensor]
    buffers: list[Tensor]


def make(name: str, data: Group | None = None) -> UNet:
    torch.manual_seed(0)
    net = MAKERS[name](data).double().train()
    with torch.no_grad():  # so that no weight begins at 0 and hides what lies behind it
        for number, p in enumerate(net.parameters()):
            p += 0.1 * numbers(1000 + number, *p.shape)
    return net


def outputs(net: UNet, image: Tensor, grid: BoxGrid | None) -> tuple[list[Tensor], list[BoxGrid | None]]:
    values = net.on_boxes(image, grid)
    return [x for x, _ in values], [after for _, after in values]


def learned(net: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


@cache
def whole(case: Case) -> Whole:
    net = make(case.name)
    image = numbers(1, case.samples, CHANNELS, *case.extents).requires_grad_()
    results, _ = outputs(net, image, None)
    slopes = [numbers(2 + level, *x.shape) for level, x in enumerate(results)]
    total = sum((x * slope).sum() for x, slope in zip(results, slopes))
    parameters = learned(net)
    dimage, *grads = torch.autograd.grad(total, [image, *parameters.values()])  # type: ignore[arg-type]
    buffers = [buffer.double() for buffer in net.buffers()]
    return Whole([x.detach() for x in results], slopes, image.detach(), dimage, dict(zip(parameters, grads)), buffers)


def gaps(mesh: Mesh, case: Case, want: Whole) -> dict[str, float]:
    """Returns the relative differences of outputs, input gradient, parameter gradients and running statistics.

    What has no gradient but rounding, a bias before a norm, is compared to the largest gradient of all.
    """
    net, grid = make(case.name, mesh.data), BoxGrid(case.edges, mesh.seq)
    if case.recompute:
        net.recompute()
    (samples,) = torch.arange(case.samples).chunk(mesh.data.size)[mesh.data.index : mesh.data.index + 1]
    part = want.image[samples][box(grid)].clone().requires_grad_()
    got, grids = outputs(net, part, grid)
    boxes = [box(after) for after in grids if after is not None]
    total = sum((x * slope[samples][at]).sum() for x, slope, at in zip(got, want.slopes, boxes))
    dpart, *grads = torch.autograd.grad(total, [part, *learned(net).values()])  # type: ignore[arg-type]
    by_name = {
        f"output {level}": float((x - y[samples][at]).abs().max() / y.abs().max())
        for level, (x, y, at) in enumerate(zip(got, want.outputs, boxes))
    }
    by_name["input"] = float((dpart - want.dimage[samples][box(grid)]).abs().max() / want.dimage.abs().max())
    largest = max(float(grad.abs().max()) for grad in want.grads.values())
    flat = all_reduce(torch.cat([grad.flatten() for grad in grads]), mesh.world)
    pieces = flat.split([grad.numel() for grad in grads])
    for grad, (name, expected) in zip(pieces, want.grads.items()):
        size = float(expected.abs().max())
        by_name[name] = float((grad - expected.flatten()).abs().max()) / (size if size > 1e-10 * largest else largest)
    for (name, buffer), expected in zip(net.named_buffers(), want.buffers):
        by_name[name] = relative(buffer.double(), expected)
    return by_name


def check_all(mesh: Mesh, cases: list[tuple[Case, Whole]]) -> list[dict[str, float]]:
    return [gaps(mesh, *case) for case in cases]


def alone_on_boxes(mesh: Mesh, case: Case) -> float:
    """Returns how far boxes that know nothing of each other are from the whole: the control."""
    net = copy.deepcopy(make(case.name))
    image, grid = numbers(1, 2, CHANNELS, *case.extents), BoxGrid(case.edges, mesh.seq)
    (whole,), _ = outputs(net, image, None)
    (own,), _ = outputs(net, image[box(grid)], None)
    return relative(own, whole[box(grid)])
