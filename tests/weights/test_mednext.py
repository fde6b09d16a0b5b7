"""Weights of MedNeXt's package compute here what they compute there, whole and on boxes, and go back as they came."""

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.cli.export import act as export
from seqpar.data.errors import DataError
from seqpar.models.build import build_network
from seqpar.models.cell_network import VolumeNet
from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Group, Mesh
from seqpar.settings.config import Config
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.halos import Halos
from seqpar.spatial.norms import InstanceNorm3d
from seqpar.weights.nnunet_weights import _mednext_names, export_mednext, export_nnunet, load_mednext
from seqpar.weights.pretrained import load_pretrained
from seqpar.weights.weight_files import State, read_weights, write_weights
from tests.support.boxes import box, numbers
from tests.support.plain_mednext import plain_mednext
from tests.support.predictions import make_run
from tests.support.ranks import relative

TILE = (32, 32, 16)
CONFIG = Config(network="mednext-b", features=2, tile=TILE, precision="fp64", deep_supervision=True)


def slopes(logits: list[Tensor]) -> list[Tensor]:
    return [numbers(7 + level, *x.shape) for level, x in enumerate(logits)]


def reference(kernel: int) -> tuple[State, list[Tensor], dict[str, Tensor]]:
    """Returns the reference's weights, its logits, and the gradients of image and weights."""
    net, image = plain_mednext(kernel), numbers(1, 1, 2, *TILE).requires_grad_()
    logits = net(image)
    sum((x * slope).sum() for x, slope in zip(logits, slopes(logits))).backward()
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return net.state_dict(), [x.detach() for x in logits], {**grads, "image": image.grad}  # type: ignore[dict-item]


def gaps(mesh: Mesh, kernel: int, want: tuple[State, list[Tensor], dict[str, Tensor]]) -> dict[str, float]:
    """Returns relative differences; of a bias before a norm, whose gradient is rounding, to the largest gradient."""
    state, logits, grads = want
    net = load_mednext(state, TILE, deep_supervision=True, group=mesh.seq, mode="halo").train()
    grid = BoxGrid(net.layout.voxel_cuts(net.layout.patch), mesh.seq)
    image = numbers(1, 1, 2, *TILE)[box(grid)].requires_grad_()
    got = net.unet.on_boxes(image, grid)
    boxes = [box(at) for _, at in got if at is not None]
    sum((x * slope[at]).sum() for (x, _), slope, at in zip(got, slopes(logits), boxes)).backward()
    found = {f"level {n}": relative(x.detach(), y[at]) for n, ((x, _), y, at) in enumerate(zip(got, logits, boxes))}
    assert image.grad is not None and len(got) == len(logits) == 5
    found["image"] = relative(image.grad, grads["image"][box(grid)])
    own, largest = dict(net.unet.named_parameters()), max(float(grad.abs().max()) for grad in grads.values())
    names = _mednext_names(net.unet)
    assert {*names.values(), "image"} == {*grads}
    for ours, theirs in names.items():
        grad, expected = all_reduce(own[ours].grad.clone(), mesh.world), grads[theirs]
        grad = grad.transpose(0, 1) if theirs.startswith("out_") and grad.ndim == 5 else grad
        scale = largest if theirs.endswith("conv1.bias") else float(expected.abs().max())
        found[theirs] = float((grad - expected).abs().max()) / scale
    return found


@pytest.mark.parametrize(("world", "kernels"), [(1, (3,)), (2, (5,)), (4, (3,))])
def test_outputs_and_gradients_are_the_references(
    world: int, kernels: tuple[int, ...], ranks: Callable[..., list]
) -> None:
    for kernel in kernels:
        for found in ranks(world, gaps, kernel, reference(kernel)):
            assert max(found.values()) < 1e-12, (kernel, max(found, key=found.__getitem__), found)


def gaps_of_controls(mesh: Mesh, want: tuple[State, list[Tensor], dict[str, Tensor]]) -> list[float]:
    """Returns the gaps of the finest logits with norms of each box alone, and with halos that are short by one."""
    opened, normed = Halos.open, InstanceNorm3d.forward

    def short(self, x, while_waiting=None):
        window = opened(self, x, while_waiting)
        return window.index_fill(2, torch.tensor([-1 if mesh.seq.index == 0 else 0]) % window.shape[2], 0.0)

    def alone(self, x, grid=None, slope=None):
        return normed(self, x, None, slope)[0], grid

    found = []
    for where, name, control in ((InstanceNorm3d, "forward", alone), (Halos, "open", short)):
        with patch.object(where, name, control):
            found.append(gaps(mesh, 3, want)["level 0"])
    return found


def test_norms_of_a_box_alone_and_short_halos_are_another_function(ranks: Callable[..., list]) -> None:
    assert all(min(found) > 1e-4 for found in ranks(2, gaps_of_controls, reference(3)))


@pytest.mark.parametrize("supervised", [False, True])
def test_weights_go_back_as_the_package_loads_them_strictly(supervised: bool) -> None:
    theirs = plain_mednext(supervised=supervised)
    state = export_mednext(load_mednext(theirs.state_dict(), TILE))
    other = plain_mednext(supervised=supervised, seed=1)
    other.load_state_dict(state, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), theirs.parameters()))
    assert all(tensor.is_contiguous() for tensor in state.values())


def started(path: Path, config: Config = CONFIG) -> tuple[VolumeNet, str]:
    config = replace(config, weights=str(path))
    net = build_network(config, 2, 3, Group("seq")).double()
    assert isinstance(net, VolumeNet)
    return net, load_pretrained(net, config)


def test_a_run_starts_from_them_in_the_axes_of_its_images_and_gives_them_back(tmp_path: Path) -> None:
    theirs, file = plain_mednext(), tmp_path / "model_final_checkpoint.model"
    torch.save({"epoch": 1, "state_dict": theirs.state_dict(), "best_stuff": [0.5, None]}, file)
    net, line = started(file)
    assert line.endswith("(MedNeXt): 236 of 236 tensors"), line
    image = numbers(1, 1, 2, *TILE)
    turned = theirs(image.permute(0, 1, 4, 3, 2))
    assert all(relative(a, b.permute(0, 1, 4, 3, 2)) < 1e-12 for a, b in zip(net.train()(image), turned))
    assert relative(net(image)[0], theirs(image)[0]) > 1e-3, "the control"
    back = export_mednext(net)
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.state_dict().items())
    assert len(back) == 237


def test_kernels_of_3_become_kernels_of_5(tmp_path: Path) -> None:
    theirs, file, ours = plain_mednext(), tmp_path / "theirs.pth", tmp_path / "ours.safetensors"
    torch.save(theirs.state_dict(), file)
    write_weights(ours, started(file)[0], {"network": "mednext-b"})
    for net, line in (started(path, replace(CONFIG, network="mednext-b-k5")) for path in (file, ours)):
        assert "; kernels of 3 enlarged trilinearly to 5 (UpKern)" in line
        got = export_mednext(net)
        for name, tensor in theirs.state_dict().items():
            enlarged = name.endswith("conv1.weight")
            want = F.interpolate(tensor, (5, 5, 5), mode="trilinear") if enlarged else tensor
            assert relative(got[name], want) < 1e-12, name
    larger = export_mednext(load_mednext(theirs.state_dict(), TILE, kernel=5))
    assert all(relative(larger[name], tensor) < 1e-12 for name, tensor in got.items())
    with pytest.raises(ValueError, match="kernel=3: these weights have kernels of 5"):
        load_mednext(larger, TILE, kernel=3)


def test_what_does_not_fit_is_refused_by_what_is_needed(tmp_path: Path) -> None:
    state, file = plain_mednext(supervised=False).state_dict(), tmp_path / "weights.pth"
    torch.save(plain_mednext(5).state_dict(), file)
    with pytest.raises(ValueError, match="do not fit the U-Net: .*; they need --network mednext-b-k5 --features 2$"):
        started(file)
    with pytest.raises(ValueError, match="no logits of coarser levels"):
        load_mednext(state, TILE, deep_supervision=True)
    with pytest.raises(ValueError, match=r"first version; unknown: enc_block_0\.0\.grn_beta"):
        load_mednext({**state, "enc_block_0.0.grn_beta": torch.zeros(1, 4, 1, 1, 1)}, TILE)
    with pytest.raises(ValueError, match="three-dimensional MedNeXt: stem.weight missing or of another shape"):
        load_mednext({**state, "stem.weight": state["stem.weight"][..., 0]}, TILE)
    with pytest.raises(ValueError, match="nnU-Net has no network with gelu, "):
        export_nnunet(load_mednext(state, TILE))
    batch = build_network(replace(CONFIG, norm="batch"), 2, 3, Group("seq"))
    for net in (batch, build_network(replace(CONFIG, network="unet-lamp", tile=(32,) * 3), 2, 3, Group("seq"))):
        with pytest.raises(ValueError, match="no MedNeXt with instance norm"):
            export_mednext(net)


def test_a_run_is_exported_for_its_package_and_nothing_is_overwritten(tmp_path: Path) -> None:
    run, file = make_run(tmp_path / "run", config=replace(CONFIG, precision="fp32")), tmp_path / "weights.pth"
    assert export([str(run), str(file)]) == 0
    net = load_mednext(file, TILE, deep_supervision=True)
    assert len(read_weights(file)) == 237 and len(net.unet.outputs) == 5
    with pytest.raises(DataError, match="is there already"):
        export([str(run), str(file)])
    with pytest.raises(ValueError, match="network mednext-b, which nnU-Net does not build: .* a file OUT.pth"):
        export([str(run), str(tmp_path / "folder")])
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch("pathlib.Path.write_bytes", side_effect=full), pytest.raises(DataError, match=r"b.pth: cannot be"):
        export([str(run), str(tmp_path / "b.pth")])
    assert not [*tmp_path.glob("*b.pth*")]
