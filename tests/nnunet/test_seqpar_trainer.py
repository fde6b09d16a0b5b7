"""The trainer for nnU-Net on two ranks against its parent alone, with a small stand-in for nnU-Net's trainer.

The same with the real nnU-Net is in there_and_back.py.
"""

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqpar.parallel.collectives import broadcast_tensors
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Mesh
from tests.support.ranks import run_ranks


class Net(nn.Module):
    """Two levels, each with a head, as nnU-Net's networks with deep supervision."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.down = nn.Conv3d(1, 12, 3, padding=1), nn.Conv3d(12, 6, 3, stride=2, padding=1)
        self.norm, self.up = nn.InstanceNorm3d(6, affine=True), nn.ConvTranspose3d(6, 12, 2, stride=2)
        self.heads = nn.ModuleList([nn.Conv3d(12, 2, 1), nn.Conv3d(6, 2, 1)])
        self.decoder = nn.Identity()
        self.decoder.deep_supervision = True

    def forward(self, x: Tensor) -> Any:
        fine = nn.functional.leaky_relu(self.fine(x))
        coarse = nn.functional.leaky_relu(self.norm(self.down(fine)))
        first = self.heads[0](fine + self.up(coarse))
        return [first, self.heads[1](coarse)] if self.decoder.deep_supervision else first


class StandIn:
    """The parts of nnU-Net's trainer that the one on boxes uses or overrides."""

    def __init__(self, plans: Any, configuration: str, fold: int, dataset_json: Any, device: torch.device) -> None:
        self.is_ddp, self.local_rank, self.device = torch.distributed.is_initialized(), 0, device
        if self.is_ddp:
            self.local_rank = torch.distributed.get_rank()
        self.grad_scaler, self.enable_deep_supervision, self.flips = None, True, ()
        self.saved: dict[str, Any] = {}

    def initialize(self) -> None:
        torch.manual_seed(self.local_rank)
        self.network: nn.Module = Net()
        self.optimizer = torch.optim.SGD(self.network.parameters(), 0.1, momentum=0.9)

    def configure_rotation_dummyDA_mirroring_and_inital_patch_size(self) -> None:
        self.flips = (0, 1, 2)

    def get_dataloaders(self) -> Any:
        self.configure_rotation_dummyDA_mirroring_and_inital_patch_size()
        dice, sides = torch.Generator().manual_seed(3), (12, 10, 8)

        def batch() -> dict[str, Any]:
            levels = [(2, 1, *(side // step for side in sides)) for step in (1, 2)]
            target = [torch.randint(2, level, generator=dice).short() for level in levels]
            return {"data": torch.randn(2, 1, *sides, generator=dice), "target": target, "keys": ["a", "b"]}

        return tuple(iter([batch() for _ in range(3)]) for _ in range(2))

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        pairs = zip((1.0, 0.0), outputs, targets)  # the last level has no weight, as in nnU-Net
        terms = [w * nn.functional.cross_entropy(y, t[:, 0].long()) for w, y, t in pairs if w]
        return sum(terms[1:], terms[0])

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.network(batch["data"]), batch["target"])
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 12)
        self.optimizer.step()
        return {"loss": loss.item()}

    def validation_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"loss": self.loss(self.network(batch["data"]), batch["target"]).item()}

    def perform_actual_validation(self, save_probabilities: bool = False) -> None:
        self.saved["share"] = (self.local_rank if self.is_ddp else None, type(self.network))

    def set_deep_supervision_enabled(self, enabled: bool) -> None:
        (self.network.module if self.is_ddp else self.network).decoder.deep_supervision = enabled

    def save_checkpoint(self, filename: str) -> None:
        self.saved |= {"trainer_name": self.__class__.__name__, "network_weights": self.network.state_dict()}


@pytest.fixture
def trainer_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trainer on boxes, on top of the stand-in."""
    names = ["nnunetv2", "training", "nnUNetTrainer", "nnUNetTrainer"]
    for name in itertools.accumulate(names, "{}.{}".format):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stand_in = type("nnUNetTrainer", (StandIn,), {})
    sys.modules[".".join(names)].nnUNetTrainer = stand_in  # type: ignore[attr-defined]
    import seqpar.nnunet_trainer as package

    monkeypatch.syspath_prepend(str(Path(package.__file__).parent))  # as nnU-Net puts it
    monkeypatch.delitem(sys.modules, "nnUNetTrainerSeqPar", raising=False)
    return __import__("nnUNetTrainerSeqPar").nnUNetTrainerSeqPar


def trained(mesh: Mesh | None, kind: Any) -> dict[str, Any]:
    """Returns the losses of three steps and a validation, what was saved, and the bytes held for backward."""
    trainer = kind({}, "3d_fullres", 0, {}, torch.device("cpu"))
    trainer.initialize()
    training, validation = trainer.get_dataloaders()
    held = dict[int, int]()

    def hold(saved: Tensor) -> Tensor:
        held[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda saved: saved):
        losses = [trainer.train_step(next(training))["loss"]]
    losses += [trainer.train_step(next(training))["loss"] for _ in range(2)]
    with torch.no_grad():
        losses.append(trainer.validation_step(next(validation))["loss"])
    trainer.set_deep_supervision_enabled(False)
    trainer.perform_actual_validation()
    trainer.save_checkpoint("")
    assert type(trainer) is kind and not trainer.is_ddp
    return {"losses": losses, "flips": trainer.flips, "held": sum(held.values()), **trainer.saved}


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_that_share_each_tile_train_as_one_process(trainer_class: Any, world: int) -> None:
    alone = trained(None, trainer_class.__mro__[1])
    assert len(set(alone["losses"])) == 4
    for rank, run in enumerate(run_ranks(world, trained, trainer_class)):
        assert run["losses"] == pytest.approx(alone["losses"], abs=1e-5) and run["flips"] == (0, 1, 2)
        assert (
            run["trainer_name"] == "nnUNetTrainer" and run["network_weights"].keys() == alone["network_weights"].keys()
        )
        for name, tensor in alone["network_weights"].items():
            assert (run["network_weights"][name] - tensor).abs().max() < 1e-5, name
        assert 0 < run["held"] <= (0.65 if world > 1 else 1) * alone["held"]
        assert run["share"] == (rank if world > 1 else None, Net), "each rank validates other cases, alone"


def test_a_trainer_that_derives_from_it_saves_its_own_name(trainer_class: Any) -> None:
    assert trained(None, type("Mine", (trainer_class,), {}))["trainer_name"] == "Mine"


def test_ranks_of_cpus_share_the_cores(trainer_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, before = sys.modules[trainer_class.__module__], torch.get_num_threads()
    monkeypatch.setattr(module, "read_launcher", lambda env: Launcher("torchrun", world=2, local_world=2))
    monkeypatch.setattr(module, "start", lambda *arguments, **named: None)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 6)
    try:
        module._mesh_of_launcher(torch.device("cpu"))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def on_ranks(mesh: Mesh) -> list[Tensor]:
    own = [torch.arange(6.0).reshape(2, 3), torch.tensor([True, False]), torch.full((2, 1, 2), 7, dtype=torch.int16)]
    return broadcast_tensors(own if mesh.is_first else [], mesh.seq, mesh.device)


def test_the_first_ranks_tensors_come_to_all(ranks: Any) -> None:
    for floats, bools, ints in ranks(3, on_ranks):
        assert floats.tolist() == [[0, 1, 2], [3, 4, 5]] and bools.tolist() == [True, False]
        assert ints.dtype == torch.int16 and ints.shape == (2, 1, 2) and (ints == 7).all()
