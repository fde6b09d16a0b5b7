"""torch.distributed.pipelining as the peer: one stage a rank, GPipe and 1F1B, the same losses and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lab.benches.other_libraries import PeerStage
from seqpar.losses import DiceCE
from seqpar.parallel.mesh import Mesh
from seqpar.pipeline.stages import StageMap
from seqpar.settings.config import Config
from tests.support.piped_nets import Case, micro_batch, net_of, train

UNET = {"network": "nnunet-plain", "tile": (8, 8, 16), "features": 3, "stages": "133:111 333:222"}
pipelining = pytest.importorskip("torch.distributed.pipelining")


def torchs(mesh: Mesh, case: Case, cut: int) -> tuple[dict[str, Tensor], list[float]]:
    """Returns the gradients of torch's pipeline and, at the last stage, its losses."""
    net = net_of(case, mesh)
    staged = net.staged()
    stages = StageMap.of_cuts(staged.takes, staged.outputs, (cut,))
    batches = [micro_batch(case, mesh, net, 0, micro) for micro in range(case.micros)]
    images = [staged.image(part)[0] for part, _, _ in batches]
    between = PeerStage(net, stages, 0, batches[0][0])(images[0])
    half = PeerStage(net, stages, mesh.pipe.index, batches[0][0])
    inputs = tuple(x.detach().requires_grad_() for x in between) if mesh.pipe.index else (images[0],)
    given = half(*inputs)
    outputs = given if isinstance(given, tuple) else (given,)
    stage = pipelining.PipelineStage(
        half, mesh.pipe.index, 2, mesh.device, input_args=inputs, output_args=outputs, group=mesh.pipe.handle
    )
    loss_of, losses = DiceCE(batch_dice=True), list[Tensor]()
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[case.schedule]
    schedule = kind(stage, case.micros, lambda y, t: loss_of(y, t) / case.micros, scale_grads=False)
    if mesh.pipe.index:
        schedule.step(target=torch.cat([label for _, label, _ in batches]), losses=losses)
    else:
        schedule.step(torch.cat(images))
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return grads, [float(loss) * case.micros for loss in losses]


def both(mesh: Mesh, cases: list[Case], cut: int) -> list[tuple]:
    return [(train(mesh, case), torchs(mesh, case, cut)) for case in cases]


def test_gradients_and_losses_are_those_of_torchs_pipeline(ranks: Callable[..., list]) -> None:
    config, cut = Config(**UNET), 3
    num = 8
    allocation = tuple(int(cell >= cut) for cell in range(num))
    cases = [Case(name, config, allocation, name, steps=1) for name in ("gpipe", "1f1b")]
    for of_ranks in zip(*ranks(2, both, cases, cut, pipe=2, timeout=120)):
        for place, (ours, (grads, losses)) in enumerate(of_ranks):
            assert ours.grads.keys() == grads.keys() and len(grads) > 4
            largest = max(float(grad.abs().max()) for grad in grads.values())
            assert max(float((ours.grads[n] - grads[n]).abs().max()) for n in grads) < 1e-13 * largest
            if place:
                assert losses == pytest.approx(ours.losses, rel=1e-14)
