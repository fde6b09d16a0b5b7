"""MONAI's own classes give the same outputs as ours with the same weights, on one rank and on four."""

import sys

import pytest
import torch
from torch import Tensor, nn

import seqpar
from seqpar.parallel.mesh import Mesh
from seqpar.weights.monai_weights import export_monai, load_monai, monai_names
from tests.support import references
from tests.support.foreign_weights import HEADS, TILE, image, out, tiny_unetr
from tests.support.marks import long_case
from tests.support.ranks import alone_mesh, relative, summed

SIZES = {"feature_size": 3, "hidden_size": 24, "mlp_dim": 40, "num_heads": HEADS}
PLANE = (48, 32)


def monai_net(dtype: torch.dtype, **options: object) -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(0)
    net = nets.UNETR(2, 3, options.pop("img_size", TILE), **SIZES, **options)
    net = net.to(dtype).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return net


@pytest.mark.parametrize("options", [{}, {"proj_type": "perceptron"}, {"qkv_bias": True}])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 5e-5)])
def test_monai_itself_agrees(options: dict, dtype: torch.dtype, bound: float) -> None:
    theirs, x = monai_net(dtype, **options), image(*TILE, dtype=dtype)
    ours = load_monai(theirs.state_dict(), TILE, HEADS)
    assert (out(ours, x) - out(theirs, x)).abs().max() < bound


@pytest.mark.parametrize("bias", [False, True])
def test_monai_itself_loads_what_is_exported(bias: bool) -> None:
    theirs, x = monai_net(torch.float64, qkv_bias=bias), image(*TILE)
    version = sys.modules["monai"].__version__
    ours = load_monai(tiny_unetr(bias=bias), TILE, HEADS)
    theirs.load_state_dict(export_monai(ours, version))
    assert (out(ours, x) - out(theirs, x)).abs().max() < 1e-12
    encoder = ours.encoder
    vit = sys.modules["monai.networks.nets"].ViT(2, TILE, 16, 24, 40, 12, HEADS, qkv_bias=bias).double()
    vit.load_state_dict(export_monai(encoder, version))
    assert (out(encoder, x) - vit.eval()(x)[0]).abs().max() < 1e-12


def test_a_perceptron_vit_goes_there_and_back() -> None:
    vit = pytest.importorskip("monai.networks.nets").ViT(2, TILE, 16, 24, 40, 2, HEADS, "perceptron").double().eval()
    state = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in vit.state_dict().items()}
    vit.load_state_dict(state)
    encoder, x = load_monai(state, TILE, HEADS), image(*TILE)
    assert isinstance(encoder, seqpar.SeqParViT) and (out(encoder, x) - vit(x)[0]).abs().max() < 1e-12
    back = export_monai(encoder, sys.modules["monai"].__version__, "perceptron")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state if "cross_attn" not in name)


KINDS = {
    "perceptron": {"proj_type": "perceptron"},
    "batch norm": {"norm_name": "batch"},
    "no shortcuts": {"res_block": False},
    "batch norm without shortcuts": {"norm_name": "batch", "res_block": False},
    "two dimensions": {"img_size": PLANE, "spatial_dims": 2},
    "two dimensions, all else": {
        "img_size": PLANE, "spatial_dims": 2, "norm_name": "batch", "res_block": False, "proj_type": "perceptron",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_unetr_goes_there_and_back(kind: str) -> None:
    tile: tuple[int, ...] = KINDS[kind].get("img_size", TILE)  # type: ignore[assignment]
    theirs, x = monai_net(torch.float64, **KINDS[kind]), image(*tile)
    for buffer in theirs.buffers():  # running statistics that matter
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    ours = load_monai(state, tile, HEADS)
    assert (out(ours, x) - out(theirs, x)).abs().max() < 1e-12
    back = export_monai(ours, sys.modules["monai"].__version__, str(KINDS[kind].get("proj_type", "conv")))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state if "cross_attn" not in name)  # MONAI's idle ones
    ours.train(), theirs.train()
    assert (ours(x) - theirs(x)).abs().max() < 1e-12


def statistics_spread(mesh: Mesh, state: references.State, x: Tensor) -> tuple[Tensor, Tensor]:
    net = load_monai(state, TILE, HEADS, mesh.seq, "halo").train()
    net.on_whole(x).square().sum().backward()
    return net.decoder.stem.activate1.norm.running_mean, net.decoder.stem.conv1.weight.grad / mesh.seq.size


def test_batch_norm_sums_over_all_boxes(ranks) -> None:
    theirs, x = monai_net(torch.float64, norm_name="batch").train(), image(*TILE)
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    theirs(x).square().sum().backward()
    layer = theirs.encoder1.layer
    found = ranks(2, statistics_spread, state, x)
    for mean, _ in found:
        assert (mean - layer.norm1.running_mean).abs().max() < 1e-12
    total = sum(gradient for _, gradient in found)
    assert (total - layer.conv1.conv.weight.grad).abs().max() < 1e-9 * total.abs().max()


SMALL = {"in_channels": 1, "out_channels": 2, "feature_size": 2, "hidden_size": 24, "mlp_dim": 24, "num_heads": 2}
OTHERS = {
    "SwinUNETR": (
        {"in_channels": 1, "out_channels": 2, "feature_size": 12},
        "weights of MONAI's SwinUNETR, which neither load_monai nor seqpar.convert supports: use UNETR",
    ),
    "UNETR of two dimensions for a tile of three": (
        SMALL | {"img_size": (32, 32), "spatial_dims": 2},
        r"tile=\(32, 32, 16\): the weights are for images of 2 dimensions: give 2 numbers",
    ),
    "UNETR with group norm": (
        SMALL | {"img_size": TILE, "norm_name": ("group", {"num_groups": 1})},
        "whose norm is neither .*: load them into MONAI's own",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_refused_in_a_sentence_that_says_what_works(name: str) -> None:
    nets = pytest.importorskip("monai.networks.nets")
    options, words = OTHERS[name]
    with pytest.raises(ValueError, match=words):
        load_monai(getattr(nets, name.split()[0])(**options).state_dict(), TILE, HEADS)


def plane_gradients(mesh: Mesh, state: references.State, x: Tensor, label: Tensor, mode: str) -> list[Tensor]:
    """Returns logits, loss and gradients of a UNETR in two dimensions, whole on every rank."""
    net = load_monai(state, PLANE, HEADS, mesh.seq, mode)
    loss = net.loss(seqpar.DiceCE(), x, label)
    loss.backward()
    found = [loss.detach()[None], *(p.grad for p in net.parameters() if p.grad is not None)]
    if mesh.seq.size > 1:
        found = summed(found, mesh.seq)
    return [net.on_whole(x).detach(), *(tensor / mesh.seq.size for tensor in found)]


@pytest.mark.parametrize(
    "world, modes", [(1, ["gather"]), (2, ["gather", "halo", "swap"]), (3, ["halo"]), (4, ["halo"])]
)
def test_a_plane_trains_on_any_number_of_ranks(ranks, world: int, modes: list[str]) -> None:
    theirs, x = monai_net(torch.float64, img_size=PLANE, spatial_dims=2), image(*PLANE)
    label = torch.randint(3, (2, *PLANE), generator=torch.Generator().manual_seed(1))
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    logits = theirs(x)
    loss = seqpar.DiceCE()(logits, label)
    loss.backward()
    learned, names = dict(theirs.named_parameters()), monai_names(12, False, 4, True)
    ours = {our: learned[their].grad for their, our in names.items()}
    for mode in modes:
        for found in ranks(world, plane_gradients, state, x, label, mode):
            expected = [
                logits,
                loss[None],
                *(ours[name] for name, _ in load_monai(state, PLANE, HEADS).named_parameters()),
            ]
            assert len(found) == len(expected) > 100
            assert relative(found[0], logits) < 1e-12 and relative(found[1], loss[None]) < 1e-12
            for one, other in zip(found[2:], expected[2:]):
                assert relative(one, other.view_as(one)) < 1e-10


def test_our_unetr_of_a_plane_is_monais() -> None:
    net = seqpar.UNETR(2, 3, PLANE, *SIZES.values()).double()  # type: ignore[arg-type]
    theirs = monai_net(torch.float64, img_size=PLANE, spatial_dims=2)
    theirs.load_state_dict(export_monai(net, sys.modules["monai"].__version__))
    assert (out(net, image(*PLANE)) - out(theirs, image(*PLANE))).abs().max() < 1e-12
    picture, model = torch.randn(1, 2, 60, 40, dtype=torch.float64), seqpar.ParallelModel(net, alone_mesh()).eval()
    whole = sys.modules["monai"].inferers.sliding_window_inference(picture, PLANE, 2, theirs, overlap=0.25)
    assert relative(seqpar.predict(model, picture, PLANE), whole) < 1e-12


def spread_outputs(
    mesh: Mesh, state: references.State, x: Tensor, modes: list[str], split: str
) -> list[tuple[Tensor, Tensor]]:
    """Returns a rank's logits in each mode, with the numbers of the voxels that they belong to."""
    outputs = []
    for mode in modes:
        net = load_monai(state, x.shape[2:], HEADS, mesh.seq, mode, split)
        voxels = torch.arange(x[:, 0].numel()).view_as(x[:, 0])
        layout = net.encoder.layout
        logits = out(net, layout.cut(x, mesh.seq.index))
        outputs.append((logits, net.arrange(layout.cut(voxels, mesh.seq.index))))
    return outputs


def check_spread(ranks, state: references.State, x: Tensor, whole: Tensor, split: str, bound: float) -> None:
    """Holds the logits of four ranks against those of the whole tile, ``b k W D H``; none may be left out."""
    modes = ["gather", "halo", "swap"]
    rows = whole.movedim(1, -1).flatten(0, 3)  # voxels of all samples, classes
    seen: dict[str, list[Tensor]] = {mode: [] for mode in modes}
    for outputs in ranks(4, spread_outputs, state, x, modes, split):
        for mode, (logits, voxels) in zip(modes, outputs):
            assert (logits.movedim(1, -1) - rows[voxels]).abs().max() < bound, mode
            seen[mode].append(voxels.flatten())
    assert all(torch.cat(voxels).unique().numel() == len(rows) for voxels in seen.values())


@pytest.mark.parametrize("split", ["spatial", long_case("ordered")])
def test_loaded_weights_give_the_reference_output_on_four_ranks(ranks, split: str) -> None:
    state, x = tiny_unetr(), torch.cat([image(*TILE)] * 2)
    check_spread(ranks, state, x, references.unetr(state, x, HEADS), split, 1e-12)


def test_monai_itself_agrees_on_four_ranks_in_float32(ranks) -> None:
    """In float64 the reference does, above."""
    theirs, x = monai_net(torch.float32), torch.cat([image(*TILE, dtype=torch.float32)] * 2)
    check_spread(ranks, theirs.state_dict(), x, out(theirs, x), "spatial", 5e-5)
