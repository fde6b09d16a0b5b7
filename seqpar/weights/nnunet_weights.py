"""Loads and exports weights of nnU-Net's networks and of MedNeXt, by the names in their packages."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.data.addresses import local_file
from seqpar.data.errors import DataError, unwritable
from seqpar.data.files import refuse_existing, whole_file
from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.unets.architecture import ONE, Architecture, three
from seqpar.decoders.unets.nnunet import network
from seqpar.decoders.unets.published import MEDNEXT, mednext_architecture
from seqpar.decoders.unets.unet import UNet
from seqpar.models.cell_network import VolumeNet
from seqpar.parallel.mesh import AnyGroup, as_group
from seqpar.weights.nnunet_results import CHECKPOINT, NnunetResults, fold_files, read_checkpoint, read_results
from seqpar.weights.weight_files import (
    State,
    last_number,
    load_strict,
    read_weights,
    refuse_unusable,
    rename,
    shorten_list,
    unwrap,
    write_pth,
)

_COPY = re.compile(r"^decoder\.encoder\.|\.all_modules\.\d+\.")
_BLOCK = re.compile(r"(.*)\.(conv|norm)\.([a-z_]+)")  # a tensor of a convolution or its norm
_UNUSED = "dummy_tensor"  # of MedNeXt: a parameter that no output depends on


def load_nnunet(
    folder: str | Path,
    fold: int | str | None = None,
    checkpoint: str = CHECKPOINT,
    deep_supervision: bool = False,
    group: AnyGroup | None = None,
    mode: str = "auto",
    split: str = "spatial",
) -> VolumeNet:
    """Returns a network with the weights that nnU-Net trained, for images in nnU-Net's axes (z y x, transposed).

    - ``folder``: a results folder (TRAINER__PLANS__CONFIGURATION), or the path or address of one checkpoint of it
    - ``fold``: whose weights; None: those of the first fold
    - ``checkpoint``: the name of its file
    - ``deep_supervision``: return the logits of all levels but the coarsest in training
    - ``group``: the ranks that share a tile: ours or torch's; None: this process alone
    - ``mode``: how ranks divide the work
    """
    folder = local_file(folder)
    if folder.is_file():
        results = read_checkpoint(folder)
    else:
        files = fold_files(folder, [] if fold is None else [str(fold)], checkpoint)
        results = read_results(folder, files[:1])
    return nets_of(results, group, mode, split, deep_supervision)[0]


def nets_of(
    results: NnunetResults,
    group: AnyGroup | None,
    mode: str = "auto",
    split: str = "spatial",
    deep_supervision: bool = False,
) -> list[VolumeNet]:
    """Returns the network of each fold; for the arguments see ``load_nnunet``."""
    if results.architecture is None:
        raise DataError(results.path, "holds a Primus: load its checkpoints by load_primus")
    nets = []
    for fold in results.folds:
        with torch.random.fork_rng(devices=[]):  # what the constructors draw is overwritten
            unet = network(results.architecture, deep_supervision)
        net = VolumeNet(unet, results.plan.patch_size, choose_mode(mode, as_group(group)), split)
        refuse_unusable(fold.weights, fold.path)
        names = {theirs: f"unet.{ours}" for ours, theirs in nnunet_names(unet).items()}
        what = f"the plan's {results.plan.network_class.rpartition('.')[2]}"
        try:
            load_strict(net, rename(without_copies(fold.weights), names, what))
        except ValueError as error:
            if not fold.unknown_trainer:
                raise
            own = f"{fold.path} was trained by {fold.unknown_trainer}, which builds another network than {what}"
            raise ValueError(f"{own}: {error}") from error
        nets.append(net)
    return nets


def trained_state(results: NnunetResults) -> State:
    """Returns the first fold's weights under our names, for images in the axes of a file: W D H."""
    state = nets_of(results, None)[0].state_dict()
    order = [2 + axis for axis in results.plan.file_axes]
    return {name: tensor.permute(0, 1, *order) if tensor.ndim == 5 else tensor for name, tensor in state.items()}


def export_nnunet(net: nn.Module, transpose_forward: Sequence[int] | None = None) -> State:
    """Returns the network's weights as the state dict that nnU-Net loads with ``strict=True``, including copies.

    - ``net``: a network such as ``load_nnunet`` returns, the network of a run of ours, or a U-Net alone
    - ``transpose_forward``: of the plans that will use the weights. The kernels of a run, for images W D H, are turned
      to the axis order of these plans (None: 0 1 2, which is z y x). Those of ``load_nnunet`` already have it; a
      U-Net alone is turned only if this is given
    """
    unet = net.unet if isinstance(net, VolumeNet) else net
    if not isinstance(unet, UNet):
        raise ValueError(f"nnU-Net loads the weights of a U-Net, not of a {type(net).__name__}")
    _refuse_foreign(unet.architecture)
    order = _to_theirs(net, transpose_forward)
    tensors = {
        name: (tensor.permute(order) if tensor.ndim == 5 else tensor)
        .detach()
        .clone(memory_format=torch.contiguous_format)
        for name, tensor in unet.state_dict().items()
    }
    state: State = {}
    for ours, theirs in nnunet_names(unet).items():
        for name in (theirs, *second_names(theirs)):
            state[name] = tensors[ours]
            if name.startswith("encoder."):
                state[f"decoder.{name}"] = tensors[ours]
    return state


def second_names(theirs: str) -> list[str]:
    """Returns the other name that a tensor of a convolution or its norm also has there."""
    block = _BLOCK.fullmatch(theirs)
    return [f"{block[1]}.all_modules.{('conv', 'norm').index(block[2])}.{block[3]}"] if block else []


def _to_theirs(net: nn.Module, transpose_forward: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the order of a kernel's dims in nnU-Net's axes."""
    of_a_run = isinstance(net, VolumeNet) and bool(net.settings)
    if isinstance(net, VolumeNet) and not of_a_run and transpose_forward is not None:
        raise ValueError(
            f"transpose_forward {tuple(transpose_forward)}: the weights of load_nnunet are in nnU-Net's axes already: "
            "remove it"
        )
    axes = transpose_forward if transpose_forward is not None or not of_a_run else (0, 1, 2)
    if axes is None:
        return 0, 1, 2, 3, 4
    if sorted(axes) != [0, 1, 2]:
        raise ValueError(f"transpose_forward {tuple(axes)}: the axes 0, 1 and 2 in some order are needed")
    return 0, 1, *(4 - axis for axis in axes)


def nnunet_names(unet: UNet) -> dict[str, str]:
    """Returns a mapping from our names to nnU-Net's, of a U-Net's parameters and statistics."""
    return {ours: _theirs(ours, unet.architecture) for ours in unet.state_dict()}


def _theirs(ours: str, a: Architecture) -> str:
    cell, _, rest = ours.removeprefix("cells.").partition(".")
    if cell == "stem":
        return f"encoder.stem.convs.0.{rest}"
    match = re.fullmatch(r"([a-z]+)(\d+)(?:_(\d+))?", cell)
    assert match is not None, ours
    kind, level, number = match[1], int(match[2]), match[3]
    from_below = len(a.features) - 2 - level  # the coarsest level is their first
    if kind == "up":
        return f"decoder.transpconvs.{from_below}.{rest.removeprefix('conv.')}"
    if kind == "classes":
        return f"decoder.seg_layers.{from_below}.{rest}"
    if kind == "decoder":
        return f"decoder.stages.{from_below}.convs.{number}.{rest}"
    if a.block == "plain":
        return f"encoder.stages.{level}.0.convs.{number}.{rest}"
    pools = number == "0" and a.strides[level] != ONE
    return f"encoder.stages.{level}.blocks.{number}.{name_in_block(rest, pools)}"


def name_in_block(ours: str, pools: bool) -> str:
    """Returns the name there of a tensor of a residual block; ``pools``: whether its shortcut begins with pooling."""
    theirs = re.sub(r"^convs\.(\d+)\.", lambda m: f"conv{int(m[1]) + 1}.", ours)
    return re.sub(r"^project\.", f"skip.{int(pools)}.", theirs)


def without_copies(theirs: State) -> State:
    """Returns the state without the second names of tensors; raises where these hold other numbers."""
    state = {name: tensor for name, tensor in theirs.items() if not _COPY.search(name)}
    differing = []
    for name in theirs.keys() - state.keys():
        first = re.sub(r"^decoder\.encoder\.", "encoder.", name)
        first = re.sub(r"\.all_modules\.([01])\.", lambda m: (".conv.", ".norm.")[int(m[1])], first)
        if first not in state or not torch.equal(state[first], theirs[name]):
            differing.append(name)
    if differing:
        raise ValueError(
            "these weights hold other numbers under second names than under the first "
            f"({shorten_list(sorted(differing), 4)}): they are not those of one network of nnU-Net's"
        )
    return state


def _refuse_foreign(a: Architecture) -> None:
    """Raises ValueError if the network has anything that nnU-Net's do not have."""
    heads = len(a.features) - 1
    kinds: Sequence[tuple[bool, str]] = (
        (a.style.norm not in ("instance", "batch"), f"{a.style.norm} norm"),
        (a.style.length > 0, "norms of the last axis"),
        (a.first_kernel is not None, "a first convolution of another kernel"),
        (a.style.activation != "leaky_relu", a.style.activation),
        (a.style.bias != a.style.up_bias, "biases in some convolutions alone"),
        (a.down != "stride", f"{a.down}-pooling"),
        (a.up != "transposed" or a.up_kernel > 0, "other upsampling than by the stride"),
        (a.heads != heads, f"{a.heads} heads (it has {heads})"),
        (a.head_kernel != 1, f"heads of kernel {a.head_kernel}"),
        (a.squeeze > 0, "squeeze-excite"),
        (a.bare_last or a.merge or a.tail > 0, "bare convolutions, merges or a tail"),
        ((a.block == "plain") != (a.stem == 0), f"{a.block} blocks with a stem of {a.stem} channels"),
    )
    if faults := [what for differs, what in kinds if differs]:
        raise ValueError(f"nnU-Net has no network with {', '.join(faults)}; save it with write_weights")


def load_mednext(
    source: Mapping[str, Any] | str | Path,
    tile: int | Sequence[int] = 128,
    kernel: int = 0,
    deep_supervision: bool = False,
    group: AnyGroup | None = None,
    mode: str = "auto",
    split: str = "spatial",
) -> VolumeNet:
    """Returns the network of a state dict of MedNeXt's package (``nnunet_mednext``), for images in the axes there.

    Its norms are taken to be group norms of one channel each, as published: names do not tell them from layer norms.

    - ``source``: a state dict or checkpoint, or the path or address of its file
    - ``tile``: on which it is to be trained
    - ``kernel``: 5 enlarges kernels of 3 by UpKern, that is trilinearly; 0: as they are
    - ``deep_supervision``: return the logits of all levels in training, if the weights have them
    - ``group``, ``mode``, ``split``: as in ``load_nnunet``
    """
    weights = read_weights(source) if isinstance(source, (str, Path)) else unwrap(source)
    architecture, state = mednext_state(weights)
    if kernel:
        if kernel < architecture.kernels[0][0]:
            raise ValueError(f"kernel={kernel}: these weights have kernels of {architecture.kernels[0][0]}")
        architecture = replace(architecture, kernels=(three(kernel),) * len(architecture.kernels))
    if deep_supervision and architecture.heads == 1:
        raise ValueError("deep_supervision=True: these weights have no logits of coarser levels")
    with torch.random.fork_rng(devices=[]):  # what the constructors draw is overwritten
        unet = UNet(architecture, architecture.heads if deep_supervision else 1)
    net = VolumeNet(unet, three(tile), choose_mode(mode, as_group(group)), split)
    enlarge_kernels(state, net.state_dict())
    load_strict(net, state)
    return net


def export_mednext(net: nn.Module, transpose_forward: Sequence[int] | None = None) -> State:
    """Returns the network's weights as the state dict that MedNeXt's package loads with ``strict=True``.

    - ``net``: a network such as ``load_mednext`` returns, the network of a run of ours, or a U-Net alone
    - ``transpose_forward``: as in ``export_nnunet``
    """
    unet = net.unet if isinstance(net, VolumeNet) else net
    if not isinstance(unet, UNet) or unet.architecture.block != "mednext" or unet.architecture.style.norm != "instance":
        raise ValueError(
            f"a {type(net).__name__} came that is no MedNeXt with instance norm: give a network such as load_mednext "
            "or seqpar.decoders.mednext returns"
        )
    order = _to_theirs(net, transpose_forward)
    state = {theirs: _turned(unet.state_dict()[ours], theirs, order) for ours, theirs in _mednext_names(unet).items()}
    return {**state, _UNUSED: torch.ones_like(state["stem.bias"][:1])}


def write_mednext(path: Path, net: nn.Module, transpose_forward: Sequence[int], licence: str) -> None:
    """Writes the weights of a run as a checkpoint that MedNeXt's package starts from, whole or not at all."""
    refuse_existing(path)
    content = {"state_dict": export_mednext(net, transpose_forward), "licence": licence}
    try:
        with whole_file(path, replaces=False) as temporary:
            write_pth(temporary, content)
    except OSError as error:
        raise unwritable(path, error) from error


def holds_mednext(state: Mapping[str, Any]) -> bool:
    """Returns whether a state dict is one of MedNeXt's package."""
    return "enc_block_0.0.conv1.weight" in state and "bottleneck.0.conv1.weight" in state


def mednext_state(theirs: State, reverse_axes: bool = False) -> tuple[Architecture, State]:
    """Returns the architecture that MedNeXt's weights have, and the weights under the names of a ``VolumeNet``.

    - ``reverse_axes``: turn kernels from z y x to W D H
    """
    theirs = {name: tensor for name, tensor in theirs.items() if name != _UNUSED}
    stages = [*(f"enc_block_{stage}" for stage in range(last_number(theirs, "enc_block_") + 1)), "bottleneck"]
    needed = ["stem.weight", "out_0.conv_out.weight"]
    needed += [f"{stage}.0.{conv}.weight" for stage in stages for conv in ("conv1", "conv2")]
    unusable = [name for name in needed if name not in theirs or theirs[name].ndim != 5 or not theirs[name].numel()]
    if unusable:
        raise ValueError(
            f"these are not weights of a three-dimensional MedNeXt: {shorten_list(unusable, 4)} missing or of another "
            "shape"
        )
    first = [theirs[f"{stage}.0.conv2.weight"].shape for stage in stages]
    architecture = mednext_architecture(
        theirs["stem.weight"].shape[1],
        theirs["out_0.conv_out.weight"].shape[1],
        tuple(last_number(theirs, f"{stage}\\.") + 1 for stage in stages),
        tuple(inner // outer for inner, outer, *_ in first),
        theirs[f"{stages[0]}.0.conv1.weight"].shape[2],
        len(theirs["stem.weight"]),
        "out_1.conv_out.weight" in theirs,
    )
    with torch.device("meta"):
        names = {name: f"unet.{ours}" for ours, name in _mednext_names(UNet(architecture)).items()}
    order = (0, 1, 4, 3, 2) if reverse_axes else (0, 1, 2, 3, 4)
    turned = {name: _turned(tensor, name, order) for name, tensor in theirs.items()}
    return architecture, rename(turned, names, "MedNeXt's first version")


def mednext_flags(a: Architecture) -> str:
    """Returns the flags of a network with these sizes."""
    sizes = [size for size, own in MEDNEXT.items() if own == (a.encoder, a.expansion)]
    kernel = a.kernels[0][0]
    if not sizes or kernel not in (3, 5):
        return f"blocks {a.encoder}, expansion {a.expansion} and kernels of {kernel}, which no --network has"
    return f"--network mednext-{sizes[0]}{'-k5' * (kernel == 5)} --features {a.features[0]}"


def enlarge_kernels(state: State, own: Mapping[str, Tensor]) -> str:
    """Enlarges kernels of MedNeXt in place to those of ``own`` (UpKern: trilinearly); says so, or returns ""."""
    before: tuple[int, ...] = ()
    for name, tensor in state.items():
        wanted = own[name].shape if name.endswith(".conv1.weight") and name in own else tensor.shape
        if wanted[:2] == tensor.shape[:2] and wanted[2:] > tensor.shape[2:]:
            before, after = tensor.shape[2:], wanted[2:]
            state[name] = F.interpolate(tensor, after, mode="trilinear")
    return f"kernels of {before[0]} enlarged trilinearly to {after[0]} (UpKern)" if before else ""


def _turned(tensor: Tensor, theirs: str, order: Sequence[int]) -> Tensor:
    """Returns a tensor with its axes in another order, to or from MedNeXt's: its heads are transposed convolutions."""
    if tensor.ndim == 5:
        tensor = tensor.permute(*order)
        tensor = tensor.transpose(0, 1) if theirs.startswith("out_") else tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _mednext_names(unet: UNet) -> dict[str, str]:
    """Returns a mapping from our names to MedNeXt's."""
    last = len(unet.architecture.features) - 1

    def theirs(ours: str) -> str:
        cell, _, rest = ours.removeprefix("cells.").partition(".")
        match = re.fullmatch(r"([a-z]+)(\d+)(?:_(\d+))?", cell)
        if match is None:
            return f"{cell}.{rest}"
        kind, level, number = match[1], int(match[2]), match[3]
        place = {
            "encoder": "bottleneck" if level == last else f"enc_block_{level}", "decoder": f"dec_block_{level}",
            "down": f"down_{level - 1}", "up": f"up_{level}", "classes": f"out_{level}.conv_out",
        }[kind]  # fmt: skip
        return ".".join([place, *[number] * (number is not None), rest])

    return {ours: theirs(ours) for ours in unet.state_dict()}
