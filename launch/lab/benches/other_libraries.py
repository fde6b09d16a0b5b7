"""What the benches compare with: attention, U-Nets and pipelining of other libraries, as far as they are installed.

Attention: DeepSpeed's ``DistributedAttention`` (Ulysses), and the ring of torch's context parallelism, called with
torch's CPU kernel because its public function refuses the CPU. U-Nets: nnU-Net's own (``dynamic-network-
architectures``; install it with ``--no-deps``, or pip brings another torch), MONAI's, and one of torch's modules alone.
Any of them may be compiled. Pipelining: torch's own, one stage a rank, of our U-Net and with our cut. Windows over a
volume: nnU-Net's predictor and MONAI's ``sliding_window_inference``.
"""

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from seqpar.cluster.torch_setup import missing_compiler
from seqpar.decoders.unets.architecture import ONE, Architecture, Three, three
from seqpar.models.network import Network
from seqpar.models.pipelined import PartOfBatch
from seqpar.parallel.mesh import Mesh
from seqpar.pipeline.cells import IMAGE
from seqpar.pipeline.stages import StageMap

Act = Callable[[], object]
COMPILED = ", compiled"  # ends the name of a peer that is
_TORCH = "torch.distributed.tensor.experimental._context_parallel._attention"


def with_compiled(*names: str) -> list[str]:
    """Returns each name and, where torch finds a compiler for the CPU, that of the same network compiled."""
    endings = ("", COMPILED) if missing_compiler(on_gpu=False) is None else ("",)
    return [name + ending for name in names for ending in endings]


def compiled(net: nn.Module) -> nn.Module:
    """Returns a network that ``torch.compile`` translates when it is first called, which takes up to two minutes."""
    return torch.compile(net)  # type: ignore[return-value]


def attention_peers(heads: int, head_dim: int) -> dict[str, Callable[[Mesh, Sequence[int]], Act]]:
    """Returns, for each peer that is installed, what makes its forward and backward."""
    makers: dict[str, Callable[[Mesh, Sequence[int]], Act]] = {}
    if importlib.util.find_spec("deepspeed") is not None:
        makers["DeepSpeed Ulysses"] = partial(_deepspeed, heads, head_dim)
    if importlib.util.find_spec(_TORCH) is not None:
        ring = importlib.import_module(_TORCH)
        if hasattr(ring, "_templated_ring_attention_backward") and hasattr(ring, "set_rotate_method"):
            makers["torch ring, all-gather"] = partial(_torch_ring, ring, "allgather", heads, head_dim)
            makers["torch ring, all-to-all"] = partial(_torch_ring, ring, "alltoall", heads, head_dim)
    return makers


def _inputs(shape: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    return [torch.randn(*shape, requires_grad=True) for _ in range(3)], torch.randn(*shape)


def _deepspeed(heads: int, head_dim: int, mesh: Mesh, sizes: Sequence[int]) -> Act:
    layer = importlib.import_module("deepspeed.sequence.layer")
    inside: Any = importlib.import_module("deepspeed.comm.torch")
    inside.build_shm_op = lambda: None  # it would compile a sum through shared memory, which Ulysses does not use
    comm = importlib.import_module("deepspeed.comm")
    comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)  # uses the process group that exists

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # b n a f
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2).contiguous()

    spread = layer.DistributedAttention(attend, mesh.seq.handle, 2, 1)
    leaves, weight = _inputs((1, sizes[mesh.seq.index], heads, head_dim))
    return lambda: torch.autograd.grad(spread(*leaves, 0), leaves, weight)


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: ModuleType, handle: object) -> Tensor:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sum = ring._templated_ring_attention(handle, 2, op, q, k, v, is_causal=False)
        ctx.how = ring, handle
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ring, handle = ctx.how
        q, k, v, out, log_sum = ctx.saved_tensors
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = ring._templated_ring_attention_backward(
            handle, 2, op, grad, "grad_out", q, k, v, out, log_sum, False, dropout_p=0.0
        )
        return dq, dk, dv, None, None


def _torch_ring(ring: ModuleType, rotation: str, heads: int, head_dim: int, mesh: Mesh, sizes: Sequence[int]) -> Act:
    leaves, weight = _inputs((1, heads, sizes[mesh.seq.index], head_dim))
    ring._cp_options.enable_load_balance = False  # without a causal mask there is nothing to balance

    def act() -> object:
        ring.set_rotate_method(rotation)
        return torch.autograd.grad(_Ring.apply(*leaves, ring, mesh.seq.handle), leaves, weight)

    return act


class PlainUNet(nn.Module):
    """nnU-Net's PlainConvUNet of torch's own modules: convolution, instance norm, leaky ReLU; no box knows of it.

    - ``modules``: where its convolutions and norms come from
    """

    def __init__(self, a: Architecture, modules: Any = nn) -> None:
        super().__init__()
        widths = (a.in_channels, *a.features)
        self.down = nn.ModuleList(
            nn.Sequential(*_blocks(modules, channels, width, count, kernel, stride))
            for (channels, width), count, kernel, stride in zip(
                itertools.pairwise(widths), a.encoder, a.kernels, a.strides
            )
        )
        levels = list(reversed(range(len(a.features) - 1)))
        self.ups = nn.ModuleList(
            modules.ConvTranspose3d(a.features[level + 1], a.features[level], stride, stride)
            for level in levels
            for stride in [a.strides[level + 1]]
        )
        self.joins = nn.ModuleList(
            nn.Sequential(*_blocks(modules, 2 * a.features[level], a.features[level], count, a.kernels[level], ONE))
            for level, count in zip(levels, a.decoder)
        )
        self.classes = modules.Conv3d(a.features[0], a.num_outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
        for up, join, skip in zip(self.ups, self.joins, reversed(skips[:-1])):
            x = join(torch.cat([up(x), skip], 1))
        logits: Tensor = self.classes(x)
        return logits


def _blocks(modules: Any, channels: int, width: int, count: int, kernel: Three, stride: Three) -> list[nn.Module]:
    layers, padding = list[nn.Module](), three([side // 2 for side in kernel])
    for number in range(count):
        conv = modules.Conv3d(width if number else channels, width, kernel, ONE if number else stride, padding)
        layers += [conv, modules.InstanceNorm3d(width, affine=True), nn.LeakyReLU(inplace=True)]
    return layers


def _nnunets_own(a: Architecture) -> nn.Module:
    from dynamic_network_architectures.architectures.unet import (  # type: ignore[import-not-found, unused-ignore]
        PlainConvUNet,
    )

    net: nn.Module = PlainConvUNet(
        a.in_channels, len(a.features), a.features, nn.Conv3d, a.kernels, a.strides, a.encoder, a.num_outputs,
        a.decoder, conv_bias=True, norm_op=nn.InstanceNorm3d, norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True},
    )  # fmt: skip
    return net


def _basic(a: Architecture) -> nn.Module:
    from monai.networks.nets import BasicUNet  # type: ignore[import-not-found, unused-ignore]

    net: nn.Module = BasicUNet(3, a.in_channels, a.num_outputs)
    return net


def _dynamic(a: Architecture) -> nn.Module:
    from monai.networks.nets import DynUNet  # type: ignore[import-not-found, unused-ignore]

    norm = ("INSTANCE", {"affine": True})
    net: nn.Module = DynUNet(
        3, a.in_channels, a.num_outputs, a.kernels, a.strides, a.strides[1:], a.features, norm_name=norm
    )
    return net


UNETS: dict[str, tuple[str, Callable[[Architecture], nn.Module]]] = {  # name → the package it needs, and how it is made
    "dynamic-network-architectures": ("dynamic_network_architectures", _nnunets_own),
    "torch's own modules": ("torch", PlainUNet),
    "MONAI DynUNet": ("monai", _dynamic),
    "MONAI BasicUNet": ("monai", _basic),
}


def unets_here() -> list[str]:
    """Returns the peers whose package is installed."""
    return [name for name, (package, _) in UNETS.items() if importlib.util.find_spec(package)]


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Gives a network of the same layers the weights of another, kind by kind in order; heads from the finest on."""
    for ours, theirs in zip(_by_kind(target), _by_kind(source)):
        for a, b in zip(ours, theirs):
            a.load_state_dict(b.state_dict())


def _by_kind(net: nn.Module) -> list[list[nn.Module]]:
    """Returns convolutions, transposed ones, norms, and heads, the finest first, each in order."""
    convs, ups, norms, heads = list[nn.Module](), list[nn.Module](), list[nn.Module](), list[nn.Module]()
    for module in net.modules():
        if isinstance(module, nn.ConvTranspose3d):
            ups.append(module)
        elif isinstance(module, nn.InstanceNorm3d):
            norms.append(module)
        elif isinstance(module, nn.Conv3d):
            (heads if max(module.kernel_size) == 1 else convs).append(module)
    return [convs, ups, norms, heads[::-1]]


def nnunets_predictor(net: nn.Module, tile: Sequence[int], num_classes: int, mirror: bool) -> Any:
    """Returns nnU-Net's own predictor of a network, on the CPU and else at its defaults.

    - ``mirror``: also predict all flips of each window, which is its default
    """
    from nnunetv2.inference.predict_from_raw_data import (  # type: ignore[import-not-found, unused-ignore]
        nnUNetPredictor,
    )

    predictor = nnUNetPredictor(
        use_mirroring=mirror, perform_everything_on_device=False, device=torch.device("cpu"), allow_tqdm=False
    )
    predictor.configuration_manager = SimpleNamespace(patch_size=list(tile))
    predictor.label_manager = SimpleNamespace(num_segmentation_heads=num_classes)
    predictor.network, predictor.allowed_mirroring_axes = net.eval(), (0, 1, 2) if mirror else None
    return predictor


def _nnunets_windows(net: nn.Module, image: Tensor, tile: Sequence[int], num_classes: int, mirror: bool) -> Tensor:
    logits: Tensor = nnunets_predictor(net, tile, num_classes, mirror).predict_sliding_window_return_logits(image)
    return logits


def _monais_windows(net: nn.Module, image: Tensor, tile: Sequence[int], num_classes: int, mirror: bool) -> Tensor:
    from monai.inferers import sliding_window_inference  # type: ignore[import-not-found, unused-ignore]

    assert not mirror, "MONAI flips no windows"
    logits: Any = sliding_window_inference(image[None], tuple(tile), 1, net)
    return logits[0]  # type: ignore[no-any-return]


# name → what predicts a volume ``c W D H`` by its windows, given network, image, tile, classes, and whether to mirror
WINDOWS: dict[str, Callable[[nn.Module, Tensor, Sequence[int], int, bool], Tensor]] = {
    "nnU-Net": _nnunets_windows,
    "MONAI": _monais_windows,
}


def windows_here() -> list[str]:
    """Returns the libraries whose windows can be computed here."""
    packages = {"nnU-Net": "nnunetv2", "MONAI": "monai"}
    return [name for name in WINDOWS if importlib.util.find_spec(packages[name])]


_PIPELINING = "torch.distributed.pipelining"


class PeerStage(nn.Module):
    """One of two stages, as torch takes it: tensors in, tensors out; ``micro``: a micro-batch like all others."""

    def __init__(self, net: Network, stages: StageMap, stage: int, micro: PartOfBatch) -> None:
        super().__init__()
        self.net, self.staged, self.stages, self.stage, self.micro = net, net.staged(), stages, stage, micro

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...] | Tensor:
        entering = [value for value, _, _ in self.stages.enters(self.stage)] if self.stage else [IMAGE]
        values = dict(zip(entering, tensors))
        for cell in self.stages.runs(self.stage):
            inputs = [(values[value], None) for value in self.stages.takes[cell]]
            values[cell] = self.staged.run_cell(cell, inputs, self.micro)[0]
        if self.stage:
            return values[self.stages.outputs[0]]
        leaving = [values[value] for value, _, _ in reversed(self.stages.leaves(0))]
        return tuple(x.contiguous() for x in leaving)  # gloo sends no others


def torchs_step(
    net: Network,
    stages: StageMap,
    micro: PartOfBatch,
    label: Tensor,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    micros: int,
    mesh: Mesh,
) -> Callable[[], None]:
    """Returns a step of 1F1B that adds the gradients of ``micros`` equal micro-batches.

    ``net``: whole, on both ranks; each uses its own stage's weights.
    """
    pipelining = importlib.import_module(_PIPELINING)
    place = mesh.pipe.index
    image, _ = net.staged().image(micro)
    between = PeerStage(net, stages, 0, micro)(image)
    half = PeerStage(net, stages, place, micro)
    inputs = tuple(x.detach().requires_grad_() for x in between) if place else (image.contiguous(),)
    outputs = half(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = tuple(x.detach().requires_grad_() for x in outputs)
    stage = pipelining.PipelineStage(
        half, place, mesh.pipe.size, mesh.device, input_args=inputs, output_args=outputs, group=mesh.pipe.handle
    )

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return loss_of(y, target) / micros

    schedule = pipelining.Schedule1F1B(stage, micros, loss, scale_grads=False)
    images, labels = torch.cat([image] * micros), torch.cat([label] * micros)
    return lambda: schedule.step(target=labels) if place else schedule.step(images)
