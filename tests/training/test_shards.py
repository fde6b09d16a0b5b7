"""Weights in shards over data x seq: the same training, a share of the bytes, checkpoints that anybody can load."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp  # once here, and not in each of 24 runs
from safetensors.torch import load_file

from seqpar.models.build import build_network
from seqpar.parallel.mesh import Mesh
from seqpar.planner.feasibility import require_peers
from seqpar.runs.journal import read_metrics
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.training import after_step, data_parallel
from seqpar.weights.states import copy_into, optimizer_tensors, whole_tensors
from tests.support.configs import NoStop, config_of, trainer_of
from tests.support.marks import long_case
from tests.support.ranks import relative
from tests.support.training_runs import Launch, at, losses, prepare, signalled, tiny_data, trained, weights

LAYOUTS = {  # two tiles a step, in each of them
    "2 x 2": (4, "--seqpar 2 --batch 1 --grad-checkpoint full"),  # validation by groups, of unequally many windows
    "1 x 4": (4, "--seqpar 4 --batch 1 --accumulate 2 --mlp-chunks 2"),
}
EXACT = "--precision fp64 --dropout 0.1 --clip 0.1 --batch 4"
BF16 = "--seqpar 2 --precision bf16 --grad-checkpoint full --mlp-chunks 2 --tile 32 --epochs 1"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    arguments = [*tiny_data(tmp_path_factory.mktemp("shards")), *EXACT.split()]
    prepare(arguments)
    return arguments


def farthest(a: Path, b: Path) -> float:
    ours, theirs = (load_file(path / "model.safetensors") for path in (a, b))
    assert ours.keys() == theirs.keys()
    return max(relative(ours[name], theirs[name]) for name in theirs)


FOUR_STEPS = ["--iterations", "4", "--epochs", "1", "--depth", "2"]


@pytest.fixture(scope="module")
def replicated(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with all weights on each."""
    out = tmp_path_factory.mktemp("replicated") / "run"
    trained(2, [*flags, *FOUR_STEPS, "--seqpar", "2", "--batch", "2"], out)
    return out


@pytest.mark.parametrize("layout", [long_case(name) if name == "1 x 4" else name for name in LAYOUTS])
def test_sharded_weights_become_what_replicated_ones_become(
    flags: list[str], replicated: Path, tmp_path: Path, layout: str
) -> None:
    """Loss, global gradient norm and scores of each of 4 Adam steps, and the weights after them."""
    world, more = LAYOUTS[layout]
    trained(world, [*flags, *FOUR_STEPS, *more.split(), "--shard-weights"], tmp_path / "sharded")
    rows = [read_metrics(out / "metrics.jsonl") for out in (tmp_path / "sharded", replicated)]
    assert len(rows[0]) == len(rows[1]) == 5
    for ours, theirs in zip(*rows):
        for name in {"loss", "dice_loss", "ce_loss", "grad_norm"} & theirs.keys():
            assert abs(ours[name] / theirs[name] - 1) < 1e-10, (name, ours, theirs)
        assert ours.get("dice") == theirs.get("dice")
    assert min(row["grad_norm"] for row in rows[1] if "grad_norm" in row) > 0.1, "clipping did nothing"
    assert farthest(tmp_path / "sharded", replicated) < 1e-10


@pytest.mark.started
def test_a_sharded_run_goes_on_to_the_same_bits_and_on_any_ranks(flags: list[str], tmp_path: Path) -> None:
    run = [*flags, "--seqpar", "2", "--shard-weights"]
    trained(2, run, tmp_path / "whole")
    left = tmp_path / "left"
    trained(2, run, left, expect=75, hook=at(after_step.AfterStep, "decide", 1, signalled(signal.SIGUSR1), call=3))
    goes_on = {
        "the same": (2, ""),
        "alone, not sharded": (1, "--seqpar 1 --no-shard-weights"),
        "replicated": (2, "--no-shard-weights"),
        "other ranks": (3, "--seqpar 3 --split ordered"),
    }
    for name, (world, more) in goes_on.items():
        shutil.copytree(left, tmp_path / name)
        trained(world, ["--resume", *more.split()], tmp_path / name)
        assert farthest(tmp_path / name, tmp_path / "whole") < 1e-10, name
    assert weights(tmp_path / "the same") == weights(tmp_path / "whole")
    assert losses(tmp_path / "the same") == losses(tmp_path / "whole")
    replicated = tmp_path / "began replicated"
    shutil.copytree(tmp_path / "replicated", replicated)
    with Launch(2, ["--resume", "--shard-weights", "--epochs", "4"], replicated) as launch:
        assert launch.wait() == [0, 0], launch.said()
    assert len(losses(replicated)) == 8


def first_gradients(mesh: Mesh, runs: list[list[str]], folder: Path) -> list[dict[str, torch.Tensor]]:
    """Returns the whole gradients with which each of the runs would take its first step."""
    gradients = []
    for flags in runs:
        trainer = trainer_of(config_of(flags), mesh, folder)
        with trainer._loader() as loader:
            trainer.gradients.add([next(loader) for _ in range(trainer.config.accumulate)], 0, NoStop())  # type: ignore
        grads = {name: p.grad for name, p in trainer.net.named_parameters() if p.grad is not None}
        gradients.append(whole_tensors(grads, keep=True))
    return gradients


def test_in_bf16_every_gradient_of_sharded_weights_is_that_of_replicated_ones(
    flags: list[str], tmp_path: Path, ranks: Callable[..., list]
) -> None:
    """They differ from float32's, which shows that bf16 computed them, by no more than bf16 rounds."""
    # a grid of 4, since oneDNN's bf16 convolutions of 3 on a grid of 2 read memory that nobody wrote
    run = [*flags, *BF16.split(), "--accumulate", "2"]
    runs = [run, [*run, "--shard-weights"], [*run, "--precision", "fp32"]]
    for replicated, sharded, exact in ranks(2, first_gradients, runs, tmp_path):
        assert replicated.keys() == sharded.keys() == exact.keys() and len(exact) > 20
        for name, tensor in replicated.items():
            assert tensor.dtype == sharded[name].dtype == torch.float32
            assert relative(sharded[name], tensor) < 1e-5, name
        rounded = {name: relative(tensor, exact[name]) for name, tensor in replicated.items()}
        assert 1e-3 < max(rounded.values()) < 0.2, rounded


def test_sharded_weights_train_in_bf16_and_are_kept_in_float32(flags: list[str], tmp_path: Path) -> None:
    """Their gradients are compared above."""
    trained(2, [*flags, *BF16.split(), "--shard-weights"], tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 2
    assert all(tensor.dtype == torch.float32 for tensor in load_file(tmp_path / "run/model.safetensors").values())


NETWORK = "--preset debug --tile 16 --patch 8 --embed-dim 48 --heads 4 --depth 2 --decoder-width 8"


def count_states(mesh: Mesh, sharded: bool, flags: str) -> tuple[dict[str, int], bool]:
    """Returns the bytes of weights, gradients and Adam's states on this rank, and whether all joins as it was."""
    config = parse(flags.split(), "debug")[1]
    net = build_network(config, 2, 3, mesh.seq)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    if sharded:
        data_parallel.shard(net, mesh)
    joined = whole_tensors(net.state_dict(), keep=True)
    same = all(torch.equal(joined[name], before[name]) for name in before)
    for name, tensor in net.state_dict().items():
        copy_into(tensor, before[name] + 1)
    joined = whole_tensors(net.state_dict(), keep=True)
    same = same and all(torch.equal(joined[name], before[name] + 1) for name in before)
    optimizer = torch.optim.Adam(net.parameters())
    image = torch.zeros(1, net.encoder.layout.counts[mesh.seq.index], 2, 8, 8, 8)
    net(image).square().mean().backward()
    optimizer.step()
    kinds = {
        "weights": list(net.parameters()),
        "gradients": [p.grad for p in net.parameters()],
        "states": [t for name, t in optimizer_tensors(net, optimizer).items() if not name.endswith("/step")],
    }
    local = {kind: [t.to_local() if hasattr(t, "to_local") else t for t in tensors] for kind, tensors in kinds.items()}
    sizes = {}
    for kind, tensors in local.items():
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}  # type: ignore[union-attr]
        sizes[kind] = sum(storages.values())
    return sizes, same


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_holds_its_share_of_weights_gradients_and_states(world: int, ranks: Callable[..., list]) -> None:
    """Learned positions, one row long in their first direction, are cut in another."""
    whole, _ = ranks(1, count_states, False, NETWORK)[0]
    shares = ranks(world, count_states, True, NETWORK)
    assert all(same for _, same in shares), "what was cut does not join as it was"
    for kind, size in whole.items():
        mine = [sizes[kind] for sizes, _ in shares]
        assert max(mine) <= 1.05 * size / world and sum(mine) >= 0.99 * size, (kind, mine, size)
    if world == 2:
        assert [sizes for sizes, _ in ranks(2, count_states, False, NETWORK)] == [whole] * 2, "the control"


def test_one_rank_cannot_share() -> None:
    with pytest.raises(ValueError, match="start 2 or more"):
        require_peers(Config(shard_weights=True), 1)
    require_peers(Config(shard_weights=True), 2)


def test_a_lonely_run_is_refused_as_a_usage_error(flags: list[str], tmp_path: Path) -> None:
    with Launch(1, [*flags, "--shard-weights"], tmp_path / "run") as launch:
        assert launch.wait() == [2]
    assert "start 2 or more" in launch.said() and not (tmp_path / "run").exists(), json.dumps(launch.said())
