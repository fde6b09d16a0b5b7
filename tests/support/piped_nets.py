"""Networks of the house trained over a pipe, and in one process with the same batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from seqpar.losses import DiceCE
from seqpar.models.build import build_network
from seqpar.models.network import Network
from seqpar.models.pipelined import PartOfBatch
from seqpar.parallel.mesh import Mesh
from seqpar.pipeline.engine import Engine
from seqpar.pipeline.schedule import make_timetable
from seqpar.pipeline.stage_weights import average_gradients, keep_local_weights, places_of_names
from seqpar.pipeline.stages import StageMap
from seqpar.settings.config import Config
from seqpar.vit.dropout import DropoutKey

CHANNELS, CLASSES = 2, 3


@dataclass(frozen=True)
class Case:
    """A network, its stages, and its batches.

    - ``allocation``: of its cells to places; none: as many cells a place as can be
    - ``samples``: of a micro-batch over all groups; ``micros``: micro-batches of a step
    """

    name: str
    config: Config
    allocation: tuple[int, ...] = ()
    schedule: str = "1f1b"
    recompute: bool = False
    samples: int = 2
    micros: int = 3
    steps: int = 2


@dataclass
class Outcome:
    """What a rank made of a case: of the first step, then the weights and statistics after the last.

    - ``logits``, ``voxels``: voxels by classes, and the voxels' numbers, of the first micro-batch
    """

    losses: list[float] = field(default_factory=list)
    logits: Tensor | None = None
    voxels: Tensor | None = None
    grads: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)


def net_of(case: Case, mesh: Mesh) -> Network:
    net = build_network(case.config, CHANNELS, CLASSES, mesh.seq, data=mesh.data).train()
    return net if case.config.precision == "bf16" else net.double()


def micro_batch(case: Case, mesh: Mesh, net: Network, step: int, micro: int) -> tuple[PartOfBatch, Tensor, Tensor]:
    """Returns this rank's part, its label where its logits are, and the numbers of those voxels, or volumes."""
    dice = torch.Generator().manual_seed(1000 * step + micro)
    like = torch.float32 if case.config.precision == "bf16" else torch.float64
    image = torch.randn(case.samples, CHANNELS, *case.config.tile, generator=dice, dtype=torch.float64).to(like)
    mine = torch.arange(case.samples).chunk(mesh.data.size)[mesh.data.index]
    of_volumes = case.config.task == "classify"
    sides = () if of_volumes else case.config.tile
    label = torch.randint(CLASSES, (case.samples, *sides), generator=dice)
    numbers = torch.arange(label.numel()).view_as(label)
    part = net.layout.cut(image[mine], mesh.seq.index)
    target, voxels = (x[mine] if of_volumes else net.layout.cut(x[mine], mesh.seq.index) for x in (label, numbers))
    key = DropoutKey(1, step, tuple((micro * case.samples + mine).tolist()))
    return PartOfBatch(part, net.layout, key), net.arrange(target), net.arrange(voxels).flatten()


def autocast(case: Case) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=case.config.precision == "bf16")


def train(mesh: Mesh, case: Case) -> Outcome:
    """Returns this rank's outcome; with one place it is the loop of accumulation over whole networks, with DDP."""
    net, outcome = net_of(case, mesh), Outcome()
    loss_of, groups = (
        net.training_loss(DiceCE(batch_dice=True)),
        net.loss_groups(mesh.data, case.samples // mesh.data.size),
    )
    engine = _engine(case, mesh, net) if mesh.pipe.size > 1 or case.allocation else None
    ddp = DistributedDataParallel(net) if engine is None and mesh.world.size > 1 else net
    adam = case.config.network == "vit"
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(net.parameters(), lr=1e-3 if adam else 1e-2)
    for step in range(case.steps):
        batches = [micro_batch(case, mesh, net, step, micro) for micro in range(case.micros)]
        losses = list[Tensor]()

        def judge(logits: Sequence[Tensor], micro: int) -> Tensor:
            if outcome.logits is None:
                outcome.logits = logits[0].detach().movedim(1, -1).flatten(0, 3)
                outcome.voxels = batches[micro][2]
            output = list(logits) if len(logits) > 1 else logits[0]
            losses.append(loss_of(output, batches[micro][1], groups))
            return losses[-1] / case.micros

        if engine is not None:
            engine.step([part for part, _, _ in batches], lambda values, micro: judge([x for x, _ in values], micro))
            average_gradients(list(net.parameters()), mesh.stage)
        else:
            for micro, (part, _, _) in enumerate(batches):
                if isinstance(ddp, DistributedDataParallel):
                    ddp.require_backward_grad_sync = micro == case.micros - 1
                with autocast(case):
                    output = ddp(part.part, None, part.key)
                judge(output if isinstance(output, list) else [output], micro).backward()
        outcome.losses += [loss.item() for loss in losses]
        if step == 0:
            outcome.grads = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    outcome.weights = {name: x.detach().clone() for name, x in net.state_dict().items() if x is not None}
    outcome.sent = dict(mesh.pipe.traffic)
    mesh.pipe.traffic.clear()
    return outcome


def _engine(case: Case, mesh: Mesh, net: Network) -> Engine:
    staged = net.staged()
    num, count = len(staged.takes), mesh.pipe.size
    allocation = case.allocation or tuple(cell * count // num for cell in range(num))
    stages = StageMap.of_allocation(staged.takes, staged.outputs, allocation)
    events = make_timetable(stages, case.micros, case.schedule).events[mesh.pipe.index]
    keep_local_weights(
        net, places_of_names(list(net.state_dict()), staged.owns, stages.place_of_cells), mesh.pipe.index
    )
    return Engine(staged, stages, events, mesh.pipe, mesh.seq, mesh.device, case.recompute, lambda: autocast(case))


def train_all(mesh: Mesh, cases: Sequence[Case]) -> list[Outcome]:
    return [train(mesh, case) for case in cases]


def differences(case: Case, outcomes: Sequence[Outcome], want: Outcome) -> dict[str, float]:
    """Returns the largest difference of all ranks' outcomes to one process: relative, for each kind of quantity.

    Gradients that are rounding alone, of a bias before a norm, are compared to the largest gradient of all.
    """
    last = [outcome for outcome in outcomes if outcome.logits is not None]
    assert last and want.logits is not None
    losses = torch.tensor([outcome.losses for outcome in last], dtype=torch.float64).mean(0)
    gaps = {"loss": float((losses - torch.tensor(want.losses, dtype=torch.float64)).abs().max())}
    scale = float(want.logits.abs().max())
    gaps["logits"] = max(float((o.logits - want.logits[o.voxels]).abs().max()) / scale for o in last)  # type: ignore
    seen = torch.cat([o.voxels for o in last]).unique()  # type: ignore[misc]
    assert len(seen) == len(want.logits), "some voxels have no logits"
    for kind in ("grads", "weights"):
        every = getattr(want, kind)
        assert {name for outcome in outcomes for name in getattr(outcome, kind)} == set(every)
        largest = max(float(x.abs().max()) for x in every.values())
        gaps[kind] = max(
            apart(x, every[name], largest) for outcome in outcomes for name, x in getattr(outcome, kind).items()
        )
    return gaps


def apart(a: Tensor, b: Tensor, largest: float) -> float:
    size = float(b.abs().max()) if b.numel() else 0.0
    return float((a - b).abs().max()) / (size if size > 1e-10 * largest else largest) if b.numel() else 0.0


def is_identical(outcomes: Sequence[Outcome], others: Sequence[Outcome]) -> bool:
    """Returns whether gradients, weights and losses have the same bits, whichever ranks have them."""
    for kind in ("grads", "weights"):
        known = {name: x for outcome in others for name, x in getattr(outcome, kind).items()}
        ours = {name: x for outcome in outcomes for name, x in getattr(outcome, kind).items()}
        if known.keys() != ours.keys() or not all(torch.equal(x, known[name]) for name, x in ours.items()):
            return False
    return sorted(o.losses for o in outcomes if o.losses) == sorted(o.losses for o in others if o.losses)
