"""One object trains and predicts on several ranks as on one, whatever the network and the loss."""

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from monai.inferers import sliding_window_inference
from monai.losses import DiceFocalLoss
from monai.networks.nets import SegResNet
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import seqpar
from seqpar import DiceCE, ParallelModel, predict
from seqpar.decoders.unets import Architecture, Style, UNet, distmis, hou, lamp
from seqpar.losses import DeepSupervision, Loss, make_loss
from seqpar.losses.terms import Dice
from seqpar.losses.tile_network import SeenTiles, TileNetwork
from seqpar.parallel.mesh import Mesh
from tests.support.ranks import RanksFailed, alone_mesh, relative, run_ranks

TILE = (16, 16, 24)
LOSSES: dict[str, Any] = {
    "ours": DiceCE(),
    "Dice over the batch": Loss([Dice(True, True)]),
    "MONAI's": DiceFocalLoss(to_onehot_y=True, softmax=True),
    "a function": lambda x, y: (x.softmax(1)[:, 1:2].mean() - (y == 1).double().mean()) ** 2,
}
ONE_LOSS = {"swap": "MONAI's", "U-Net": "MONAI's"}  # what they add is how they gather


def networks(mesh: Mesh) -> Iterator[tuple[str, TileNetwork]]:
    def of_seed(net: nn.Module) -> Any:
        torch.manual_seed(0)
        for parameter in net.parameters():
            parameter.data.copy_(0.2 * torch.randn_like(parameter))
        return net.double()

    for mode in ("halo", "swap"):
        yield mode, of_seed(seqpar.UNETR(1, 3, TILE, 2, 12, 24, 2, patch=8, depth=2, mode=mode, group=mesh.seq))
    yield "U-Net", of_seed(UNet(Architecture.of(1, 3, (4, 8), style=Style(bias=False)), group=mesh.seq))
    plain = SegResNet(3, 8, 1, 3, blocks_down=(1, 1), blocks_up=(1,))
    yield "converted", of_seed(seqpar.convert(plain, mesh.seq))


def batch(number: int) -> tuple[Tensor, Tensor]:
    toss = torch.Generator().manual_seed(number)
    image = torch.randn(2, 1, *TILE, generator=toss, dtype=torch.float64)
    return image, torch.randint(3, (2, 1, *TILE), generator=toss)


def run(mesh: Mesh) -> tuple[dict[str, Any], ...]:
    """Returns loss and weights' gradients, images' ones, those of ``halves``, logits, and what is said of misuse."""
    trained, images = dict[str, list[Tensor]](), dict[str, Tensor]()
    predicted, texts = dict[str, list[Tensor]](), dict[str, str]()
    for name, net in networks(mesh):
        model = ParallelModel(net, mesh)
        for (kind, loss_fn), share in itertools.product(LOSSES.items(), (False, True, None)):
            if kind != ONE_LOSS.get(name, kind):
                continue
            model.zero_grad()
            image, label = batch(mesh.data.index)
            if share:
                label = label if name == "swap" else net.shard(label[:, 0])
                image = net.shard(image)
                if kind == "MONAI's" and label.ndim == 4:
                    continue  # it needs the channel
            if share is None and kind != "MONAI's":
                continue
            image.requires_grad_(not share)
            loss = model.loss(loss_fn, image, label) if share is not None else loss_fn(model(image), label)
            loss.backward()
            losses = loss.detach()[None].clone()
            if mesh.world.size > 1:
                torch.distributed.all_reduce(losses)
            gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
            if image.grad is not None:
                images[f"{name}, {kind}, {share}"] = image.grad
            trained[f"{name}, {kind}, {share}"] = [losses / mesh.world.size, *gradients]
        predicted[name] = predictions(model, mesh)
    if mesh.seq.size > 1:
        texts = misuse(model, mesh)
    return trained, images, halves(mesh), predicted, texts


def halves(mesh: Mesh) -> dict[str, list[Tensor]]:
    """Returns all weights' gradients in float32, and under autocast to bf16."""
    found = {}
    for name, net in networks(mesh):
        model, found[name] = ParallelModel(net.float(), mesh), list[Tensor]()
        image, label = batch(0)
        for casts in (False, True):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                loss = model.loss(DiceCE(), image.float(), label)
            loss.backward()
            found[name].append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    return found


def predictions(model: ParallelModel, mesh: Mesh) -> list[Tensor]:
    """Returns the logits of a volume by MONAI's windows and by ours."""
    toss = torch.Generator().manual_seed(5)
    volume = torch.randn(1, 1, 16, 15, 30, generator=toss, dtype=torch.float64)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    model.eval(), averaged.eval()
    monai = sliding_window_inference(volume, TILE, 1, model, overlap=0.25)
    own = [
        predict(model, volume, TILE),
        predict(model, volume[0], TILE, mesh=mesh)[None],
        torch.from_numpy(predict(model.net, volume.numpy(), TILE, batch=2)),
    ]
    with torch.no_grad():
        ema = sliding_window_inference(volume, TILE, 3, averaged, overlap=0.25, mode="gaussian")
    gaussian = predict(averaged, volume, TILE, weights="gaussian")
    model.train()
    return [monai.detach(), *own, ema, gaussian]


def misuse(model: ParallelModel, mesh: Mesh) -> dict[str, str]:
    net, (image, label) = model.net, batch(0)
    fresh = ParallelModel(seqpar.convert(SegResNet(3, 8, 1, 3, blocks_down=(1, 1), blocks_up=(1,)), mesh.seq), mesh)
    one = seqpar.UNETR(1, 3, TILE, 2, 12, 24, 2, patch=8, depth=2)
    shared = ParallelModel(seqpar.UNETR(1, 3, TILE, 2, 12, 24, 2, patch=8, depth=2, group=mesh.seq), mesh)
    unet, other = (ParallelModel(UNet(Architecture.of(1, 3, (4, 8)), group=mesh.seq), mesh) for _ in range(2))
    tries = {
        "different tiles": lambda: fresh.loss(DiceCE(), image.float() + mesh.seq.index, label),
        "different tiles, another's loss": lambda: unet(image.float() + mesh.seq.index),
        "different labels": lambda: other.loss(DiceCE(), image.float(), label.roll(mesh.seq.index, -1)),
        **dict(later(mesh, {"converted": fresh, "U-Net": unet, "UNETR": shared})),
        "a box for a tile": lambda: unet.net.shard(unet.net.shard(image.float())),
        "an array": lambda: model.loss(DiceCE(), image.numpy(), label),
        "another label": lambda: model.loss(DiceCE(), image, label[..., :8]),
        "a copy": lambda: copy.deepcopy(model).loss(DiceCE(), image, label),
        "another group": lambda: ParallelModel(one, mesh),
        "no mesh": lambda: ParallelModel(net),
        "not ours": lambda: ParallelModel(nn.Conv3d(1, 1, 1), mesh),
        "training": lambda: predict(net, image, TILE),
        "an unknown box": lambda: UNet(Architecture.of(1, 3, (4, 8)), group=mesh.seq).unshard(image),
    }

    def twice() -> None:
        with model.no_sync():
            kept = model.loss(DiceCE(), image, label)
            kept.backward(retain_graph=True)
            kept.backward()  # adds up on this rank, as asked
        loss = model.loss(DiceCE(), image, label)
        loss.backward(retain_graph=True)
        loss.backward()

    def wrong_labels(of: ParallelModel, loss_fn: Any, whole: bool) -> Callable[[], Any]:
        wrong = label.clone()
        wrong[..., -1, -1, -1] = 7  # in the second rank's box alone
        if not whole:
            wrong = of.net.shard(wrong[:, 0])
        return lambda: of.loss(loss_fn, image, wrong)

    def with_other_models() -> None:
        model.loss(DiceCE(), image, label).backward()
        ParallelModel(model.net, mesh).loss(DiceCE(), image, label).backward()  # the first of this one
        raise ValueError("trained by both")

    tries["other models"] = with_other_models
    tries["two backwards"] = twice
    tries["one wrong label"] = wrong_labels(model, DiceCE(), True)
    tries["one wrong share"] = wrong_labels(model, DiceCE(), False)
    texts = {}
    for name, act in tries.items():
        with pytest.raises(ValueError) as caught:
            act()
        texts[name] = str(caught.value)
    return texts


def later(mesh: Mesh, models: dict[str, ParallelModel]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields calls with different tiles, each after one with the same tile."""
    image, label = (x.float() if x.is_floating_point() else x for x in batch(0))
    zeros = torch.zeros(2, 1, *TILE[:2], TILE[2] + 8 * mesh.seq.index)
    for name, model in models.items():
        for what, given in {
            "tile": (image.roll(mesh.seq.index, -1), label),
            "label": (image, label.roll(mesh.seq.index, 2)),
            "size": (zeros, zeros.long()),
        }.items():

            def act(model: ParallelModel = model, given: tuple[Tensor, Tensor] = given) -> Any:
                model.train().loss(LOSSES["MONAI's"], image, label).backward()
                return model.loss(LOSSES["MONAI's"], *given)

            yield f"later {what}, {name}", act

        def predicts(model: ParallelModel = model) -> Any:
            with torch.no_grad():
                model.eval()(image)
                return model(image.roll(mesh.seq.index, -1))

        yield f"later volume, {name}", predicts


def wrong_in_one_group(mesh: Mesh) -> list[str]:
    """Returns what every rank is told of a label that one of two data groups has wrong, by two of ours and torch's."""
    net = seqpar.convert(SegResNet(3, 8, 1, 3, blocks_down=(1, 1), blocks_up=(1,)), mesh.seq)
    model, (image, label), texts = ParallelModel(net, mesh), batch(mesh.data.index), list[str]()
    label[..., -1, -1, -1] = 7 if mesh.data.index else 0
    weighted = DeepSupervision(make_loss("ce", class_weights=(1, 2, 3)), [(1, 1, 1)])  # counts before it adds
    with pytest.raises((ValueError, RuntimeError), match="out of bounds"):
        net.loss(weighted, image.float(), label, mesh.data)
    for loss_fn in (DiceCE(), nn.CrossEntropyLoss()):
        with pytest.raises(ValueError) as caught:
            model.loss(loss_fn, image.float(), label if isinstance(loss_fn, DiceCE) else label[:, 0])
        texts.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        model.loss(DiceCE(), image.float(), label[..., mesh.data.index :])
    return [*texts, str(caught.value)]


@pytest.fixture(scope="module")
def alone() -> Any:
    """One process, with the batches of both data ranks."""
    return run(alone_mesh())


@pytest.fixture(scope="module")
def two() -> list:
    return run_ranks(2, run, timeout=240)


def test_any_loss_and_its_gradients_are_those_of_one_process(alone: Any, two: list) -> None:
    expected = alone[0]
    for trained, *_ in two:
        assert trained.keys() == expected.keys() and len(trained) >= 16
        for name, found in trained.items():
            assert len(found) == len(expected[name]) > 8
            assert relative(found[0], expected[name][0]) < 1e-12, name
            scale = max(float(gradient.abs().max()) for gradient in expected[name][1:])
            for ours, theirs in zip(found[1:], expected[name][1:]):
                assert float((ours - theirs).abs().max()) < 1e-11 * scale, name


def test_the_gradient_of_a_whole_image_is_that_of_one_process_on_every_rank(alone: Any, two: list) -> None:
    for _, images, *_ in two:
        assert images.keys() == alone[1].keys() and len(images) >= 13
        for name, gradient in images.items():
            assert relative(gradient, alone[1][name]) < 1e-10, name


def test_bf16_is_as_far_from_float32_on_two_ranks_as_on_one(alone: Any, two: list) -> None:
    """Two ranks round other sums than one, so that single gradients differ, but they do not round more."""

    def error(half: Tensor, single: Tensor) -> float:
        return float((half - single).norm() / single.norm())

    for _, _, halved, *_ in two:
        for name, (single, half) in alone[2].items():
            assert error(halved[name][0], single) < 1e-4, name
            assert error(half, single) > 0.002, name
            assert 0.7 < error(halved[name][1], single) / error(half, single) < 1.4, name


def test_windows_of_monai_and_ours_agree_on_any_number_of_ranks(alone: Any, two: list) -> None:
    for *_, predicted, _ in (alone, *two):
        for name, (monai, *own, ema, gaussian) in predicted.items():
            assert max(relative(each, monai) for each in own) < 1e-12, name
            assert relative(gaussian, ema) < 1e-6  # float32 weights
            assert relative(monai, alone[3][name][0]) < 1e-11, name


def test_misuse_is_refused_in_words_on_all_ranks(two: list) -> None:
    (*_, first), (*_, second) = two
    assert "rank 1 cut another than rank 0" in first["different tiles"] == second["different tiles"]
    assert first["different tiles, another's loss"] == first["different labels"] == first["different tiles"]
    others = {name: text for name, text in first.items() if name.startswith("later")}
    assert len(others) == 12 and all(second[name] == text for name, text in others.items())
    for name, text in others.items():
        assert "the seq group of ranks 0, 1 shares one tile, but rank 1 cut another than rank 0" in text, name
        assert ("of another size" in text) == ("size" in name)
    assert "a second backward after one call of ParallelModel came" in first["two backwards"] == second["two backwards"]
    assert first["other models"] == second["other models"] == "trained by both"
    for words in (first["one wrong label"], first["one wrong share"]):
        assert words.startswith("label: rank 1: Target 7 is out of bounds. Give numbers of outputs")
    assert second["one wrong label"] == second["one wrong share"] == words.replace("rank 1: ", "")
    assert "is this rank's box already: give the whole tile" in first["a box for a tile"]
    assert first["an array"] == "ndarray: give a tensor, as torch.as_tensor makes one"
    assert "came with an image of extents (16, 16, 24), of which this rank has (8, 16, 24)" in first["another label"]
    assert "this is a copy" in first["a copy"] and "train ParallelModel(copy.net, mesh)" in first["a copy"]
    assert "shares tiles among 1 rank, but the mesh among 2" in first["another group"]
    assert "shares tiles among 2 ranks: give mesh=" in first["no mesh"]
    assert "net is a Conv3d: give a network of seqpar" in first["not ours"]
    assert "call model.eval() first" in first["training"]
    assert "that this network does not know" in first["an unknown box"]


def test_a_label_that_one_data_group_has_wrong_is_known_to_all() -> None:
    every = run_ranks(4, wrong_in_one_group, seqpar=2, timeout=100)  # a hang is killed
    for *values, shape in every:
        assert all("label: " in text and "Target 7 is out of bounds" in text for text in values), every
        assert "a label of shape (2, 1, 16, 16, 23) came with an image of extents (16, 16, 24)" in shape, every


def test_a_gpu_is_asked_rarely_for_the_tiles_of_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, seen = dict[int, int](), SeenTiles()
    for call in range(1, 50):

        def compare(fingerprint: Tensor, *_: Any, call: int = call) -> None:
            compared[call] = int(fingerprint[1])

        monkeypatch.setattr("seqpar.losses.tile_network.refuse_different_tiles", compare)
        seen.note(torch.ones(3))
        seen.compare(alone_mesh().seq, torch.device("cuda"))
    assert compared == {1: 1, 2: 1, 4: 2, 8: 4, 16: 8, 32: 16, 48: 16}


def call_alone(mesh: Mesh, other: str) -> None:
    """Calls the network on the first rank as in a validation, while the other rank does something else."""
    mesh.seq.watch.notice_s = 0.3
    model = ParallelModel(seqpar.convert(nn.Conv3d(1, 3, 3, padding=1), mesh.seq), mesh)
    image, label = torch.ones(1, 1, *TILE), torch.ones(1, *TILE, dtype=torch.int64)
    if other != "trains at once":
        model.loss(DiceCE(), image, label).backward()
    if not mesh.is_first and other == "is late":
        time.sleep(0.9)
    if mesh.is_first or other == "is late":
        with torch.no_grad():
            model.eval()(image)
    elif other.startswith("trains"):
        model.loss(DiceCE(), image, label)


ALONE = {
    "trains": r"rank 0 called the network in eval\(\) without gradients, but rank 1 waits in .* of the seq group of ",
    "trains at once": r"differently \(rank 0: eval\(\) without gradients; rank 1: train\(\) with gradients\): call it ",
    "ends": r"but rank 1 waits in the end of the world group of ranks 0, 1: every rank of a sequence group must ",
}


@pytest.mark.parametrize("other", ALONE)
def test_a_rank_that_validates_alone_hears_so_soon(other: str) -> None:
    with pytest.raises(RanksFailed, match=ALONE[other]):
        run_ranks(2, call_alone, other, timeout=30)


def test_a_rank_that_comes_late_to_validate_is_waited_for(capfd: pytest.CaptureFixture) -> None:
    run_ranks(2, call_alone, "is late", timeout=30)
    said = capfd.readouterr().err
    assert said.count("warning: rank 0 called the network in eval() without gradients, and waits for rank 1: ") == 1


def one_step_more(mesh: Mesh) -> None:
    mesh.seq.watch.notice_s = 0.3
    model = ParallelModel(seqpar.convert(nn.Conv3d(1, 3, 3, padding=1), mesh.seq), mesh)
    for _ in range(1 + mesh.seq.index):
        model.loss(DiceCE(), torch.ones(1, 1, *TILE), torch.ones(1, *TILE, dtype=torch.int64)).backward()


def test_a_rank_that_makes_one_step_more_says_which_has_ended(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(RanksFailed, match="did not end in time"):
        run_ranks(2, one_step_more, timeout=8)
    said = capfd.readouterr().err
    assert said.count("warning: rank 1 waits in ") == 1
    assert said.count("of ranks 0, 1, but the script has ended on rank 0: all ranks must make ") == 1


def of_groups(mesh: Mesh) -> dict[str, list[Tensor]]:
    """Returns loss and gradients of two sequence groups, or of one process with the batches of both."""
    found = {}
    for kind in ("ours", "Dice over the batch", "MONAI's"):
        net = UNet(Architecture.of(1, 3, (4, 8), style=Style(bias=False)), group=mesh.seq)
        torch.manual_seed(0)
        for parameter in net.parameters():
            parameter.data.copy_(0.2 * torch.randn_like(parameter))
        model = ParallelModel(net.double(), mesh)
        each = [batch(mesh.data.index)] if mesh.world.size > 1 else [batch(0), batch(1)]
        loss = model.loss(LOSSES[kind], *(torch.cat(tensors) for tensors in zip(*each)))
        loss.backward()
        found[kind] = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return found


def test_two_sequence_groups_are_one_process_with_both_batches() -> None:
    expected = of_groups(alone_mesh())
    for found in run_ranks(4, of_groups, seqpar=2, timeout=120):
        for kind, gradients in expected.items():
            scale = max(float(gradient.abs().max()) for gradient in gradients)
            assert len(gradients) > 8
            for ours, theirs in zip(found[kind], gradients):
                assert float((ours - theirs).abs().max()) < 1e-11 * scale, kind


def of_published(mesh: Mesh) -> dict[str, list[Tensor]]:
    found = {}
    for name, make in {
        "hou": lambda: hou(1, 3, features=2, group=mesh.seq),
        "distmis": lambda: distmis(1, 3, variant="text", features=2, group=mesh.seq),
        "lamp": lambda: lamp(1, 3, features=2, group=mesh.seq),
    }.items():
        torch.manual_seed(0)
        model = ParallelModel(make().double(), mesh)
        toss = torch.Generator().manual_seed(1)
        image = torch.randn(2, 1, 64, 32, 32, generator=toss, dtype=torch.float64)
        label = torch.randint(3, (2, 64, 32, 32), generator=toss)
        loss = model.loss(DiceCE(), image, label)
        loss.backward()
        whole = model(image)
        found[name] = [loss.detach()[None], whole.detach()]
    return found


@pytest.mark.started
def test_published_unets_take_a_group() -> None:
    expected = of_published(alone_mesh())
    for found in run_ranks(2, of_published, timeout=120):
        for name, (loss, whole) in expected.items():
            assert relative(found[name][0], loss) < 1e-12 and relative(found[name][1], whole) < 1e-10, name


def test_volumes_are_arrays_or_tensors_with_or_without_a_batch() -> None:
    model = ParallelModel(seqpar.UNETR(1, 3, TILE, 2, 12, 24, 2, patch=8, depth=2)).eval()
    array = np.zeros((1, 20, 20, 30), np.float32)
    assert predict(model, array, TILE).shape == (3, 20, 20, 30)
    assert predict(nn.Conv3d(1, 2, 1).eval(), torch.zeros(2, 1, 20, 20, 30), 16).shape == (2, 2, 20, 20, 30)
    with pytest.raises(ValueError, match="c W D H or b c W D H is needed"):
        predict(model, array[0], TILE)
    with pytest.raises(ValueError, match=r"returned \(8, 8, 8\) voxels of a window of \(16, 16, 16\)"):
        predict(nn.Conv3d(1, 1, 2, 2).eval(), array, 16)
    with pytest.raises(ValueError, match="returned a tuple of a window"):
        predict(Pair().eval(), array, 16)
    for other in (nn.Identity().eval(), torch.relu):
        with pytest.raises(ValueError, match="give a module with parameters, which tell its device"):
            predict(other, array, 16)  # type: ignore[arg-type]
    for tile in (0, (16, 16)):
        with pytest.raises(ValueError, match="^tile=.*: give 3 numbers of voxels above 0"):
            predict(model, array, tile)
    with pytest.raises(ValueError, match="overlap=1.0: give a share"):
        predict(model, array, TILE, overlap=1.0)


class Pair(nn.Conv3d):
    def __init__(self) -> None:
        super().__init__(1, 1, 1)

    def forward(self, x: Tensor) -> Any:
        return x, x
