"""--cuda-graph, on a CPU: what a replay is given and returns, and what is refused. Graphs themselves need a GPU."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from seqpar.models.build import build_network
from seqpar.parallel.mesh import Group, Mesh
from seqpar.settings.config import Config
from seqpar.settings.rules import refuse_settings_without_effect
from seqpar.spatial.norms import BatchNorm3d
from seqpar.training import gradients
from seqpar.training.gradients import Gradients, GraphedNetwork
from seqpar.vit.dropout import DropoutKey
from tests.support.ranks import run_ranks

VIT = dict(tile=(8, 8, 8), patch=(4, 4, 4), embed_dim=16, depth=2, heads=2, decoder="unetr", decoder_width=4)
CPU = torch.device("cpu")


class Replayed:
    """Takes the place of a CUDA graph: a replay computes again into the memory of the recorded pass."""

    recorded: "gradients._Passes"
    is_frozen = False
    logits: list[torch.Tensor]

    def replay(self) -> None:
        passes = Replayed.recorded
        if Replayed.is_frozen:
            return
        if self is passes._graphs[0]:
            with torch.enable_grad():
                Replayed.logits = passes.forward()
            sources, targets = Replayed.logits, passes._logits
        else:
            sources, targets = [*passes.gradients(Replayed.logits, passes._given)], passes._gradients  # type: ignore
        for source, target in zip(sources, targets):
            if target is not None:
                target.copy_(source.detach())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def recording(*of: Any, **more: Any):
        yield

    class Stream:
        def wait_stream(self, other: "Stream") -> None:
            pass

    original = gradients._Passes.record

    def record(passes: gradients._Passes) -> None:
        Replayed.recorded = passes
        original(passes)

    monkeypatch.setattr(gradients._Passes, "record", record)
    for name, value in {
        "CUDAGraph": Replayed,
        "graph": recording,
        "stream": recording,
        "Stream": Stream,
        "current_stream": Stream,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "autocast", recording)


def network(**more: Any):
    torch.manual_seed(0)
    return build_network(Config(**VIT, **more), 1, 2, Group("seq"))


def keys(net: Any, *steps: int) -> list[DropoutKey]:
    return [net.drawn(DropoutKey(0, step, (0, 1)), CPU) for step in steps]


def test_micro_batches_of_replays_have_the_gradients_of_the_network(graphs: None) -> None:
    net = network(dropout=0.3, drop_path=0.4)
    graphed, image = GraphedNetwork(net), torch.randn(2, 1, 8, 8, 8)
    part = net.layout.cut(image, 0)
    graphed.record(torch.zeros_like(part), *keys(net, 0, 1))
    computed = []
    for module in (net, graphed):
        net.zero_grad()
        for step in (2, 3):  # the second adds to what the first left
            (module(part * step, None, *keys(net, step)) ** 2).sum().backward()
        computed.append([p.grad.clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*computed))
    net.eval()
    assert torch.equal(graphed(part, None, None), net(part, None, None)), "validation is not replayed"


def test_passes_that_do_the_same_each_time_are_refused(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(drop_path=0.4)
    monkeypatch.setattr(Replayed, "is_frozen", True)
    with pytest.raises(ValueError, match="--cuda-graph: a replayed step differs from a computed one by .*remove it"):
        GraphedNetwork(net).record(torch.zeros(2, 8, 1, 4, 4, 4), *keys(net, 0, 1))


@pytest.mark.parametrize("other", [dict(seqpar=2), dict(pipe=2), dict(shard_weights=True)])
def test_ranks_that_exchange_messages_within_a_pass_cannot_replay(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--cuda-graph would do nothing: .*within a pass"):
        refuse_settings_without_effect(Config(cuda_graph=True, **other), ["cuda_graph"])


def test_pretraining_which_hides_other_tokens_in_each_step_is_refused() -> None:
    with pytest.raises(ValueError, match="--cuda-graph would do nothing: --task pretrain does not use it"):
        refuse_settings_without_effect(Config(cuda_graph=True, task="pretrain"), ["cuda_graph"])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("capturing\nmore")])
def test_what_cannot_be_recorded_is_refused_and_too_little_memory_stays_that(
    graphs: None, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    net = network()

    def fails(passes: gradients._Passes) -> None:
        raise error

    monkeypatch.setattr(gradients._Passes, "record", fails)
    expected = type(error) if isinstance(error, torch.OutOfMemoryError) else ValueError
    with pytest.raises(expected, match="out of memory|cannot be recorded: remove it .capturing.$"):
        GraphedNetwork(net).record(torch.zeros(2, 8, 1, 4, 4, 4), *keys(net, 0, 1))


def test_batch_norm_of_several_data_groups_is_refused() -> None:
    mesh: Any = SimpleNamespace(data=Group("data", (0, 1)))
    with pytest.raises(ValueError, match="--cuda-graph: 2 data groups .* batch norm .*another --norm"):
        gradients._graphed(torch.nn.Sequential(BatchNorm3d(2, data=mesh.data)), mesh, Config(cuda_graph=True))  # type: ignore[arg-type]


def fails_on_one_rank(mesh: Mesh) -> str:
    class Graphed:
        def record(self, *of: Any) -> None:
            if mesh.world.index == 1:
                raise ValueError("--cuda-graph: it differs")

    own = Gradients.__new__(Gradients)
    own.config, own.mesh, own.net = Config(batch=2, precision="fp32"), mesh, network()
    with pytest.raises(ValueError, match="it differs") as raised:
        own._record(Graphed(), torch.zeros(1))  # type: ignore[arg-type]
    return str(raised.value)


def test_what_one_rank_cannot_record_fails_on_all() -> None:
    assert run_ranks(2, fails_on_one_rank) == ["rank 1: --cuda-graph: it differs", "--cuda-graph: it differs"]
