"""Networks with groups inside pass through torch's and MONAI's tools, and any loss has the value of one process."""

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.data import MetaTensor
from monai.losses import DiceFocalLoss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from seqpar import DiceCE, LossGroups, SegmentationNet, SeqParViT, UnetrDecoder, choose_mode, compile_blocks, convert
from seqpar.decoders import nnunet
from seqpar.losses import DeepSupervision
from seqpar.losses.tile_network import TileNetwork
from seqpar.models.cell_network import VolumeNet
from seqpar.models.network import Network
from seqpar.parallel.mesh import Mesh
from seqpar.spatial import BoxGrid
from tests.support.ranks import alone_mesh, relative, run_ranks, summed

TILE = (16, 16, 24)


def unetr(mode: str = "halo", group: Any = None, **options: Any) -> SegmentationNet:
    torch.manual_seed(0)
    encoder = SeqParViT(1, TILE, 8, embed_dim=12, depth=2, num_heads=2, group=group, **options)
    decoder = UnetrDecoder(1, 12, 3, 8, width=2)
    return SegmentationNet(encoder, decoder, choose_mode(mode, encoder.group), taps=(0, 1)).double()


def unet(group: Any = None) -> VolumeNet:
    torch.manual_seed(0)
    return VolumeNet(nnunet(1, 3, TILE, features=2), TILE, choose_mode("halo", group)).double()


def tiles(batch: int = 2) -> tuple[Tensor, Tensor]:
    toss = torch.Generator().manual_seed(1)
    image = torch.randn(batch, 1, *TILE, generator=toss, dtype=torch.float64)
    return image, torch.randint(3, (batch, *TILE), generator=toss)


def part_of(net: Network, whole: Tensor) -> Tensor:
    return net.layout.cut(whole, net.group.index)


def copies_of(net: Network) -> dict[str, Any]:
    letter = io.BytesIO()
    torch.save(net, letter)
    letter.seek(0)
    ema = AveragedModel(net)
    ema.update_parameters(net)
    return {
        "deepcopy": copy.deepcopy(net),
        "pickle": pickle.loads(pickle.dumps(net)),
        "torch.save": torch.load(letter, weights_only=False),
        "EMA": ema,
    }


def check_copies(mesh: Mesh) -> dict[str, bool]:
    """Returns for each network and tool whether the copy computes the same bits."""
    same = {}
    torchs = mesh.seq.handle  # torch's own group, where there are several ranks
    for name, net in {
        "UNETR": unetr("halo", torchs),
        "rotary": unetr("swap", mesh.seq, positions="rope"),
        "U-Net": unet(mesh.seq),
    }.items():
        part = part_of(net, tiles()[0])
        expected = net(part)
        for tool, other in copies_of(net).items():
            same[f"{name} {tool}"] = torch.equal(other(part), expected)
    if mesh.world.size > 1:
        model = DistributedDataParallel(unetr("halo", mesh.seq))
        same["EMA of DDP"] = torch.equal(
            AveragedModel(model)(part_of(model.module, tiles()[0])), model(part_of(model.module, tiles()[0]))
        )
    return same


def as_meta(mesh: Mesh) -> list[str]:
    """Returns the types of what MONAI's tensors become, where they do not give the bits of plain ones."""
    faults = []
    for net in (unetr("halo", mesh.seq), unetr("swap", mesh.seq), unetr("gather", mesh.seq), unet(mesh.seq)):
        results = []
        for kind in (Tensor, MetaTensor):
            image, label = (x if kind is Tensor else MetaTensor(x) for x in tiles())
            logits = net(part_of(net, image) if mesh.seq.size > 1 else image)
            loss = net.loss(DiceCE(), image, label)
            results.append((type(logits), type(loss), float(loss.detach())))
        if results[0] != results[1]:
            faults.append(f"{net.mode.name}: {results}")
    return faults


def losses_of(mesh: Mesh) -> dict[str, tuple[float, list[Tensor]]]:
    """Returns this rank's loss and the mean gradients, for losses of ours, of MONAI and a function, in each mode."""
    monai = DiceFocalLoss(to_onehot_y=True, softmax=True, include_background=False)
    every = {
        "ours": DiceCE(),
        "MONAI's": monai,
        "a function": lambda x, y: (x.softmax(1)[:, 1].mean() - (y == 1).double().mean()) ** 2,
    }
    found = {}
    for mode in ("gather", "halo", "swap"):
        for name, loss_fn in every.items():
            for given in ("whole", "part"):
                if name == "MONAI's" and given == "part":
                    continue  # it needs the channel
                net = unetr(mode, mesh.seq)
                image, label = tiles()
                if name == "MONAI's":
                    label = label[:, None]
                shares = (image, label) if given == "whole" else (part_of(net, image), part_of(net, label))
                loss = net.loss(loss_fn, *shares)
                loss.backward()
                grads = [p.grad for p in net.parameters() if p.grad is not None]
                sums = summed(grads, mesh.seq) if mesh.seq.size > 1 else grads
                found[f"{mode} {name} {given}"] = float(loss.detach()), [g / mesh.seq.size for g in sums]
    return found


def refusals(mesh: Mesh) -> dict[str, str]:
    """Returns what is said of tiles that differ between ranks, and of a box without its grid."""
    texts = {}
    for name, net in {"UNETR": unetr("halo", mesh.seq), "U-Net": unet(mesh.seq)}.items():
        image = tiles()[0] + (mesh.seq.index == 1)
        with pytest.raises(ValueError) as caught:
            net(part_of(net, image))
        texts[name] = str(caught.value)
        net(part_of(net, tiles()[0]))  # it is noticed once
    box = nnunet(1, 3, TILE, features=2, group=mesh.seq)
    grid = BoxGrid(((0, 8, 16), (0, 16), (0, 24)), mesh.seq)
    with pytest.raises(ValueError) as caught:
        box(torch.zeros(1, 1, 8, 16, 24))
    texts["box"] = str(caught.value)
    assert box(torch.zeros(1, 1, 8, 16, 24), grid).shape == (1, 3, 8, 16, 24)
    return texts | lone_boxes(mesh)


def lone_boxes(mesh: Mesh) -> dict[str, str]:
    """Returns what is said of a loss of a box that does not know the other ranks."""
    nets: dict[str, TileNetwork] = {"UNETR": unetr("halo", mesh.seq), "VolumeNet": unet(mesh.seq)}
    nets["UNet"] = nnunet(1, 3, TILE, features=2, group=mesh.seq).double()
    nets["converted"] = convert(nn.Conv3d(1, 3, 3, padding=1).double(), mesh.seq)
    image, label = tiles()
    texts = {}
    for name, net in nets.items():
        logits, target = net(net.shard(image)), net.shard(label)
        for loss_fn, given in ((DiceCE(), logits), (DeepSupervision(DiceCE(), [(1, 1, 1)]), [logits])):
            with pytest.raises(ValueError) as caught:
                loss_fn(given, target)
            texts[f"{name}, {type(loss_fn).__name__}"] = str(caught.value)
            loss_fn(given, target, LossGroups(mesh.seq))
        DiceCE()(net.unshard(logits), label)  # the whole is what it seems
    for mode in ("gather", "swap"):
        net = unetr(mode, mesh.seq)
        DiceCE()(net(net.shard(image)), net.shard(label))  # whole tiles, or whole samples
    return texts


def run(mesh: Mesh) -> tuple[dict[str, bool], list[str], dict[str, Any], dict[str, str]]:
    return check_copies(mesh), as_meta(mesh), losses_of(mesh), refusals(mesh) if mesh.seq.size > 1 else {}


@pytest.fixture(scope="module")
def alone() -> Any:
    return run(alone_mesh())


@pytest.fixture(scope="module")
def two() -> list:
    return run_ranks(2, run, timeout=240)


def test_copies_compute_the_same(alone: Any, two: list) -> None:
    for same, *_ in (alone, *two):
        assert len(same) >= 12 and all(same.values()), same
    assert "EMA of DDP" in two[0][0]


def test_monais_tensors_pass_everywhere(alone: Any, two: list) -> None:
    assert [faults for _, faults, *_ in (alone, *two)] == [[]] * 3


def test_any_loss_is_that_of_one_process_in_each_mode(alone: Any, two: list) -> None:
    expected = alone[2]
    assert len(expected) == 15
    for _, _, found, _ in two:
        for name, (loss, grads) in found.items():
            assert loss == pytest.approx(expected[name][0], rel=1e-12), name
            assert len(grads) > 20
            for ours, theirs in zip(grads, expected[name][1]):
                assert relative(ours, theirs) < 1e-9, name  # of gradients that are nearly zero too


def test_different_tiles_and_a_box_without_its_grid_are_refused_on_all_ranks(two: list) -> None:
    for *_, texts in two:
        for name in ("UNETR", "U-Net"):
            assert "the seq group of ranks 0, 1 shares one tile, but rank 1 cut another than rank 0" in texts[name]
        assert "came without its grid" in texts["box"] and "or grid=" in texts["box"]


def test_a_loss_of_a_box_that_does_not_know_the_other_ranks_is_refused(two: list) -> None:
    for *_, texts in two:
        alone = {name: text for name, text in texts.items() if "," in name}
        assert len(alone) == 8
        for name, text in alone.items():
            assert "came without loss_groups, and are those of this rank's box alone: call net.loss(" in text, name


def test_a_pickle_of_several_ranks_says_where_it_can_be_loaded(tmp_path: Path) -> None:
    def save(mesh: Mesh) -> bytes:
        return pickle.dumps(mesh.seq)

    (letter, _) = run_ranks(2, save)
    with pytest.raises(ValueError, match="saved in a seq group of ranks 0, 1, which does not exist here"):
        pickle.loads(letter)


@pytest.mark.parametrize(
    "make", [lambda: unetr().encoder, unetr, lambda: unet().unet], ids=["encoder", "UNETR", "U-Net"]
)
def test_a_network_of_one_process_is_exported_with_its_tile(make: Any) -> None:
    net, image = make().eval(), tiles(1)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(net, (image,))
    other = torch.randn_like(image)
    assert relative(program.module()(other), net(other)) < 1e-12


def compiled(mesh: Mesh) -> tuple[int, float, list[float]]:
    """Returns the number of graphs and how far output and gradients are from those that are not compiled."""
    from torch._dynamo.utils import counters

    plain, net = unetr("halo", mesh.seq), unetr("halo", mesh.seq)
    compile_blocks(net, backend="aot_eager", fullgraph=True)
    outs = []
    for each in (plain, net):
        out = each(part_of(each, tiles()[0]))
        out.square().sum().backward()
        outs.append(out)
    pairs = zip(plain.named_parameters(), net.named_parameters())
    apart = [
        relative(b.grad, a.grad) for (m, a), (n, b) in pairs if a.grad is not None and b.grad is not None and m == n
    ]
    return counters["stats"]["unique_graphs"], relative(outs[1], outs[0]), apart


def test_a_network_without_blocks_is_not_compiled() -> None:
    with pytest.raises(ValueError, match="VolumeNet has no transformer blocks"):
        compile_blocks(unet())


@pytest.mark.started
def test_compiled_blocks_are_whole_graphs_that_compute_the_same() -> None:
    for graphs, out, apart in (*run_ranks(2, compiled, timeout=240), compiled(alone_mesh())):
        assert graphs > 0 and out < 1e-12 and len(apart) > 20 and max(apart) < 1e-10
