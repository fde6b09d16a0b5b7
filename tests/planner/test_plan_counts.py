"""The planner's numbers are the run's: bytes held, sent and kept by the optimizer, counted with data and without."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # once here, not in every rank

from lab.benches.memory import local_bytes
from seqpar.losses import DiceCE
from seqpar.models.build import build_network, build_on_meta
from seqpar.optimization.optimizers import make_optimizer
from seqpar.parallel.mesh import Group, Mesh
from seqpar.planner.memory_counter import MemoryCounter, saved_bytes
from seqpar.planner.step_counter import StepCost, StepSetup, count_step, count_whole_step, trainable_parameters
from seqpar.settings.config import Config
from seqpar.spatial import cache_pieces
from seqpar.training.data_parallel import shard
from seqpar.vit.dropout import DropoutKey

SMALL = Config(tile=(16, 16, 16), patch=4, depth=2, embed_dim=24, heads=3, decoder_width=8, batch=1)
CHANNELS, OUTPUTS = 2, 3


def taken(mesh: Mesh, config: Config, is_counted: bool) -> dict[str, Any]:
    """Returns what a step on real numbers holds and sends on this rank; nothing where the rank only takes part."""
    net = build_network(config, CHANNELS, OUTPUTS, mesh.seq)
    net.to(torch.float64 if config.precision == "fp64" else torch.float32)
    dtype, layout = next(net.parameters()).dtype, net.layout
    tokens = (config.batch, layout.counts[mesh.seq.index])
    mesh.seq.traffic.clear(), mesh.seq.messages.clear(), mesh.seq.exchanges.clear()
    image = torch.randn(*tokens, CHANNELS, *layout.patch, dtype=dtype)
    label = torch.randint(0, OUTPUTS, (*tokens, *layout.patch), dtype=torch.uint8)
    loss_groups, key = net.mode.loss_groups(None, config.batch), DropoutKey(0, 0, tuple(range(config.batch)))
    losses = []

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, config.precision == "bf16"):
            logits = net(image, None, key)
        losses.append(DiceCE(batch_dice=config.batch_dice)(logits, net.arrange(label), loss_groups))
        return losses[0]

    if not is_counted:
        run().backward()
        return {}
    with MemoryCounter() as alive:
        saved = saved_bytes(net, run, [image, label])
        for p in trainable_parameters(net):
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        losses.pop().backward()
        most = alive.most
    state, updates = 0, []
    for at_once in (False, True)[: 1 + (mesh.seq.size == 1 and config in UPDATED_AT_ONCE)]:  # as on a CPU, on a GPU
        optimizer = make_optimizer(net, config.optimizer_options)
        for parameters in optimizer.param_groups:
            parameters["foreach"] = at_once
        for p in trainable_parameters(net):
            p.grad = torch.zeros_like(p)
        with MemoryCounter() as alive:
            optimizer.step()
        state = sum(t.nbytes for own in optimizer.state.values() for t in own.values() if isinstance(t, torch.Tensor))
        updates.append(alive.most - state)
    return {
        "held": saved,
        "most": most,
        "updates": updates,
        "sent": mesh.seq.traffic.copy(),
        "messages": mesh.seq.messages.copy(),
        "exchanges": mesh.seq.exchanges.copy(),
        "weights": sum(t.nbytes for t in [*net.parameters(), *net.buffers()]),
        "gradients": sum(p.grad.nbytes for p in net.parameters() if p.grad is not None),
        "optimizer": state,
    }


def check_counts(mesh: Mesh, configs: list[Config]) -> int:
    """Compares what this rank's steps take with what is counted for it; returns how many it compared.

    Every config is compared on one rank, in turn, and where heads are shared unevenly on the last one too. Each rank
    counts for itself, so that the counting is spread over the cores.
    """
    cache_pieces._AT_ONCE = 1 << 62  # all at once, as it is counted and as GPUs do it; this process ends with the test
    rank, world, compared = mesh.seq.index, mesh.seq.size, 0
    for number, config in enumerate(configs):
        is_counted = rank in ranks_of(number, config)
        real = taken(mesh, config, is_counted)
        if not is_counted:
            continue
        expected, compared = counted(config, rank), compared + 1
        assert expected.tokens + expected.decoder == pytest.approx(real["held"], rel=0.01), config
        updates = [updating(expected)]
        if world == 1 and config in UPDATED_AT_ONCE:  # an update knows of no other ranks
            updates.append(updating(counted(config, rank, on_gpu=True)))
        assert updates == pytest.approx(real["updates"][: len(updates)], rel=0.05), config
        most = max(expected.peaks.values()) - expected.input
        if most > 1.05 * real["most"]:  # frames of what torch imports within the first step hold tensors
            again = counted(config, rank)
            most = max(again.peaks.values()) - again.input
        assert most == pytest.approx(real["most"], rel=0.05), config
        assert (expected.sent, expected.messages) == (real["sent"], real["messages"]), config
        assert expected.exchanges == real["exchanges"], config
        assert (expected.weights, expected.gradients) == (real["weights"], real["gradients"]), config
        assert expected.optimizer == real["optimizer"], config
    return compared


def ranks_of(number: int, config: Config) -> set[int]:
    """Returns the ranks on which the config of a number is compared."""
    shares_heads = config.attention.startswith(("ulysses", "hybrid"))
    last = {config.seqpar - 1} if shares_heads and config.heads % config.seqpar else set()
    return {number % config.seqpar, *last}


def setup(config: Config, rank: int, on_gpu: bool = False) -> StepSetup:
    return StepSetup(config, rank, CHANNELS, OUTPUTS, on_gpu=on_gpu)


def counted(config: Config, rank: int, on_gpu: bool = False) -> StepCost:
    return count_step(setup(config, rank, on_gpu))


def updating(step: StepCost) -> int:
    return step.peaks.pop("update") - step.input


def in_shards(mesh: Mesh, config: Config) -> dict[str, int]:
    """Returns this rank's bytes of weights, gradients and optimizer states after a step with weights in shards."""
    net = build_network(config, CHANNELS, OUTPUTS, mesh.seq)
    shard(net, mesh)
    optimizer, layout = make_optimizer(net, config.optimizer_options), net.layout
    tokens = (config.batch, layout.counts[mesh.seq.index])
    image, label = torch.randn(*tokens, CHANNELS, *layout.patch), torch.zeros(*tokens, *layout.patch, dtype=torch.uint8)
    DiceCE()(net(image), net.arrange(label), net.mode.loss_groups(None, config.batch)).backward()
    optimizer.step()
    return local_bytes(net, optimizer)


def test_shards_are_a_share_of_what_is_counted(ranks: Callable[..., list]) -> None:
    """Between steps, so without the blocks that run, which are together for a while."""
    config = replace(SMALL, seqpar=2, shard_weights=True, mode="halo", decoder="unetr")
    alone = replace(config, shard_weights=False)
    for rank, measured in enumerate(ranks(2, in_shards, config)):
        expected, whole = counted(config, rank), counted(alone, rank)
        assert measured["optimizer"] == pytest.approx(expected.optimizer, rel=0.02)
        assert measured["weights"] == pytest.approx(whole.weights / 2, rel=0.02)
        assert measured["gradients"] == pytest.approx(whole.gradients / 2, rel=0.02)
        # the planner also counts blocks that are whole while they run
        assert measured["weights"] < expected.weights and measured["gradients"] < expected.gradients


NETWORKS = [
    replace(SMALL, decoder=decoder, mode=mode, batch=4, patch=patch)
    for decoder, patch in (("plain", 4), ("unetr", 4), ("unetr", 8), ("primus", 4))
    for mode in ("gather", "halo", "swap")
    if (patch, mode) != (8, "gather")
]
STAGES = replace(
    SMALL, encoder="hierarchical", stage_depths=(1, 2), decoder="unetr", tile=(16, 16, 24), positions="rope"
)
NETWORKS += [
    replace(STAGES, mode=mode, batch=4, heads=2, window=w) for mode, w in (("halo", 0), ("halo", 3), ("swap", 0))
]
SETTINGS = [
    replace(SMALL, depth=5),
    replace(SMALL, tile=(16, 24, 32), split="ordered", decoder="primus"),
    replace(SMALL, depth=4, dropout=0.1, drop_path=0.1, layer_scale=0.1),
    replace(SMALL, depth=4, heads=2, positions="rope", mlp="swiglu"),
    *(replace(SMALL, grad_checkpoint=again, depth=4) for again in ("attention", "full")),
    replace(SMALL, mlp_chunks=3, depth=4),
    *(
        replace(SMALL, mlp_chunks=n, grad_checkpoint=a, precision="bf16")
        for n, a in ((3, "none"), (1, "full"), (3, "full"))
    ),
    replace(SMALL, precision="fp64", optimizer="sgd", batch_dice=True, batch=2),
    *(replace(SMALL, decoder=decoder, mode="halo", precision="bf16") for decoder in ("plain", "unetr", "primus")),
]
THREE = "333:111 333:222 333:222"
UNETS = [
    replace(SMALL, network=network, stages=stages, features=4, mode="halo", grad_checkpoint=again)
    for network, stages in (("nnunet-plain", THREE), ("nnunet-resenc", THREE), ("unet-hou", ""))
    for again in ("none", "full")
]
UPDATED_AT_ONCE = (SETTINGS[0], NETWORKS[2], *(c for c in SETTINGS if c.optimizer == "sgd"), UNETS[0])
ATTENTION = [
    replace(SMALL, attention=name, keep_kv=keep, heads=heads)
    for name in ("gather-kv", "gather-x", "ulysses", "hybrid:2")
    for keep in (False, True)
    for heads in (3, 4)
    if not (name == "ulysses" and keep)
]


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.started) for world in (1, 4))])
def test_what_is_counted_without_data_is_what_a_step_takes(world: int, ranks: Callable[..., list]) -> None:
    """Bytes held within 1 %, alive at the worst moment within 5 %, all else exactly: sent, messages, optimizer states.

    What alone differs when alive: in which order torch lays out some gradients of a convolution.
    """
    nets = {
        1: [*(c for c in NETWORKS if c.mode == "swap"), *SETTINGS, *UNETS],  # alone, all modes are one
        2: [*NETWORKS, *UNETS[::2], UNETS[-1], *(c for c in ATTENTION if not c.attention.startswith("hybrid"))],
        4: [*(c for c in NETWORKS if c.mode == "halo"), *SETTINGS[::2], *(c for c in ATTENTION if c.heads == 3)],
    }[world]
    configs = [replace(c, seqpar=world) for c in nets]
    assert world > 1 or {*UPDATED_AT_ONCE} <= {*configs} and len(UPDATED_AT_ONCE) == 4
    compared = ranks(world, check_counts, configs, timeout=240)
    assert sum(compared) == sum(len(ranks_of(*case)) for case in enumerate(configs)) >= len(configs)
    assert min(compared) >= len(configs) // world


def test_no_tensor_of_a_step_waits_for_the_garbage_collector() -> None:
    """Else memory would depend on when it comes."""
    net = build_on_meta(replace(SMALL, positions="rope"), Group("seq"), CHANNELS, OUTPUTS)

    def step() -> None:
        net(torch.empty(1, 64, CHANNELS, 4, 4, 4, device="meta")).sum().backward()

    step()  # torch imports in a process's first one, and frames of these imports hold tensors
    gc.disable()
    try:
        with MemoryCounter() as counter:
            step()
            left = counter.now
            gc.collect()
            assert counter.now == left
    finally:
        gc.enable()


def test_a_deep_network_is_counted_in_two_shallow_ones() -> None:
    """Seven blocks, extrapolated, against seven that ran; also where a block holds little, being computed again."""
    for config in (replace(SMALL, depth=7), replace(SMALL, depth=7, grad_checkpoint="full", embed_dim=48)):
        short = counted(config, 0)
        whole = count_whole_step(setup(config, 0))
        assert (short.tokens, short.decoder, short.weights) == (whole.tokens, whole.decoder, whole.weights)
        assert short.transient == whole.transient and short.operations == whole.operations


def test_numbers_are_not_needed_and_nothing_is_sent() -> None:
    """A part of a tile of 512 voxels a side, which would need hundreds of GB, with groups that no process serves."""
    config = replace(SMALL, tile=(512, 512, 512), patch=8, embed_dim=768, heads=12, depth=12, seqpar=64, mode="halo")
    step = counted(config, 21)
    assert step.sent["attention"] > 1e9 and step.tokens > 1e9
