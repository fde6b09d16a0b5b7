"""What ``convert`` shares with its module, what ``shard`` and ``unshard`` take, and what is refused."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from monai.data import MetaTensor
from torch import Tensor, nn
from torch.nn import functional as F

import seqpar
from seqpar import ParallelModel, predict
from seqpar.conversion.converted import Converted, convert
from seqpar.parallel.mesh import Mesh
from tests.support.ranks import alone_mesh, relative


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.Conv3d(4, 2, 3, padding=1))


def test_a_group_of_one_is_the_module_itself_at_no_cost() -> None:
    module = small()
    net = seqpar.convert(module)
    assert isinstance(net, Converted) and isinstance(net, nn.Sequential)
    assert all(a is b for a, b in zip(net.parameters(), module.parameters()))
    assert all(a is b for a, b in zip(net.buffers(), module.buffers()))
    assert list(net.state_dict()) == list(module.state_dict())
    x = torch.randn(1, 1, 6, 5, 4)
    assert net.shard(x) is x and net.unshard(x) is x
    kept = list[int]()
    for each in (module, net):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):  # type: ignore[func-returns-value]
            each.eval()(x)
    assert kept[: len(kept) // 2] == kept[len(kept) // 2 :] and len(kept) > 2
    assert torch.equal(net(x), module(x))


def test_in_one_process_it_is_compiled_and_exported_as_the_module() -> None:
    module, x = small().eval(), torch.randn(1, 1, 6, 5, 4)
    net = convert(module)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))
    program = torch.export.export(net, (x,))
    torch.testing.assert_close(program.module()(x + 1), module(x + 1))


def copies(mesh: Mesh) -> list[float]:
    """Returns the differences of copies' outputs from the original's."""
    net = convert(small(), mesh.seq).eval()
    box = net.shard(torch.randn(1, 1, 7, 5, 4))
    letter = io.BytesIO()
    torch.save(net, letter)
    letter.seek(0)
    averaged = torch.optim.swa_utils.AveragedModel(net).eval()
    others = [
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        torch.load(letter, weights_only=False),
        averaged.module,
    ]
    assert all(type(other) is type(net) for other in others)
    assert not any(a is b for other in others for a, b in zip(other.parameters(), net.parameters()))
    others.append(torch.compile(net, backend="eager"))
    outputs = [*[other(box) for other in others], net(box * 1)]  # the last box is not known, so the ranks compare
    meta = net(MetaTensor(box))
    assert type(meta) is Tensor
    return [float((y - net(box)).abs().max()) for y in [*outputs, meta]]


def test_copies_on_two_ranks_compute_the_same(ranks: Callable[..., list]) -> None:
    for found in ranks(2, copies):
        assert found == [0.0] * 7


def labels(mesh: Mesh) -> None:
    net = convert(small(), mesh.seq)
    for extents in ((7, 9, 10), (16, 12, 8)):
        label, image = torch.randint(9, (2, *extents)), torch.randn(2, 3, *extents)
        assert torch.equal(net.unshard(net.shard(label)), label)
        assert torch.equal(net.unshard(net.shard(image)), image)
        assert net.shard(label).shape[1:] == net.shard(image).shape[2:]
        assert net.shard(label).numel() < label.numel()


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_unshard_joins_what_shard_cuts(world: int, ranks: Callable[..., list]) -> None:
    ranks(world, labels)


class Bare(nn.Conv3d):
    def __init__(self) -> None:
        super().__init__(1, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).as_subclass(Tensor)


class Turned(nn.Conv3d):
    """Returns axes of space in another order."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(2, 3)


class Halving(nn.Module):
    """Takes multiples of two only."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv3d(1, 2, 3, 2, 1), nn.ConvTranspose3d(2, 2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


def misuse(mesh: Mesh) -> dict[str, str]:
    kinds = small, small, Bare, Halving, lambda: Turned(1, 2, 1)
    net, fresh, bare, odd, turned = (convert(make(), mesh.seq) for make in kinds)
    whole = torch.randn(1, 1, 8, 6, 4)
    box = net.shard(whole)
    tries: dict[str, Callable[[], object]] = {
        "whole": lambda: net(whole),
        "not the grid's": lambda: net(box[:, :, : 3 + mesh.seq.index]),
        "channels only": lambda: net(torch.randn(1, 4)),
        "too small": lambda: net.shard(torch.randn(1, 1, 1, 6, 4)),
        "no image": lambda: net.shard(torch.randn(4, 4)),
        "no output": lambda: net.unshard(torch.randn(4, 4)),
        "traced": lambda: torch.jit.trace(net, box),
        "sizes": lambda: odd(odd.shard(torch.randn(1, 1, 7, 6, 4))),
        "a bare output": lambda: bare(box),
        "a turned output": lambda: turned(box),
        "different tiles": lambda: fresh(fresh.shard(whole + mesh.seq.index)),
    }
    words = {}
    for name, act in tries.items():
        with pytest.raises(ValueError) as error:
            act()
        words[name] = str(error.value)
    return words


def test_misuse_is_refused_in_words_on_all_ranks(ranks: Callable[..., list]) -> None:
    first, second = ranks(2, misuse)
    assert first == second
    assert "every rank gave the same tensor (1, 1, 8, 6, 4): give its own box, net.shard(whole)" in first["whole"]
    assert "(3, 6, 4) and (4, 6, 4) on the ranks are not the boxes of one volume" in first["not the grid's"]
    assert "expected a box of (batch, channels, W, D, H), got [(1, 4)]" in first["channels only"]
    assert "(1, 6, 4) cannot be cut into 2 boxes" in first["too small"]
    assert "shard: expected an image (batch, channels, W, D, H)" in first["no image"]
    assert "unshard: expected an output" in first["no output"]
    assert "cannot be exported or traced: export the network of one process" in first["traced"]
    assert "extents (7, 6, 4) and (8, 6, 4): the sizes differ, as they would in one process" in first["sizes"]
    assert "returned a bare tensor (1, 2, 4, 6, 4) of the size of one box" in first["a bare output"]
    assert "(1, 2, 6, 8, 4) whose last axes are not those of the image" in first["a turned output"]
    assert "ranks 0, 1 shares one tile, but rank 1 cut another than rank 0" in first["different tiles"]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.Conv3d(1, 1, 1), nn.SyncBatchNorm(1)), "1, a SyncBatchNorm, sends its own messages"),
        (nn.Linear(2, 2), "has no layer that tells its dimensions: give spatial_dims"),
        (nn.Conv1d(1, 1, 1), "volumes have 2 or 3 dimensions"),
        (convert(small()), "is converted already"),
        (nn.Sequential(nn.Conv3d(1, 1, 1), convert(small())), "1, a Converted.*, is converted already"),
    ],
)
def test_what_cannot_be_converted_is_refused_when_converting(module: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert(module)


class Pyramid(nn.Conv3d):
    """Returns two scales: a box of the finer has the sides of the coarser, which every rank holds whole."""

    def forward(self, x: Tensor) -> list[Tensor]:
        y = super().forward(x)
        return [F.avg_pool3d(y, 4), F.avg_pool3d(y, 8)]


def scales(mesh: Mesh) -> list[Tensor]:
    torch.manual_seed(0)
    net = convert(Pyramid(1, 2, 1).double(), mesh.seq)
    return [y.detach() for y in net.on_whole(torch.randn(1, 1, 8, 8, 8, dtype=torch.float64))]


def test_a_box_is_no_whole_of_the_same_sides(ranks: Callable[..., list]) -> None:
    wants = scales(alone_mesh())
    for found in ranks(8, scales):
        for y, want in zip(found, wants):
            torch.testing.assert_close(y, want)


def stacked(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
    """Returns outputs that a network stacks, joined; a loss of them; and windows of an image, for one number."""
    torch.manual_seed(0)
    net = convert(Stacking().double(), mesh.seq)
    model = ParallelModel(net, mesh)
    image, label = torch.randn(1, 1, 12, 10, dtype=torch.float64), torch.randint(3, (1, 12, 10))
    loss = model.loss(lambda x, y: sum(F.cross_entropy(each, y) for each in x.unbind(1)), image, label)
    return net.on_whole(image).detach(), loss.detach(), predict(model.eval(), torch.ones(1, 14, 9).double(), 8).detach()


class Stacking(nn.Module):
    """A network of two dimensions that stacks two outputs in training, as MONAI's DynUNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(1, 3, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.first(x), self.second(x)], 1) if self.training else self.first(x)


def test_outputs_that_a_network_stacks_are_joined_and_a_plane_has_square_windows(ranks: Callable[..., list]) -> None:
    outputs, loss, windows = stacked(alone_mesh())
    assert outputs.shape == (1, 2, 3, 12, 10) and windows.shape == (3, 14, 9)
    for found in ranks(2, stacked):
        assert all(relative(*pair) < 1e-12 for pair in zip(found, (outputs, loss, windows)))
