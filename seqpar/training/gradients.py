"""Gradients: forward and backward of a step's micro-batches, on this rank's part."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from seqpar.cluster.stop_request import StopRequest
from seqpar.data.sampling.loader import MicroBatch
from seqpar.losses import DeepSupervision, Loss, LossGroups, LossOf
from seqpar.models.network import Network, autocast
from seqpar.optimization.optimizers import use_fused
from seqpar.parallel.collectives import full_tensor
from seqpar.parallel.consensus import raise_on_all_ranks
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.messages import check_collective
from seqpar.settings.config import Config
from seqpar.settings.rules import why_without_effect
from seqpar.spatial.norms import BatchNorm3d
from seqpar.tasks.training_data import TrainingData, outputs_shown
from seqpar.training.data_parallel import data_parallel, frozen_running_statistics, gathered, no_sync
from seqpar.vit.dropout import DropoutKey, RandomDraws
from seqpar.weights.states import whole_tensors


def losses_of_step(
    net: Network,
    loss: Loss | DeepSupervision,
    data: TrainingData,
    micros: Sequence[MicroBatch],
    loss_groups: LossGroups,
    device: torch.device,
) -> list[LossOf]:
    """Returns the loss of each micro-batch of a step, whose labels are arranged and counted together.

    - ``loss``: of what ``net`` returns in training
    """
    labels = [net.arrange(data.labels_of(micro)) for micro in micros]
    shown = [outputs_shown(data, micro.cases, net.mode, device) for micro in micros]
    return loss.of_step(labels, loss_groups, shown)


class GraphedNetwork(nn.Module):
    """A network whose forward and backward in training can be replayed as two CUDA graphs, of one launch each.

    Without, a step of small tiles waits for this process, which launches more than a thousand kernels one by one.
    Before ``record`` and outside training the network runs as ever.
    """

    def __init__(self, net: Network) -> None:
        super().__init__()
        self.net = net
        self._passes: _Passes | None = None

    def record(self, image: Tensor, first: DropoutKey, second: DropoutKey) -> None:
        """Records a forward and a backward for images like ``image``, in the present autocast.

        Raises ValueError if a replay with the draws of ``second`` is not what the network computes with them: what
        this process computes by itself, such as random numbers on the CPU, would be the same in every step.
        """
        other = torch.randn_like(image)
        exact = _Passes(self.net, other, second)
        logits = exact.forward()
        given = [torch.randn_like(x) for x in logits]
        expected = [*(x.detach().clone() for x in logits), _joined(exact.gradients(logits, given))]
        del exact, logits
        torch.cuda.empty_cache()  # recorded passes have memory of their own
        passes = _Passes(self.net, image, first)
        try:
            passes.record()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # such as a copy from the CPU, for which the recording would have to wait
            why = str(error).partition("\n")[0]
            raise ValueError(f"--cuda-graph: this network's passes cannot be recorded: remove it ({why})") from error
        replayed = [*passes.replay_forward(other, second), _joined(passes.replay_backward(given))]
        apart = max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(replayed, expected, strict=True))
        if not apart <= 0.05:
            raise ValueError(f"--cuda-graph: a replayed step differs from a computed one by {apart:.1e}: remove it")
        self._passes = passes

    def forward(self, image: Tensor, layout: Layout | None, key: DropoutKey | None) -> Tensor | list[Tensor]:
        """Returns what the network returns; of a replay, in memory that the next one overwrites."""
        passes = self._passes
        if passes is None or layout is not None or key is None or not (self.net.training and torch.is_grad_enabled()):
            return self.net(image, layout, key)
        logits = [*_Replay.apply(passes, image, key, *passes.parameters)]
        return logits if passes.returns_list else logits[0]


def _joined(gradients: Sequence[Tensor | None]) -> Tensor:
    """Returns all gradients as one tensor: single ones that should be zero are noise."""
    return torch.cat([x.flatten() for x in gradients if x is not None])


class _Passes:
    """Forward and backward of a network for one shape of image, computed or replayed."""

    def __init__(self, net: Network, image: Tensor, key: DropoutKey) -> None:
        self.net, self.image = net, image.clone()
        self.parameters = [p for p in net.parameters() if p.requires_grad]
        self.returns_list = False
        self.key = key
        if key.draws is not None:
            tables = ({at: x.clone() for at, x in table.items()} for table in key.draws.tables)
            self.key = replace(key, draws=RandomDraws(*tables))
        self._graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._logits, self._given = list[Tensor](), list[Tensor]()
        self._gradients = list[Tensor | None]()

    def forward(self) -> list[Tensor]:
        """Returns the logits for the image."""
        dtype, is_on = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", dtype, enabled=is_on, cache_enabled=False):  # it would keep casts of old weights
            logits = self.net(self.image, None, self.key)
        self.returns_list = isinstance(logits, list)
        return logits if isinstance(logits, list) else [logits]

    def gradients(self, logits: list[Tensor], given: list[Tensor]) -> Sequence[Tensor | None]:
        """Returns the gradients of the parameters from those of the logits."""
        return torch.autograd.grad(logits, self.parameters, given, allow_unused=True)

    def record(self) -> None:
        """Records both passes, after three that choose kernels and make constants."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                logits = self.forward()
                self.gradients(logits, [torch.zeros_like(x) for x in logits])
        torch.cuda.current_stream().wait_stream(aside)
        del logits
        pool, (forward, backward) = torch.cuda.graph_pool_handle(), self._graphs
        with torch.cuda.graph(forward, pool, capture_error_mode="thread_local"):
            logits = self.forward()
        self._given = [torch.zeros_like(x) for x in logits]
        with torch.cuda.graph(backward, pool, capture_error_mode="thread_local"):
            self._gradients = [*self.gradients(logits, self._given)]
        self._logits = [x.detach() for x in logits]

    def replay_forward(self, image: Tensor, key: DropoutKey) -> list[Tensor]:
        """Returns the logits for another image with the draws of ``key``."""
        assert self.image.shape == image.shape
        self.image.copy_(image)
        if self.key.draws is not None:
            assert key.draws is not None
            for own, new in zip(self.key.draws.tables, key.draws.tables):
                if own:
                    torch._foreach_copy_([*own.values()], [new[at] for at in own])
        self._graphs[0].replay()
        return [x.detach() for x in self._logits]

    def replay_backward(self, given: Sequence[Tensor]) -> list[Tensor | None]:
        """Returns the gradients of the parameters, in memory of their own."""
        for own, new in zip(self._given, given, strict=True):
            assert own.shape == new.shape
            own.copy_(new)
        self._graphs[1].replay()
        present = [x for x in self._gradients if x is not None]
        copies = iter(
            torch._foreach_mul(present, 1.0)
        )  # autograd may keep what it gets, and the next replay overwrites
        return [None if x is None else next(copies) for x in self._gradients]


class _Replay(torch.autograd.Function):
    """Replays a forward, and in backward its backward; parameters are arguments so that their gradients reach them."""

    @staticmethod
    def forward(ctx: Any, passes: _Passes, image: Tensor, key: DropoutKey, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        return tuple(passes.replay_forward(image, key))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.passes.replay_backward(given)
        assert all(g is None or g.shape == p.shape for g, p in zip(gradients, ctx.passes.parameters, strict=True))
        return None, None, None, *gradients


def _graphed(net: Network, mesh: Mesh, config: Config) -> GraphedNetwork:
    """Returns the network to record; raises ValueError where ranks exchange messages within a pass."""
    if why := why_without_effect(config, "cuda_graph"):  # of a resumed run, whose command line did not name it
        raise ValueError(f"--cuda-graph, with which this run began: {why}, or add --no-cuda-graph")
    if mesh.data.size > 1 and any(isinstance(module, BatchNorm3d) for module in net.modules()):
        raise ValueError(
            f"--cuda-graph: {mesh.data.size} data groups exchange the statistics of batch norm within a pass: "
            "remove it, or use another --norm"
        )
    return GraphedNetwork(net)


class Gradients:
    """Adds the gradients of ``net``, averaged over all ranks, with the settings of ``config``.

    ``loss``: of the finest logits.
    """

    roles: Sequence[str] = ()  # of the ranks: all do the same

    def __init__(self, config: Config, mesh: Mesh, data: TrainingData, net: Network, loss: Loss) -> None:
        self.config, self.mesh, self.data, self.net = config, mesh, data, net
        self.graphed = _graphed(net, mesh, config) if config.cuda_graph and mesh.device.type == "cuda" else None
        self.parallel_net = data_parallel(self.graphed or net, mesh, config.shard_weights)
        self.loss = net.training_loss(loss)
        self.loss_groups = net.loss_groups(mesh.data, config.batch)

    def warm_up(self) -> None:
        """Runs one forward and backward whose gradients are dropped.

        DDP rearranges its buckets after the first backward, which changes the order of sums from 3 ranks up: so every
        start, fresh or resumed, has its first backward before the first step that counts.
        """
        layout, config, device = self.net.layout, self.config, self.mesh.device
        tokens = (config.batch, layout.counts[self.mesh.seq.index])
        image = torch.zeros(*tokens, self.data.num_channels, *layout.patch, device=device)
        label = torch.zeros(self.net.label_shape(config.batch), device=device, dtype=torch.long)
        with frozen_running_statistics(self.net):
            with self._autocast():
                logits = self.parallel_net(self._cast(image), None, DropoutKey(0, 0, tuple(range(config.batch))))
            shown = outputs_shown(self.data, self.data.train_ids[:1] * config.batch, self.net.mode, device)
            self.loss(logits, self.net.arrange(label), self.loss_groups, shown).backward()
            self.net.zero_grad()
            if self.graphed is not None:
                del logits
                self._record(self.graphed, self._cast(image))

    def _record(self, graphed: GraphedNetwork, image: Tensor) -> None:
        """Records passes for images like ``image``; raises on all ranks if one of them cannot."""
        samples, error = tuple(range(self.config.batch)), None
        keys = (DropoutKey(self.config.seed, step, samples) for step in (0, 1))
        try:
            with self._autocast():
                graphed.record(image, *(self.net.drawn(key, self.mesh.device) for key in keys))
        except (ValueError, torch.OutOfMemoryError) as own:
            error = own
        raise_on_all_ranks(error, self.mesh.world)

    def gathered(self) -> AbstractContextManager[None]:
        """Returns a context in which this rank predicts with the whole network, as in validation."""
        return gathered(self.net, self.mesh, self.config.shard_weights)

    def whole_tensors(self, tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
        """Returns whole tensors of the network or its optimizer, or an empty dict on ranks without ``keep``."""
        return whole_tensors(tensors, keep)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the whole network's tensors."""
        return {name: tuple(x.shape) for name, x in self.net.state_dict().items()}

    def add(self, micros: list[MicroBatch], step: int, stopper: StopRequest) -> Tensor | None:
        """Returns the step's loss and its terms, None where all ranks leave between two micro-batches.

        The last backward averages the gradients over the ranks.
        """
        sums: Tensor | None = None
        losses = losses_of_step(self.net, self.loss, self.data, micros, self.loss_groups, self.mesh.device)
        for number, (micro, loss_of) in enumerate(zip(micros, losses)):
            is_last = number == len(micros) - 1
            if number and stopper.should_leave():
                return None
            if is_last:
                check_collective("gradients", self.mesh.world)
            with nullcontext() if is_last else no_sync(self.parallel_net):
                own = self._backward(micro, step, loss_of)
                sums = own if sums is None else sums + own
        return sums

    def clip(self, limit: float) -> Tensor:
        """Returns the norm of all gradients, after scaling them to ``limit``: the same on all ranks."""
        parameters = list(self.net.parameters())
        if math.isfinite(limit):
            return full_tensor(torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=use_fused(parameters)))
        gradients = [p.grad for p in parameters if p.grad is not None]
        return full_tensor(torch.nn.utils.get_total_norm(gradients, foreach=use_fused(parameters)))

    def _backward(self, micro: MicroBatch, step: int, loss_of: LossOf) -> Tensor:
        """Returns a micro-batch's share of the loss and its terms, after adding its gradients."""
        with self._autocast():
            key = self.net.drawn(DropoutKey(self.config.seed, step, micro.samples), self.mesh.device)
            logits = self.parallel_net(self._cast(micro.image), None, key)
        parts = loss_of(logits)
        parts.total.backward()
        self.mesh.world.watch.clock.count_since_ready()
        return torch.stack([parts.total, *parts.terms.values()]).detach().double()

    def _cast(self, image: Tensor) -> Tensor:
        return image.double() if self.config.precision == "fp64" else image

    def _autocast(self) -> AbstractContextManager[None]:
        return autocast(self.config.precision, self.mesh.device)
