"""Updates and norms that take all parameters at once, as on GPUs: of shards too, from checkpoints of either kind."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # once here, not in every rank
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar.models.build import build_network
from seqpar.optimization import optimizers
from seqpar.parallel.mesh import Mesh
from seqpar.settings.command_line import parse
from seqpar.training import gradients
from seqpar.training.data_parallel import data_parallel
from seqpar.weights import checkpoint
from seqpar.weights.checkpoint import Progress
from seqpar.weights.states import whole_tensors
from tests.support.ranks import relative

NETWORK = "--preset debug --tile 16 --patch 8 --embed-dim 24 --heads 2 --depth 1 --decoder-width 4 --precision fp64"
KINDS = ("adamw", "sgd", "rmsprop")
STEPS, LIMIT = 3, 0.1
WAYS = {"replicated, one by one": (False, False), "shards, at once": (True, True)}


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


class Training:
    """A network on ranks that have tiles of their own, with its optimizer; ``at_once``: as on GPUs."""

    def __init__(self, mesh: Mesh, kind: str, shards: bool, at_once: bool) -> None:
        optimizers.use_fused = gradients.use_fused = lambda parameters: at_once or None
        config = parse([*NETWORK.split(), "--optimizer", kind, "--lr", "0.01"], "debug")[1]
        self.mesh, self.net, self.calls = mesh, build_network(config, 2, 3, mesh.seq).double(), Calls()
        self.module = data_parallel(self.net, mesh, shards)
        self.optimizer = optimizers.make_optimizer(self.net, config.optimizer_options)

    def run(self, first: int) -> list[float]:
        """Returns the norm of the gradients in each of some steps; ``calls`` are those of the last update."""
        norms = []
        for step in range(first, first + STEPS):
            dice = torch.Generator().manual_seed(2 * step + self.mesh.world.index)
            tile = torch.randn(1, 2, 16, 16, 16, generator=dice, dtype=torch.float64)
            self.module(self.net.layout.cut(tile, 0)).square().mean().backward()
            self.calls = Calls()
            with self.calls:
                norms.append(float(gradients.Gradients.clip(SimpleNamespace(net=self.net), LIMIT)))  # type: ignore
                self.optimizer.step()
            self.optimizer.zero_grad()
        return norms

    def weights(self) -> dict[str, Tensor]:
        return whole_tensors(self.net.state_dict(), keep=True)


def trained_on(mesh: Mesh, folder: Path, kind: str) -> dict[str, tuple[list[float], dict[str, Tensor], Counter[str]]]:
    """Returns norms, weights and operators of steps; of Adam also of those that go on in the other way amid them."""
    results, saved = {}, {}
    for name, how in WAYS.items():
        training = Training(mesh, kind, *how)
        if kind != "adamw":
            results[name] = training.run(0), training.weights(), training.calls.names
            continue
        norms = training.run(0)
        saved[name] = checkpoint.save(folder / kind / name, training.net, training.optimizer, Progress(3), mesh.world)
        results[name] = norms + training.run(STEPS), training.weights(), training.calls.names
    for name, other in (tuple(WAYS), tuple(WAYS)[::-1]) if saved else ():
        training = Training(mesh, kind, *WAYS[other])
        checkpoint.load(saved[name], training.net, training.optimizer, mesh.world.index)
        norms = results[name][0][:STEPS] + training.run(STEPS)
        results[f"{name}, then {other}"] = norms, training.weights(), training.calls.names
    return results


def all_kinds(mesh: Mesh, folder: Path) -> list[Any]:
    return [trained_on(mesh, folder, kind) for kind in KINDS]


@pytest.mark.started
def test_shards_that_are_updated_at_once_are_replicated_weights_and_go_on_from_either(
    tmp_path: Path, ranks: Callable[..., list]
) -> None:
    for of_rank in ranks(2, all_kinds, tmp_path, seqpar=1):
        for kind, results in zip(KINDS, of_rank):
            norms, weights, calls = results["replicated, one by one"]
            assert len(results) == (4 if kind == "adamw" else 2) and min(norms) > LIMIT and len(weights) > 20
            assert calls.total() > len(weights)  # one by one
            for name, (other_norms, others, other_calls) in results.items():
                assert other_norms == pytest.approx(norms, rel=1e-10), (kind, name)
                assert all(relative(others[key], weights[key]) < 1e-10 for key in weights), (kind, name)
                if name.endswith("at once"):
                    assert other_calls.total() < len(weights), other_calls
                    assert other_calls["_foreach_norm"] == 1
                    fused = other_calls["_fused_adamw_"]  # a launch for each of the optimizer's two groups
                    assert fused == (2 if kind == "adamw" else 0), other_calls
