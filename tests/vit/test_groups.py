"""``group=`` takes what people have: our groups, torch's process groups, device meshes of one direction."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from seqpar import BoxGrid, DiceCE, LossGroups, SegmentationNet, SeqParViT, UnetrDecoder, as_group, choose_mode
from seqpar.parallel.mesh import Group, Mesh
from seqpar.spatial import BatchNorm3d
from tests.support.ranks import run_ranks

TILE, PATCH = (16, 16, 8), 8


def encoder_of(group: Any) -> SeqParViT:
    torch.manual_seed(0)
    return SeqParViT(1, TILE, PATCH, embed_dim=12, depth=1, num_heads=2, group=group)


def one_step(seq: Any, data: Any) -> list[Tensor]:
    """Returns loss and gradients of a network on boxes, and running statistics over ``data``."""
    encoder = encoder_of(seq)
    mode = choose_mode("halo", seq)
    net = SegmentationNet(encoder, UnetrDecoder(1, 12, 3, (PATCH,) * 3, width=4), mode, taps=(0, 0)).double()
    dice = torch.Generator().manual_seed(encoder.group.ranks[0])  # another tile in each group
    image = torch.randn(1, 1, *TILE, generator=dice, dtype=torch.float64)
    label = torch.randint(3, (1, *TILE), generator=dice)
    part, target = (encoder.layout.cut(whole, encoder.group.index) for whole in (image, label))
    norm = BatchNorm3d(1, data=data).double()
    norm(image)
    loss = DiceCE(batch_dice=True)(net(part), net.arrange(target), mode.loss_groups(data, 1))
    loss.backward()
    assert norm.running_mean is not None
    return [loss.detach(), norm.running_mean, *(p.grad for p in net.parameters() if p.grad is not None)]


def check_kinds(mesh: Mesh) -> dict[str, bool]:
    """Returns for torch's kinds of groups whether everything has the same bits as with ours."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "seq"))
    kinds: dict[str, tuple[Any, Any]] = {
        "process groups": (mesh.seq.handle, mesh.data.handle),
        "device meshes": (grid["seq"], grid["data"]),
    }
    ours = one_step(mesh.seq, mesh.data)
    same = {
        name: all(map(torch.equal, ours, one_step(seq, data))) and len(ours) > 20 for name, (seq, data) in kinds.items()
    }
    boxes = BoxGrid(((0, 8, 16), (0, 8)), grid["seq"])  # type: ignore[arg-type]
    same["a box grid"] = boxes.group.ranks == mesh.seq.ranks and boxes.place == (mesh.seq.index, 0)
    groups = LossGroups(grid["seq"], (mesh.data.handle,))  # type: ignore[arg-type]
    same["loss groups"] = (groups.voxels.ranks, groups.num_sample_ranks) == (mesh.seq.ranks, 2)  # type: ignore[union-attr]
    return same


def check_refusals(mesh: Mesh) -> list[str]:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "seq"))
    first = dist.new_group([0])  # the other ranks get what is no group
    texts = []
    for group in (grid, "seq", *([first] if mesh.world.index else [])):
        with pytest.raises(ValueError) as caught:
            encoder_of(group)
        texts.append(str(caught.value))
    return texts


def check_notice(mesh: Mesh) -> list[str]:
    """Returns what is said of training on several ranks: in evaluation, with a group, and without, twice."""
    texts = []
    for group, trains in ((None, False), (mesh.seq, True), (Group("seq"), True), (None, True)):
        encoder = encoder_of(group).train(trains)
        image = torch.zeros(1, 1, *TILE)
        part = encoder.layout.cut(image, encoder.group.index)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                encoder(part)
        texts.append(" | ".join(str(one.message) for one in caught))
    return texts


def run(mesh: Mesh) -> tuple[dict[str, bool], list[str], list[str]]:
    return check_kinds(mesh), check_refusals(mesh), check_notice(mesh)


@pytest.fixture(scope="module")
def results() -> list[tuple[dict[str, bool], list[str], list[str]]]:
    """What each of 2 x 2 ranks found."""
    return run_ranks(4, run, seqpar=2)


def test_torchs_process_groups_and_device_meshes_compute_the_same_bits_as_ours(results: list) -> None:
    for same, _, _ in results:
        assert len(same) == 4 and all(same.values()), same


def test_what_is_no_group_of_this_process_is_refused_with_what_is_needed(results: list) -> None:
    for rank, (_, texts, _) in enumerate(results):
        assert "got one of 2 dimensions" in texts[0] and "give mesh['seq']" in texts[0]
        assert (
            "a str is not a group of ranks: give group=mesh.seq of seqpar.init_mesh, torch's ProcessGroup" in texts[1]
        )
        assert len(texts) == (3 if rank else 2)
        assert all("does not contain this process" in text for text in texts[2:])


def test_training_on_several_ranks_without_a_group_is_noticed_once_on_the_first_rank(results: list) -> None:
    for rank, (_, _, (in_evaluation, shared, alone_on_purpose, unsaid)) in enumerate(results):
        assert in_evaluation == shared == alone_on_purpose == ""
        assert unsaid.count("trains on 4 ranks without group=: each computes everything") == (rank == 0)


def test_one_process_alone_has_nothing_to_notice(recwarn: pytest.WarningsRecorder) -> None:
    assert encoder_of(None)(torch.zeros(1, 1, *TILE)).shape == (1, 4, 12)
    assert as_group(None).size == 1 and not recwarn.list
