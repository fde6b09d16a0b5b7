"""Checkpoints of nnssl's, from which nnU-Net trains on: weights, and what they ask of a plan.

The encoder of a U-Net is read from one (``primus_weights`` reads those of Primus), and an encoder of Primus is written
as one, which ``nnUNetv2_preprocess_like_nnssl -pc FILE`` takes. All lengths are in nnU-Net's axes: their first is the
last of a file.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seqpar.data.errors import DataError, unwritable
from seqpar.data.files import refuse_existing, whole_file
from seqpar.decoders.primus import STEMS, ConvStem
from seqpar.decoders.unets.architecture import Architecture
from seqpar.decoders.unets.nnunet import of_plan
from seqpar.decoders.unets.unet import UNet
from seqpar.weights.nnunet_results import PRETRAINING
from seqpar.weights.nnunet_weights import nnunet_names
from seqpar.weights.primus_weights import SIZES, export_primus
from seqpar.weights.weight_files import State, rename, unwrap, write_pth

PATCH = (8, 8, 8)
_RES_ENC_L = {  # the network that nnssl knows by this name
    "n_stages": 6, "features_per_stage": [32, 64, 128, 256, 320, 320], "conv_op": "torch.nn.modules.conv.Conv3d",
    "kernel_sizes": 3, "strides": [1, 2, 2, 2, 2, 2], "n_blocks_per_stage": [1, 3, 4, 6, 6, 6],
    "n_conv_per_stage_decoder": 1, "conv_bias": True, "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
    "norm_op_kwargs": {"eps": 1e-5, "affine": True}, "nonlin": "torch.nn.LeakyReLU",
    "nonlin_kwargs": {"inplace": True},
}  # fmt: skip
_SECOND = re.compile(r"\.all_modules\.([01])\.")
_SCHEMES = {  # of a recipe -> the same in nnU-Net's plans, or the nearest
    "zscore": "ZScoreNormalization",
    "volume": "ZScoreNormalization",
    "ct": "CTNormalization",
    "clip": "RescaleTo01Normalization",
    "none": "NoNormalization",
}
_NEAR = ("ct", "clip")  # by its data set's intensities; by an image's smallest and largest
_RESAMPLING = {"is_seg": False, "order": 3, "order_z": 0, "force_separate_z": None}


@dataclass(frozen=True)
class PretrainedUnet:
    """A pretraining whose encoder is that of a U-Net.

    - ``architecture``: of the U-Net that nnU-Net trains on from it, for two classes
    - ``file_axes``: the axis of its images for each axis W D H of a file
    - ``patch_size``: on which nnU-Net is told to train, in its axes
    - ``weights``: of stem and stages, under nnU-Net's names
    """

    path: Path
    architecture: Architecture
    file_axes: tuple[int, ...]
    patch_size: tuple[int, ...]
    weights: State

    def encoder_state(self) -> State:
        """Returns the weights of stem and stages under our names, for images in the axes of a file.

        nnU-Net takes nothing else from a pretraining. A tensor of two names has the numbers of the second one, which
        torch loads last and with which the network computed: in pretrainings of sparse convolutions they differ.
        """
        theirs = {name: tensor for name, tensor in self.weights.items() if not _SECOND.search(name)}
        for name in self.weights.keys() - theirs.keys():
            theirs[_SECOND.sub(lambda m: (".conv.", ".norm.")[int(m[1])], name)] = self.weights[name]
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            names = nnunet_names(UNet(self.architecture))
        names = {there: f"unet.{ours}" for ours, there in names.items() if there.startswith("encoder.")}
        try:
            state = rename(theirs, names, f"the encoder that its {PRETRAINING} names")
        except ValueError as error:
            raise DataError(self.path, str(error)) from error
        order = [2 + axis for axis in self.file_axes]
        return {name: tensor.permute(0, 1, *order) if tensor.ndim == 5 else tensor for name, tensor in state.items()}


def holds_pretrained_unet(content: Mapping[str, Any]) -> bool:
    """Returns whether a file's content is an nnssl pretraining of another network than Primus."""
    return not _class_of(content).startswith(("Primus", "None"))


def _class_of(content: Mapping[str, Any]) -> str:
    """Returns the class of the network for which a pretraining is, "None" for other files."""
    try:
        return str(content[PRETRAINING]["architecture_plans"]["arch_class_name"]).rsplit(".", 1)[-1]
    except (KeyError, TypeError):
        return "None"


def read_pretrained_unet(content: Mapping[str, Any], path: str | Path) -> PretrainedUnet:
    """Returns what a pretraining holds; raises DataError where its network is not built here; ``path``: of its file."""
    path, plan, name, weights = Path(path), content[PRETRAINING], _class_of(content), unwrap(content, path)
    try:
        channels = int(plan["pretrain_num_input_channels"])
        arguments = _RES_ENC_L if name == "ResEncL" else dict(plan["architecture_plans"].get("arch_kwargs") or {})
        architecture = of_plan("ResidualEncoderUNet" if name == "ResEncL" else name, arguments, channels, 2)
        forward = [*map(int, plan["pretrain_plan"].get("transpose_forward", range(3)))]
        file_axes = tuple(forward.index(2 - axis) for axis in range(3))
        patch_size = tuple(int(plan["recommended_downstream_patchsize"][axis]) for axis in range(3))
        prefixes = {f"{plan['key_to_encoder']}.": "encoder.stages.", f"{plan['key_to_stem']}.": "encoder.stem."}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"its {PRETRAINING} lacks {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(path, f"{reason}; of nnssl's pretrainings Primus, ResEncL and what nnU-Net's plans can name "
                        f"are read, and this is {name}") from error  # fmt: skip
    own = {
        place + key.removeprefix(prefix): tensor
        for prefix, place in prefixes.items()
        for key, tensor in weights.items()
        if key.startswith(prefix)
    }
    return PretrainedUnet(path, architecture, file_axes, patch_size, own)


def write_pretrained(
    path: Path, net: nn.Module, spacing: Sequence[float] | None, schemes: Sequence[str], licence: str
) -> str:
    """Writes the checkpoint, whole or not at all; returns the name of the network that nnU-Net builds for it.

    - ``net``: of a run: a masked autoencoder, or a network with the primus decoder
    - ``spacing``: of the run's prepared images in mm; None: each case kept its own
    - ``schemes``: how each of their channels was normalised, as a recipe names it
    """
    refuse_existing(path)
    name = primus_name(net)
    encoder: Any = net.encoder
    if isinstance(encoder.patch_embed, ConvStem):
        raise ValueError(
            f"a {name} is not written as a pretraining, whose stem would be one convolution: name a folder, from "
            "which nnU-Net predicts and trains on"
        )
    weights = export_primus(net, reverse_axes=True)
    content = {
        "network_weights": weights,
        "nnssl_adaptation_plan": _plan(net, name, spacing, schemes),
        "citations": [],
        "trainer_name": "seqpar",
        "licence": licence,
    }
    try:
        with whole_file(path, replaces=False) as temporary:
            write_pth(temporary, content)
    except OSError as error:
        raise unwritable(path, error) from error
    return name


def primus_name(net: nn.Module) -> str:
    """Returns the name of the published network whose encoder this is; raises ValueError where it is none."""
    encoder: Any = net.encoder
    size = encoder.embed_dim, len(encoder.blocks), encoder.num_heads
    hidden = encoder.blocks[0].mlp.fc1.weight.shape[0]
    has_options = encoder.positions == "learned+rope" and {"ls1.gamma", "attn.norm.weight", "attn.q_bias"} <= {
        *encoder.blocks[0].state_dict()
    }
    for name, (embed_dim, depth, heads) in SIZES.items():
        if size == (embed_dim, depth, heads) and has_options and hidden == int(embed_dim * 8 / 3):
            if encoder.layout.patch != PATCH:
                raise ValueError(
                    f"nnU-Net's {name} has patches of 8, not of {encoder.layout.patch}: train with --patch 8"
                )
            return name.replace("Primus", f"Primus{_version(encoder.patch_embed)}")
    every = ", ".join(f"{name} (--embed-dim {e} --depth {d} --heads {h})" for name, (e, d, h) in SIZES.items())
    raise ValueError(
        f"nnU-Net builds only {every}, with --patch 8 --mlp swiglu --mlp-ratio 2.6666666666666665 --attention-norm "
        "--positions learned+rope --layer-scale 0.1, as --preset mae has them: this encoder is another"
    )


def _version(patch_embed: nn.Module) -> str:
    """Returns the version of the network whose tokens are made so: V2, V3 or "" for the first."""
    if not isinstance(patch_embed, ConvStem):
        return ""
    names = [name for name, kind in STEMS.items() if kind == patch_embed.kind]
    if not names:
        raise ValueError(f"nnU-Net builds no Primus with a stem of {patch_embed.kind}: train with --stem primus-v2")
    return names[0].removeprefix("primus-").upper()


def other_normalisation(schemes: Sequence[str]) -> str:
    """Returns a line on channels that nnU-Net will not normalise as the run did; "" where it does so with all."""
    others = [f"{scheme} ({_SCHEMES[scheme]} there)" for scheme in dict.fromkeys(schemes) if scheme in _NEAR]
    return (
        f"warning: this run normalised channels by {', '.join(others)}: nnU-Net has its own numbers for that, "
        "so that images will differ from those that the encoder has seen"
        if others
        else ""
    )


def _plan(net: nn.Module, name: str, spacing: Sequence[float] | None, schemes: Sequence[str]) -> dict[str, Any]:
    """Returns what nnU-Net and nnssl read of the plan of a pretraining."""
    encoder: Any = net.encoder
    tile, in_channels = list(encoder.layout.tile[::-1]), encoder.in_channels
    millimetres = None if spacing is None else [float(side) for side in spacing[::-1]]
    configuration: dict[str, Any] = {
        "data_identifier": "seqpar",
        "preprocessor_name": "DefaultPreprocessor",
        "spacing_style": "noresample" if spacing is None else "onemmiso" if set(spacing) == {1.0} else "median",
        "normalization_schemes": [_SCHEMES[scheme] for scheme in schemes],
        "use_mask_for_norm": [scheme == "zscore" for scheme in schemes],  # whose mean is that of what is not 0
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": dict(_RESAMPLING),
        "resampling_fn_mask": "resample_data_or_seg_to_shape",
        "resampling_fn_mask_kwargs": _RESAMPLING | {"is_seg": True, "order": 1},
        "spacing": millimetres,
        "patch_size": tile,
    }
    pretrain_plan = {
        "dataset_name": "seqpar",
        "plans_name": "seqpar",
        "original_median_spacing_after_transp": millimetres or [1.0, 1.0, 1.0],
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "configurations": {configuration["spacing_style"]: configuration},
        "experiment_planner_used": "seqpar",
    }
    return {
        "architecture_plans": {"arch_class_name": name, "arch_kwargs": None, "arch_kwargs_requiring_import": None},
        "pretrain_plan": pretrain_plan,
        "pretrain_num_input_channels": in_channels,
        "pretrain_patch_size": tile,
        "recommended_downstream_patchsize": tile,
        "key_to_encoder": "eva",
        "key_to_stem": "down_projection",
        "keys_to_in_proj": ["down_projection.proj"],
        "key_to_lpe": "eva.pos_embed",
    }
