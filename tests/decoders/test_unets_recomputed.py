"""Cells that backward computes again: the same gradients and statistics, about half of the bytes held."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import nn

from seqpar.decoders.unets import UNet, hou, lamp, nnunet
from seqpar.parallel.recomputation import checkpointed, copied_buffers, update_buffers_once
from seqpar.pipeline.cells import IMAGE
from seqpar.planner.memory_counter import saved_bytes
from seqpar.planner.step_counter import StepSetup, count_whole_step
from seqpar.settings.config import Config
from tests.decoders.test_unets_on_boxes import OF_THREE_STAGES, OFF_THE_STRIDE, UNEVEN, WIDE, WITHOUT_LAST
from tests.support import unets
from tests.support.unets import Case

CASES = {
    2: [*(Case(name, UNEVEN[2]) for name in OF_THREE_STAGES), Case("se-lamp", WIDE[2], 2)],
    4: [Case("batch norm", OFF_THE_STRIDE[4]), Case("residual", OFF_THE_STRIDE[4]), Case("distmis", WITHOUT_LAST[4])],
}


@pytest.mark.parametrize("world", CASES)
def test_cells_computed_again_give_the_same_gradients_and_move_statistics_once(
    world: int, ranks: Callable[..., list]
) -> None:
    cases = [(replace(case, recompute=True), unets.whole(case)) for case in CASES[world]]
    for gaps_of in ranks(world, unets.check_all, cases, timeout=240):
        for (case, _), gaps in zip(cases, gaps_of):
            assert max(gaps.values()) < 1e-12, (case, max(gaps, key=gaps.__getitem__), gaps)
        assert any("running" in name for gaps in gaps_of for name in gaps)


@pytest.mark.parametrize("name", ["batch norm", "distmis", "lamp"])
def test_in_one_process_statistics_move_once_too(name: str) -> None:
    extents = (32, 32, 32) if name == "lamp" else (16, 16, 16)
    image = unets.numbers(1, 2, unets.CHANNELS, *extents)
    tensors = []
    for recompute in (False, True):
        net = unets.make(name)
        if recompute:
            net.recompute()
        net(image).square().sum().backward()
        tensors.append([*net.buffers(), *(p.grad for p in net.parameters())])
    assert all(unets.relative(a.double(), b.double()) < 1e-12 for a, b in zip(*tensors))


def test_without_copies_statistics_would_move_twice() -> None:
    """The control: what runs again moves them, unless its buffers are copies."""
    norms = [nn.BatchNorm3d(1) for _ in range(3)]
    x = torch.arange(8.0).view(1, 1, 2, 2, 2).requires_grad_()
    norms[0](x).square().sum().backward()
    checkpointed(norms[1], x).square().sum().backward()
    checkpointed(update_buffers_once(norms[2], norms[2]), x).square().sum().backward()
    once, twice, kept = (int(norm.num_batches_tracked) for norm in norms)
    assert (once, twice, kept) == (1, 2, 1)
    with pytest.raises(RuntimeError, match="inside"), copied_buffers(norms[0]):
        norms[0].running_mean.fill_(9.0)
        raise RuntimeError("inside")
    assert float(norms[0].running_mean) != 9.0


def inputs_held(net: UNet, image: torch.Tensor) -> int:
    """Returns the bytes of the outputs that other cells take, and of the image."""
    sizes = dict[int, int]()
    runs = net.needed(net.outputs)
    for number in runs:
        net.cells[net.names[number]].register_forward_hook(
            lambda module, args, output, number=number: sizes.__setitem__(number, output[0].nbytes)
        )
    with torch.no_grad():
        net(image)
    taken = {source for number in runs for source in net.takes[number]} - {IMAGE}
    return image.nbytes + sum(sizes[number] for number in taken)


HALF = {
    "plain": (lambda: nnunet(1, 2, 32, features=8), 0.52),
    "residual": (lambda: nnunet(1, 2, 32, features=8, residual=True), 0.40),
    "hou": (lambda: hou(1, 2, 64, 4), 0.60),
    "lamp": (lambda: lamp(1, 2, 8), 0.80),
}


@pytest.mark.parametrize("name", HALF)
def test_what_is_held_is_what_cells_take(name: str) -> None:
    make, share = HALF[name]
    net, image = make(), torch.randn(2, 1, 32, 32, 32)
    everything = saved_bytes(net, lambda: net(image).sum())
    net.recompute()
    saved = saved_bytes(net, lambda: net(image).sum())
    assert saved < share * everything
    inputs = inputs_held(net, image)
    indices = sum(2 * prod(size) for size in pooled(net, image))  # of max-pooling: int64, twice a float32
    assert inputs <= saved <= 1.01 * (inputs + 4 * indices)


def pooled(net: UNet, image: torch.Tensor) -> list[torch.Size]:
    sizes = list[torch.Size]()
    for name, cell in net.cells.items():
        if name.startswith("pool"):
            cell.register_forward_hook(lambda module, args, output: sizes.append(output[0].shape))
    with torch.no_grad():
        net(image)
    return sizes


def test_what_is_computed_again_fetches_its_halos_once_more_and_no_third_time() -> None:
    config = Config(network="nnunet-plain", tile=(32, 32, 32), features=4, seqpar=2, mode="halo", batch=1)
    usual, again = (count_whole_step(StepSetup(replace(config, grad_checkpoint=way))) for way in ("none", "full"))
    assert again.decoder < 0.55 * usual.decoder
    assert usual.messages["window"] < again.messages["window"] < 1.15 * usual.messages["window"]
